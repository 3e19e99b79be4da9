//! Mounting FUSE, and holes in files.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::result::check;

/// Mounts the connection `device` (an open /dev/fuse) at `path`, read-only; by modes of files, which the kernel checks.
pub fn mount_fuse(device: BorrowedFd, path: &CStr, read_bytes_max: u32) -> io::Result<()> {
    let options = format!(
        "fd={},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions,max_read={read_bytes_max}\0",
        device.as_raw_fd()
    );
    let flags = libc::MS_RDONLY | libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;
    // SAFETY: all four texts are terminated and live through the call.
    check(unsafe {
        libc::mount(
            c"dsec-loader".as_ptr(),
            path.as_ptr(),
            c"fuse.dsec".as_ptr(),
            flags,
            options.as_ptr().cast(),
        )
    })
    .map(drop)
}

/// Gives the room of these bytes back; they read as zeros afterwards. The file's length stays.
pub fn punch_hole(file: BorrowedFd, offset: u64, length: u64) -> io::Result<()> {
    let too_large = || io::Error::from_raw_os_error(libc::EFBIG);
    let offset = libc::off_t::try_from(offset).map_err(|_| too_large())?;
    let length = libc::off_t::try_from(length).map_err(|_| too_large())?;
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: no pointers.
    check(unsafe { libc::fallocate(file.as_raw_fd(), mode, offset, length) }).map(drop)
}

/// Takes an exclusive flock(2); false when somebody else has one.
pub fn try_lock(file: BorrowedFd) -> io::Result<bool> {
    // SAFETY: no pointers.
    match check(unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) }) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
        Err(error) => Err(error),
    }
}

/// A descriptor that programs started from now on have too.
pub fn keep_on_exec(fd: i32) -> io::Result<()> {
    // SAFETY: no pointers.
    check(unsafe { libc::fcntl(fd, libc::F_SETFD, 0) }).map(drop)
}

/// Standard input as a descriptor of its own, closed for programs started from now on.
pub fn standard_input() -> io::Result<std::os::fd::OwnedFd> {
    use std::os::fd::FromRawFd;
    // SAFETY: no pointers; the descriptor returned is new and ours.
    unsafe {
        let fd = check(libc::fcntl(0, libc::F_DUPFD_CLOEXEC, 3))?;
        Ok(std::os::fd::OwnedFd::from_raw_fd(fd))
    }
}
