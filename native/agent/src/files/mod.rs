//! Operations on files, with the rights of the user named.

pub mod extract;
pub mod helper;
pub mod list;
pub mod names;
pub mod read;
pub mod small;
pub mod tar;
pub mod write;

use std::ffi::OsStr;
use std::fs::Metadata;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use dsec_protocol::files::FileStat;
use dsec_protocol::limits::PATH_BYTES_MAX;

use crate::acting::acting_as;
use crate::agent::Agent;
use crate::refusal::Refusal;
use crate::users::Account;

/// A path of a caller: absolute, of a length that the kernel takes, without zero bytes.
pub fn path_of(bytes: &[u8]) -> Result<PathBuf, Refusal> {
    if !bytes.starts_with(b"/") || bytes.contains(&0) {
        return Err(Refusal::invalid(
            "a path is absolute and holds no zero byte",
        ));
    }
    if bytes.len() > PATH_BYTES_MAX {
        let error = io::Error::from_raw_os_error(libc::ENAMETOOLONG);
        return Err(Refusal::file(&bytes[..64], &error));
    }
    Ok(PathBuf::from(OsStr::from_bytes(bytes)))
}

impl Agent {
    /// Runs a small operation on `path` with the rights of `user`.
    pub fn on_path<T>(
        &self,
        path: &[u8],
        user: Option<&str>,
        work: impl FnOnce(&Path) -> io::Result<T>,
    ) -> Result<T, Refusal> {
        let account = self.account(user)?;
        self.on_path_as(path, &account, work)
    }

    pub fn on_path_as<T>(
        &self,
        path: &[u8],
        account: &Account,
        work: impl FnOnce(&Path) -> io::Result<T>,
    ) -> Result<T, Refusal> {
        let target = path_of(path)?;
        acting_as(&self.own, account, || work(&target)).map_err(|e| Refusal::file(path, &e))
    }
}

pub fn facts(path: &Path, follow: bool) -> io::Result<Metadata> {
    match follow {
        true => std::fs::metadata(path),
        false => std::fs::symlink_metadata(path),
    }
}

pub fn stat_of(path: &Path, facts: &Metadata) -> FileStat {
    let name = path.file_name().unwrap_or(OsStr::new("/"));
    let kind = facts.file_type();
    let target = match kind.is_symlink() {
        true => std::fs::read_link(path).ok(),
        false => None,
    };
    FileStat {
        name: name.as_bytes().to_vec(),
        kind: kind_word(facts).to_owned(),
        size: facts.size(),
        mode: facts.mode() & 0o7777,
        uid: facts.uid(),
        gid: facts.gid(),
        mtime_ns: facts
            .mtime()
            .saturating_mul(1_000_000_000)
            .saturating_add(facts.mtime_nsec()),
        target: target.map(|path| path.into_os_string().into_vec()),
        nlink: facts.nlink(),
    }
}

fn kind_word(facts: &Metadata) -> &'static str {
    let kind = facts.file_type();
    if kind.is_file() {
        "file"
    } else if kind.is_dir() {
        "directory"
    } else if kind.is_symlink() {
        "symlink"
    } else if kind.is_fifo() {
        "fifo"
    } else if kind.is_socket() {
        "socket"
    } else if kind.is_char_device() {
        "char"
    } else {
        "block"
    }
}

/// Makes a directory, and those above it if asked; one that is there already is no error then.
pub fn make_directory(path: &Path, parents: bool) -> io::Result<bool> {
    match std::fs::create_dir(path) {
        Ok(()) => Ok(true),
        Err(error) if !parents => Err(error),
        Err(error) => match error.kind() {
            io::ErrorKind::AlreadyExists if path.is_dir() => Ok(false),
            io::ErrorKind::NotFound => {
                let above = path.parent().ok_or(error)?;
                make_directory(above, true)?;
                make_directory(path, true)
            }
            _ => Err(error),
        },
    }
}
