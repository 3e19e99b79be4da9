//! Paths resolved without leaving a root, and files by directory descriptor.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

const RESOLVE_NO_MAGICLINKS: u64 = 0x02;
const RESOLVE_NO_SYMLINKS: u64 = 0x04;
const RESOLVE_IN_ROOT: u64 = 0x10;

#[repr(C)]
struct OpenHow {
    flags: u64,
    mode: u64,
    resolve: u64,
}

fn check(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(result)
}

fn owned(result: libc::c_long) -> io::Result<OwnedFd> {
    let number = check(result)?;
    // SAFETY: the kernel has just returned this descriptor to us, so it is open and nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(number as i32) })
}

/// A path descriptor of `path` as seen by one whose root is `root`. A symbolic link on the way is ELOOP; one at the end is
/// itself what is opened.
pub fn resolve_in_root(root: BorrowedFd, path: &CStr) -> io::Result<OwnedFd> {
    let how = OpenHow {
        flags: (libc::O_PATH | libc::O_NOFOLLOW | libc::O_CLOEXEC) as u64,
        mode: 0,
        resolve: RESOLVE_IN_ROOT | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS,
    };
    let size = std::mem::size_of::<OpenHow>();
    // SAFETY: `path` is a valid C string and `how` lives through the call; the size passed is its own.
    owned(unsafe {
        libc::syscall(
            libc::SYS_openat2,
            root.as_raw_fd(),
            path.as_ptr(),
            std::ptr::addr_of!(how),
            size,
        )
    })
}

/// Opens `path` below `at` (or the working directory). Never through a symbolic link at the end; closed by execve.
pub fn open_at(at: Option<BorrowedFd>, path: &CStr, flags: i32, mode: u32) -> io::Result<OwnedFd> {
    let at = at.map_or(libc::AT_FDCWD, |fd| fd.as_raw_fd());
    let flags = flags | libc::O_CLOEXEC | libc::O_NOFOLLOW;
    // SAFETY: `path` is a valid C string for the time of the call.
    owned(unsafe { libc::openat(at, path.as_ptr(), flags, mode) }.into())
}

/// As `open_at` for reading, but a link is followed, as those of the kernel must be that stand for what has no path.
pub fn open_linked_at(at: Option<BorrowedFd>, path: &CStr) -> io::Result<OwnedFd> {
    let at = at.map_or(libc::AT_FDCWD, |fd| fd.as_raw_fd());
    let flags = libc::O_RDONLY | libc::O_CLOEXEC;
    // SAFETY: `path` is a valid C string for the time of the call.
    owned(unsafe { libc::openat(at, path.as_ptr(), flags) }.into())
}

pub fn make_dir_at(at: Option<BorrowedFd>, path: &CStr, mode: u32) -> io::Result<()> {
    let at = at.map_or(libc::AT_FDCWD, |fd| fd.as_raw_fd());
    // SAFETY: `path` is a valid C string for the time of the call.
    check(unsafe { libc::mkdirat(at, path.as_ptr(), mode) }.into())?;
    Ok(())
}

/// Removes a file or, with `directory`, an empty directory.
pub fn remove_at(at: Option<BorrowedFd>, path: &CStr, directory: bool) -> io::Result<()> {
    let at = at.map_or(libc::AT_FDCWD, |fd| fd.as_raw_fd());
    let flags = if directory { libc::AT_REMOVEDIR } else { 0 };
    // SAFETY: `path` is a valid C string for the time of the call.
    check(unsafe { libc::unlinkat(at, path.as_ptr(), flags) }.into())?;
    Ok(())
}

pub fn rename_at(from: BorrowedFd, old: &CStr, to: BorrowedFd, new: &CStr) -> io::Result<()> {
    // SAFETY: both paths are valid C strings for the time of the call.
    check(
        unsafe { libc::renameat(from.as_raw_fd(), old.as_ptr(), to.as_raw_fd(), new.as_ptr()) }
            .into(),
    )?;
    Ok(())
}

pub fn link_at(target: &CStr, at: BorrowedFd, path: &CStr) -> io::Result<()> {
    // SAFETY: both texts are valid C strings for the time of the call.
    check(unsafe { libc::symlinkat(target.as_ptr(), at.as_raw_fd(), path.as_ptr()) }.into())?;
    Ok(())
}

/// A character device node.
pub fn make_device_at(
    at: BorrowedFd,
    path: &CStr,
    mode: u32,
    major: u32,
    minor: u32,
) -> io::Result<()> {
    let (mode, number) = (libc::S_IFCHR | mode, libc::makedev(major, minor));
    // SAFETY: `path` is a valid C string for the time of the call.
    check(unsafe { libc::mknodat(at.as_raw_fd(), path.as_ptr(), mode, number) }.into())?;
    Ok(())
}

/// Gives `path` (itself, if it is a symbolic link) to `uid` and `gid`.
pub fn change_owner_at(at: Option<BorrowedFd>, path: &CStr, uid: u32, gid: u32) -> io::Result<()> {
    let at = at.map_or(libc::AT_FDCWD, |fd| fd.as_raw_fd());
    let flags = libc::AT_SYMLINK_NOFOLLOW
        | if path.is_empty() {
            libc::AT_EMPTY_PATH
        } else {
            0
        };
    // SAFETY: `path` is a valid C string for the time of the call.
    check(unsafe { libc::fchownat(at, path.as_ptr(), uid, gid, flags) }.into())?;
    Ok(())
}

pub fn change_mode(file: BorrowedFd, mode: u32) -> io::Result<()> {
    // SAFETY: plain numbers; the descriptor is borrowed, hence open.
    check(unsafe { libc::fchmod(file.as_raw_fd(), mode) }.into())?;
    Ok(())
}

/// Changes the working directory to `directory`.
pub fn change_directory(directory: BorrowedFd) -> io::Result<()> {
    // SAFETY: plain number; the descriptor is borrowed, hence open.
    check(unsafe { libc::fchdir(directory.as_raw_fd()) }.into())?;
    Ok(())
}

/// Sets the bits that files are created without.
pub fn set_file_mask(mask: u32) {
    // SAFETY: umask takes any number and cannot fail.
    unsafe { libc::umask(mask) };
}

/// One write(2) of all of `bytes`; a short one is an error.
pub fn write_once(file: BorrowedFd, bytes: &[u8]) -> io::Result<()> {
    // SAFETY: the true length of the buffer is passed.
    let written = check(
        unsafe { libc::write(file.as_raw_fd(), bytes.as_ptr().cast(), bytes.len()) }
            as libc::c_long,
    )?;
    if written as usize != bytes.len() {
        return Err(io::ErrorKind::WriteZero.into());
    }
    Ok(())
}

/// One read(2); its length, 0 at the end.
pub fn read_once(file: BorrowedFd, bytes: &mut [u8]) -> io::Result<usize> {
    // SAFETY: the true length of the buffer is passed.
    let read = check(
        unsafe { libc::read(file.as_raw_fd(), bytes.as_mut_ptr().cast(), bytes.len()) }
            as libc::c_long,
    )?;
    Ok(read as usize)
}

/// Takes the exclusive lock of `file`; false when somebody else has it.
pub fn try_lock(file: BorrowedFd) -> io::Result<bool> {
    // SAFETY: plain numbers; the descriptor is borrowed, hence open.
    match check(unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) }.into()) {
        Ok(_) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::EWOULDBLOCK) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Closes a forked process's copy of a descriptor whose record it has inherited but will never drop.
pub fn close_copy(file: BorrowedFd) {
    // SAFETY: plain number. The process ends without running destructors, so that nobody closes or uses the number again.
    unsafe { libc::close(file.as_raw_fd()) };
}
