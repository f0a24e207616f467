//! Secrets by which private repositories and private inputs of flakes are read. A credential is a file in netrc's form, which
//! binds each secret to a host: `machine git.example.org login ci password …`.

use std::fmt::Write;
use std::path::Path;

use thiserror::Error;

/// Why a credential cannot be used. The secret itself is in none of these.
#[derive(Debug, Error)]
pub enum CredentialError {
    /// There is none of that name.
    #[error(
        "the project's credential {0} is not there: put a netrc file of that name into the directory that HARMONIA_CI_CREDENTIALS_DIR names, or in \
         Kubernetes into the Secret <release>-credentials under that key"
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
#[derive(Clone, PartialEq, Eq)]
pub struct Credential(Vec<Machine>);

#[derive(Clone, Default, PartialEq, Eq)]
struct Machine {
    host: String,
    login: String,
    password: String,
}

/// A secret is nobody's to print.
impl std::fmt::Debug for Credential {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        to.debug_list().entries(self.0.iter().map(|machine| &machine.host)).finish()
    }
}

impl Credential {
    /// The one of that name.
    pub fn load(directory: Option<&Path>, name: &str) -> Result<Self, CredentialError> {
        let missing = || CredentialError::Missing(name.to_owned());
        // A name is one file in the directory, whatever it says.
        let plain = !name.is_empty() && !name.starts_with('.') && !name.contains('/');
        let file = directory.filter(|_| plain).map(|directory| directory.join(name)).ok_or_else(missing)?;
        let text = std::fs::read_to_string(file).map_err(|_| missing())?;
        Self::parse(&text).map_err(|why| CredentialError::Form { name: name.to_owned(), why })
    }

    fn parse(text: &str) -> Result<Self, &'static str> {
        let mut machines: Vec<Machine> = Vec::new();
        let mut words = text.split_whitespace();
        while let Some(word) = words.next() {
            let mut value = || words.next().map(str::to_owned).ok_or("a word is missing at its end");
            match (word, machines.last_mut()) {
                ("machine", _) => machines.push(Machine { host: value()?, ..Machine::default() }),
                ("login", Some(machine)) => machine.login = value()?,
                ("password", Some(machine)) => machine.password = value()?,
                ("default", _) => {
                    return Err(
                        "`default` would show the secret to every host: name the host with `machine`",
                    );
                }
                _ => return Err("write `machine HOST login NAME password SECRET`, for each host"),
            }
        }
        let whole = |machine: &Machine| !machine.login.is_empty() && !machine.password.is_empty();
        if machines.is_empty() || !machines.iter().all(whole) {
            return Err("write `machine HOST login NAME password SECRET`, for each host");
        }
        Ok(Self(machines))
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
        let credential = Credential::parse(
            "machine github.com\n login me password s1\nmachine git.example.org login me password s2",
        )
        .unwrap();
        assert_eq!(credential.access_tokens(), "github.com=s1 git.example.org=s2");
        assert!(credential.netrc().contains("machine git.example.org login me password s2\n"));
    }

    #[test]
    fn a_secret_for_everybody_or_half_of_one_is_refused() {
        for text in ["", "default login me password s", "machine h login me", "password s", "machine"] {
            assert!(Credential::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_name_is_a_file_of_the_directory_and_a_secret_is_not_printed() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("ci.key"), "machine h login me password secret").unwrap();
        let credential = Credential::load(Some(directory.path()), "ci.key").unwrap();
        assert_eq!(format!("{credential:?}"), "[\"h\"]");
        for name in ["../ci.key", "", ".", "other"] {
            assert!(
                matches!(Credential::load(Some(directory.path()), name), Err(CredentialError::Missing(_))),
                "{name}"
            );
        }
    }
}
