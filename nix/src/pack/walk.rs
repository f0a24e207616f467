//! The walk over a tree, relative to open directories: nobody can put a link in its way. Names are bytes.

use std::cell::Cell;
use std::ffi::CString;
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use nix_archive::nar::{Encoder, Error as NarError};
use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, fstat, openat, readlinkat, statat};

use super::PackError;
use super::listing::{Listing, Names};

/// One read of a file; most files are one.
const READ: usize = 256 << 10;

/// Writes the NAR of `root` and notes what is in it. `written` counts the NAR's bytes.
pub(super) fn walk(
    root: &Path,
    encoder: Encoder<impl Write>,
    written: &Cell<u64>,
    listing: &mut Listing,
) -> Result<(), PackError> {
    let mut walk =
        Walk { path: root.to_owned(), encoder, written, listing, buffer: vec![0; READ].into_boxed_slice() };
    let name = CString::new(root.as_os_str().as_bytes())
        .map_err(|_| PackError::Read { path: root.to_owned(), source: ErrorKind::InvalidInput.into() })?;
    let kind = walk.kind(CWD, &name)?;
    walk.node(CWD, &name, kind, None)?;
    walk.encoder.finish().map(drop).map_err(|source| PackError::Archive { path: root.to_owned(), source })
}

struct Walk<'a, W> {
    /// Where it is, for sentences.
    path: PathBuf,
    encoder: Encoder<W>,
    written: &'a Cell<u64>,
    listing: &'a mut Listing,
    buffer: Box<[u8]>,
}

/// A name in the NAR and in the listing.
#[derive(Clone, Copy)]
struct Name<'a> {
    nar: &'a [u8],
    listed: &'a str,
}

impl<W: Write> Walk<'_, W> {
    fn node(
        &mut self,
        parent: impl rustix::fd::AsFd,
        disk: &CString,
        kind: FileType,
        name: Option<Name>,
    ) -> Result<(), PackError> {
        let (nar, listed) = (name.map(|name| name.nar), name.map(|name| name.listed));
        match kind {
            FileType::RegularFile => self.regular(self.open(parent, disk, OFlags::NONBLOCK)?, nar, listed),
            FileType::Directory => self.directory(self.open(parent, disk, OFlags::DIRECTORY)?, nar, listed),
            FileType::Symlink => {
                let target = readlinkat(parent, disk, Vec::new()).map_err(|errno| self.unreadable(errno))?;
                self.encoder.symlink(nar, target.to_bytes()).map_err(|source| self.unfit(source))?;
                self.listing.symlink(listed, target.to_bytes());
                Ok(())
            }
            _ => Err(PackError::Special { path: self.path.clone() }),
        }
    }

    fn directory(
        &mut self,
        directory: File,
        nar: Option<&[u8]>,
        listed: Option<&str>,
    ) -> Result<(), PackError> {
        self.encoder.start_directory(nar).map_err(|source| self.unfit(source))?;
        self.listing.start_directory(listed);
        let entries = self.entries(&directory)?;
        let mut names = Names::new(entries.iter().map(|(name, _)| name.to_bytes()));
        for (disk, kind) in &entries {
            self.path.push(std::ffi::OsStr::from_bytes(disk.to_bytes()));
            // Some file systems do not say in the directory.
            let kind = if *kind == FileType::Unknown { self.kind(&directory, disk)? } else { *kind };
            let listed = names.listed(disk.to_bytes());
            let name = Name { nar: disk.to_bytes(), listed: &listed };
            self.node(&directory, disk, kind, Some(name))?;
            self.path.pop();
        }
        self.listing.end_directory();
        self.encoder.end_directory().map_err(|source| self.unfit(source))
    }

    fn regular(&mut self, mut file: File, nar: Option<&[u8]>, listed: Option<&str>) -> Result<(), PackError> {
        let stat = fstat(&file).map_err(|errno| self.unreadable(errno))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(PackError::Changed { path: self.path.clone() });
        }
        // The owner's bit decides, as in Nix.
        let executable = stat.st_mode & 0o100 != 0;
        let size = u64::try_from(stat.st_size).unwrap_or_default();
        let path = &self.path;
        let unfit = |source| PackError::Archive { path: path.clone(), source };
        let mut contents = self.encoder.start_regular(nar, executable, size).map_err(unfit)?;
        self.listing.regular(listed, size, executable, self.written.get());
        let mut left = size;
        loop {
            let read = match file.read(&mut self.buffer) {
                Ok(read) => read,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(source) => return Err(PackError::Read { path: path.clone(), source }),
            };
            left = match left.checked_sub(read as u64) {
                Some(left) if read > 0 || left == 0 => left,
                _ => return Err(PackError::Changed { path: path.clone() }),
            };
            contents.write_all(&self.buffer[..read]).map_err(|error| unfit(error.into()))?;
            if left == 0 && read < self.buffer.len() {
                break;
            }
        }
        contents.finish().map_err(unfit)
    }

    /// The names in a directory, in the order of a NAR.
    fn entries(&self, directory: &File) -> Result<Vec<(CString, FileType)>, PackError> {
        let unreadable = |errno| self.unreadable(errno);
        let mut entries = Vec::new();
        for entry in Dir::read_from(directory).map_err(unreadable)? {
            let entry = entry.map_err(unreadable)?;
            let name = entry.file_name();
            if name != c"." && name != c".." {
                entries.push((name.to_owned(), entry.file_type()));
            }
        }
        entries.sort_unstable_by(|(one, _), (other, _)| one.cmp(other));
        Ok(entries)
    }

    fn kind(&self, parent: impl rustix::fd::AsFd, name: &CString) -> Result<FileType, PackError> {
        let stat = statat(parent, name, AtFlags::SYMLINK_NOFOLLOW).map_err(|errno| self.unreadable(errno))?;
        Ok(FileType::from_raw_mode(stat.st_mode))
    }

    /// Without following a link and without waiting for the other end of a pipe that took the file's place.
    fn open(&self, parent: impl rustix::fd::AsFd, name: &CString, flags: OFlags) -> Result<File, PackError> {
        let flags = flags | OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        openat(parent, name, flags, Mode::empty()).map(File::from).map_err(|errno| self.unreadable(errno))
    }

    fn unreadable(&self, errno: rustix::io::Errno) -> PackError {
        PackError::Read { path: self.path.clone(), source: errno.into() }
    }

    fn unfit(&self, source: NarError) -> PackError {
        PackError::Archive { path: self.path.clone(), source }
    }
}
