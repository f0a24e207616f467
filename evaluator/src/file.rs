//! Files that somebody else has made.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// What is in a plain file, unless that is too much. A link is not followed, and a pipe or a device is neither waited for nor read.
pub fn read(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let file = File::options().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is no plain file"));
    }
    let mut bytes = Vec::new();
    file.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > most {
        true => Err(io::Error::other(format!("it has more than the {most} bytes that are taken"))),
        false => Ok(bytes),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::process::Command;

    use super::*;

    #[test]
    fn only_a_plain_file_of_a_fitting_size_is_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        std::fs::write(path("plain"), "text").unwrap();
        assert_eq!(read(&path("plain"), 4).unwrap(), b"text");
        assert!(read(&path("plain"), 3).unwrap_err().to_string().contains("more than the 3 bytes"));
        symlink(path("plain"), path("link")).unwrap();
        symlink("/dev/zero", path("endless")).unwrap();
        assert!(Command::new("mkfifo").arg(path("pipe")).status().unwrap().success());
        for name in ["link", "endless", "pipe", ".", "missing"] {
            assert!(read(&path(name), 4).is_err(), "{name}");
        }
        assert!(read(Path::new("/dev/zero"), 4).is_err());
    }
}
