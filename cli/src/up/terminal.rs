//! What a person sees of the parts: warnings, or everything if they ask for it. All of it is in the log files.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};

/// A log file that has grown to this is put aside, in the place of the one put aside before.
const LOG_LIMIT: u64 = 16 << 20;

/// Where lines for people go.
#[derive(Debug, Default)]
pub struct Terminal {
    verbose: bool,
    hushed: AtomicBool,
}

impl Terminal {
    pub fn new(verbose: bool) -> Self {
        Self { verbose, hushed: AtomicBool::new(false) }
    }

    /// From now on only what is said by [`Self::say`]: parts that stop complain about each other.
    pub fn hush(&self) {
        self.hushed.store(true, Ordering::Relaxed);
    }

    /// A line of `up` itself.
    pub fn say(&self, text: &str) {
        // Nobody is left to be told that nobody reads.
        let _ = writeln!(io::stdout(), "{text}");
    }

    fn show(&self, name: &str, line: &Line) {
        if self.verbose || line.loud && !self.hushed.load(Ordering::Relaxed) {
            let _ = writeln!(io::stderr(), "{name:9} {}", line.text);
        }
    }

    /// Follows what a part writes until it ends.
    pub async fn follow(
        &self,
        name: &'static str,
        log: &std::sync::Mutex<LogFile>,
        output: impl AsyncRead + Unpin,
    ) {
        let mut lines = BufReader::new(output).split(b'\n');
        while let Ok(Some(bytes)) = lines.next_segment().await {
            let text = String::from_utf8_lossy(&bytes);
            log.lock().unwrap_or_else(std::sync::PoisonError::into_inner).write(&text);
            self.show(name, &Line::read(&text));
        }
    }
}

/// A line of a part's log, as people read it.
#[derive(Debug, PartialEq, Eq)]
struct Line {
    loud: bool,
    text: String,
}

impl Line {
    /// Roles write JSON; PostgreSQL and Nix write text.
    fn read(line: &str) -> Self {
        let Ok(Value::Object(entry)) = serde_json::from_str(line) else {
            let loud = line.starts_with("error:") || line.contains("PANIC:");
            return Self { loud, text: line.to_owned() };
        };
        let word = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let level = entry.get("level").map(word).unwrap_or_default();
        let fields = entry.get("fields").and_then(Value::as_object);
        let mut text = fields.and_then(|fields| fields.get("message")).map(word).unwrap_or_default();
        for (name, value) in fields.into_iter().flatten().filter(|(name, _)| *name != "message") {
            text.push_str(&format!(" {name}={}", word(value)));
        }
        let loud = level == "WARN" || level == "ERROR";
        Self { loud, text: if loud { format!("{level} {text}") } else { text } }
    }
}

/// A file that lines are added to. One that cannot be written loses them: the part goes on.
#[derive(Debug)]
pub struct LogFile {
    path: PathBuf,
    open: Option<(File, u64)>,
    last: String,
}

impl LogFile {
    pub fn new(path: PathBuf) -> Self {
        Self { path, open: None, last: String::new() }
    }

    pub fn write(&mut self, line: &str) {
        line.clone_into(&mut self.last);
        let written = self.open().and_then(|(file, size)| {
            writeln!(file, "{line}")?;
            *size += line.len() as u64 + 1;
            Ok(*size)
        });
        if written.is_ok_and(|size| size >= LOG_LIMIT) {
            self.open = None;
            let _ = fs::rename(&self.path, self.path.with_extension("log.old"));
        }
    }

    fn open(&mut self) -> io::Result<&mut (File, u64)> {
        match &mut self.open {
            Some(open) => Ok(open),
            closed => {
                let file = File::options().append(true).create(true).open(&self.path)?;
                let size = file.metadata()?.len();
                Ok(closed.insert((file, size)))
            }
        }
    }

    /// Its last line, as people read it.
    pub fn last(&self) -> String {
        Line::read(&self.last).text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_warning_of_a_role_is_shown_with_its_facts() {
        let line = Line::read(
            r#"{"level":"WARN","fields":{"message":"the canary died","error":"no daemon","n":2}}"#,
        );
        assert_eq!(line, Line { loud: true, text: "WARN the canary died error=no daemon n=2".into() });
    }

    #[test]
    fn news_are_not_loud() {
        assert!(!Line::read(r#"{"level":"INFO","fields":{"message":"registered"}}"#).loud);
        assert!(!Line::read("2026-01-01 LOG:  checkpoint starting").loud);
        assert!(Line::read("error: cannot open /nix").loud);
    }

    #[test]
    fn a_full_log_is_put_aside() {
        let directory = tempfile::tempdir().unwrap();
        let mut log = LogFile::new(directory.path().join("role.log"));
        let line = "x".repeat(1 << 20);
        (0..17).for_each(|_| log.write(&line));
        assert!(directory.path().join("role.log.old").exists());
        assert!(fs::metadata(directory.path().join("role.log")).unwrap().len() < LOG_LIMIT);
    }
}
