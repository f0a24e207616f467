//! One commit of a repository.

use std::ops::ControlFlow;
use std::path::PathBuf;

use thiserror::Error;

use crate::child::{self, Bounds, ChildError};
use crate::nix::Workplace;
use crate::source::At;
use crate::words::{Words, plain};

/// What git's own branch here is called.
pub const BRANCH: &str = "evaluated";

/// Why there is no commit.
#[derive(Debug, Error)]
pub enum GitError {
    /// The repository has no such ref.
    #[error("the repository {url} has no {what}: push it, or name another")]
    Missing {
        /// Which repository.
        url: String,
        /// What is missing.
        what: String,
    },
    /// Everything else that git says.
    #[error(
        "the repository {url} cannot be fetched: check that it exists and that the evaluator may read it\n{words}"
    )]
    Fetch {
        /// Which repository.
        url: String,
        /// What git said.
        words: String,
    },
    /// git did not come to its end.
    #[error("git, fetching {url}: {source}")]
    Child {
        /// Which repository.
        url: String,
        /// Why.
        source: ChildError,
    },
}

/// A commit that was fetched.
#[derive(Debug)]
pub struct Checkout {
    /// The repository, with nothing but that commit.
    pub repository: PathBuf,
    /// Its files, without a `.git` beside them, which would be another one each time.
    pub files: PathBuf,
    /// Its name.
    pub commit: String,
}

/// Fetches one commit.
pub async fn fetch(
    place: &Workplace,
    url: &str,
    at: &At,
    local: bool,
    bounds: Bounds,
) -> Result<Checkout, GitError> {
    let git = Git { place, url, local, bounds };
    let (repository, files) = (place.path("repository"), place.path("source"));
    let wanted = match at {
        At::Head => "HEAD",
        At::Ref(name) | At::Commit(name) => name,
    };
    git.run(&["init", "--quiet", "--bare", &format!("--initial-branch={BRANCH}"), "."]).await?;
    let refspec = format!("+{wanted}:refs/heads/{BRANCH}");
    let fetched = git.run(&["fetch", "--quiet", "--no-tags", "--depth=1", "--", url, &refspec]).await;
    match (fetched, at) {
        (Err(GitError::Fetch { .. }), At::Commit(commit)) => git.fetch_all(commit).await?,
        (Err(GitError::Fetch { words, .. }), _) if words.contains("couldn't find remote ref") => {
            let what =
                if *at == At::Head { "commit yet".to_owned() } else { format!("branch or tag {wanted}") };
            return Err(GitError::Missing { url: shown(url), what });
        }
        (fetched, _) => drop(fetched?),
    }
    let commit = git.run(&["rev-parse", "--verify", &format!("{BRANCH}^{{commit}}")]).await?;
    std::fs::create_dir_all(&files).map_err(|error| git.failed(error.into()))?;
    let tree = format!("--work-tree={}", files.display());
    git.run(&[&tree, "checkout", "--quiet", "--force", BRANCH, "--", "."]).await?;
    Ok(Checkout { repository, files, commit: commit.trim().to_owned() })
}

struct Git<'a> {
    place: &'a Workplace,
    url: &'a str,
    local: bool,
    bounds: Bounds,
}

impl Git<'_> {
    /// Some servers give out only what a branch or tag names.
    async fn fetch_all(&self, commit: &str) -> Result<(), GitError> {
        let refspecs = ["+refs/heads/*:refs/remotes/fetched/*", "+refs/tags/*:refs/tags/*"];
        self.run(&[&["fetch", "--quiet", "--", self.url], &refspecs[..]].concat()).await?;
        let there =
            self.run(&["update-ref", &format!("refs/heads/{BRANCH}"), &format!("{commit}^{{commit}}")]).await;
        there.map(drop).map_err(|error| match error {
            GitError::Fetch { url, .. } => GitError::Missing { url, what: format!("commit {commit}") },
            error => error,
        })
    }

    async fn run(&self, arguments: &[&str]) -> Result<String, GitError> {
        let repository = self.place.path("repository");
        std::fs::create_dir_all(&repository).map_err(|error| self.failed(error.into()))?;
        let mut command = self.place.git();
        let protocols = if self.local { "https:http:ssh:git:file" } else { "https:http:ssh:git" };
        command
            .env("GIT_ALLOW_PROTOCOL", protocols)
            .env("GIT_DIR", &repository)
            .env("LC_ALL", "C")
            .args(["-c", "gc.auto=0", "-c", "maintenance.auto=false", "-c", "advice.detachedHead=false"])
            .current_dir(&repository)
            .args(arguments);
        let mut words = Words::default();
        let ended = child::run(command, b"", self.bounds, |line| {
            words.push(line);
            ControlFlow::Continue(())
        });
        let ended = ended.await.map_err(|error| self.failed(error))?;
        if ended.success {
            return Ok(String::from_utf8_lossy(&ended.output).into_owned());
        }
        let words = plain(&words.text()).replace(self.url, &shown(self.url));
        Err(GitError::Fetch { url: shown(self.url), words: words.trim().to_owned() })
    }

    fn failed(&self, source: ChildError) -> GitError {
        GitError::Child { url: shown(self.url), source }
    }
}

/// A URL without what may be a password in it.
fn shown(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else { return url.to_owned() };
    let (authority, path) =
        rest.split_once('/').map_or((rest, None), |(authority, path)| (authority, Some(path)));
    let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    match path {
        Some(path) => format!("{scheme}://{host}/{path}"),
        None => format!("{scheme}://{host}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_is_not_shown() {
        assert_eq!(shown("https://me:secret@host:8443/x/y@z.git"), "https://host:8443/x/y@z.git");
        assert_eq!(shown("https://secret@host"), "https://host");
        assert_eq!(shown("git@host:x/y"), "git@host:x/y");
    }
}
