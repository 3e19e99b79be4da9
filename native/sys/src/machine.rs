//! What only the first program of a machine does: mounting, kernel modules, its clock, its entropy, turning it off.

use std::ffi::CStr;
use std::fs::Metadata;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;

use crate::result::{check, check_long};

pub const NO_SUID: u64 = libc::MS_NOSUID;
pub const NO_DEVICES: u64 = libc::MS_NODEV;
pub const NO_EXEC: u64 = libc::MS_NOEXEC;
pub const READ_ONLY: u64 = libc::MS_RDONLY;
pub const NO_ACCESS_TIMES: u64 = libc::MS_NOATIME;

// _IOW('R', 0x03, int[2]) and _IO('R', 0x07) of random(4).
const RNDADDENTROPY: libc::c_ulong = 0x4008_5203;
const RNDRESEEDCRNG: libc::c_ulong = 0x5207;
const SEED_BYTES_MAX: usize = 512;

/// mount(2) of a new file system.
pub fn mount(kind: &CStr, source: &CStr, target: &CStr, flags: u64, data: &CStr) -> io::Result<()> {
    // SAFETY: all are valid C strings for the time of the call.
    check(unsafe {
        libc::mount(
            source.as_ptr(),
            target.as_ptr(),
            kind.as_ptr(),
            flags,
            data.as_ptr().cast(),
        )
    })
    .map(drop)
}

/// What is mounted at `source` is mounted at `target` from now on.
pub fn move_mount(source: &CStr, target: &CStr) -> io::Result<()> {
    // SAFETY: both paths are valid C strings; type and data may be null for a move.
    check(unsafe {
        libc::mount(
            source.as_ptr(),
            target.as_ptr(),
            std::ptr::null(),
            libc::MS_MOVE,
            std::ptr::null(),
        )
    })
    .map(drop)
}

/// A node of the same device as `like`, for its owner only.
pub fn make_device(path: &CStr, like: &Metadata) -> io::Result<()> {
    // SAFETY: the path is a valid C string.
    check(unsafe {
        libc::mknod(
            path.as_ptr(),
            (like.mode() & libc::S_IFMT) | 0o600,
            like.rdev(),
        )
    })
    .map(drop)
}

/// The working directory becomes the root.
pub fn chroot_here() -> io::Result<()> {
    // SAFETY: a static C string.
    check(unsafe { libc::chroot(c".".as_ptr()) })?;
    std::env::set_current_dir("/")
}

/// Loads a kernel module. One that is there already is no error.
pub fn load_module(file: BorrowedFd) -> io::Result<()> {
    // SAFETY: the descriptor is open and the arguments are a static C string.
    let loaded = check_long(unsafe {
        libc::syscall(
            libc::SYS_finit_module,
            file.as_raw_fd(),
            c"".as_ptr(),
            0 as libc::c_int,
        )
    });
    match loaded {
        Err(error) if error.raw_os_error() != Some(libc::EEXIST) => Err(error),
        _ => Ok(()),
    }
}

/// Sets the wall clock. `wall_s`: seconds since 1970, not negative.
pub fn set_wall_clock(wall_s: f64) -> io::Result<()> {
    let time = libc::timespec {
        tv_sec: wall_s.trunc() as libc::time_t,
        tv_nsec: ((wall_s.fract() * 1e9) as libc::c_long).clamp(0, 999_999_999),
    };
    // SAFETY: the record is valid during the call.
    check(unsafe { libc::clock_settime(libc::CLOCK_REALTIME, &raw const time) }).map(drop)
}

#[repr(C)]
struct Entropy {
    bits: libc::c_int,
    bytes: libc::c_int,
    seed: [u8; SEED_BYTES_MAX],
}

/// Adds `seed` to the kernel's pool, counted as full of entropy, and makes its generator begin anew from the pool: what it gives
/// from now on has nothing to do with what a machine of the same memory gives. At most 512 bytes are used.
pub fn reseed(random: BorrowedFd, seed: &[u8]) -> io::Result<()> {
    let mut entropy = Entropy {
        bits: 0,
        bytes: 0,
        seed: [0; SEED_BYTES_MAX],
    };
    let count = seed.len().min(SEED_BYTES_MAX);
    entropy.seed[..count].copy_from_slice(&seed[..count]);
    entropy.bytes = count as libc::c_int;
    entropy.bits = (count * 8) as libc::c_int;
    let fd = random.as_raw_fd();
    // SAFETY: the record is a struct rand_pool_info whose size field is that of the buffer behind it.
    check(unsafe { libc::ioctl(fd, RNDADDENTROPY as _, &raw const entropy) })?;
    // SAFETY: takes no argument.
    check(unsafe { libc::ioctl(fd, RNDRESEEDCRNG as _) }).map(drop)
}

/// Ends this machine at once. Returns only the error.
pub fn restart() -> io::Error {
    // SAFETY: no pointers.
    unsafe {
        libc::sync();
        libc::reboot(libc::LINUX_REBOOT_CMD_RESTART);
    }
    io::Error::last_os_error()
}
