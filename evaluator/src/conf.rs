//! What Nix is told on this machine, as evaluations may know it: `nix.conf` in one piece, without secrets, and the registry.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// What nobody's evaluation is to read, with or without `extra-` before it.
const SECRET: [&str; 3] = ["access-tokens", "netrc-file", "secret-key-files"];
/// Where all of it is in a workplace.
pub const DIRECTORY: &str = "conf";
/// A registry with nothing in it.
pub const NO_REGISTRY: &str = "conf/no-registry.json";
/// Files that include one another end somewhere.
const DEEPEST: usize = 8;

/// Writes it into a workplace.
pub fn write(place: &Path) -> io::Result<()> {
    let to = place.join(DIRECTORY);
    fs::create_dir(&to)?;
    fs::write(place.join(NO_REGISTRY), r#"{"flakes":[],"version":2}"#)?;
    let machines = std::env::var_os("NIX_CONF_DIR").map_or_else(|| PathBuf::from("/etc/nix"), PathBuf::from);
    fs::write(to.join("nix.conf"), public(&machines.join("nix.conf"), 0))?;
    match fs::read(machines.join("registry.json")) {
        Ok(registry) => fs::write(to.join("registry.json"), registry),
        // Whoever has none knows the one of the internet.
        Err(_) => Ok(()),
    }
}

/// The lines of a file and of those that it includes. One that cannot be read says nothing.
fn public(file: &Path, depth: usize) -> String {
    let text = fs::read_to_string(file).unwrap_or_default();
    let mut told = String::new();
    for line in text.lines() {
        let plain = line.split('#').next().unwrap_or_default();
        let mut words = plain.split_whitespace();
        match (words.next(), words.next()) {
            (Some("include" | "!include"), Some(other)) if depth < DEEPEST => {
                told.push_str(&public(&file.with_file_name(other), depth + 1));
            }
            (Some("include" | "!include"), _) | (None, _) => {}
            (Some(name), _) if is_secret(name) || has_password(plain) => {}
            _ => {
                told.push_str(plain.trim_end());
                told.push('\n');
            }
        }
    }
    told
}

fn is_secret(name: &str) -> bool {
    SECRET.contains(&name.strip_prefix("extra-").unwrap_or(name))
}

/// `https://me:secret@host`.
fn has_password(line: &str) -> bool {
    let mut authorities = line.split("://").skip(1).filter_map(|rest| rest.split(['/', ' ', '?']).next());
    authorities.any(|authority| authority.contains('@'))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_told_and_secrets_are_not() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("nix.conf");
        let own = "max-jobs = 2 # of four\naccess-tokens = github.com=s1\nextra-access-tokens = h=s2\nnetrc-file = /s3\n\
                   substituters = https://me:s4@cache.example.org\n!include more.conf\n!include missing.conf\ninclude nix.conf\n";
        fs::write(&file, own).unwrap();
        fs::write(directory.path().join("more.conf"), "cores = 1\nsecret-key-files = /s5").unwrap();
        let told = public(&file, 0);
        assert!(told.starts_with("max-jobs = 2\ncores = 1\n"), "{told}");
        assert!(!told.contains("s1") && !told.contains("/s") && !told.contains("s4"), "{told}");
    }
}
