//! Paths that cannot leave a directory: openat2 with RESOLVE_IN_ROOT, and the *at calls on what it gives.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::result::{check, check_long};

#[repr(C)]
struct OpenHow {
    flags: u64,
    mode: u64,
    resolve: u64,
}

const RESOLVE_NO_MAGICLINKS: u64 = 0x02;
const RESOLVE_IN_ROOT: u64 = 0x10;

pub const PATH_ONLY_DIRECTORY: i32 = libc::O_PATH | libc::O_DIRECTORY;
pub const READ_NONBLOCKING: i32 = libc::O_RDONLY | libc::O_NONBLOCK | libc::O_NOCTTY;
pub const DIRECTORY: i32 = libc::O_RDONLY | libc::O_DIRECTORY;
pub const WRITE_ONLY: i32 = libc::O_WRONLY;
pub const NEW_FILE: i32 = libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL | libc::O_NOFOLLOW;
pub const NOT_FOLLOWING: i32 = libc::O_NOFOLLOW;
pub const NOT_BLOCKING: i32 = libc::O_NONBLOCK | libc::O_NOCTTY;

/// A path of a caller as C wants it; EINVAL for one with a zero byte.
pub fn c_path(bytes: &[u8]) -> io::Result<CString> {
    CString::new(bytes).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
}

/// Opens `path` as if `root` were `/`: neither `..` nor a symlink gets out. Close-on-exec is always set.
pub fn open_in_root(
    root: &impl AsRawFd,
    path: &CStr,
    flags: i32,
    mode: u32,
) -> io::Result<OwnedFd> {
    let flags = flags | libc::O_CLOEXEC;
    let how = OpenHow {
        flags: flags as u32 as u64,
        mode: u64::from(mode),
        resolve: RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS,
    };
    // SAFETY: path and record are valid during the call; the descriptor is new and ours.
    unsafe {
        let raw = check_long(libc::syscall(
            libc::SYS_openat2,
            root.as_raw_fd(),
            path.as_ptr(),
            &raw const how,
            std::mem::size_of::<OpenHow>(),
        ))?;
        Ok(OwnedFd::from_raw_fd(raw as i32))
    }
}

pub fn mkdir_at(directory: &impl AsRawFd, name: &CStr, mode: u32) -> io::Result<()> {
    // SAFETY: the name is valid during the call.
    check(unsafe { libc::mkdirat(directory.as_raw_fd(), name.as_ptr(), mode) }).map(drop)
}

pub fn unlink_at(directory: &impl AsRawFd, name: &CStr) -> io::Result<()> {
    // SAFETY: the name is valid during the call.
    check(unsafe { libc::unlinkat(directory.as_raw_fd(), name.as_ptr(), 0) }).map(drop)
}

pub fn rmdir_at(directory: &impl AsRawFd, name: &CStr) -> io::Result<()> {
    // SAFETY: the name is valid during the call.
    check(unsafe { libc::unlinkat(directory.as_raw_fd(), name.as_ptr(), libc::AT_REMOVEDIR) })
        .map(drop)
}

pub fn symlink_at(target: &CStr, directory: &impl AsRawFd, name: &CStr) -> io::Result<()> {
    // SAFETY: both strings are valid during the call.
    check(unsafe { libc::symlinkat(target.as_ptr(), directory.as_raw_fd(), name.as_ptr()) })
        .map(drop)
}

pub fn mkfifo_at(directory: &impl AsRawFd, name: &CStr, mode: u32) -> io::Result<()> {
    // SAFETY: the name is valid during the call.
    check(unsafe { libc::mkfifoat(directory.as_raw_fd(), name.as_ptr(), mode) }).map(drop)
}

/// A second name for `old` (never through a symlink of that name).
pub fn link_at(from: &impl AsRawFd, old: &CStr, to: &impl AsRawFd, new: &CStr) -> io::Result<()> {
    // SAFETY: both strings are valid during the call.
    check(unsafe {
        libc::linkat(
            from.as_raw_fd(),
            old.as_ptr(),
            to.as_raw_fd(),
            new.as_ptr(),
            0,
        )
    })
    .map(drop)
}

pub fn chown_at(directory: &impl AsRawFd, name: &CStr, uid: u32, gid: u32) -> io::Result<()> {
    // SAFETY: the name is valid during the call.
    check(unsafe {
        libc::fchownat(
            directory.as_raw_fd(),
            name.as_ptr(),
            uid,
            gid,
            libc::AT_SYMLINK_NOFOLLOW,
        )
    })
    .map(drop)
}

/// Access and modification time of a name, not of what a symlink points to.
pub fn set_mtime_at(
    directory: &impl AsRawFd,
    name: &CStr,
    seconds: i64,
    nanoseconds: i64,
) -> io::Result<()> {
    let time = libc::timespec {
        tv_sec: seconds,
        tv_nsec: nanoseconds,
    };
    let times = [time, time];
    // SAFETY: name and times are valid during the call.
    check(unsafe {
        libc::utimensat(
            directory.as_raw_fd(),
            name.as_ptr(),
            times.as_ptr(),
            libc::AT_SYMLINK_NOFOLLOW,
        )
    })
    .map(drop)
}

/// rename(2); EEXIST when there is a target and `replace` is false.
pub fn rename_path(source: &CStr, target: &CStr, replace: bool) -> io::Result<()> {
    let flags: libc::c_uint = match replace {
        true => 0,
        false => libc::RENAME_NOREPLACE,
    };
    // SAFETY: both strings are valid during the call.
    check_long(unsafe {
        libc::syscall(
            libc::SYS_renameat2,
            libc::AT_FDCWD,
            source.as_ptr(),
            libc::AT_FDCWD,
            target.as_ptr(),
            flags,
        )
    })
    .map(drop)
}

/// File systems whose files have no size before they are read: what stat says of them is 0, or a page.
const MADE_WHEN_READ: [i64; 11] = [
    0x9fa0,      // proc
    0x6265_6572, // sysfs
    0x0027_e0eb, // cgroup
    0x6367_7270, // cgroup2
    0x6462_6720, // debugfs
    0x7472_6163, // tracefs
    0x7363_6673, // securityfs
    0xf97c_ff8c, // selinuxfs
    0x6265_6570, // configfs
    0x6165_676c, // pstore
    0xde5e_81e4, // efivarfs
];

/// Whether the content of an open file is made up by the kernel as it is read.
pub fn is_made_when_read(file: &impl AsRawFd) -> bool {
    // SAFETY: statfs is plain data for which zeroes are valid; the record is valid during the call.
    let kind = unsafe {
        let mut facts: libc::statfs = std::mem::zeroed();
        match libc::fstatfs(file.as_raw_fd(), &raw mut facts) {
            0 => facts.f_type,
            _ => 0,
        }
    };
    MADE_WHEN_READ.contains(&kind)
}

#[derive(Clone, Copy, Debug, Default)]
pub struct DiskSpace {
    pub used_bytes: u64,
    pub total_bytes: u64,
    /// Files, directories and whatever else has an inode.
    pub used_inodes: u64,
}

pub fn disk_space(path: &CStr) -> io::Result<DiskSpace> {
    // SAFETY: statvfs is plain data for which zeroes are valid; path and record are valid during the call.
    let facts = unsafe {
        let mut facts: libc::statvfs = std::mem::zeroed();
        check(libc::statvfs(path.as_ptr(), &raw mut facts))?;
        facts
    };
    Ok(DiskSpace {
        used_bytes: facts.f_blocks.saturating_sub(facts.f_bfree) * facts.f_frsize,
        total_bytes: facts.f_blocks * facts.f_frsize,
        used_inodes: facts.f_files.saturating_sub(facts.f_ffree),
    })
}
