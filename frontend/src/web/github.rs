//! Sign-in with GitHub, which knows no OpenID Connect: OAuth, and then it is asked whose token that is.

use harmonia_service::problem::Problem;
use reqwest::Client;
use serde::Deserialize;

use super::provider::{Attempt, Home, Somebody, Us, ask, away, client, fields, form, refused};

/// GitHub, and what we are to it.
pub struct GitHub {
    web: String,
    api: String,
    us: Us,
    home: Home,
    client: Client,
}

/// A wrong code is answered with 200, and with an error instead of a token.
#[derive(Deserialize)]
struct Answer {
    access_token: Option<String>,
}

#[derive(Deserialize)]
struct User {
    login: String,
}

impl GitHub {
    /// Where people go, and where is asked who they are.
    pub fn new(web: &str, api: &str, us: Us, home: Home) -> Self {
        Self { web: web.to_owned(), api: api.to_owned(), us, home, client: client() }
    }

    /// What people call it.
    pub fn name(&self) -> &str {
        "GitHub"
    }

    /// Where somebody says who they are. No scope: who they are is all that is asked for.
    pub fn address(&self, attempt: &Attempt) -> String {
        let fields = fields(&[
            ("client_id", &self.us.id),
            ("redirect_uri", &self.us.back),
            ("state", &attempt.state),
            ("code_challenge", &attempt.challenge()),
            ("code_challenge_method", "S256"),
        ]);
        format!("{}/login/oauth/authorize?{fields}", self.web)
    }

    /// Who came back with this code. The token is not kept.
    pub async fn redeem(&self, attempt: &Attempt, code: &str) -> Result<Somebody, Problem> {
        let secret = match &self.us.secret {
            Some(secret) => secret.read().map_err(|error| away(&error))?,
            None => String::new(),
        };
        let fields = [
            ("client_id", self.us.id.as_str()),
            ("client_secret", &secret),
            ("code", code),
            ("redirect_uri", &self.us.back),
            ("code_verifier", &attempt.verifier),
        ];
        let request = form(self.client.post(format!("{}/login/oauth/access_token", self.web)), &fields);
        let answer: Answer = ask(request).await?;
        let token = answer.access_token.ok_or_else(|| refused("is that the code is wrong or too old"))?;
        let User { login } = ask(self.client.get(format!("{}/user", self.api)).bearer_auth(token)).await?;
        if login.is_empty() {
            return Err(refused("names nobody"));
        }
        Ok(self.home.somebody(login, &self.us.people))
    }
}
