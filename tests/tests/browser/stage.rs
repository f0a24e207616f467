//! A farm with something to see, and a browser before it.

use std::path::Path;
use std::process::Command;

use harmonia_tests::eventually;
use tempfile::TempDir;

use super::chromium::Chromium;
use super::machine::{Machine, Up};

/// Where pictures are kept, and where sources are.
pub const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

/// What a person has before them.
pub struct Stage<'a> {
    pub machine: &'a Machine,
    pub browser: Chromium,
    pub url: String,
    source: TempDir,
    _up: Up<'a>,
}

impl<'a> Stage<'a> {
    /// Of a farm that has just started.
    pub async fn new(machine: &'a Machine) -> Self {
        let up = machine.up_with(&["--slots", "2"]).await;
        let browser = Chromium::start().await;
        let source = tempfile::Builder::new().prefix("source-").tempdir().unwrap();
        let copied =
            Command::new("cp").arg("-r").arg(format!("{ROOT}/docs/demo")).arg(source.path()).status();
        assert!(copied.unwrap().success());
        Self { machine, browser, url: format!("http://{}", machine.listen), source, _up: up }
    }

    /// Loads a page of the farm.
    pub async fn open(&self, path: &str) {
        // Chromium drops what it loads when an interface of the machine comes or goes, as those of other tests do.
        for _ in 0..5 {
            self.browser.open(&format!("{}{path}", self.url)).await;
            if self.browser.run("return document.querySelector('#main') !== null").await == true {
                return;
            }
        }
        panic!("{path} cannot be loaded: {}", self.browser.text().await);
    }

    /// The link that `up` printed.
    pub fn invitation(&self) -> String {
        let printed = self.machine.printed();
        printed.lines().find(|line| line.contains("/sign-in?once=")).expect("a link").trim().to_owned()
    }

    /// Signs in as whoever started the farm.
    pub async fn sign_in(&self) {
        self.browser.open(&self.invitation()).await;
        self.browser.click("form.sign button").await;
        self.reads("Sign out").await;
    }

    /// Waits until the page says so, by itself.
    pub async fn reads(&self, words: &str) {
        eventually(words, || async { self.browser.text().await.contains(words) }).await;
    }

    /// The demo, evaluated as a person does.
    pub fn evaluate(&self, words: &[&str]) -> (String, i32) {
        let source = self.source.path().join("demo");
        self.machine.verb(&[&["eval", source.to_str().unwrap()], words].concat())
    }

    /// The number of a build.
    pub fn build(&self, attribute: &str) -> i64 {
        let text = self.machine.does(&["why", attribute]);
        text.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    /// Keeps what is seen, if pictures are wanted.
    pub async fn picture(&self, name: &str) {
        if std::env::var_os("HARMONIA_CI_TEST_PICTURES").is_some() {
            let directory = Path::new(ROOT).join("docs/images");
            std::fs::create_dir_all(&directory).unwrap();
            std::fs::write(directory.join(format!("{name}.png")), self.browser.picture().await).unwrap();
        }
    }
}
