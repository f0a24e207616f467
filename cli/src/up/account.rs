//! Accounts: this process's own, and what PostgreSQL runs as if that is root's.

use std::fs;
use std::os::unix::fs::{MetadataExt, chown};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use rustix::process::geteuid;

use super::error::{UpError, file};

/// An account without privileges.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Account {
    pub name: String,
    uid: u32,
    gid: u32,
}

impl Account {
    /// `None` if this process is not root's and can run PostgreSQL itself.
    pub fn unprivileged() -> Result<Option<Self>, UpError> {
        if !geteuid().is_root() {
            return Ok(None);
        }
        let accounts = fs::read_to_string("/etc/passwd").map_err(file("/etc/passwd"))?;
        find(&accounts, &["postgres", "nobody"]).map(Some).ok_or(UpError::NoAccount)
    }

    /// Runs a command as this account.
    pub fn runs(&self, command: &mut Command) {
        command.uid(self.uid).gid(self.gid);
    }

    /// Gives it a file or a directory.
    pub fn owns(&self, path: &Path) -> Result<(), UpError> {
        chown(path, Some(self.uid), Some(self.gid)).map_err(file(path))
    }

    /// Every directory on the way must let it through.
    pub fn can_reach(&self, path: &Path) -> Result<(), UpError> {
        for directory in path.ancestors().filter(|directory| directory.exists()) {
            let found = fs::metadata(directory).map_err(file(directory))?;
            if !self.may_enter(found.uid(), found.gid(), found.mode()) {
                return Err(UpError::Closed { directory: directory.to_owned(), account: self.name.clone() });
            }
        }
        Ok(())
    }

    fn may_enter(&self, uid: u32, gid: u32, mode: u32) -> bool {
        let bit = if uid == self.uid {
            0o100
        } else if gid == self.gid {
            0o010
        } else {
            0o001
        };
        mode & bit != 0
    }
}

/// What this process's user is called, which the variable says for those that are not in `/etc/passwd`.
pub fn own_name() -> String {
    let uid = geteuid().as_raw();
    let accounts = fs::read_to_string("/etc/passwd").unwrap_or_default();
    let own = parse(&accounts).find(|account| account.uid == uid).map(|account| account.name);
    own.or_else(|| std::env::var("USER").ok()).unwrap_or_else(|| uid.to_string())
}

/// The first of the names that `/etc/passwd` has.
fn find(accounts: &str, names: &[&str]) -> Option<Account> {
    names.iter().find_map(|name| parse(accounts).find(|account| account.name == *name))
}

fn parse(accounts: &str) -> impl Iterator<Item = Account> {
    accounts.lines().filter_map(|line| {
        let mut fields = line.split(':');
        let (name, uid, gid) = (fields.next()?, fields.nth(1)?, fields.next()?);
        Some(Account { name: name.to_owned(), uid: uid.parse().ok()?, gid: gid.parse().ok()? })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nobody() -> Account {
        Account { name: "nobody".into(), uid: 65534, gid: 65534 }
    }

    #[test]
    fn the_first_known_account_is_taken() {
        let accounts = "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534::/:/bin/false\n";
        assert_eq!(find(accounts, &["postgres", "nobody"]), Some(nobody()));
        assert_eq!(find("root:x:0:0::/:/bin/sh\n", &["postgres"]), None);
    }

    #[test]
    fn a_home_is_closed_and_a_public_directory_is_not() {
        assert!(!nobody().may_enter(0, 0, 0o40700));
        assert!(!nobody().may_enter(0, 65534, 0o40701));
        assert!(nobody().may_enter(0, 0, 0o40711));
    }
}
