//! A Chromium of one's own, led by chromedriver: the few words of WebDriver that the tests need.

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use reqwest::{Client, Method};
use serde_json::{Value, json};
use tempfile::TempDir;

/// As root there is no sandbox, and nothing of it is to speak with anybody.
const OPTIONS: &[&str] = &[
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
];
/// How elements are written in WebDriver.
const ELEMENT: &str = "element-6066-11e4-a52e-4f735466cecf";

/// A browser with one window.
pub struct Chromium {
    driver: Child,
    client: Client,
    session: String,
    _profile: TempDir,
}

impl Chromium {
    /// With an empty profile.
    pub async fn start() -> Self {
        let mut driver = Command::new("chromedriver")
            .arg("--port=0")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .expect("chromedriver: `./dev test browser` installs it");
        let lines = BufReader::new(driver.stdout.take().unwrap()).lines();
        let port = lines.map_while(Result::ok).find_map(|line| {
            line.strip_prefix("ChromeDriver was started successfully on port ")
                .map(|port| port.trim_end_matches('.').to_owned())
        });
        let base = format!("http://127.0.0.1:{}", port.expect("chromedriver says its port"));
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = Client::builder().timeout(Duration::from_secs(120)).build().unwrap();
        let profile = TempDir::new().unwrap();
        let mut options: Vec<String> = OPTIONS.iter().map(|option| (*option).to_owned()).collect();
        options.push(format!("--user-data-dir={}", profile.path().display()));
        let wanted = json!({"capabilities": {"alwaysMatch": {
            "browserName": "chrome", "goog:chromeOptions": {"args": options}, "goog:loggingPrefs": {"browser": "ALL"}}}});
        let mut browser = Self { driver, client, session: format!("{base}/session"), _profile: profile };
        let session = browser.tell(Method::POST, "", wanted).await;
        browser.session = format!("{base}/session/{}", session["sessionId"].as_str().unwrap());
        browser.size(1280, 900).await;
        browser
    }

    async fn tell(&self, method: Method, path: &str, body: Value) -> Value {
        let request = self.client.request(method.clone(), format!("{}{path}", self.session));
        let request = if method == Method::POST { request.json(&body) } else { request };
        let mut answer: Value = request.send().await.unwrap().json().await.unwrap();
        assert!(answer["value"]["error"].is_null(), "{path} {body}: {answer}");
        answer["value"].take()
    }

    /// Loads a page.
    pub async fn open(&self, url: &str) {
        self.tell(Method::POST, "/url", json!({"url": url})).await;
    }

    /// Where it is.
    pub async fn url(&self) -> String {
        self.tell(Method::GET, "/url", Value::Null).await.as_str().unwrap().to_owned()
    }

    /// What a function's body answers; a promise is awaited.
    pub async fn run(&self, script: &str) -> Value {
        self.tell(Method::POST, "/execute/sync", json!({"script": script, "args": []})).await
    }

    /// What can be read on the page.
    pub async fn text(&self) -> String {
        self.run("return document.body.innerText").await.as_str().unwrap().to_owned()
    }

    /// Clicks what this selector finds first.
    pub async fn click(&self, selector: &str) {
        let element =
            self.tell(Method::POST, "/element", json!({"using": "css selector", "value": selector})).await;
        let path = format!("/element/{}/click", element[ELEMENT].as_str().unwrap());
        self.tell(Method::POST, &path, json!({})).await;
    }

    /// Types, whatever has the focus.
    pub async fn keys(&self, text: &str) {
        let actions: Vec<Value> = text
            .chars()
            .flat_map(|key| ["keyDown", "keyUp"].map(|kind| json!({"type": kind, "value": key.to_string()})))
            .collect();
        let keyboard = json!({"actions": [{"type": "key", "id": "keyboard", "actions": actions}]});
        self.tell(Method::POST, "/actions", keyboard).await;
    }

    /// How large the page is, on a screen of that size.
    pub async fn size(&self, width: u32, height: u32) {
        let screen = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600});
        self.devtools("Emulation.setDeviceMetricsOverride", screen).await;
    }

    /// light or dark.
    pub async fn scheme(&self, scheme: &str) {
        let features = json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]});
        self.devtools("Emulation.setEmulatedMedia", features).await;
    }

    /// Runs no script of a page from now on.
    pub async fn without_scripts(&self) {
        self.devtools("Emulation.setScriptExecutionDisabled", json!({"value": true})).await;
    }

    /// A word to the browser itself.
    pub async fn devtools(&self, command: &str, parameters: Value) -> Value {
        self.tell(Method::POST, "/goog/cdp/execute", json!({"cmd": command, "params": parameters})).await
    }

    /// What it looks like, as PNG.
    pub async fn picture(&self) -> Vec<u8> {
        let picture = self.tell(Method::GET, "/screenshot", Value::Null).await;
        STANDARD.decode(picture.as_str().unwrap()).unwrap()
    }

    /// What the browser complained about since the last time.
    pub async fn complaints(&self) -> Vec<String> {
        let entries = self.tell(Method::POST, "/se/log", json!({"type": "browser"})).await;
        entries.as_array().unwrap().iter().map(|entry| entry["message"].to_string()).collect()
    }
}

impl Drop for Chromium {
    fn drop(&mut self) {
        // The driver and its browser are one group of processes.
        let group = format!("-{}", self.driver.id());
        let _ = Command::new("kill").args(["-TERM", "--", &group]).status();
        let _ = self.driver.wait();
    }
}
