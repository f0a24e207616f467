//! Secrets that may change while a process runs.

use std::fmt;
use std::path::PathBuf;

use thiserror::Error;

/// A secret: its value, or the file that holds it, which is read whenever the secret is needed.
#[derive(Clone, PartialEq, Eq)]
pub enum Secret {
    /// Given as it is.
    Value(String),
    /// In a file.
    File(PathBuf),
}

/// The file of a secret cannot be read.
#[derive(Debug, Error)]
#[error("the secret in {} cannot be read", file.display())]
pub struct SecretError {
    file: PathBuf,
    #[source]
    source: std::io::Error,
}

impl Secret {
    /// What it is now, without the line's end.
    pub fn read(&self) -> Result<String, SecretError> {
        match self {
            Self::Value(value) => Ok(value.clone()),
            Self::File(file) => match std::fs::read_to_string(file) {
                Ok(text) => Ok(text.trim_end_matches(['\r', '\n']).to_owned()),
                Err(source) => Err(SecretError { file: file.clone(), source }),
            },
        }
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Value(_) => f.write_str("…"),
            Self::File(file) => write!(f, "…, in {}", file.display()),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_again() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("secret");
        std::fs::write(&file, "one\n").unwrap();
        let secret = Secret::File(file.clone());
        assert_eq!(secret.read().unwrap(), "one");
        std::fs::write(&file, "two\n").unwrap();
        assert_eq!(secret.read().unwrap(), "two");
    }

    #[test]
    fn it_is_not_shown() {
        assert_eq!(format!("{:?}", Secret::Value("hunter2".into())), "…");
    }
}
