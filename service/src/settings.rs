//! How a role is configured: a TOML file named by `HARMONIA_CI_CONFIG`, and environment variables of the same names,
//! which win. Every secret has a twin with `_file` that names a file instead.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::str::FromStr;

use thiserror::Error;

use crate::nearest;
use crate::secret::Secret;

/// Every setting: its name, whether it is a secret, and what it is for.
pub const KNOWN: &[(&str, bool, &str)] = &[
    ("database_url", true, "the database, as postgres://user:password@host:port/name"),
    ("database_direct_url", true, "the same past a pooler, for LISTEN and locks"),
    ("database_admin_url", true, "the same as somebody who may migrate and make logins, for the operator"),
    ("database_connections", false, "connections to the database, at most"),
    ("listen", false, "the address and port to serve on"),
    ("url", false, "where other processes reach this one"),
    ("s3_endpoint", false, "the S3 server; without it, AWS"),
    ("s3_public_endpoint", false, "the same server as clients of the cache reach it, where that differs"),
    ("s3_bucket", false, "the bucket"),
    ("s3_region", false, "its region; us-east-1 if nothing else is known"),
    ("s3_virtual_host", false, "true: the bucket is part of the host name"),
    ("s3_access_key_id", false, "a static key; without it, whatever the environment offers"),
    ("s3_secret_access_key", true, "its secret"),
    (
        "signing_key_files",
        false,
        "the keys to sign with, separated by commas: files, or directories of files",
    ),
    ("cache_priority", false, "the cache's priority for Nix: the lower, the sooner it is asked"),
    (
        "public_keys",
        false,
        "the keys that sign the cache, separated by spaces, where they cannot be asked for",
    ),
    ("public_url", false, "where people reach the frontend with their browsers; else its url"),
    (
        "forges",
        false,
        "the forges that send webhooks and are told statuses, each a table [[forges]]; in the environment, the same as a list in JSON",
    ),
    ("anonymous_read", false, "true: the cache, and the API to whoever only looks, answer without a token"),
    ("oidc_issuer", false, "who says who people are, by OpenID Connect, such as https://id.example.org"),
    ("oidc_client_id", false, "what the frontend is called there"),
    ("oidc_client_secret", true, "its secret there, if it has one"),
    (
        "admins",
        false,
        "who may do everything after that: subjects or addresses, of a forge FORGE:LOGIN, separated by commas",
    ),
    ("operators", false, "who may start and stop builds after that, likewise"),
    (
        "readers",
        false,
        "who else may look after that, likewise, or FORGE:* and *@example.org; without it, all of oidc_issuer and who may push to what is built",
    ),
    ("log_limit", false, "bytes of a compressed log, at most"),
    (
        "sweep_every",
        false,
        "how often a signer removes from the bucket what nobody needs, such as 1d; 0s for never",
    ),
    ("sweep_grace", false, "how long what nobody needs any more stays in the bucket, such as 1d"),
    ("log_retention", false, "how long the logs of single attempts are kept, such as 30d"),
    ("node", false, "the builder's or evaluator's name, unique in its pool; else the machine's"),
    ("kube_node", false, "the Kubernetes node that the builder runs on"),
    (
        "state_dir",
        false,
        "where a builder keeps its secret and the logs of what it builds, and an evaluator what it evaluates",
    ),
    ("slots", false, "builds at once, within what the pool allows"),
    ("systems", false, "the systems to build for, separated by commas; else all of the pool's"),
    ("features", false, "the features to offer, separated by commas; else all of the pool's"),
    ("nix_daemon", false, "the Nix daemon's socket"),
    ("nix_root", false, "where the store's files are, if not at /"),
    ("build_cores", false, "what a build sees as NIX_BUILD_CORES; 0 for all"),
    ("build_timeout", false, "how long a build may take, such as 4h"),
    ("max_silent", false, "how long a build may say nothing, such as 30m"),
    ("max_output_size", false, "bytes of all outputs of a build, such as 4GB"),
    ("max_log_size", false, "bytes of a build's log that are kept, such as 64MB"),
    ("min_free", false, "garbage is collected when less of the store's disk is free, such as 2GiB"),
    ("max_free", false, "and until so much is"),
    ("upload_backlog", false, "bytes built but not uploaded at which a builder claims no more"),
    ("grace", false, "how long a builder may go on after SIGTERM, such as 1h"),
    ("margin", false, "how long before the end of that, or of a drain, builds are given back, such as 30s"),
    ("nix_bin", false, "the directory of nix and nix-instantiate; else they are looked for in PATH"),
    (
        "local_sources",
        false,
        "true: directories and repositories of the evaluator's own machine are evaluated",
    ),
    ("eval_workers", false, "evaluations at once"),
    ("eval_timeout", false, "how long an evaluation may take, such as 30m"),
    ("eval_memory", false, "memory that an evaluation may take, such as 4GiB"),
    ("eval_max_attrs", false, "attributes of an evaluation, at most"),
    ("eval_max_source", false, "bytes of the files of a source, at most, such as 1GiB"),
    (
        "eval_processes",
        false,
        "processes of Nix that share one evaluation; else half of the processors, 4 at most",
    ),
    (
        "eval_user",
        false,
        "the first of one user more than there are eval_workers, as which evaluations run if the evaluator is root",
    ),
    (
        "eval_sandbox",
        false,
        "strongest: what this machine offers; full: nothing is evaluated without all of it",
    ),
    (
        "eval_networks",
        false,
        "private networks that evaluations may reach, separated by commas, such as 10.0.0.0/8",
    ),
    ("eval_confine", false, "the program whose verb `confine` starts evaluations; else the evaluator's own"),
    ("eval_visible", false, "further files and directories that evaluations may read, separated by colons"),
    (
        "substituters",
        false,
        "binary caches that an evaluator asks for what is built already, separated by spaces; builders must use them too",
    ),
    ("trusted_public_keys", false, "the keys whose signatures count there, separated by spaces"),
    (
        "credentials_dir",
        false,
        "a directory of netrc files by which evaluators read private repositories, by name",
    ),
    (
        "otlp_endpoint",
        false,
        "where traces of builds go, by OTLP over HTTP, such as http://collector:4318; else nowhere",
    ),
    ("installation", false, "the file in which the chart tells the operator what to install"),
    ("namespace", false, "the operator's own namespace"),
    (
        "watch_namespaces",
        false,
        "namespaces in which the operator looks for pools and projects, separated by commas; else all",
    ),
];

/// Why settings are not usable.
#[derive(Debug, Error)]
pub enum SettingsError {
    /// The file cannot be read.
    #[error("the configuration {} cannot be read", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The file is not TOML.
    #[error("the configuration {} is not TOML", file.display())]
    Parse {
        /// The file.
        file: PathBuf,
        /// Where and why.
        #[source]
        source: toml::de::Error,
    },
    /// A key that means nothing.
    #[error("the configuration has a setting {key}, which does not exist; the nearest is {nearest}")]
    Unknown {
        /// The key.
        key: String,
        /// What was meant, perhaps.
        nearest: &'static str,
    },
    /// A table or a date where a word belongs.
    #[error("the setting {0} must be a text, a number, true, false or a list of texts")]
    Shape(String),
    /// It must be there.
    #[error("the setting {0} is missing: set it in the file that HARMONIA_CI_CONFIG names, or set {1}")]
    Missing(&'static str, String),
    /// It is there and cannot be used.
    #[error("the setting {key} is {value:?}, which {why}")]
    Invalid {
        /// The key.
        key: &'static str,
        /// What it says.
        value: String,
        /// What is wrong with it.
        why: String,
    },
    /// A secret's file cannot be read.
    #[error(transparent)]
    Secret(#[from] crate::secret::SecretError),
    /// The database's URL is none.
    #[error("the setting database_url cannot be used: write postgres://user:password@host:port/name")]
    Database,
    /// A secret and its file at once.
    #[error("both {0} and {0}_file are set: keep one")]
    Twice(&'static str),
}

/// Settings by name.
#[derive(Debug, Clone, Default)]
pub struct Settings(BTreeMap<String, String>);

impl Settings {
    /// Of this process.
    pub fn load() -> Result<Self, SettingsError> {
        let mut settings = match std::env::var_os("HARMONIA_CI_CONFIG") {
            Some(file) => Self::read(&PathBuf::from(file))?,
            None => Self::default(),
        };
        settings.overlay(
            std::env::vars_os()
                .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?))),
        );
        Ok(settings)
    }

    /// Of a file alone.
    pub fn read(file: &PathBuf) -> Result<Self, SettingsError> {
        let text = std::fs::read_to_string(file)
            .map_err(|source| SettingsError::Read { file: file.clone(), source })?;
        let table: toml::Table =
            text.parse().map_err(|source| SettingsError::Parse { file: file.clone(), source })?;
        let mut settings = Self::default();
        for (key, value) in table {
            if !names().any(|name| name == key) {
                let nearest = nearest(&key);
                return Err(SettingsError::Unknown { key, nearest });
            }
            let word = word(&value).ok_or_else(|| SettingsError::Shape(key.clone()))?;
            settings.0.insert(key, word);
        }
        Ok(settings)
    }

    /// Variables of the environment win. One that takes the place of a secret's file, or the other way round, removes it.
    pub fn overlay(&mut self, variables: impl IntoIterator<Item = (String, String)>) {
        let mut given: Vec<(String, String)> = Vec::new();
        for (name, value) in variables {
            let Some(key) = name.strip_prefix("HARMONIA_CI_").map(str::to_ascii_lowercase) else { continue };
            if names().any(|name| name == key) {
                given.push((key, value));
            }
        }
        for (key, _) in &given {
            self.0.remove(key.strip_suffix("_file").unwrap_or(key));
            self.0.remove(&format!("{key}_file"));
        }
        self.0.extend(given);
    }

    /// The same with one more.
    pub fn with(mut self, key: &str, value: impl Into<String>) -> Self {
        self.0.insert(key.to_owned(), value.into());
        self
    }

    /// Whether it is set.
    pub fn has(&self, key: &str) -> bool {
        self.0.contains_key(key)
    }

    /// A file that says the same.
    pub fn to_toml(&self) -> String {
        // TOML writes a text as JSON does.
        let line = |(key, value): (&String, &String)| format!("{key} = {}\n", serde_json::json!(value));
        self.0.iter().map(line).collect()
    }

    /// A setting's words.
    pub fn get(&self, key: &'static str) -> Option<&str> {
        debug_assert!(names().any(|name| name == key), "{key} is no setting");
        self.0.get(key).map(String::as_str)
    }

    /// A setting that must be there.
    pub fn require(&self, key: &'static str) -> Result<&str, SettingsError> {
        self.get(key).ok_or_else(|| SettingsError::Missing(key, variable(key)))
    }

    /// A setting as a number, a truth value, an address.
    pub fn parse<T: FromStr<Err: std::fmt::Display>>(
        &self,
        key: &'static str,
    ) -> Result<Option<T>, SettingsError> {
        let parse = |value: &str| {
            value.parse().map_err(|error: T::Err| SettingsError::Invalid {
                key,
                value: value.to_owned(),
                why: format!("cannot be used: {error}"),
            })
        };
        self.get(key).map(parse).transpose()
    }

    /// A secret, or the file that holds it.
    pub fn secret(&self, key: &'static str) -> Result<Option<Secret>, SettingsError> {
        debug_assert!(KNOWN.iter().any(|(name, secret, _)| *name == key && *secret), "{key} is no secret");
        let file = self.0.get(&format!("{key}_file"));
        match (self.get(key), file) {
            (Some(_), Some(_)) => Err(SettingsError::Twice(key)),
            (Some(value), None) => Ok(Some(Secret::Value(value.to_owned()))),
            (None, Some(file)) => Ok(Some(Secret::File(PathBuf::from(file)))),
            (None, None) => Ok(None),
        }
    }

    /// A secret that must be there.
    pub fn require_secret(&self, key: &'static str) -> Result<Secret, SettingsError> {
        self.secret(key)?
            .ok_or_else(|| SettingsError::Missing(key, format!("{0} or {0}_FILE", variable(key))))
    }
}

/// Every name that can be set.
fn names() -> impl Iterator<Item = String> {
    KNOWN.iter().flat_map(|(name, secret, _)| {
        std::iter::once((*name).to_owned()).chain(secret.then(|| format!("{name}_file")))
    })
}

fn variable(key: &str) -> String {
    format!("HARMONIA_CI_{}", key.to_ascii_uppercase())
}

/// A value as one word; lists are joined by commas, and those of tables written as JSON.
fn word(value: &toml::Value) -> Option<String> {
    match value {
        toml::Value::String(text) => Some(text.clone()),
        toml::Value::Integer(number) => Some(number.to_string()),
        toml::Value::Float(number) => Some(number.to_string()),
        toml::Value::Boolean(truth) => Some(truth.to_string()),
        toml::Value::Array(values) if values.iter().any(toml::Value::is_table) => {
            serde_json::to_string(values).ok()
        }
        toml::Value::Array(values) => {
            values.iter().map(toml::Value::as_str).collect::<Option<Vec<_>>>().map(|words| words.join(","))
        }
        toml::Value::Datetime(_) | toml::Value::Table(_) => None,
    }
}

/// The known name with the fewest letters to change.
fn nearest(key: &str) -> &'static str {
    nearest::nearest(key, KNOWN.iter().map(|(name, ..)| *name)).unwrap_or_default()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Settings, SettingsError> {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("config.toml");
        std::fs::write(&file, text).unwrap();
        Settings::read(&file)
    }

    #[test]
    fn an_unknown_key_names_the_nearest() {
        let error = read("s3_buckt = 'x'").unwrap_err().to_string();
        assert!(error.contains("s3_buckt") && error.contains("nearest is s3_bucket"), "{error}");
    }

    #[test]
    fn what_is_written_is_read_as_the_same() {
        let settings = read("s3_bucket = 'a \"b\"'\nlog_limit = 7\nadmins = ['x', 'y']").unwrap();
        assert_eq!(read(&settings.to_toml()).unwrap().0, settings.0);
    }

    #[test]
    fn a_variable_wins() {
        let mut settings = read("s3_bucket = 'file'").unwrap();
        settings.overlay([("HARMONIA_CI_S3_BUCKET".into(), "variable".into())]);
        assert_eq!(settings.get("s3_bucket"), Some("variable"));
    }

    #[test]
    fn a_variable_that_names_a_file_takes_the_place_of_the_value() {
        let mut settings = read("database_url = 'postgres://'").unwrap();
        settings.overlay([("HARMONIA_CI_DATABASE_URL_FILE".into(), "/run/url".into())]);
        assert_eq!(settings.secret("database_url").unwrap(), Some(Secret::File("/run/url".into())));
    }

    #[test]
    fn a_secret_and_its_file_are_one_too_many() {
        let settings = read("database_url = 'a'\ndatabase_url_file = 'b'").unwrap();
        assert!(matches!(settings.secret("database_url"), Err(SettingsError::Twice("database_url"))));
    }

    #[test]
    fn what_is_missing_is_named_with_its_variable() {
        let error = Settings::default().require("s3_bucket").unwrap_err().to_string();
        assert!(error.contains("HARMONIA_CI_S3_BUCKET"), "{error}");
    }

    #[test]
    fn a_list_is_joined() {
        let settings = read("signing_key_files = ['/a', '/b']").unwrap();
        assert_eq!(settings.get("signing_key_files"), Some("/a,/b"));
    }

    #[test]
    fn a_list_of_tables_is_json() {
        let settings = read("[[forges]]\nname = 'a'\napp_id = 7\n[[forges]]\nname = 'b'").unwrap();
        assert_eq!(settings.get("forges"), Some(r#"[{"app_id":7,"name":"a"},{"name":"b"}]"#));
        assert!(matches!(read("[s3_bucket]\nname = 'a'"), Err(SettingsError::Shape(_))));
    }

    #[test]
    fn a_number_that_is_none_says_so() {
        let settings = read("log_limit = 'many'").unwrap();
        assert!(settings.parse::<u64>("log_limit").unwrap_err().to_string().contains("many"));
    }
}
