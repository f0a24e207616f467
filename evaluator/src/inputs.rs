//! Inputs of a flake that the project's credential may open. They are fetched before anything of the flake is evaluated, each by an
//! expression of ours: what a flake evaluates, and where else it says that its inputs are, meets no secret. Then Nix finds them in
//! its store, by the hashes in `flake.lock`.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;

use reqwest::Url;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::child::{self, Bounds, Heard};
use crate::expression::quoted;
use crate::file;
use crate::nix::Workplace;
use crate::words::{Words, nix_error};

/// Where a flake says what its inputs are.
const LOCK: &str = "flake.lock";
/// More is no lock file.
const LONGEST: u64 = 16 << 20;

/// An input that could not be fetched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// How Nix names it where it needs it: by one of these.
    names: Vec<String>,
    words: String,
}

#[derive(Deserialize)]
struct Lock {
    nodes: BTreeMap<String, Node>,
}

#[derive(Deserialize)]
struct Node {
    locked: Option<Map<String, Value>>,
}

/// Fetches the inputs of the flake in a directory. One that cannot be fetched may be one that nobody needs.
pub async fn fetch(place: &Workplace, flake: &Path, bounds: Bounds) -> Vec<Refused> {
    let Some(credential) = place.lent() else { return Vec::new() };
    // What is no lock file is Nix's to complain about.
    let lock = file::read(&flake.join(LOCK), LONGEST).ok();
    let Some(Lock { nodes }) = lock.and_then(|text| serde_json::from_slice(&text).ok()) else {
        return Vec::new();
    };
    let mut refused = Vec::new();
    for input in nodes.into_values().filter_map(|node| node.locked) {
        if host(&input).is_some_and(|host| credential.concerns(&host)) {
            refused.extend(fetch_one(place, input, bounds).await);
        }
    }
    refused
}

/// The host that it is fetched from, if that is one that is shown a credential.
fn host(input: &Map<String, Value>) -> Option<String> {
    let text = |name| input.get(name).and_then(Value::as_str);
    let given = |usual: &str| Some(text("host").unwrap_or(usual).to_owned());
    match text("type")? {
        "github" => given("github.com"),
        "gitlab" => given("gitlab.com"),
        "sourcehut" => given("git.sr.ht"),
        "git" | "tarball" | "file" => {
            let url = Url::parse(text("url")?).ok()?;
            matches!(url.scheme(), "http" | "https").then(|| url.host_str().map(str::to_owned))?
        }
        _ => None,
    }
}

async fn fetch_one(place: &Workplace, mut input: Map<String, Value>, bounds: Bounds) -> Option<Refused> {
    // Which directory of it is a flake is not the fetchers' business.
    input.remove("dir");
    let names = ["rev", "url", "narHash"].map(|name| input.get(name)?.as_str().map(str::to_owned));
    let names = names.into_iter().flatten().collect();
    let input = quoted(&Value::Object(input).to_string());
    let text = format!("(builtins.fetchTree (builtins.fromJSON {input})).outPath");
    let mut command = place.nix("nix-instantiate");
    // Purely: what says where it is, but not what it is, is not fetched.
    command.args(["--eval", "--read-write-mode", "--option", "pure-eval", "true", "-"]);
    let mut words = Words::default();
    let ended = child::run(command, text.as_bytes(), bounds, Heard::Errors, |line| {
        words.push(line);
        ControlFlow::Continue(())
    });
    let words = match ended.await {
        Ok(ended) if ended.success => return None,
        Ok(_) => nix_error(&words, &[]),
        Err(error) => error.to_string(),
    };
    Some(Refused { names, words })
}

/// An error, with what was said when an input that it is about was fetched with the credential.
pub fn explained(error: String, refused: &[Refused]) -> String {
    let about = |input: &&Refused| input.names.iter().any(|name| error.contains(name.as_str()));
    match refused.iter().find(about) {
        Some(Refused { words, .. }) => format!(
            "{error}\nIt is an input that could not be fetched with the project's credential, either:\n{words}"
        ),
        None => error,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_what_is_elsewhere_has_a_host() {
        let of = |input: Value| host(input.as_object().unwrap());
        assert_eq!(of(json!({"type": "github", "owner": "a"})).unwrap(), "github.com");
        assert_eq!(of(json!({"type": "gitlab", "host": "git.example.org"})).unwrap(), "git.example.org");
        assert_eq!(of(json!({"type": "git", "url": "https://h:8443/x.git"})).unwrap(), "h");
        for (kind, url) in [
            ("git", "file:///x"),
            ("git", "ssh://h/x"),
            ("tarball", "file:///x"),
            ("file", "/x"),
            ("git", "ext::x"),
        ] {
            assert_eq!(of(json!({"type": kind, "url": url})), None, "{url}");
        }
        assert_eq!(of(json!({"type": "path", "path": "/proc/self/environ"})), None);
        assert_eq!(of(json!({"type": "indirect", "id": "nixpkgs"})), None);
    }

    #[test]
    fn an_error_about_an_input_says_what_was_said_with_the_credential() {
        let refused = [Refused { names: vec!["1b2f".to_owned()], words: "error: 403".to_owned() }];
        assert!(explained("no password for …?rev=1b2f".to_owned(), &refused).ends_with("error: 403"));
        assert_eq!(explained("infinite recursion".to_owned(), &refused), "infinite recursion");
    }
}
