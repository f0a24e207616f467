//! Secrets by which private repositories and private inputs of flakes are read. A credential is a file in netrc's form, which
//! binds each secret to a host: `machine git.example.org login ci password …`.

use std::fmt::Write;
use std::path::Path;

use harmonia_service::netrc::{self, Machine};
use thiserror::Error;

/// Why a credential cannot be used. The secret itself is in none of these.
#[derive(Debug, Error)]
pub enum CredentialError {
    /// There is none of that name.
    #[error(
        "the project's credential {0} is not there: put a netrc file of that name into the directory that HARMONIA_CI_CREDENTIALS_DIR names; in \
         Kubernetes, see the Project's Ready condition, and give a Secret that was just made two minutes to reach the evaluators"
    )]
    Missing(String),
    /// It is not what netrc's form asks for.
    #[error("the project's credential {name} cannot be used: {why}")]
    Form {
        /// Which.
        name: String,
        /// What is wrong.
        why: &'static str,
    },
}

/// Secrets for hosts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Credential(Vec<Machine>);

impl Credential {
    /// The one of that name.
    pub fn load(directory: Option<&Path>, name: &str) -> Result<Self, CredentialError> {
        let missing = || CredentialError::Missing(name.to_owned());
        // A name is one file in the directory, whatever it says.
        let plain = !name.is_empty() && !name.starts_with('.') && !name.contains('/');
        let file = directory.filter(|_| plain).map(|directory| directory.join(name)).ok_or_else(missing)?;
        let text = std::fs::read_to_string(file).map_err(|_| missing())?;
        let machines = netrc::parse(&text);
        machines.map(Self).map_err(|why| CredentialError::Form { name: name.to_owned(), why })
    }

    /// Whether this host, or one above or below it, is shown anything: `github.com` is `api.github.com`, too.
    pub fn concerns(&self, host: &str) -> bool {
        let below = |lower: &str, upper: &str| {
            lower.strip_suffix(upper).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
        };
        self.0.iter().any(|machine| below(host, &machine.host) || below(&machine.host, host))
    }

    /// For git and for what Nix downloads.
    pub fn netrc(&self) -> String {
        self.0.iter().fold(String::new(), |mut text, Machine { host, login, password }| {
            // Writing to a text cannot fail.
            let _ = writeln!(text, "machine {host} login {login} password {password}");
            text
        })
    }

    /// For inputs of flakes such as `github:owner/repo`.
    pub fn access_tokens(&self) -> String {
        let tokens = self.0.iter().map(|machine| match machine.host.as_str() {
            "gitlab.com" => format!("gitlab.com=PAT:{}", machine.password),
            host => format!("{host}={}", machine.password),
        });
        tokens.collect::<Vec<_>>().join(" ")
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_bound_to_hosts() {
        let text = "machine github.com login me password s1 machine git.example.org login me password s2";
        let credential = Credential(netrc::parse(text).unwrap());
        assert_eq!(credential.access_tokens(), "github.com=s1 git.example.org=s2");
        assert!(credential.netrc().contains("machine git.example.org login me password s2\n"));
        assert!(credential.concerns("github.com") && credential.concerns("api.github.com"));
        assert!(credential.concerns("example.org") && !credential.concerns("notgithub.com"));
    }

    #[test]
    fn a_name_is_a_file_of_the_directory_and_a_secret_is_not_printed() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("ci.key"), "machine h login me password secret").unwrap();
        let credential = Credential::load(Some(directory.path()), "ci.key").unwrap();
        assert_eq!(format!("{credential:?}"), "Credential([\"h\"])");
        for name in ["../ci.key", "", ".", "other"] {
            assert!(
                matches!(Credential::load(Some(directory.path()), name), Err(CredentialError::Missing(_))),
                "{name}"
            );
        }
    }
}
