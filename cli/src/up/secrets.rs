//! Small files that only their owner reads, made once and whole.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use harmonia_nix::key::{Keys, SecretKey};
use harmonia_service::settings::Settings;

use super::error::{UpError, file};
use super::layout::Layout;

/// What is in the file, or what `make` says, which is in it from then on.
pub fn once(path: &Path, make: impl FnOnce() -> String) -> Result<String, UpError> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(text.trim().to_owned()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let text = make();
            write(path, &text)?;
            Ok(text)
        }
        Err(error) => Err(file(path)(error)),
    }
}

/// Whole or not at all.
pub fn write(path: &Path, text: &str) -> Result<(), UpError> {
    let new = path.with_extension("new");
    let put = || {
        let mut out = File::options().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
        writeln!(out, "{text}")?;
        out.sync_all()?;
        fs::rename(&new, path)
    };
    put().map_err(file(path))
}

/// A password that needs no quoting anywhere: 256 bits.
pub fn password() -> String {
    format!("{:032x}{:032x}", rand::random::<u128>(), rand::random::<u128>())
}

/// The public halves of the keys that sign the cache, as Nix wants them. At first there is one, named after the machine.
pub fn public_keys(layout: &Layout, settings: &Settings) -> Result<String, UpError> {
    let own = layout.secret("signing-key");
    let files: Vec<PathBuf> = match settings.get("signing_key_files") {
        Some(files) => files.split(',').map(|file| file.trim().into()).collect(),
        None => vec![own.clone()],
    };
    if files.contains(&own) && !own.exists() {
        let key = SecretKey::generate(&format!("harmonia-ci-{}-1", harmonia_builder::machine_name()))?;
        write(&own, &key.to_text())?;
    }
    let keys = Keys::load(files)?.current();
    Ok(keys.iter().map(SecretKey::public_text).collect::<Vec<_>>().join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_secret_is_made_once_and_kept_from_others() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("secret");
        let first = once(&path, password).unwrap();
        assert_eq!(once(&path, password).unwrap(), first);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }
}
