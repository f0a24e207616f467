//! Which programs this machine has.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::error::UpError;

/// What the schema asks for.
const OLDEST_POSTGRES: u32 = 15;
/// Where Nix's installers and NixOS put programs, of which a PATH such as sudo's knows nothing.
const PROFILES: [&str; 2] = ["/nix/var/nix/profiles/default/bin", "/run/current-system/sw/bin"];

/// A program in PATH, or where Nix keeps some.
pub fn which(program: &str) -> Option<PathBuf> {
    env::split_paths(&path()).map(|directory| directory.join(program)).find(|path| path.is_file())
}

/// PATH, and behind it the profiles that there are.
pub fn path() -> OsString {
    let path = env::var_os("PATH").unwrap_or_default();
    let profiles = PROFILES.iter().map(PathBuf::from).filter(|profile| profile.is_dir());
    // No profile has a colon in its name.
    env::join_paths(env::split_paths(&path).chain(profiles)).unwrap_or(path)
}

/// The directories of PostgreSQL's programs, by version. Debian keeps them out of PATH, one directory a version.
fn postgres() -> Vec<(u32, PathBuf)> {
    let debian = fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let debian = debian
        .filter_map(|entry| Some((entry.file_name().to_str()?.parse().ok()?, entry.path().join("bin"))));
    let mut found: Vec<(u32, PathBuf)> =
        debian.filter(|(_, programs)| programs.join("initdb").is_file()).collect();
    if let Some(initdb) = which("initdb").and_then(|program| program.canonicalize().ok())
        && let Some(programs) = initdb.parent()
        && programs.join("postgres").is_file()
        && let Some(version) = output_of(Command::new(&initdb).arg("--version")).as_deref().and_then(major)
    {
        found.push((version, programs.to_owned()));
    }
    found.sort();
    found.dedup();
    found
}

/// The programs for a database: of the version that made it, or else the newest.
pub fn postgres_for(data: &Path) -> Result<(u32, PathBuf), UpError> {
    let made_by = fs::read_to_string(data.join("PG_VERSION")).ok().and_then(|text| text.trim().parse().ok());
    choose_postgres(&postgres(), made_by, data)
}

fn choose_postgres(
    installed: &[(u32, PathBuf)],
    made_by: Option<u32>,
    data: &Path,
) -> Result<(u32, PathBuf), UpError> {
    let newest = installed.last().ok_or(UpError::NoPostgres)?;
    let version = made_by.unwrap_or(newest.0);
    if version < OLDEST_POSTGRES {
        return Err(UpError::OldPostgres { version });
    }
    let missing = || UpError::OtherPostgres { data: data.to_owned(), version, newest: newest.0 };
    installed.iter().find(|(installed, _)| *installed == version).cloned().ok_or_else(missing)
}

/// The first number of a version in words such as `initdb (PostgreSQL) 15.14 (Debian 15.14-0+deb12u1)`.
fn major(words: &str) -> Option<u32> {
    let number =
        words.split_whitespace().find(|word| word.starts_with(|letter: char| letter.is_ascii_digit()))?;
    number.split(|letter: char| !letter.is_ascii_digit()).next()?.parse().ok()
}

/// What a program that succeeds has to say, in one line.
pub fn output_of(command: &mut Command) -> Option<String> {
    let output = command.stdin(std::process::Stdio::null()).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_existing_database_keeps_its_version() {
        let installed = [(15, PathBuf::from("/15")), (17, PathBuf::from("/17"))];
        let choose = |made_by| choose_postgres(&installed, made_by, Path::new("/data"));
        assert_eq!(choose(None).unwrap().1, PathBuf::from("/17"));
        assert_eq!(choose(Some(15)).unwrap().1, PathBuf::from("/15"));
        assert!(choose(Some(16)).unwrap_err().to_string().contains("postgresql-16"));
        assert!(matches!(choose_postgres(&[], None, Path::new("/data")), Err(UpError::NoPostgres)));
    }

    #[test]
    fn a_postgres_that_is_too_old_makes_no_database() {
        let chosen = choose_postgres(&[(13, PathBuf::from("/13"))], None, Path::new("/data"));
        assert!(matches!(chosen, Err(UpError::OldPostgres { version: 13 })), "{chosen:?}");
    }

    #[test]
    fn a_version_is_found_in_words() {
        assert_eq!(major("initdb (PostgreSQL) 15.14 (Debian 15.14-0+deb12u1)"), Some(15));
        assert_eq!(major("initdb (PostgreSQL) 18beta1"), Some(18));
        assert_eq!(major("initdb"), None);
    }
}
