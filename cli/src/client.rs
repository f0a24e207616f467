//! The frontend's API, as the CLI talks to it.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use harmonia_builder::upload::{UploadError, http_client, local_http_client};
use reqwest::{Method, RequestBuilder, Response, StatusCode, Url, header};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Answers come within this, streams apart.
const PATIENCE: Duration = Duration::from_secs(60);

/// The options that name a farm.
#[derive(Args)]
pub struct Farm {
    /// The farm's address; without it, the one that `harmonia-ci up` runs on this machine
    #[arg(long, global = true, value_name = "URL", env = "HARMONIA_CI_URL", hide_env_values = true)]
    url: Option<String>,

    /// A file that holds the token; else the token is HARMONIA_CI_TOKEN, or in the file that HARMONIA_CI_TOKEN_FILE names
    #[arg(long, global = true, value_name = "FILE")]
    token_file: Option<PathBuf>,
}

/// What `harmonia-ci up` leaves for the CLI.
#[derive(Deserialize)]
struct Local {
    url: String,
    token_file: PathBuf,
}

/// Why the farm did not do what was asked.
#[derive(Debug, Error)]
pub enum ApiError {
    /// Nobody said where it is.
    #[error(
        "no farm is known: start one with `harmonia-ci up`, or set HARMONIA_CI_URL and HARMONIA_CI_TOKEN"
    )]
    Unknown,
    /// Nobody can be asked there.
    #[error(
        "{0:?} is not the address of a farm: write it as https://ci.example.org, after --url or in HARMONIA_CI_URL"
    )]
    Address(String),
    /// What `up` wrote is not what it writes.
    #[error("{} is not what `harmonia-ci up` writes: remove it, and start that again", file.display())]
    Local {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        source: toml::de::Error,
    },
    /// The token cannot be read.
    #[error("the token cannot be read from {}", file.display())]
    Token {
        /// The file.
        file: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The HTTP client cannot be made.
    #[error(transparent)]
    Client(#[from] UploadError),
    /// Nobody answers.
    #[error("the farm at {url} cannot be reached")]
    Unreachable {
        /// Where.
        url: String,
        /// Why.
        source: reqwest::Error,
    },
    /// It ends what it has begun, again and again.
    #[error(
        "the farm at {url} breaks off again and again: is there a proxy before it that cuts connections?"
    )]
    CutOff {
        /// Where.
        url: String,
    },
    /// It says no.
    #[error("{detail}")]
    Refused {
        /// How.
        status: StatusCode,
        /// In words.
        detail: String,
    },
    /// Its answer is not one.
    #[error(
        "the farm at {url} answers something else than its API says: is it another service, or another release?"
    )]
    Nonsense {
        /// Where.
        url: String,
        /// What is wrong with it.
        source: reqwest::Error,
    },
}

impl ApiError {
    /// Whether the same may be answered in a moment: nobody is there, or somebody behind them is not.
    pub fn is_away(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::CutOff { .. } => true,
            Self::Refused { status, .. } => status.is_server_error(),
            _ => false,
        }
    }
}

/// A farm that can be asked.
pub struct Client {
    http: reqwest::Client,
    url: String,
    token: Option<String>,
}

impl Farm {
    /// Where it is and who asks: options, then the environment, then what `up` left.
    pub fn client(&self) -> Result<Client, ApiError> {
        let local = match &self.url {
            Some(url) if !is_address(url) => return Err(ApiError::Address(url.clone())),
            Some(_) => None,
            None => Some(local()?.ok_or(ApiError::Unknown)?),
        };
        let token = self.token(local.as_ref())?;
        let is_near = local.is_some() || self.url.as_deref().is_some_and(is_loopback);
        let http = if is_near { local_http_client()? } else { http_client()? };
        let url = self.url.clone().or(local.map(|local| local.url)).unwrap_or_default();
        Ok(Client { http, url: url.trim_end_matches('/').to_owned(), token })
    }

    fn token(&self, local: Option<&Local>) -> Result<Option<String>, ApiError> {
        let set = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        if self.token_file.is_none()
            && let Some(token) = set("HARMONIA_CI_TOKEN")
        {
            return Ok(Some(token.trim().to_owned()));
        }
        let file = self.token_file.clone().or_else(|| set("HARMONIA_CI_TOKEN_FILE").map(PathBuf::from));
        file.or_else(|| Some(local?.token_file.clone())).map(read_token).transpose()
    }
}

fn is_address(url: &str) -> bool {
    Url::parse(url).is_ok_and(|url| matches!(url.scheme(), "http" | "https") && url.has_host())
}

/// Whether that is this machine, wherever it is.
fn is_loopback(url: &str) -> bool {
    let url: Option<Url> = url.parse().ok();
    let host = url.as_ref().and_then(Url::host_str).unwrap_or_default();
    let address = host.trim_matches(['[', ']']).parse::<IpAddr>();
    address.map_or(host == "localhost", |address| address.is_loopback())
}

/// Where `up` leaves the address of the farm on this machine.
pub fn local_file() -> Option<PathBuf> {
    let config = std::env::var_os("XDG_CONFIG_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    Some(config.or_else(|| Some(std::env::home_dir()?.join(".config")))?.join("harmonia-ci/local.toml"))
}

fn local() -> Result<Option<Local>, ApiError> {
    let Some(file) = local_file() else { return Ok(None) };
    let Ok(text) = std::fs::read_to_string(&file) else { return Ok(None) };
    toml::from_str(&text).map(Some).map_err(|source| ApiError::Local { file, source })
}

fn read_token(file: PathBuf) -> Result<String, ApiError> {
    match std::fs::read_to_string(&file) {
        Ok(text) => Ok(text.trim().to_owned()),
        Err(source) => Err(ApiError::Token { file, source }),
    }
}

impl Client {
    /// Asks for something.
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ApiError> {
        self.read(self.request(Method::GET, path).timeout(PATIENCE)).await
    }

    /// Asks for something with a query.
    pub async fn find<T: DeserializeOwned>(&self, path: &str, query: &[(&str, &str)]) -> Result<T, ApiError> {
        let query: Vec<String> =
            query.iter().map(|(name, value)| format!("{name}={}", word(value))).collect();
        self.get(&format!("{path}?{}", query.join("&"))).await
    }

    /// Has something done.
    pub async fn send<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Option<&(impl Serialize + Sync)>,
    ) -> Result<T, ApiError> {
        let request = self.request(method, path).timeout(PATIENCE);
        let request = match body {
            Some(body) => request.json(body),
            None => request,
        };
        self.read(request).await
    }

    /// Has something done that needs no words.
    pub async fn post<T: DeserializeOwned>(&self, path: &str) -> Result<T, ApiError> {
        self.send(Method::POST, path, None::<&()>).await
    }

    /// Begins to read what may take for ever; `after`: from this event on.
    pub async fn open(&self, path: &str, after: Option<&str>) -> Result<Response, ApiError> {
        let request = self.request(Method::GET, path);
        let request = match after {
            Some(id) => request.header("last-event-id", id),
            None => request,
        };
        self.ask(request).await
    }

    /// An error of a connection that was open.
    pub fn lost(&self, source: reqwest::Error) -> ApiError {
        ApiError::Unreachable { url: self.url.clone(), source: source.without_url() }
    }

    /// Too many connections ended before their time.
    pub fn cut_off(&self) -> ApiError {
        ApiError::CutOff { url: self.url.clone() }
    }

    fn request(&self, method: Method, path: &str) -> RequestBuilder {
        let request = self.http.request(method, format!("{}/api/{path}", self.url));
        match &self.token {
            Some(token) => request.bearer_auth(token),
            None => request,
        }
    }

    async fn read<T: DeserializeOwned>(&self, request: RequestBuilder) -> Result<T, ApiError> {
        let answer = self.ask(request).await?;
        answer
            .json()
            .await
            .map_err(|source| ApiError::Nonsense { url: self.url.clone(), source: source.without_url() })
    }

    async fn ask(&self, request: RequestBuilder) -> Result<Response, ApiError> {
        let answer = request.send().await.map_err(|source| self.lost(source))?;
        let status = answer.status();
        if status.is_success() {
            return Ok(answer);
        }
        let is_problem = answer
            .headers()
            .get(header::CONTENT_TYPE)
            .is_some_and(|value| value.as_bytes().starts_with(b"application/problem+json"));
        let detail = match answer.json::<Problem>().await {
            Ok(problem) if is_problem => problem.detail,
            _ => format!("{} answers {status}: is it a farm?", self.url),
        };
        Err(ApiError::Refused { status, detail })
    }
}

#[derive(Deserialize)]
struct Problem {
    detail: String,
}

/// A word of a path or a query, written so that it stays one.
pub fn word(text: &str) -> String {
    text.bytes().fold(String::new(), |word, byte| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
            word + char::from(byte).encode_utf8(&mut [0; 4])
        }
        _ => format!("{word}%{byte:02X}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_is_known_by_its_addresses() {
        for url in ["http://127.0.0.1:7777", "http://localhost", "http://[::1]:7777/"] {
            assert!(is_loopback(url), "{url}");
        }
        for url in ["http://10.0.0.1:7777", "https://ci.example.org", "localhost", ""] {
            assert!(!is_loopback(url), "{url}");
        }
    }

    #[test]
    fn an_address_is_one_of_http() {
        assert!(is_address("http://127.0.0.1:7777") && is_address("https://ci.example.org/"));
        for text in ["ci.example.org", "localhost:7777", "postgres://h/x", "https://", ""] {
            assert!(!is_address(text), "{text}");
        }
    }

    #[test]
    fn a_word_with_odd_letters_stays_one() {
        assert_eq!(word("a/b c?é"), "a%2Fb%20c%3F%C3%A9");
        assert_eq!(word("default-1.0_x"), "default-1.0_x");
    }
}
