//! Small files that only their owner reads, made once and whole.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use harmonia_nix::key::SecretKey;

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

/// The key that signs the cache, named after the machine on which it was made.
pub fn signing_key(layout: &Layout) -> Result<SecretKey, UpError> {
    let path = layout.secret("signing-key");
    if !path.exists() {
        let key = SecretKey::generate(&format!("harmonia-ci-{}-1", harmonia_builder::machine_name()))?;
        write(&path, &key.to_text())?;
    }
    let text = fs::read_to_string(&path).map_err(file(&path))?;
    Ok(SecretKey::parse(text.trim())?)
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
