//! Which programs this machine has.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::error::UpError;

/// A program in PATH.
pub fn which(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path).map(|directory| directory.join(program)).find(|path| path.is_file())
}

/// The directories of PostgreSQL's programs, by version. Debian keeps them out of PATH, one directory a version.
pub fn postgres() -> Vec<(u32, PathBuf)> {
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

/// The programs for a database that exists, or else the newest.
pub fn choose_postgres(
    installed: &[(u32, PathBuf)],
    made_by: Option<u32>,
    data: &Path,
) -> Result<PathBuf, UpError> {
    let newest = installed.last().ok_or(UpError::NoPostgres)?;
    match made_by {
        None => Ok(newest.1.clone()),
        Some(version) => {
            let same = installed.iter().find(|(installed, _)| *installed == version);
            let missing = || UpError::OtherPostgres { data: data.to_owned(), version };
            same.map(|(_, programs)| programs.clone()).ok_or_else(missing)
        }
    }
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
        assert_eq!(choose(None).unwrap(), PathBuf::from("/17"));
        assert_eq!(choose(Some(15)).unwrap(), PathBuf::from("/15"));
        assert!(choose(Some(16)).unwrap_err().to_string().contains("postgresql-16"));
        assert!(matches!(choose_postgres(&[], None, Path::new("/data")), Err(UpError::NoPostgres)));
    }

    #[test]
    fn a_version_is_found_in_words() {
        assert_eq!(major("initdb (PostgreSQL) 15.14 (Debian 15.14-0+deb12u1)"), Some(15));
        assert_eq!(major("initdb (PostgreSQL) 18beta1"), Some(18));
        assert_eq!(major("initdb"), None);
    }
}
