//! Files in memory that cannot change any more, and running one.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use crate::paths::write_once;

const SEALS: libc::c_int =
    libc::F_SEAL_SEAL | libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_WRITE;
const EXEC: libc::c_uint = 0x10;
const NO_EXEC: libc::c_uint = 0x8;

/// An empty file in memory, to be written and read.
pub fn memory_file(name: &CStr) -> io::Result<OwnedFd> {
    create(name, NO_EXEC, 0)
}

fn create(name: &CStr, kind: libc::c_uint, more: libc::c_uint) -> io::Result<OwnedFd> {
    let create = |kind: libc::c_uint| {
        let flags = libc::MFD_CLOEXEC | more | kind;
        // SAFETY: `name` is a valid C string for the time of the call.
        unsafe { libc::memfd_create(name.as_ptr(), flags) }
    };
    let mut number = create(kind);
    if number < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::EINVAL) {
        number = create(0); // before Linux 6.3, where the two flags do not exist
    }
    if number < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just returned this descriptor to us.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// A file in memory that holds `bytes`, has `mode`, and can never be written again.
pub fn sealed_file(name: &CStr, bytes: &[u8], mode: u32) -> io::Result<OwnedFd> {
    let kind = if mode & 0o111 != 0 { EXEC } else { NO_EXEC };
    let file = create(name, kind, libc::MFD_ALLOW_SEALING)?;
    for part in bytes.chunks(1 << 20) {
        write_once(file.as_fd(), part)?;
    }
    // SAFETY: plain numbers; the file is open.
    if unsafe { libc::fchmod(file.as_raw_fd(), mode) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: plain numbers; the file is open.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, SEALS) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: plain numbers; the file is open.
    if unsafe { libc::lseek(file.as_raw_fd(), 0, libc::SEEK_SET) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(file)
}

/// Becomes the program in `file`. Returns only the error.
pub fn run_file(file: BorrowedFd, arguments: &[&CStr], environment: &[&CStr]) -> io::Error {
    let list = |texts: &[&CStr]| -> Vec<*const libc::c_char> {
        texts
            .iter()
            .map(|text| text.as_ptr())
            .chain([std::ptr::null()])
            .collect()
    };
    let (arguments, environment) = (list(arguments), list(environment));
    // SAFETY: both lists end with a null pointer and hold valid C strings that live through the call.
    unsafe {
        libc::syscall(
            libc::SYS_execveat,
            file.as_raw_fd(),
            c"".as_ptr(),
            arguments.as_ptr(),
            environment.as_ptr(),
            libc::AT_EMPTY_PATH,
        )
    };
    io::Error::last_os_error()
}

/// Gives the descriptors the numbers 0, 1, 2, … in this order, without close-on-exec (None: that number is closed). All others are
/// closed by the next execve; those of `keep` are returned under new numbers, above, until then.
pub fn arrange(
    descriptors: &[Option<BorrowedFd>],
    keep: &[BorrowedFd],
) -> io::Result<Vec<OwnedFd>> {
    let count = descriptors.len() as i32;
    // First out of the way: a number below `count` may still be the source of another.
    let high = descriptors
        .iter()
        .map(|fd| fd.map(|fd| above(fd, count)).transpose())
        .collect::<io::Result<Vec<_>>>()?;
    let kept = keep
        .iter()
        .map(|&fd| above(fd, count))
        .collect::<io::Result<Vec<_>>>()?;
    for (number, source) in (0..count).zip(&high) {
        let result = match source {
            // SAFETY: plain numbers. What is replaced was owned by records of a process that is about to become another program.
            Some(source) => unsafe { libc::dup2(source.as_raw_fd(), number) },
            // SAFETY: as above; that the number was not open is no error here.
            None => unsafe { libc::close(number) }.max(0),
        };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    let flags = libc::CLOSE_RANGE_CLOEXEC;
    // SAFETY: plain numbers; only marks descriptors.
    if unsafe { libc::syscall(libc::SYS_close_range, count, u32::MAX, flags) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(kept)
}

/// A duplicate with a number of at least `lowest`, closed by execve.
fn above(fd: BorrowedFd, lowest: i32) -> io::Result<OwnedFd> {
    // SAFETY: plain numbers; the descriptor is borrowed, hence open.
    let number = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, lowest) };
    if number < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just returned this descriptor to us.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// A duplicate of a descriptor that this program was started with, closed by execve; the original stays as it is.
pub fn inherited(number: i32) -> io::Result<OwnedFd> {
    // SAFETY: plain numbers; one that is not open is an error.
    let copy = unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 0) };
    if copy < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just returned this descriptor to us.
    Ok(unsafe { OwnedFd::from_raw_fd(copy) })
}
