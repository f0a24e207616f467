//! Somebody with a browser, as far as HTTP goes: cookies, forms, where they come from.

use reqwest::redirect::Policy;
use reqwest::{Client, RequestBuilder, Response};

use super::desk::Desk;

/// A browser at a desk.
pub struct Reader<'a> {
    desk: &'a Desk,
    client: Client,
    /// What it sends as its cookie.
    pub cookie: Option<String>,
}

impl<'a> Reader<'a> {
    /// Nobody in particular.
    pub fn new(desk: &'a Desk) -> Self {
        let client = Client::builder().redirect(Policy::none()).build().unwrap();
        Self { desk, client, cookie: None }
    }

    /// Signed in by a token.
    pub async fn signed_in(desk: &'a Desk, token: &str) -> Self {
        let mut reader = Self::new(desk);
        let answer = reader.send("/sign-in", &[("token", token)]).await;
        assert_eq!(answer.status(), 303);
        reader.cookie = Some(cookie(&answer));
        reader
    }

    /// What is there.
    pub async fn get(&self, path: &str) -> Response {
        self.known(self.client.get(format!("{}{path}", self.desk.url)).header("accept", "text/html")).await
    }

    /// A page that must be there.
    pub async fn page(&self, path: &str) -> String {
        let answer = self.get(path).await;
        let (status, text) = (answer.status(), answer.text().await.unwrap());
        assert_eq!(status, 200, "{path}: {text}");
        text
    }

    /// A form of our own site, without what makes it the session's.
    pub async fn send(&self, path: &str, fields: &[(&str, &str)]) -> Response {
        self.send_from(&self.desk.url, path, fields).await
    }

    /// A form that a page of some site sends.
    pub async fn send_from(&self, origin: &str, path: &str, fields: &[(&str, &str)]) -> Response {
        let escape = |word: &str| word.bytes().map(|byte| format!("%{byte:02X}")).collect::<String>();
        let pairs: Vec<String> =
            fields.iter().map(|(name, value)| format!("{name}={}", escape(value))).collect();
        let request = self
            .client
            .post(format!("{}{path}", self.desk.url))
            .header("origin", origin)
            .header("content-type", "application/x-www-form-urlencoded")
            .body(pairs.join("&"));
        self.known(request).await
    }

    async fn known(&self, request: RequestBuilder) -> Response {
        let request = match &self.cookie {
            Some(cookie) => request.header("cookie", cookie),
            None => request,
        };
        request.send().await.unwrap()
    }

    /// The form of a page, sent as its button does.
    pub async fn press(&self, page: &str, action: &str, fields: &[(&str, &str)]) -> Response {
        let csrf = csrf(&self.page(page).await);
        let fields: Vec<(&str, &str)> = fields.iter().copied().chain([("csrf", csrf.as_str())]).collect();
        self.send(action, &fields).await
    }
}

/// What makes a form of this page the session's.
pub fn csrf(page: &str) -> String {
    let from = page.find("name=\"csrf\" value=\"").expect("a form") + 19;
    page[from..].split('"').next().unwrap().to_owned()
}

/// The session that an answer begins.
pub fn cookie(answer: &Response) -> String {
    let value = answer.headers()["set-cookie"].to_str().unwrap();
    value.split(';').next().unwrap().to_owned()
}
