//! What a webhook says. GitHub and Gitea use the same words for all that matters here.

use harmonia_queue::forges::Repository;
use jiff::Timestamp;
use serde::Deserialize;
use thiserror::Error;

/// Something that has happened in a repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// Where.
    pub repository: Repository,
    /// What.
    pub what: What,
}

/// What has happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum What {
    /// A branch is at a commit.
    Pushed {
        /// The branch.
        branch: String,
        /// Where it was before; zeros: it was not there.
        before: String,
        /// The commit.
        commit: String,
    },
    /// A branch is gone.
    Deleted {
        /// The branch.
        branch: String,
    },
    /// A pull request was opened, or has a new head.
    Proposed {
        /// Its number.
        number: i32,
        /// The commit that would be merged.
        head: String,
        /// The branch on which that is,
        branch: String,
        /// and whether that is in another repository.
        outside: bool,
        /// Whose it is.
        author: String,
        /// Who pushed that head, or opened it; not every forge has to say so.
        sender: Option<String>,
    },
    /// A pull request was merged or closed.
    Closed {
        /// Its number.
        number: i32,
    },
    /// Somebody asks for the pull request to be built.
    Asked {
        /// Its number.
        number: i32,
        /// How.
        wish: Wish,
    },
}

/// A comment that asks for a build.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wish {
    /// Who wrote it.
    pub person: String,
    /// Its number.
    pub comment: i64,
    /// When it was written, by the forge's clock.
    pub written: Option<Timestamp>,
    /// The beginning of the commit that is meant; empty: the head.
    pub commit: String,
}

/// A webhook that says nothing.
#[derive(Debug, Error)]
pub enum Unreadable {
    /// It does not say what it is about.
    #[error("the header that names the event is missing")]
    NoEvent,
    /// It is not what its event says.
    #[error("the body is not what forges send: {0}")]
    Body(#[from] serde_json::Error),
    /// It names something that cannot be.
    #[error("the body names {0}, which cannot be one")]
    Odd(&'static str),
}

#[derive(Deserialize)]
struct Payload {
    action: Option<String>,
    #[serde(rename = "ref")]
    reference: Option<String>,
    ref_type: Option<String>,
    before: Option<String>,
    after: Option<String>,
    deleted: Option<bool>,
    pull_request: Option<Proposal>,
    issue: Option<Issue>,
    is_pull: Option<bool>,
    comment: Option<Comment>,
    repository: Option<Place>,
    sender: Option<Person>,
}

#[derive(Deserialize)]
struct Place {
    name: String,
    owner: Person,
}

#[derive(Deserialize)]
struct Person {
    login: String,
}

#[derive(Deserialize)]
struct Proposal {
    number: i32,
    user: Person,
    head: Side,
    base: Side,
}

#[derive(Deserialize)]
struct Side {
    #[serde(rename = "ref")]
    reference: String,
    sha: String,
    /// Null if it was deleted.
    repo: Option<Numbered>,
}

#[derive(Deserialize)]
struct Numbered {
    id: i64,
}

#[derive(Deserialize)]
struct Issue {
    number: i32,
    pull_request: Option<serde_json::Value>,
}

#[derive(Deserialize)]
struct Comment {
    id: i64,
    body: String,
    user: Person,
    created_at: Option<String>,
}

/// Reads what an event's body says. Events that do not matter are not read further than to their repository. None: nothing that would
/// matter.
pub fn parse(event: Option<&str>, body: &[u8]) -> Result<Option<Event>, Unreadable> {
    let event = event.ok_or(Unreadable::NoEvent)?;
    if !["push", "delete", "pull_request", "pull_request_sync", "issue_comment", "pull_request_comment"]
        .contains(&event)
    {
        return Ok(None);
    }
    let payload: Payload = serde_json::from_slice(body)?;
    let Some(Place { name, owner }) = &payload.repository else { return Ok(None) };
    let repository = Repository { owner: word("an owner", &owner.login)?, name: word("a repository", name)? };
    let what = match event {
        "push" => pushed(&payload)?,
        "delete" => deleted(&payload)?,
        "pull_request" | "pull_request_sync" => proposed(&payload)?,
        _ => asked(&payload),
    };
    Ok(what.map(|what| Event { repository, what }))
}

fn pushed(payload: &Payload) -> Result<Option<What>, Unreadable> {
    let branch = payload.reference.as_deref().and_then(|name| name.strip_prefix("refs/heads/"));
    let (Some(branch), Some(after)) = (branch, &payload.after) else { return Ok(None) };
    let branch = word("a branch", branch)?;
    if payload.deleted == Some(true) || after.bytes().all(|byte| byte == b'0') {
        return Ok(Some(What::Deleted { branch }));
    }
    let before = payload.before.clone().unwrap_or_default();
    Ok(Some(What::Pushed { branch, before, commit: commit(after)? }))
}

/// GitHub says it by a push too; this is how Gitea does.
fn deleted(payload: &Payload) -> Result<Option<What>, Unreadable> {
    match (&payload.reference, payload.ref_type.as_deref()) {
        (Some(branch), Some("branch")) => {
            let branch = branch.strip_prefix("refs/heads/").unwrap_or(branch);
            Ok(Some(What::Deleted { branch: word("a branch", branch)? }))
        }
        _ => Ok(None),
    }
}

fn proposed(payload: &Payload) -> Result<Option<What>, Unreadable> {
    let (Some(action), Some(proposal)) = (&payload.action, &payload.pull_request) else {
        return Ok(None);
    };
    let Proposal { number, user, head, base } = proposal;
    let id = |side: &Side| side.repo.as_ref().map(|repo| repo.id);
    match action.as_str() {
        "opened" | "reopened" | "synchronize" | "synchronized" => Ok(Some(What::Proposed {
            number: *number,
            head: commit(&head.sha)?,
            branch: word("a branch", &head.reference)?,
            outside: is_outside(id(head), id(base), &head.reference),
            author: word("a person", &user.login)?,
            sender: payload.sender.as_ref().map(|sender| word("a person", &sender.login)).transpose()?,
        })),
        "closed" => Ok(Some(What::Closed { number: *number })),
        _ => Ok(None),
    }
}

/// What is not known to be a branch inside is outside. Whoever may only look at a repository of Gitea proposes a change by a push to
/// `refs/for/`: the repository of that is the same, and its head `refs/pull/7/head`, no branch.
pub fn is_outside(head: Option<i64>, base: Option<i64>, reference: &str) -> bool {
    head.is_none() || head != base || reference.is_empty() || reference.starts_with("refs/")
}

/// Only a new comment counts: an old one could be changed by who wrote the pull request.
fn asked(payload: &Payload) -> Option<What> {
    let (Some("created"), Some(issue), Some(comment)) =
        (payload.action.as_deref(), &payload.issue, &payload.comment)
    else {
        return None;
    };
    let is_pull = payload.is_pull.unwrap_or(issue.pull_request.is_some());
    match wish(&comment.body) {
        Some(commit) if is_pull => Some(What::Asked {
            number: issue.number,
            wish: Wish {
                person: comment.user.login.clone(),
                comment: comment.id,
                written: comment.created_at.as_deref().and_then(|at| at.parse().ok()),
                commit,
            },
        }),
        _ => None,
    }
}

/// A line `/ci run`, with or without the beginning of a commit behind it.
fn wish(body: &str) -> Option<String> {
    body.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        if (words.next(), words.next()) != (Some("/ci"), Some("run")) {
            return None;
        }
        let commit = words.next().unwrap_or_default().to_ascii_lowercase();
        let fits =
            commit.is_empty() || commit.len() >= 7 && commit.bytes().all(|byte| byte.is_ascii_hexdigit());
        (fits && words.next().is_none()).then_some(commit)
    })
}

/// All digits of a commit, as git writes it.
pub fn is_commit(text: &str) -> bool {
    matches!(text.len(), 40 | 64) && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

fn commit(text: &str) -> Result<String, Unreadable> {
    if is_commit(text) { Ok(text.to_owned()) } else { Err(Unreadable::Odd("a commit")) }
}

/// Git and PostgreSQL agree on what no name has.
fn word(what: &'static str, text: &str) -> Result<String, Unreadable> {
    let odd = text.is_empty() || text.len() > 1000 || text.chars().any(char::is_control);
    if odd { Err(Unreadable::Odd(what)) } else { Ok(text.to_owned()) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const COMMIT: &str = "1b2f83d0975393224fd5d6d37be9438264683d13";

    fn read(event: &str, mut body: Value) -> Result<Option<What>, Unreadable> {
        body["repository"] = json!({"name": "dots", "owner": {"login": "acme"}});
        let Some(event) = parse(Some(event), body.to_string().as_bytes())? else { return Ok(None) };
        assert_eq!(event.repository, Repository { owner: "acme".to_owned(), name: "dots".to_owned() });
        Ok(Some(event.what))
    }

    fn push(reference: &str, after: &str) -> Result<Option<What>, Unreadable> {
        read("push", json!({"ref": reference, "before": "0", "after": after}))
    }

    fn proposal(action: &str, head: Value) -> Option<What> {
        proposal_of(action, head, "main")
    }

    fn proposal_of(action: &str, head: Value, reference: &str) -> Option<What> {
        let head = json!({"ref": reference, "sha": COMMIT, "repo": head});
        let base = json!({"ref": "main", "sha": COMMIT, "repo": {"id": 1}});
        let body = json!({"number": 7, "user": {"login": "eve"}, "head": head, "base": base});
        read("pull_request", json!({"action": action, "pull_request": body})).unwrap()
    }

    fn comment(action: &str, body: &str) -> Option<What> {
        let issue = json!({"number": 7, "pull_request": {"url": "…"}});
        // As Gitea writes it, where GitHub has Z.
        let at = "1970-01-01T02:00:07+02:00";
        let comment = json!({"id": 9, "body": body, "user": {"login": "ann"}, "created_at": at});
        read("issue_comment", json!({"action": action, "issue": issue, "comment": comment})).unwrap()
    }

    #[test]
    fn a_push_is_of_a_branch() {
        let (branch, before, commit) = ("a/<script>".to_owned(), "0".to_owned(), COMMIT.to_owned());
        assert_eq!(
            push("refs/heads/a/<script>", COMMIT).unwrap(),
            Some(What::Pushed { branch, before, commit })
        );
        assert_eq!(push("refs/tags/v1", COMMIT).unwrap(), None);
    }

    #[test]
    fn a_branch_is_deleted_either_way() {
        let gone = Some(What::Deleted { branch: "a".to_owned() });
        assert_eq!(push("refs/heads/a", &"0".repeat(40)).unwrap(), gone);
        assert_eq!(read("delete", json!({"ref": "a", "ref_type": "branch"})).unwrap(), gone);
        assert_eq!(read("delete", json!({"ref": "v1", "ref_type": "tag"})).unwrap(), None);
    }

    #[test]
    fn what_cannot_be_a_name_or_a_commit_is_refused() {
        for (reference, after) in [
            ("refs/heads/a\nb", COMMIT),
            ("refs/heads/", COMMIT),
            ("refs/heads/a", "main"),
            ("refs/heads/a", "1b2f"),
        ] {
            assert!(push(reference, after).is_err(), "{reference} {after}");
        }
    }

    #[test]
    fn a_pull_request_whose_repository_is_not_known_is_from_outside() {
        let outside = |head| match proposal("synchronize", head) {
            Some(What::Proposed { outside, .. }) => outside,
            other => panic!("{other:?}"),
        };
        assert!(!outside(json!({"id": 1})));
        assert!(outside(json!({"id": 2})));
        assert!(outside(Value::Null));
        assert_eq!(proposal("closed", Value::Null), Some(What::Closed { number: 7 }));
        assert_eq!(proposal("labeled", Value::Null), None);
    }

    #[test]
    fn a_pull_request_whose_head_is_no_branch_is_from_outside() {
        for (reference, expected) in
            [("refs/pull/7/head", true), ("refs/heads/topic", true), ("topic", false), ("a/refs/b", false)]
        {
            let Some(What::Proposed { outside, .. }) = proposal_of("opened", json!({"id": 1}), reference)
            else {
                panic!("{reference}");
            };
            assert_eq!(outside, expected, "{reference}");
        }
    }

    #[test]
    fn only_the_words_themselves_ask_for_a_build() {
        for (body, commit) in
            [("/ci run", ""), ("Thanks!\r\n /ci  run \r\n", ""), ("/ci run 1B2F83D", "1b2f83d")]
        {
            let (person, commit) = ("ann".to_owned(), commit.to_owned());
            let wish = Wish { person, comment: 9, written: Timestamp::from_second(7).ok(), commit };
            assert_eq!(comment("created", body), Some(What::Asked { number: 7, wish }), "{body}");
        }
        for body in [
            "",
            "/ci",
            "/ci running",
            "> /ci run",
            "please /ci run",
            "/ci run now",
            "/ci run 1b2f",
            "/ci run 1b2f83d too",
        ] {
            assert_eq!(comment("created", body), None, "{body}");
        }
        assert_eq!(comment("edited", "/ci run"), None);
    }

    #[test]
    fn what_does_not_matter_is_not_read() {
        assert_eq!(parse(Some("star"), b"\xff").unwrap(), None);
        assert!(matches!(parse(None, b"{}"), Err(Unreadable::NoEvent)));
        assert!(matches!(parse(Some("push"), b"[]"), Err(Unreadable::Body(_))));
    }
}
