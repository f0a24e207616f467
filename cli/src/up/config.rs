//! `config.toml` in the data directory: settings of the roles that a person has chosen.

use harmonia_service::settings::Settings;

use super::error::UpError;
use super::layout::Layout;
use super::secrets;

const FIRST: &str =
    "# Settings of this farm's roles, read at every start: docs/reference/settings.md has them all.";
/// What `up` itself tells the roles, and the option that says it.
const OWN: &[(&str, &str)] = &[
    ("listen", "--listen"),
    ("url", "--listen"),
    ("database_url", "--database"),
    ("database_direct_url", "--database"),
    ("database_admin_url", "--database"),
    ("s3_endpoint", "--s3"),
    ("s3_bucket", "--s3"),
    ("s3_region", "--s3"),
    ("s3_access_key_id", "--s3"),
    ("s3_secret_access_key", "--s3"),
    ("nix_daemon", "--nix-daemon"),
    ("nix_root", "--nix-daemon"),
    ("slots", "--slots"),
    ("state_dir", "--data"),
];

/// What was chosen; at first nothing is.
pub fn read(layout: &Layout) -> Result<Settings, UpError> {
    let path = layout.config();
    if !path.exists() {
        secrets::write(&path, FIRST)?;
    }
    let settings = Settings::read(&path)?;
    let own = |key: &str| settings.has(key) || settings.has(&format!("{key}_file"));
    match OWN.iter().find(|(key, _)| own(key)) {
        Some(&(key, option)) => Err(UpError::Own { file: path, key, option }),
        None => Ok(settings),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn read_text(text: &str) -> Result<Settings, UpError> {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("config.toml"), text).unwrap();
        read(&Layout::open(directory.path()).unwrap())
    }

    #[test]
    fn a_setting_of_a_role_is_the_persons() {
        assert_eq!(read_text("eval_memory = '8GiB'").unwrap().get("eval_memory"), Some("8GiB"));
    }

    #[test]
    fn what_an_option_says_is_not_said_twice() {
        for (text, option) in [("listen = 'x'", "--listen"), ("database_url_file = '/x'", "--database")] {
            let error = read_text(text).unwrap_err().to_string();
            assert!(error.contains(option), "{error}");
        }
    }

    #[test]
    fn the_first_start_makes_a_file_to_write_into() {
        let directory = tempfile::tempdir().unwrap();
        let layout = Layout::open(directory.path()).unwrap();
        read(&layout).unwrap();
        assert!(layout.config().exists());
    }
}
