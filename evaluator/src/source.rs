//! What to evaluate, as people write it.

use std::path::PathBuf;

use thiserror::Error;

/// Archives are fetched by Nix, as flakes.
const ARCHIVES: [&str; 7] = [".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2", ".tar.zst", ".zip"];
/// Kinds of flake references that are nothing else.
const FLAKES: [&str; 8] = ["github:", "gitlab:", "sourcehut:", "tarball+", "file+", "hg+", "flake:", "git+"];
/// What git is asked to fetch from.
const GIT: [&str; 5] = ["https://", "http://", "ssh://", "git://", "file://"];

/// Something to evaluate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A directory of this machine, as it is.
    Directory(PathBuf),
    /// A repository.
    Git {
        /// As git understands it.
        url: String,
        /// What of it.
        at: At,
    },
    /// A reference that Nix fetches.
    Flake(String),
}

/// A point in a repository's history.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum At {
    /// Where its default branch is.
    Head,
    /// A branch, a tag, or the full name of a ref.
    Ref(String),
    /// A commit.
    Commit(String),
}

/// Why something is not evaluated.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum SourceError {
    /// Neither of the kinds.
    #[error(
        "{0:?} is not a source: name a directory by its whole path, a git repository by its URL (https://…, ssh://…, \
         git@host:…; ?ref=… for a branch or tag, ?rev=… for a commit), or a flake (github:owner/repo)"
    )]
    Unknown(String),
    /// It would be an option of git's.
    #[error("{0:?} cannot be the name of a branch, a tag or a commit")]
    Ref(String),
    /// Not a commit's name.
    #[error(
        "{0:?} is not a commit: write all 40 (or 64) hexadecimal digits after ?rev=, or name a branch or tag with ?ref="
    )]
    Rev(String),
    /// Attributes are asked for otherwise.
    #[error("leave #{0} out of the source, and ask for the attribute with --attr {0}")]
    Fragment(String),
    /// It is on another machine.
    #[error(
        "{0:?} is a path on whichever machine evaluates, which may be another one than yours: push it to a repository and name \
         its URL, or set HARMONIA_CI_LOCAL_SOURCES=true for an evaluator on your own machine"
    )]
    Local(String),
}

impl Source {
    /// Reads a source; `commit`, if known, says which commit of a repository it is.
    pub fn parse(text: &str, commit: Option<&str>) -> Result<Self, SourceError> {
        if let Some((_, fragment)) = text.split_once('#') {
            return Err(SourceError::Fragment(fragment.to_owned()));
        }
        let source = Self::read(text.trim())?;
        match (source, commit) {
            (Self::Git { url, at: At::Head | At::Ref(_) }, Some(commit)) => {
                Ok(Self::Git { url, at: At::Commit(rev(commit)?) })
            }
            (source, _) => Ok(source),
        }
    }

    fn read(text: &str) -> Result<Self, SourceError> {
        let unknown = || SourceError::Unknown(text.to_owned());
        if let Some(path) = text.strip_prefix("path:").or(text.starts_with('/').then_some(text)) {
            let whole = path.starts_with('/') && !path.contains('?');
            return if whole { Ok(Self::Directory(path.into())) } else { Err(unknown()) };
        }
        let plain = text.strip_prefix("git+").unwrap_or(text);
        let (url, query) = plain.split_once('?').unwrap_or((plain, ""));
        let is_archive = plain == text && ARCHIVES.iter().any(|ending| url.ends_with(ending));
        let is_git =
            GIT.iter().any(|scheme| url.len() > scheme.len() && url.starts_with(scheme)) || is_scp(url);
        match at(query)? {
            Some(at) if is_git && !is_archive => Ok(Self::Git { url: url.to_owned(), at }),
            _ if is_archive && is_git || FLAKES.iter().any(|kind| text.starts_with(kind)) => {
                Ok(Self::Flake(text.to_owned()))
            }
            _ => Err(unknown()),
        }
    }

    /// Whether it is on this machine, so that only who owns the machine may name it.
    pub fn is_local(&self) -> bool {
        self.local_path().is_some()
    }

    /// Where it is on this machine.
    pub fn local_path(&self) -> Option<PathBuf> {
        let after = |text: &str, scheme| {
            let (_, rest) = text.split_once(scheme)?;
            let path = rest.split(['?', '#']).next().unwrap_or(rest);
            Some(PathBuf::from(path.strip_prefix("//").unwrap_or(path)))
        };
        match self {
            Self::Directory(path) => Some(path.clone()),
            Self::Git { url, .. } => after(url, "file:").filter(|_| url.starts_with("file:")),
            Self::Flake(reference) => after(reference, "file:").or_else(|| after(reference, "path:")),
        }
    }
}

/// What the parameters of a git URL say. None: they say more, which only Nix knows.
fn at(query: &str) -> Result<Option<At>, SourceError> {
    let mut at = At::Head;
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        match (pair.split_once('='), &at) {
            (Some(("rev", value)), _) => at = At::Commit(rev(value)?),
            (Some(("ref", _)), At::Commit(_)) => {}
            (Some(("ref", value)), _) => at = At::Ref(reference(value)?),
            _ => return Ok(None),
        }
    }
    Ok(Some(at))
}

fn rev(text: &str) -> Result<String, SourceError> {
    let whole = matches!(text.len(), 40 | 64) && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    if whole { Ok(text.to_ascii_lowercase()) } else { Err(SourceError::Rev(text.to_owned())) }
}

/// No more than git's own rules keep out: an option, a pattern, a refspec of two sides.
fn reference(text: &str) -> Result<String, SourceError> {
    let text = text.replace("%2F", "/").replace("%2f", "/");
    let odd = |char: char| char.is_whitespace() || char.is_control() || ":^~?*[\\%".contains(char);
    let fits = !text.is_empty() && !text.starts_with(['-', '+', '/']) && !text.contains(odd);
    if fits { Ok(text) } else { Err(SourceError::Ref(text)) }
}

/// `user@host:path`, as ssh's copying writes it.
fn is_scp(url: &str) -> bool {
    let Some((host, path)) = url.split_once(':') else { return false };
    let word = |char: char| char.is_ascii_alphanumeric() || "-_.@".contains(char);
    !path.is_empty()
        && !path.starts_with("//")
        && host.contains('@')
        && !host.starts_with('-')
        && host.chars().all(word)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const COMMIT: &str = "1b2f83d0975393224fd5d6d37be9438264683d13";

    fn git(url: &str, at: At) -> Result<Source, SourceError> {
        Ok(Source::Git { url: url.to_owned(), at })
    }

    fn parse(text: &str) -> Result<Source, SourceError> {
        Source::parse(text, None)
    }

    #[test]
    fn a_directory_is_named_by_its_whole_path() {
        assert_eq!(parse("/src/x"), Ok(Source::Directory("/src/x".into())));
        assert_eq!(parse("path:/src/x"), Ok(Source::Directory("/src/x".into())));
        assert!(matches!(parse("./x"), Err(SourceError::Unknown(_))));
        assert!(matches!(parse("path:x"), Err(SourceError::Unknown(_))));
    }

    #[test]
    fn a_repository_is_named_by_its_url() {
        assert_eq!(parse("https://h/x.git"), git("https://h/x.git", At::Head));
        assert_eq!(parse("git+https://h/x"), git("https://h/x", At::Head));
        assert_eq!(parse("git@h:x/y.git"), git("git@h:x/y.git", At::Head));
        assert_eq!(parse("ssh://git@h/x?ref=next"), git("ssh://git@h/x", At::Ref("next".into())));
        let (commit, tag) = (format!("file:///x?rev={COMMIT}"), "file:///x?ref=refs/tags/v1");
        assert_eq!(parse(&commit), git("file:///x", At::Commit(COMMIT.into())));
        assert_eq!(parse(tag), git("file:///x", At::Ref("refs/tags/v1".into())));
        let both = format!("git+file:///x?rev={COMMIT}&ref=main");
        assert_eq!(parse(&both), git("file:///x", At::Commit(COMMIT.into())));
    }

    #[test]
    fn a_commit_that_is_known_is_the_one() {
        let found = Source::parse("https://h/x?ref=main", Some(COMMIT));
        assert_eq!(found, git("https://h/x", At::Commit(COMMIT.into())));
    }

    #[test]
    fn what_only_nix_understands_is_left_to_it() {
        for text in
            ["github:o/r/main", "git+https://h/x?dir=sub", "https://h/x.tar.gz", "tarball+https://h/x"]
        {
            assert_eq!(parse(text), Ok(Source::Flake(text.to_owned())));
        }
    }

    #[test]
    fn what_is_on_this_machine_is_local() {
        for text in
            ["/x", "path:/x", "file:///x", "git+file:///x", "git+file:///x?dir=y", "tarball+file:///x"]
        {
            assert!(parse(text).is_ok_and(|source| source.is_local()), "{text}");
        }
        for text in ["https://h/x", "git@h:x", "github:o/r"] {
            assert!(parse(text).is_ok_and(|source| !source.is_local()), "{text}");
        }
    }

    #[test]
    fn what_is_refused_says_what_to_write() {
        assert!(matches!(parse("hello"), Err(SourceError::Unknown(_))));
        assert!(matches!(parse("--upload-pack=x"), Err(SourceError::Unknown(_))));
        assert!(matches!(parse("ext::sh -c x"), Err(SourceError::Unknown(_))));
        assert!(matches!(parse("https://h/x?ref=-x"), Err(SourceError::Ref(_))));
        assert!(matches!(parse("https://h/x?rev=1b2f"), Err(SourceError::Rev(_))));
        assert_eq!(parse("github:o/r#hello"), Err(SourceError::Fragment("hello".into())));
    }

    proptest! {
        #[test]
        fn nothing_that_is_fetched_is_an_option(text in "(git\\+)?(https?://|file://|[a-z-]{0,4}@?)?[-a-z+:/.@]{0,12}(\\?(ref|rev)=[-a-z/+ ]{0,6})?") {
            if let Ok(Source::Git { url, at }) = Source::parse(&text, None) {
                prop_assert!(!url.starts_with('-'));
                if let At::Ref(name) | At::Commit(name) = at {
                    prop_assert!(!name.starts_with('-') && !name.contains(char::is_whitespace));
                }
            }
        }
    }
}
