//! Sign-in by somebody else's word: an authorization code with PKCE, from a provider of OpenID Connect or from GitHub.

use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use harmonia_queue::people::Scope;
use harmonia_service::problem::Problem;
use harmonia_service::settings::{Settings, SettingsError};
use reqwest::redirect::Policy;
use reqwest::{Client, RequestBuilder};
use ring::digest::{SHA256, digest};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::github::GitHub;
use super::oidc::Oidc;
use super::session::random;
use crate::escape::escape;
use crate::forge::{Door, Forges, Member, OIDC};

/// A provider that does not answer by then is away.
const PATIENCE: Duration = Duration::from_secs(10);
/// The longest answer.
const LONGEST: usize = 256 << 10;

/// Somebody whom a provider knows.
pub struct Somebody {
    /// What to call them.
    pub name: String,
    /// What they may do, as far as they are listed.
    pub scope: Option<Scope>,
    /// Who they are at a forge.
    pub member: Option<Member>,
}

/// Who says who people are.
pub enum Provider {
    OpenId(Oidc),
    GitHub(GitHub),
}

impl Provider {
    /// What people call it.
    pub fn name(&self) -> &str {
        match self {
            Self::OpenId(oidc) => oidc.name(),
            Self::GitHub(github) => github.name(),
        }
    }

    /// Where somebody says who they are.
    pub async fn address(&self, attempt: &Attempt) -> Result<String, Problem> {
        match self {
            Self::OpenId(oidc) => oidc.address(attempt).await,
            Self::GitHub(github) => Ok(github.address(attempt)),
        }
    }

    /// Who came back with this code.
    pub async fn redeem(&self, attempt: &Attempt, code: &str) -> Result<Somebody, Problem> {
        match self {
            Self::OpenId(oidc) => oidc.redeem(attempt, code).await,
            Self::GitHub(github) => github.redeem(attempt, code).await,
        }
    }
}

/// All that are set, by the names that their addresses have: that of `oidc_issuer`, and forges.
pub fn read(
    settings: &Settings,
    url: &str,
    forges: &Forges,
) -> Result<Vec<(String, Provider)>, SettingsError> {
    let people = People::read(settings);
    let mut all = Vec::new();
    if let Some(oidc) = Oidc::new(settings, &back(url, OIDC), &people)? {
        all.push((OIDC.to_owned(), Provider::OpenId(oidc)));
    }
    for known in forges.all() {
        let Some(client) = &known.client else { continue };
        let home = Home { forge: known.name.clone(), instance: known.instance.clone() };
        let us = Us {
            id: client.id.clone(),
            secret: Some(client.secret.clone()),
            back: back(url, &known.name),
            people: people.clone(),
        };
        let provider = match &client.door {
            Door::OpenId { issuer } => Provider::OpenId(Oidc::at_home(issuer, us, home)),
            Door::GitHub { web, api } => Provider::GitHub(GitHub::new(web, api, us, home)),
        };
        all.push((known.name.clone(), provider));
    }
    Ok(all)
}

fn back(url: &str, provider: &str) -> String {
    format!("{url}/sign-in/{provider}/back")
}

/// What we are to a provider, and who of its people is somebody here.
pub struct Us {
    pub id: String,
    pub secret: Option<harmonia_service::secret::Secret>,
    /// Where it sends people back to.
    pub back: String,
    pub people: People,
}

/// The forge whose people a provider knows.
#[derive(Debug, Clone)]
pub struct Home {
    pub forge: String,
    pub instance: String,
}

impl Home {
    /// Somebody of this forge. Names at different forges are different people: who may do more is listed as `forge:login`.
    pub fn somebody(&self, login: String, people: &People) -> Somebody {
        let scope = people.scope(&[Name::Forge(&format!("{}:{login}", self.forge))]);
        let member = Some(Member { instance: self.instance.clone(), login: login.clone() });
        Somebody { name: login, scope, member }
    }
}

/// Who may do everything, start and stop, or look.
#[derive(Debug, Clone, Default)]
pub struct People {
    pub admins: Vec<String>,
    pub operators: Vec<String>,
    pub readers: Vec<String>,
}

impl People {
    fn read(settings: &Settings) -> Self {
        let list = |name: &'static str| -> Vec<String> {
            let words = settings.get(name).unwrap_or_default().split(',').map(str::trim);
            words.filter(|word| !word.is_empty()).map(str::to_owned).collect()
        };
        Self { admins: list("admins"), operators: list("operators"), readers: list("readers") }
    }

    /// What somebody may do who has these names. None: they are not listed.
    pub fn scope(&self, names: &[Name<'_>]) -> Option<Scope> {
        let is_in = |list: &[String]| list.iter().any(|word| names.iter().any(|name| word == name.text()));
        if is_in(&self.admins) {
            Some(Scope::Admin)
        } else if is_in(&self.operators) {
            Some(Scope::Operate)
        } else {
            let reads = |word: &String| names.iter().any(|name| name.fits(word));
            self.readers.iter().any(reads).then_some(Scope::Read)
        }
    }
}

/// By what somebody is known.
#[derive(Debug, Clone, Copy)]
pub enum Name<'a> {
    /// `forge:login`.
    Forge(&'a str),
    /// An address that a provider has checked.
    Address(&'a str),
    /// What a provider calls them, or they themselves: it may look like anything.
    Subject(&'a str),
}

impl<'a> Name<'a> {
    fn text(self) -> &'a str {
        match self {
            Self::Forge(text) | Self::Address(text) | Self::Subject(text) => text,
        }
    }

    /// `code:*` is everybody of that forge, `*@example.org` whoever has an address there.
    fn fits(self, word: &str) -> bool {
        match (self, word.strip_suffix(":*"), word.strip_prefix("*@")) {
            (Self::Forge(name), Some(forge), _) => name.split_once(':').is_some_and(|(of, _)| of == forge),
            (Self::Address(name), _, Some(domain)) => {
                name.rsplit_once('@').is_some_and(|(_, of)| of.eq_ignore_ascii_case(domain))
            }
            _ => word == self.text(),
        }
    }
}

/// A sign-in that was begun.
#[derive(Debug, Serialize, Deserialize)]
pub struct Attempt {
    /// With whom.
    pub provider: String,
    pub state: String,
    pub nonce: String,
    pub verifier: String,
    /// Where to go afterwards.
    pub to: String,
}

impl Attempt {
    /// Another one.
    pub fn new(provider: &str, to: &str) -> Self {
        let (provider, to) = (provider.to_owned(), to.to_owned());
        Self { provider, state: random(), nonce: random(), verifier: random() + &random(), to }
    }

    /// Whether an answer belongs to it.
    pub fn is(&self, provider: &str, state: &str) -> bool {
        self.provider == provider && self.state == state
    }

    /// What the verifier is known by until it is shown.
    pub fn challenge(&self) -> String {
        URL_SAFE_NO_PAD.encode(digest(&SHA256, self.verifier.as_bytes()))
    }
}

/// Who asks providers.
pub fn client() -> Client {
    // An error says that another provider of cryptography is installed already: that one serves as well.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let client =
        Client::builder().timeout(PATIENCE).redirect(Policy::none()).user_agent("harmonia-ci").build();
    client.unwrap_or_default()
}

/// Fields of a form, or of an address.
pub fn fields(fields: &[(&str, &str)]) -> String {
    let pairs: Vec<String> = fields.iter().map(|(name, value)| format!("{name}={}", escape(value))).collect();
    pairs.join("&")
}

/// A form to be sent.
pub fn form(request: RequestBuilder, form: &[(&str, &str)]) -> RequestBuilder {
    request.header("content-type", "application/x-www-form-urlencoded").body(fields(form))
}

/// What a provider answers.
pub async fn ask<T: DeserializeOwned>(request: RequestBuilder) -> Result<T, Problem> {
    let response = request.header("accept", "application/json").send().await.map_err(|error| away(&error))?;
    let response = response.error_for_status().map_err(|error| away(&error))?;
    if response.content_length().is_some_and(|length| length > LONGEST as u64) {
        return Err(refused("says too much"));
    }
    let bytes = response.bytes().await.map_err(|error| away(&error))?;
    serde_json::from_slice(&bytes).map_err(|error| away(&error))
}

/// It cannot be asked.
pub fn away(error: &dyn std::error::Error) -> Problem {
    tracing::warn!(
        error = harmonia_service::sentence::sentence(error),
        "the provider of sign-in does not answer"
    );
    Problem::unavailable(
        "the provider of sign-in does not answer as it should; the log of the frontend says why",
    )
}

/// It is not believed.
pub fn refused(why: &str) -> Problem {
    tracing::warn!(why, "the word of the provider of sign-in was refused");
    Problem::unauthorized(format!("what the provider of sign-in says {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_challenge_follows_from_the_verifier() {
        let attempt = Attempt {
            verifier: "dBjftJeZ4CVP-mB92K27uhbUJU1p1r_wW1gFWFOEjXk".to_owned(),
            ..Attempt::new("oidc", "/")
        };
        assert_eq!(attempt.challenge(), "E9Melhoa2OwvFrEMTJguCHaoeK1t8URWbuGJSstw-cM");
    }

    #[test]
    fn an_answer_belongs_to_one_sign_in_with_one_provider() {
        let attempt = Attempt::new("code", "/");
        assert!(attempt.is("code", &attempt.state));
        assert!(!attempt.is("github", &attempt.state) && !attempt.is("code", "another"));
    }

    #[test]
    fn the_same_name_at_another_forge_is_somebody_else() {
        let (admins, operators) = (vec!["code:ada".to_owned()], vec!["ada".to_owned()]);
        let people = People { admins, operators, ..People::default() };
        let home = |forge: &str| Home { forge: forge.to_owned(), instance: String::new() };
        assert_eq!(home("code").somebody("ada".to_owned(), &people).scope, Some(Scope::Admin));
        assert_eq!(home("github").somebody("ada".to_owned(), &people).scope, None);
    }

    #[test]
    fn readers_are_listed_one_by_one_or_all_of_a_forge_or_of_a_domain() {
        let readers = ["code:*", "github:ada", "*@example.org"].map(str::to_owned).to_vec();
        let people = People { readers, ..People::default() };
        for name in [Name::Forge("code:eve"), Name::Forge("github:ada"), Name::Address("bob@Example.org")] {
            assert_eq!(people.scope(&[name]), Some(Scope::Read), "{name:?}");
        }
        for name in [
            Name::Forge("code"),
            Name::Forge("decode:eve"),
            Name::Forge("github:eve"),
            Name::Address("bob@evil-example.org"),
            Name::Address("bob@example.org.evil"),
            Name::Address("example.org"),
            Name::Subject("code:eve"),
            Name::Subject("bob@example.org"),
        ] {
            assert_eq!(people.scope(&[name]), None, "{name:?}");
        }
    }
}
