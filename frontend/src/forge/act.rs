//! What is done about something that has happened in a repository.

use harmonia_queue::Db;
use harmonia_queue::branches::{self, PullRequests, Push};
use harmonia_queue::forges::{self, Consent, Follower, Repository, pull_request_ref};
use harmonia_service::problem::Problem;
use harmonia_service::sentence::sentence;
use jiff::Timestamp;

use super::call::ForgeError;
use super::payload::{Event, What, Wish, is_commit};
use super::{Known, PullRequest};

/// What came of it.
#[derive(Debug, Default)]
pub struct Outcome {
    /// In words.
    pub reason: String,
    /// What is evaluated now.
    pub evaluations: Vec<i64>,
    accepted: bool,
    homeless: bool,
}

impl Outcome {
    /// Nothing.
    pub fn ignored(reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), ..Self::default() }
    }

    fn evaluated(evaluation: i64) -> Self {
        Self { evaluations: vec![evaluation], ..Self::noted("evaluated") }
    }

    fn noted(reason: impl Into<String>) -> Self {
        Self { accepted: true, ..Self::ignored(reason) }
    }

    fn homeless() -> Self {
        Self { homeless: true, ..Self::ignored("no project has this repository") }
    }

    /// Whether it changed anything.
    pub fn accepted(&self) -> bool {
        self.accepted
    }

    /// Whether it was of a repository that no project has. One that comes later may have it.
    pub fn is_homeless(&self) -> bool {
        self.homeless
    }

    /// For every project that a repository has.
    fn join(self, other: Self) -> Self {
        let accepted = self.accepted || other.accepted;
        let reason = if self.accepted || self.reason == other.reason { self.reason } else { other.reason };
        let evaluations = [self.evaluations, other.evaluations].concat();
        Self { reason, evaluations, accepted, homeless: false }
    }
}

/// Does what an event asks for.
pub async fn act(db: &Db, known: &Known, event: Event) -> Result<Outcome, Problem> {
    let Event { repository, what } = event;
    let desk = Desk { db, known, repository: &repository };
    let mut outcome: Option<Outcome> = None;
    for follower in forges::followers(db, &known.instance, &repository).await? {
        let next = desk.act_for(&follower, &what).await?;
        outcome = Some(match outcome {
            Some(before) => before.join(next),
            None => next,
        });
    }
    Ok(outcome.unwrap_or_else(Outcome::homeless))
}

struct Desk<'a> {
    db: &'a Db,
    known: &'a Known,
    repository: &'a Repository,
}

/// A pull request from outside, and the commit of it that may be built.
struct Outside<'a> {
    number: i32,
    head: &'a str,
}

/// Who wrote a pull request, and who pushed its head: not always the same, for others may push to a fork.
struct People<'a> {
    author: &'a str,
    sender: Option<&'a str>,
}

impl Desk<'_> {
    async fn act_for(&self, follower: &Follower, what: &What) -> Result<Outcome, Problem> {
        match what {
            What::Pushed { branch, before, commit } => self.pushed(follower, branch, before, commit).await,
            What::Deleted { branch } => self.deleted(follower, branch).await,
            // Its branch is pushed to, which is told too, and maybe later.
            What::Proposed { head, branch, outside: false, .. } => {
                self.pushed(follower, branch, "", head).await
            }
            What::Proposed { number, head, author, sender, .. } => {
                let people = People { author, sender: sender.as_deref() };
                self.proposed_outside(follower, &Outside { number: *number, head }, &people).await
            }
            What::Closed { number } => self.closed(follower, *number).await,
            What::Asked { number, wish } => self.asked(follower, *number, wish).await,
        }
    }

    /// Webhooks come late, twice and in any order. One that does not go on from the head that we know is a hint: then the forge
    /// itself says where the branch is.
    async fn pushed(
        &self,
        follower: &Follower,
        branch: &str,
        before: &str,
        commit: &str,
    ) -> Result<Outcome, Problem> {
        if follower.branch.as_deref().is_some_and(|only| only != branch) {
            return Ok(Outcome::ignored("the project builds another branch"));
        }
        loop {
            let known = branches::head(self.db, &follower.name, branch).await?;
            let head = if known.as_deref().is_none_or(|known| known == before || known == commit) {
                Some(commit.to_owned())
            } else {
                self.known.forge.head(self.repository, branch).await.map_err(away)?
            };
            let Some(head) = head else { return Ok(Outcome::ignored("the branch is not there any more")) };
            let push = Push {
                project: &follower.name,
                source: &follower.url,
                branch,
                commit: &head,
                untrusted: false,
                attrs: &follower.attrs,
                pull_request: None,
            };
            // Else another push of it came meanwhile, and this one may be older.
            if let Some(evaluation) = branches::push_after(self.db, &push, known.as_deref()).await? {
                return Ok(Outcome::evaluated(evaluation));
            }
        }
    }

    /// It may be there again by now.
    async fn deleted(&self, follower: &Follower, branch: &str) -> Result<Outcome, Problem> {
        let known = branches::head(self.db, &follower.name, branch).await?;
        if let Some(head) = self.known.forge.head(self.repository, branch).await.map_err(away)? {
            return self.pushed(follower, branch, "", &head).await;
        }
        let reason = "the branch was deleted";
        let cancelled = forges::end_branch(self.db, follower.id, branch, reason, known.as_deref()).await?;
        Ok(Outcome::noted(format!("the branch is gone, {cancelled} evaluations were cancelled")))
    }

    /// Likewise. The forge is not asked about one that is not known: most are from inside.
    async fn closed(&self, follower: &Follower, number: i32) -> Result<Outcome, Problem> {
        let known = forges::pull_request_head(self.db, follower.id, number).await?;
        if known.is_some() && self.known.is_open(self.repository, number).await.map_err(away)? {
            return Ok(Outcome::ignored("it is open again"));
        }
        let cancelled = forges::close_pull_request(self.db, follower.id, number).await?;
        Ok(Outcome::noted(format!("it is closed, {cancelled} evaluations were cancelled")))
    }

    async fn proposed_outside(
        &self,
        follower: &Follower,
        outside: &Outside<'_>,
        people: &People<'_>,
    ) -> Result<Outcome, Problem> {
        let known = forges::pull_request_head(self.db, follower.id, outside.number).await?;
        if known.is_some_and(|known| known != outside.head)
            && self.pull_request(outside.number).await?.head != outside.head
        {
            return Ok(Outcome::ignored("another commit is its head by now"));
        }
        forges::see_pull_request(self.db, follower.id, outside.number, outside.head).await?;
        let allowed = match follower.pull_requests {
            PullRequests::All => true,
            PullRequests::None => false,
            PullRequests::Collaborators => self.may_both_write(people).await?,
        };
        match (allowed, follower.pull_requests) {
            (true, _) => self.build(follower, outside).await,
            (false, PullRequests::None) => {
                Ok(Outcome::noted("the project builds no pull requests from outside"))
            }
            (false, _) => {
                forges::wait_for_consent(self.db, follower.id, outside.head).await?;
                Ok(Outcome::noted("it waits for a collaborator to comment /ci run"))
            }
        }
    }

    /// The comment is for the head that its author could see: one that was known here before it was written, and that is still the
    /// head. What names the whole commit is for that, whenever it was pushed; of fewer digits somebody may find another that has them.
    async fn asked(&self, follower: &Follower, number: i32, wish: &Wish) -> Result<Outcome, Problem> {
        if follower.pull_requests == PullRequests::None {
            return Ok(Outcome::ignored("the project builds no pull requests from outside"));
        }
        if !self.may_write(&wish.person).await? {
            return Ok(Outcome::ignored("whoever asks may not push to the repository"));
        }
        let known = forges::pull_request_head(self.db, follower.id, number).await?;
        // Before the forge says what its clock shows.
        let before = forges::now(self.db).await?;
        let now = self.pull_request(number).await?;
        if !now.open || !now.outside {
            return Ok(Outcome::ignored("it is closed, or built when its branch is pushed to"));
        }
        if known.as_ref() != Some(&now.head) {
            // Whoever comments again has seen this one.
            forges::see_pull_request(self.db, follower.id, number, &now.head).await?;
        }
        if known.is_some_and(|known| known != now.head) || !now.head.starts_with(&wish.commit) {
            return Ok(Outcome::ignored(
                "another commit was pushed meanwhile: look at it, and comment again",
            ));
        }
        let written = match written(before, now.as_of, wish.written) {
            _ if is_commit(&wish.commit) => None,
            None => return Ok(Outcome::ignored("nobody knows when that was written: name the whole commit")),
            written => written,
        };
        let consent = Consent { commit: &now.head, comment: wish.comment, by: &wish.person, written };
        if !forges::allow_pull_request(self.db, follower.id, number, &consent).await? {
            return Ok(Outcome::ignored(
                "the comment was used before, or is older than what we know of this commit: look at it, and comment again",
            ));
        }
        self.build(follower, &Outside { number, head: &now.head }).await
    }

    /// In its own tier, whoever allows it.
    async fn build(&self, follower: &Follower, outside: &Outside<'_>) -> Result<Outcome, Problem> {
        let push = Push {
            project: &follower.name,
            source: &follower.url,
            branch: &pull_request_ref(outside.number),
            commit: outside.head,
            untrusted: true,
            attrs: &follower.attrs,
            pull_request: Some(outside.number),
        };
        let evaluation = branches::push(self.db, &push).await?;
        Ok(evaluation
            .map_or_else(|| Outcome::ignored("another commit is its head by now"), Outcome::evaluated))
    }

    async fn pull_request(&self, number: i32) -> Result<PullRequest, Problem> {
        self.known.forge.pull_request(self.repository, number).await.map_err(away)
    }

    async fn may_both_write(&self, People { author, sender }: &People<'_>) -> Result<bool, Problem> {
        let Some(sender) = sender else { return Ok(false) };
        Ok(self.may_write(author).await? && (sender == author || self.may_write(sender).await?))
    }

    async fn may_write(&self, person: &str) -> Result<bool, Problem> {
        self.known.forge.may_write(self.repository, person).await.map_err(away)
    }
}

/// When a comment was written by the database's clock, which may show another time than the forge's: by its age, and rather too early,
/// for the forge tells whole seconds. `before` is when the forge had not yet answered.
fn written(before: f64, as_of: Option<Timestamp>, written: Option<Timestamp>) -> Option<f64> {
    let age = as_of?.duration_since(written?).as_secs_f64();
    Some(before - age.max(0.0) - 1.0)
}

fn away(error: ForgeError) -> Problem {
    let error = sentence(&error);
    tracing::warn!(error, "a forge could not be asked");
    Problem::unavailable(format!("the forge could not be asked: {error}; deliver this again"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_comment_is_as_old_as_its_forge_says_whatever_our_clock_shows() {
        let at = |second: i64| Timestamp::from_second(second).ok();
        assert_eq!(written(5000.0, at(1030), at(1000)), Some(4969.0));
        assert_eq!(written(5000.0, at(1000), at(1030)), Some(4999.0), "nothing was written later than now");
        assert_eq!(written(5000.0, None, at(1000)), None);
        assert_eq!(written(5000.0, at(1000), None), None);
    }
}
