//! One commit of a repository.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Duration;

use thiserror::Error;
use tokio::time::sleep;

use crate::child::{self, Bounds, ChildError, Heard};
use crate::nix::Workplace;
use crate::source::At;
use crate::wishes;
use crate::words::{Words, plain};

/// What git's own branch here is called.
pub const BRANCH: &str = "evaluated";
/// Where what was fetched is at first: a tag may be something else than a commit, and a branch may not.
const FETCHED: &str = "refs/fetched/source";
/// And what the branch has whose word counts.
const TRUSTED: &str = "refs/fetched/trusted";
/// Before a repository is asked again that the network does not let us reach.
const PAUSES: [Duration; 3] = [Duration::from_secs(2), Duration::from_secs(6), Duration::from_secs(15)];
/// What git says of the network, rather than of the repository.
const NETWORK: [&str; 13] = [
    "Could not resolve host",
    "Failed to connect",
    "Couldn't connect",
    "Connection refused",
    "Connection reset",
    "Connection timed out",
    "Operation timed out",
    "Recv failure",
    "early EOF",
    "RPC failed",
    "returned error: 5",
    "response 502",
    "HTTP code 502",
];
/// Large files that are elsewhere stay there, whatever this machine's git is told of them.
const NO_LFS: [&str; 8] = [
    "-c",
    "filter.lfs.process=",
    "-c",
    "filter.lfs.smudge=",
    "-c",
    "filter.lfs.clean=",
    "-c",
    "filter.lfs.required=false",
];

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
    /// More than is taken.
    #[error(
        "the repository {url} has {what}, and at most {most} are taken: see HARMONIA_CI_EVAL_MAX_SOURCE, or leave large files out of it"
    )]
    Large {
        /// Which repository.
        url: String,
        /// What it has.
        what: String,
        /// What is taken.
        most: String,
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
    /// The repository, with nothing but that commit, as Nix takes it for a flake.
    pub repository: PathBuf,
    /// Its files, without a `.git` beside them, which would be another one each time.
    pub files: PathBuf,
    /// Its name.
    pub commit: String,
    /// The name of its tree: commits of the same files have the same.
    pub tree: String,
    /// The text of `.harmonia-ci.toml` in it, and in the branch whose word counts.
    pub wishes: (Option<String>, Option<String>),
}

/// What to fetch, and from where.
#[derive(Debug, Clone, Copy)]
pub struct Wanted<'a> {
    /// As git understands it.
    pub url: &'a str,
    /// What of it.
    pub at: &'a At,
    /// The repository and branch whose word counts; None for the branch: its default.
    pub trusted: (&'a str, Option<&'a str>),
    /// Whether it may be on this machine.
    pub local: bool,
    /// Bytes of its files, at most.
    pub size: u64,
}

/// Fetches one commit.
pub async fn fetch(place: &Workplace, wanted: Wanted<'_>, bounds: Bounds) -> Result<Checkout, GitError> {
    let Wanted { url, at, trusted, local, size } = wanted;
    let git = Git { place, url, local, bounds, pauses: &PAUSES };
    let (repository, files) = (place.path("flake"), place.path("source"));
    let wanted = match at {
        At::Head => "HEAD",
        At::Ref(name) | At::Commit(name) => name,
    };
    git.run(&["init", "--quiet", "--bare", &format!("--initial-branch={BRANCH}"), "."]).await?;
    let fetched = git.fetch_one(wanted, FETCHED).await;
    match (fetched, at) {
        (Err(GitError::Fetch { .. } | GitError::Missing { .. }), At::Commit(commit)) => {
            git.fetch_all(commit).await?;
        }
        (Err(GitError::Missing { .. }), At::Head) => {
            return Err(GitError::Missing { url: shown(url), what: "commit yet".to_owned() });
        }
        (fetched, _) => {
            fetched?;
            git.point_at(&format!("{FETCHED}^{{commit}}"), format!("commit at {wanted}")).await?;
        }
    }
    let commit = git.run(&["rev-parse", "--verify", &format!("{BRANCH}^{{commit}}")]).await?;
    let tree = git.run(&["rev-parse", "--verify", &format!("{BRANCH}^{{tree}}")]).await?;
    let count = git.weigh(size).await?;
    let wishes = git.show_wishes(BRANCH).await;
    let trusted = match at {
        At::Head if trusted.0 == url && trusted.1.is_none() => wishes.clone(),
        _ => git.wishes_of(trusted).await?,
    };
    let work_tree = format!("--work-tree={}", files.display());
    // git complains if there is nothing to write.
    if count > 0 {
        git.run(&[&work_tree, "checkout", "--quiet", "--force", BRANCH, "--", "."]).await?;
    }
    Ok(Checkout {
        repository,
        files,
        commit: commit.trim().to_owned(),
        tree: tree.trim().to_owned(),
        wishes: (wishes, trusted),
    })
}

/// The branch that a repository is asked for, or its default, and the commit it is at.
pub async fn head(
    place: &Workplace,
    url: &str,
    branch: Option<&str>,
    local: bool,
    bounds: Bounds,
) -> Result<(String, String), GitError> {
    let git = Git { place, url, local, bounds, pauses: &PAUSES };
    let name = branch.map_or_else(|| "HEAD".to_owned(), |branch| format!("refs/heads/{branch}"));
    let tag = branch.map_or_else(|| "HEAD".to_owned(), |branch| format!("refs/tags/{branch}"));
    let commit = format!("{tag}^{{}}");
    let listed = git.run(&["ls-remote", "--symref", "--", url, &name, &tag, &commit]).await?;
    let missing = || GitError::Missing {
        url: shown(url),
        what: branch.map_or_else(|| "commit yet".to_owned(), |branch| format!("branch or tag {branch}")),
    };
    read_head(&listed, branch).ok_or_else(missing)
}

/// Lines are `ref: refs/heads/main<TAB>HEAD` and `commit<TAB>name`.
fn read_head(listed: &str, branch: Option<&str>) -> Option<(String, String)> {
    let lines: Vec<(&str, &str)> = listed.lines().filter_map(|line| line.split_once('\t')).collect();
    let of = |name: &str| {
        let commit = lines.iter().find(|(value, line)| *line == name && !value.starts_with("ref: "));
        commit.map(|(commit, _)| (*commit).to_owned())
    };
    match branch {
        Some(branch) => {
            // A tag with words of its own is not the commit, but has it.
            let tag =
                || of(&format!("refs/tags/{branch}^{{}}")).or_else(|| of(&format!("refs/tags/{branch}")));
            Some((branch.to_owned(), of(&format!("refs/heads/{branch}")).or_else(tag)?))
        }
        None => {
            let symbolic = lines
                .iter()
                .find_map(|(value, name)| value.strip_prefix("ref: refs/heads/").filter(|_| *name == "HEAD"));
            Some((symbolic.unwrap_or("HEAD").to_owned(), of("HEAD")?))
        }
    }
}

/// How many files a listing has, and how many bytes. Lines are `mode type name size<TAB>path`.
fn weight(listed: &str) -> (u64, u64) {
    let sizes = listed.split('\0').filter_map(|line| line.split_once('\t')?.0.split_whitespace().nth(3));
    sizes.fold((0, 0), |(files, bytes), size| (files + 1, bytes + size.parse::<u64>().unwrap_or(0)))
}

#[derive(Clone, Copy)]
struct Git<'a> {
    place: &'a Workplace,
    url: &'a str,
    local: bool,
    bounds: Bounds,
    /// Before it is asked again.
    pauses: &'a [Duration],
}

impl Git<'_> {
    /// What a name means, without what was before it.
    async fn fetch_one(&self, wanted: &str, to: &str) -> Result<(), GitError> {
        let refspec = format!("+{wanted}:{to}");
        let fetch = ["fetch", "--quiet", "--no-tags", "--depth=1", "--", self.url, &refspec];
        self.reach(&fetch).await.map(drop).map_err(|error| match error {
            GitError::Fetch { url, words } if words.contains("couldn't find remote ref") => {
                GitError::Missing { url, what: format!("branch or tag {wanted}") }
            }
            error => error,
        })
    }

    /// Some servers give out only what a branch or tag names.
    async fn fetch_all(&self, commit: &str) -> Result<(), GitError> {
        let refspecs = ["+refs/heads/*:refs/remotes/fetched/*", "+refs/tags/*:refs/tags/*"];
        self.reach(&[&["fetch", "--quiet", "--", self.url], &refspecs[..]].concat()).await?;
        self.point_at(&format!("{commit}^{{commit}}"), format!("commit {commit}")).await
    }

    /// Our branch is at that commit from now on.
    async fn point_at(&self, commit: &str, what: String) -> Result<(), GitError> {
        let there = self.run(&["update-ref", &format!("refs/heads/{BRANCH}"), commit]).await;
        there.map(drop).map_err(|error| match error {
            GitError::Fetch { url, .. } => GitError::Missing { url, what },
            error => error,
        })
    }

    /// A forge that is away for a moment costs a moment.
    async fn reach(&self, arguments: &[&str]) -> Result<String, GitError> {
        for &pause in self.pauses {
            match self.run(arguments).await {
                Err(GitError::Fetch { words, .. }) if is_of_the_network(&words) => sleep(pause).await,
                ended => return ended,
            }
        }
        self.run(arguments).await
    }

    /// How many files it has. Before anything of it is written: a small pack can hold any number of files of any size.
    async fn weigh(&self, most: u64) -> Result<u64, GitError> {
        let listed = self.run(&["ls-tree", "-r", "-l", "-z", "--full-tree", BRANCH]).await?;
        let large = |what: String, most: String| Err(GitError::Large { url: shown(self.url), what, most });
        if listed.len() as u64 >= child::LONGEST_OUTPUT {
            return large(
                "more files than can be counted".to_owned(),
                format!("{} bytes of their names", child::LONGEST_OUTPUT),
            );
        }
        match weight(&listed) {
            (files, bytes) if bytes > most => {
                large(format!("{bytes} bytes in {files} files"), format!("{most} bytes"))
            }
            (files, _) => Ok(files),
        }
    }

    /// What a repository says about its evaluation. A link is read as where it leads to, which is no TOML.
    async fn show_wishes(&self, name: &str) -> Option<String> {
        self.run(&["cat-file", "blob", &format!("{name}:{}", wishes::FILE)]).await.ok()
    }

    /// The same of the branch whose word counts. One that is not there allows nothing, nor does another repository than the one that is
    /// evaluated, if it cannot be read: whoever evaluates something else in a project need not wait for the project's own.
    async fn wishes_of(&self, (url, branch): (&str, Option<&str>)) -> Result<Option<String>, GitError> {
        let is_other = url != self.url;
        let git = Git { url, pauses: if is_other { &[] } else { self.pauses }, ..*self };
        match git.fetch_one(branch.unwrap_or("HEAD"), TRUSTED).await {
            Ok(()) => Ok(git.show_wishes(TRUSTED).await),
            Err(GitError::Missing { .. }) => Ok(None),
            Err(GitError::Fetch { url, words }) if is_other => {
                tracing::info!(url, words, "the project's own repository cannot be read, and allows nothing");
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    async fn run(&self, arguments: &[&str]) -> Result<String, GitError> {
        let repository = self.place.path("repository");
        let mut command = self.place.git();
        let protocols = if self.local { "https:http:ssh:git:file" } else { "https:http:ssh:git" };
        command
            .env("GIT_ALLOW_PROTOCOL", protocols)
            .env("GIT_DIR", &repository)
            .env("LC_ALL", "C")
            .args(["-c", "gc.auto=0", "-c", "maintenance.auto=false", "-c", "advice.detachedHead=false"])
            .args(NO_LFS)
            .current_dir(&repository)
            .args(arguments);
        let mut words = Words::default();
        let ended = child::run(command, b"", self.bounds, Heard::Errors, |line| {
            words.push(line);
            ControlFlow::Continue(())
        });
        let ended = ended.await.map_err(|error| self.failed(error))?;
        // Who has more to say than anybody listens to is cut short.
        if ended.success || ended.rest.len() as u64 >= child::LONGEST_OUTPUT {
            return Ok(String::from_utf8_lossy(&ended.rest).into_owned());
        }
        let words = plain(&words.text()).replace(self.url, &shown(self.url));
        Err(GitError::Fetch { url: shown(self.url), words: words.trim().to_owned() })
    }

    fn failed(&self, source: ChildError) -> GitError {
        GitError::Child { url: shown(self.url), source }
    }
}

/// A server's own words stand behind `remote:`, and are about something else.
fn is_of_the_network(words: &str) -> bool {
    let mut own = words.lines().filter(|line| !line.trim_start().starts_with("remote:"));
    own.any(|line| NETWORK.iter().any(|sign| line.contains(sign)))
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
    fn a_head_is_found_by_its_branch_or_as_the_default() {
        let listed = "ref: refs/heads/main\tHEAD\naa\tHEAD\nbb\trefs/heads/next\ncc\trefs/tags/v1\ndd\trefs/tags/v2\nee\trefs/tags/v2^{}\n";
        let head = |branch| read_head(listed, branch);
        assert_eq!(head(None), Some(("main".to_owned(), "aa".to_owned())));
        assert_eq!(head(Some("next")), Some(("next".to_owned(), "bb".to_owned())));
        assert_eq!(head(Some("v1")), Some(("v1".to_owned(), "cc".to_owned())));
        assert_eq!(head(Some("v2")), Some(("v2".to_owned(), "ee".to_owned())));
        assert_eq!(head(Some("x")), None);
    }

    #[test]
    fn a_tree_is_weighed_by_its_files() {
        let listed = "100644 blob aa       7\ta b\u{0}120000 blob bb      20\tlink\u{0}160000 commit cc       -\tmodule\0";
        assert_eq!(weight(listed), (3, 27));
    }

    #[test]
    fn a_network_that_fails_is_told_from_a_repository_that_is_not_there() {
        let failed = |words| is_of_the_network(words);
        assert!(failed("fatal: unable to access 'https://h/x/': Could not resolve host: h"));
        assert!(failed("fatal: unable to access 'https://h/x/': The requested URL returned error: 503"));
        assert!(!failed("remote: Connection refused\nfatal: repository 'https://h/x/' not found"));
        assert!(!failed("fatal: unable to access 'https://h/x/': The requested URL returned error: 403"));
    }

    #[test]
    fn a_password_is_not_shown() {
        assert_eq!(shown("https://me:secret@host:8443/x/y@z.git"), "https://host:8443/x/y@z.git");
        assert_eq!(shown("https://secret@host"), "https://host");
        assert_eq!(shown("git@host:x/y"), "git@host:x/y");
    }
}
