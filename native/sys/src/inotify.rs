//! Changes of directories.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::result::check;

pub const MODIFY: u32 = libc::IN_MODIFY;
pub const ATTRIB: u32 = libc::IN_ATTRIB;
pub const MOVED_FROM: u32 = libc::IN_MOVED_FROM;
pub const MOVED_TO: u32 = libc::IN_MOVED_TO;
pub const CREATE: u32 = libc::IN_CREATE;
pub const DELETE: u32 = libc::IN_DELETE;
pub const DELETE_SELF: u32 = libc::IN_DELETE_SELF;
pub const OVERFLOW: u32 = libc::IN_Q_OVERFLOW;
pub const IGNORED: u32 = libc::IN_IGNORED;
pub const IS_DIRECTORY: u32 = libc::IN_ISDIR;

const WATCHED: u32 = MODIFY | ATTRIB | MOVED_FROM | MOVED_TO | CREATE | DELETE | DELETE_SELF;

#[derive(Clone, Debug)]
pub struct Change {
    pub watch: i32,
    pub mask: u32,
    pub cookie: u32,
    pub name: Vec<u8>,
    /// Bytes that it took in what was read.
    pub size: usize,
}

pub fn new_instance() -> io::Result<OwnedFd> {
    // SAFETY: no pointers; the descriptor is new and ours.
    unsafe {
        let raw = check(libc::inotify_init1(libc::IN_CLOEXEC | libc::IN_NONBLOCK))?;
        Ok(OwnedFd::from_raw_fd(raw))
    }
}

/// `follow`: whether a symlink at the end of the path is one to the directory meant.
pub fn add_watch(fd: &impl AsRawFd, path: &CStr, follow: bool) -> io::Result<i32> {
    let mask = match follow {
        true => WATCHED,
        false => WATCHED | libc::IN_DONT_FOLLOW | libc::IN_ONLYDIR,
    };
    // SAFETY: the path is valid during the call.
    check(unsafe { libc::inotify_add_watch(fd.as_raw_fd(), path.as_ptr(), mask) })
}

pub fn remove_watch(fd: &impl AsRawFd, watch: i32) {
    // SAFETY: no pointers. The watch may have gone with its directory: no error then.
    unsafe { libc::inotify_rm_watch(fd.as_raw_fd(), watch) };
}

/// Bytes of changes that have happened and are not read yet.
pub fn waiting_bytes(fd: &impl AsRawFd) -> u64 {
    let mut count: libc::c_int = 0;
    // SAFETY: `count` is valid during the call, and is what FIONREAD writes to.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), libc::FIONREAD, &raw mut count) };
    match result {
        0 => u64::try_from(count).unwrap_or(0),
        _ => 0,
    }
}

/// The events in a buffer that read(2) filled.
pub fn parse_changes(mut bytes: &[u8]) -> Vec<Change> {
    const HEAD: usize = std::mem::size_of::<libc::inotify_event>();
    let word = |bytes: &[u8], at: usize| {
        u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
    };
    let mut changes = Vec::new();
    while bytes.len() >= HEAD {
        let end = HEAD + word(bytes, 12) as usize;
        if bytes.len() < end {
            break;
        }
        let padded = &bytes[HEAD..end];
        let length = padded.iter().position(|b| *b == 0).unwrap_or(padded.len());
        changes.push(Change {
            watch: word(bytes, 0) as i32,
            mask: word(bytes, 4),
            cookie: word(bytes, 8),
            name: padded[..length].to_vec(),
            size: end,
        });
        bytes = &bytes[end..];
    }
    changes
}
