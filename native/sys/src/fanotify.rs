//! Pre-content events: whoever reads a marked file waits until we have put there what it reads (Linux 6.14).

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use crate::result::check;

const CLASS_PRE_CONTENT: libc::c_uint = 0x08;
const CLOEXEC: libc::c_uint = 0x01;
/// A queue that is full lets reads through, and these would read zeros.
const UNLIMITED: libc::c_uint = 0x10 | 0x20;
const PRE_ACCESS: u64 = 0x0010_0000;
const MARK_ADD: libc::c_uint = 1;
const MARK_REMOVE: libc::c_uint = 2;
const ALLOW: u32 = 1;
const DENY: u32 = 2;
const METADATA_BYTES: usize = 24;
const INFO_RANGE: u8 = 6;
const INFO_RANGE_BYTES: usize = 24;
/// Room for one event, so that a thread takes no more than it can answer.
const EVENT_BYTES: usize = METADATA_BYTES + INFO_RANGE_BYTES;

/// A read that waits. The descriptor is of the file, and reads and writes by it raise no events.
pub struct Event {
    pub file: OwnedFd,
    pub process: i32,
    pub offset: u64,
    pub length: u64,
}

/// A group, without marks. Its last descriptor that is closed lets all reads through.
pub fn new_group() -> io::Result<OwnedFd> {
    let flags = CLASS_PRE_CONTENT | CLOEXEC | UNLIMITED;
    let files = (libc::O_RDWR | libc::O_LARGEFILE | libc::O_CLOEXEC) as libc::c_uint;
    // SAFETY: no pointers; the descriptor returned is new and ours.
    unsafe {
        let fd = check(libc::fanotify_init(flags, files))?;
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

/// From now on reads of the file wait, by descriptors that are opened from now on. Again is success.
pub fn mark(group: BorrowedFd, file: BorrowedFd) -> io::Result<()> {
    change(group, MARK_ADD, file)
}

/// Reads of the file wait no longer. One that is not marked is success.
pub fn unmark(group: BorrowedFd, file: BorrowedFd) -> io::Result<()> {
    match change(group, MARK_REMOVE, file) {
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
        other => other,
    }
}

fn change(group: BorrowedFd, how: libc::c_uint, file: BorrowedFd) -> io::Result<()> {
    // SAFETY: without a path the descriptor names what is marked.
    check(unsafe {
        libc::fanotify_mark(
            group.as_raw_fd(),
            how,
            PRE_ACCESS,
            file.as_raw_fd(),
            std::ptr::null(),
        )
    })
    .map(drop)
}

/// Waits for the next read. None: what came was no event that can be answered.
pub fn next_event(group: BorrowedFd) -> io::Result<Option<Event>> {
    let mut bytes = [0_u8; EVENT_BYTES];
    // SAFETY: the buffer lives through the call and has the length given.
    let length = unsafe { libc::read(group.as_raw_fd(), bytes.as_mut_ptr().cast(), EVENT_BYTES) };
    if length < 0 {
        return Err(io::Error::last_os_error());
    }
    let bytes = &bytes[..usize::try_from(length).unwrap_or(0)];
    Ok(parse(bytes))
}

fn parse(bytes: &[u8]) -> Option<Event> {
    let fd = i32::from_ne_bytes(bytes.get(16..20)?.try_into().ok()?);
    if fd < 0 {
        return None;
    }
    // SAFETY: the kernel has made the descriptor for this event, and nobody else knows it.
    let file = unsafe { OwnedFd::from_raw_fd(fd) };
    let process = i32::from_ne_bytes(bytes.get(20..24)?.try_into().ok()?);
    let info = bytes.get(METADATA_BYTES..).unwrap_or_default();
    let number = |at: usize| {
        let field = info.get(at..at + 8)?.try_into().ok()?;
        Some(u64::from_ne_bytes(field))
    };
    let ranged = info.first() == Some(&INFO_RANGE);
    let (offset, length) = match (ranged, number(8), number(16)) {
        (true, Some(offset), Some(length)) => (offset, length),
        _ => (0, u64::MAX), // of an unknown part: all of it
    };
    Some(Event {
        file,
        process,
        offset,
        length,
    })
}

/// Ends the wait of the read whose event had this descriptor: it goes on, or fails with EIO. NotFound: nobody waits so.
pub fn answer(group: BorrowedFd, event: RawFd, allow: bool) -> io::Result<()> {
    let response = if allow {
        ALLOW
    } else {
        DENY | (libc::EIO as u32) << 24
    };
    let mut bytes = [0_u8; 8];
    bytes[..4].copy_from_slice(&event.to_ne_bytes());
    bytes[4..].copy_from_slice(&response.to_ne_bytes());
    // SAFETY: the buffer lives through the call and has the length given.
    let written = unsafe { libc::write(group.as_raw_fd(), bytes.as_ptr().cast(), bytes.len()) };
    if written < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Whether nobody but us has the file open; `file` is the one descriptor that we have of it.
pub fn is_ours_alone(file: BorrowedFd) -> io::Result<bool> {
    // SAFETY: no pointers.
    let leased = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_WRLCK) };
    match check(leased) {
        Ok(_) => {
            // SAFETY: no pointers.
            check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_UNLCK) })?;
            Ok(true)
        }
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
        Err(error) => Err(error),
    }
}

/// A copy of what another process has open as `fd`.
pub fn take_descriptor(process: BorrowedFd, fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: no pointers; the descriptor returned is new and ours.
    unsafe {
        let fd = check(libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), fd, 0) as i32)?;
        Ok(OwnedFd::from_raw_fd(fd))
    }
}
