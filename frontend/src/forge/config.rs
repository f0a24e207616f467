//! Which forges there are.

use std::path::PathBuf;

use harmonia_service::secret::Secret;
use harmonia_service::settings::{Settings, SettingsError};
use reqwest::Url;
use serde::Deserialize;

use super::Forge;
use super::call::Http;
use super::gitea::Gitea;
use super::github::{App, GitHub};

const GITHUB_API: &str = "https://api.github.com";
/// What the provider of `oidc_issuer` is called among those that people sign in with.
pub const OIDC: &str = "oidc";

/// A forge that can be spoken with.
pub struct Configured {
    /// As its webhooks are addressed.
    pub name: String,
    /// What it is.
    pub kind: Kind,
    /// As projects have it.
    pub instance: String,
    /// It.
    pub forge: Box<dyn Forge>,
    /// By which people sign in with it.
    pub client: Option<Client>,
}

/// What we are to a forge when people sign in with it.
pub struct Client {
    /// What it calls us,
    pub id: String,
    /// and what we prove that by.
    pub secret: Secret,
    /// How it says who people are.
    pub door: Door,
}

/// How a forge says who people are.
pub enum Door {
    /// OAuth, as GitHub has it.
    GitHub {
        /// Where people go.
        web: String,
        /// Where is asked who they are.
        api: String,
    },
    /// OpenID Connect.
    OpenId {
        /// Who signs.
        issuer: String,
    },
}

/// An entry of `[[forges]]`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    #[serde(rename = "type")]
    kind: Kind,
    url: Option<String>,
    app_id: Option<u64>,
    private_key_file: Option<PathBuf>,
    token_file: Option<PathBuf>,
    webhook_secret_file: PathBuf,
    client_id: Option<String>,
    client_secret_file: Option<PathBuf>,
}

/// What a forge is.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// github.com, or a GitHub of one's own.
    GitHub,
    /// Gitea,
    Gitea,
    /// and what became of it.
    Forgejo,
}

/// All of them.
pub fn read(settings: &Settings) -> Result<Vec<Configured>, SettingsError> {
    let Some(text) = settings.get("forges") else { return Ok(Vec::new()) };
    let entries: Vec<Entry> =
        serde_json::from_str(text).map_err(|error| wrong(text, format!("cannot be used: {error}")))?;
    let mut all: Vec<Configured> = Vec::new();
    for entry in entries {
        let name = entry.name.clone();
        let configured = configure(entry).map_err(|why| wrong(&name, why))?;
        if all.iter().any(|other| other.name == name || other.instance == configured.instance) {
            return Err(wrong(&name, "is there twice, by its name or by its address: keep one".to_owned()));
        }
        all.push(configured);
    }
    Ok(all)
}

fn wrong(value: &str, why: String) -> SettingsError {
    SettingsError::Invalid { key: "forges", value: value.to_owned(), why }
}

fn configure(entry: Entry) -> Result<Configured, String> {
    let Entry { name, kind, url, app_id, private_key_file, token_file, webhook_secret_file, .. } = entry;
    let client = match (entry.client_id, entry.client_secret_file) {
        (Some(id), Some(file)) => Some((id, Secret::File(file))),
        (None, None) => None,
        _ => {
            return Err("lets people sign in by client_id and client_secret_file: give it both, or neither"
                .to_owned());
        }
    };
    let client = |door: Door| client.map(|(id, secret)| Client { id, secret, door });
    let fits = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    if name.is_empty() || name.len() > 63 || !name.bytes().all(fits) {
        return Err("is no name of a forge: it is part of an address, so use a-z, 0-9 and -".to_owned());
    }
    if name == OIDC {
        return Err("is how people sign in by oidc_issuer: choose another name".to_owned());
    }
    let secret = Secret::File(webhook_secret_file);
    let http = |url: &str| address(url).map(Http::new);
    match kind {
        Kind::GitHub => {
            let (Some(id), Some(key), None) = (app_id, private_key_file, token_file) else {
                return Err(
                    "is a GitHub App: give it app_id and private_key_file, and no token_file".to_owned()
                );
            };
            let api = url.as_deref().unwrap_or(GITHUB_API).trim_end_matches('/');
            let app = App::new(id, Secret::File(key), http(api)?);
            let web = web_of(api);
            Ok(Configured {
                name,
                kind,
                instance: web.to_lowercase(),
                forge: Box::new(GitHub::new(app, secret)),
                client: client(Door::GitHub { web, api: api.to_owned() }),
            })
        }
        Kind::Gitea | Kind::Forgejo => {
            let (Some(url), Some(token), None, None) = (url, token_file, app_id, private_key_file) else {
                return Err(
                    "is a Gitea or Forgejo: give it url and token_file, neither app_id nor private_key_file"
                        .to_owned(),
                );
            };
            let instance = url.trim_end_matches('/').to_lowercase();
            let forge = Box::new(Gitea::new(http(&url)?, Secret::File(token), secret));
            let issuer = url.trim_end_matches('/').to_owned();
            Ok(Configured { name, kind, instance, forge, client: client(Door::OpenId { issuer }) })
        }
    }
}

/// Where people and repositories are that are asked for by this address. GitHub's clouds have a host for it, a server of one's own
/// a path.
fn web_of(api: &str) -> String {
    match api.strip_suffix("/api/v3") {
        Some(web) => web.to_owned(),
        None => api.replacen("://api.", "://", 1),
    }
}

fn address(text: &str) -> Result<Url, String> {
    let url = Url::parse(text).ok().filter(|url| matches!(url.scheme(), "http" | "https"));
    url.ok_or_else(|| format!("has the url {text:?}, which is none: write https://host"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Vec<Configured>, String> {
        super::read(&Settings::default().with("forges", text)).map_err(|error| error.to_string())
    }

    fn refused(text: &str) -> String {
        read(text).err().unwrap()
    }

    const GITEA: &str = r#"{"name": "code", "type": "gitea", "url": "https://Code.example.org/", "token_file": "/t", "webhook_secret_file": "/w"}"#;
    const HUB: &str = r#"{"name": "github", "type": "github", "app_id": 7, "private_key_file": "/k", "webhook_secret_file": "/w"}"#;

    #[test]
    fn both_kinds_are_known_by_their_instances() {
        let all = read(&format!("[{GITEA}, {HUB}]")).unwrap();
        let known: Vec<_> = all.iter().map(|one| (one.name.as_str(), one.instance.as_str())).collect();
        assert_eq!(known, [("code", "https://code.example.org"), ("github", "https://github.com")]);
    }

    #[test]
    fn what_is_missing_or_too_much_is_named() {
        assert!(refused(&format!("[{}]", GITEA.replace("/t", "/t\", \"app_id\": \"7"))).contains("app_id"));
        assert!(refused(&format!("[{}]", HUB.replace(r#""app_id": 7, "#, ""))).contains("give it app_id"));
        assert!(refused(&format!("[{}]", GITEA.replace("token_file", "tokenfile"))).contains("tokenfile"));
        assert!(refused(&format!("[{}]", GITEA.replace("https://", "ssh://"))).contains("https://host"));
        assert!(refused(&format!("[{}]", GITEA.replace("\"code\"", "\"a/b\""))).contains("a-z"));
        assert!(refused(&format!("[{GITEA}, {GITEA}]")).contains("twice"));
        assert!(refused(&format!("[{}]", GITEA.replace("\"code\"", "\"oidc\""))).contains("another name"));
        let half = GITEA.replace("/t\"", "/t\", \"client_id\": \"us\"");
        assert!(refused(&format!("[{half}]")).contains("give it both"));
    }

    #[test]
    fn a_github_of_ones_own_is_not_the_one_that_all_have() {
        let url = r#""url": "https://Git.example.org/api/v3", "app_id""#;
        let all = read(&format!("[{}]", HUB.replace("\"app_id\"", url))).unwrap();
        assert_eq!(all[0].instance, "https://git.example.org");
    }

    #[test]
    fn people_sign_in_where_the_forge_is() {
        let client = r#""client_id": "us", "client_secret_file": "/c", "#;
        let all = read(&format!("[{}]", HUB.replace("\"app_id\"", &format!("{client}\"app_id\"")))).unwrap();
        let door = &all[0].client.as_ref().unwrap().door;
        assert!(matches!(door, Door::GitHub { web, .. } if web == "https://github.com"));
        assert_eq!(web_of("https://git.example.org/api/v3"), "https://git.example.org");
        assert_eq!(web_of("https://api.acme.ghe.com"), "https://acme.ghe.com");
    }
}
