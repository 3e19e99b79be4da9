//! Pipes and descriptor flags.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use crate::result::check;

pub struct Pipe {
    pub read: OwnedFd,
    pub write: OwnedFd,
}

pub const O_NONBLOCK: i32 = libc::O_NONBLOCK;

pub fn new_pipe() -> io::Result<Pipe> {
    let mut fds = [0; 2];
    // SAFETY: `fds` holds two descriptors; on success both are new and ours.
    unsafe {
        check(libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC))?;
        Ok(Pipe {
            read: OwnedFd::from_raw_fd(fds[0]),
            write: OwnedFd::from_raw_fd(fds[1]),
        })
    }
}

pub fn set_nonblocking(fd: &impl AsRawFd) -> io::Result<()> {
    // SAFETY: no pointers; a bad descriptor gives an error.
    unsafe {
        let flags = check(libc::fcntl(fd.as_raw_fd(), libc::F_GETFL))?;
        check(libc::fcntl(
            fd.as_raw_fd(),
            libc::F_SETFL,
            flags | libc::O_NONBLOCK,
        ))
        .map(drop)
    }
}

/// Bytes that a read would give now.
pub fn readable_bytes(fd: &impl AsRawFd) -> usize {
    let mut count: libc::c_int = 0;
    // SAFETY: FIONREAD writes one int.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), libc::FIONREAD, &raw mut count) };
    match result {
        0 => usize::try_from(count).unwrap_or(0),
        _ => 0,
    }
}

/// Takes over a descriptor that the starter left at a known number; `None` when nothing is there. Call once a number.
pub fn inherited(number: RawFd) -> Option<OwnedFd> {
    // SAFETY: the flag call fails for a closed number; an open one below belongs to the start protocol, not to any
    // object of this process, and the caller takes each number once.
    unsafe {
        check(libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC)).ok()?;
        Some(OwnedFd::from_raw_fd(number))
    }
}
