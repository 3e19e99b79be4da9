//! Signals as descriptor, and dispositions at the start.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::result::check;

pub const TERM: i32 = libc::SIGTERM;
pub const KILL: i32 = libc::SIGKILL;
pub const STOP: i32 = libc::SIGSTOP;
pub const CONT: i32 = libc::SIGCONT;
pub const CHLD: i32 = libc::SIGCHLD;
pub const INT: i32 = libc::SIGINT;
pub const HIGHEST: i32 = 64;

/// Blocks `signals` and gives a non-blocking descriptor on which they come.
pub fn signal_descriptor(signals: &[i32]) -> io::Result<OwnedFd> {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigemptyset initialises the set before it is used; all pointers are valid during the calls.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        for signal in signals {
            libc::sigaddset(set.as_mut_ptr(), *signal);
        }
        check(libc::sigprocmask(
            libc::SIG_BLOCK,
            set.as_ptr(),
            std::ptr::null_mut(),
        ))?;
        let raw = check(libc::signalfd(
            -1,
            set.as_ptr(),
            libc::SFD_CLOEXEC | libc::SFD_NONBLOCK,
        ))?;
        Ok(OwnedFd::from_raw_fd(raw))
    }
}

/// The numbers of the signals that came.
pub fn read_signals(fd: &impl AsRawFd) -> Vec<i32> {
    const SIZE: usize = std::mem::size_of::<libc::signalfd_siginfo>();
    let mut buffer = [0u8; SIZE * 16];
    // SAFETY: the buffer is writable for its length.
    let count = unsafe { libc::read(fd.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len()) };
    let whole = usize::try_from(count).unwrap_or(0) / SIZE;
    // ssi_signo is the first field, a u32 in the machine's order.
    (0..whole)
        .map(|i| {
            let at = i * SIZE;
            i32::from_ne_bytes([buffer[at], buffer[at + 1], buffer[at + 2], buffer[at + 3]])
        })
        .collect()
}

/// Every signal to its default, so that commands inherit nothing odd from whoever started us; SIGPIPE is ignored.
///
/// By the system call itself: the C library refuses to touch the two signals that it keeps for its threads, and those
/// too can be inherited as ignored.
pub fn default_dispositions() {
    for signal in 1..=HIGHEST {
        set_disposition(signal, libc::SIG_DFL);
    }
    set_disposition(libc::SIGPIPE, libc::SIG_IGN);
}

fn set_disposition(signal: i32, handler: libc::sighandler_t) {
    // struct sigaction of the kernel on x86-64 (not the C library's): handler, flags, restorer, mask of 64 bits.
    let action: [u64; 4] = [handler as u64, 0, 0, 0];
    // SAFETY: `action` is a valid record of four words with a disposition that runs no code of ours, no old one is asked
    // for, and the last argument is the size of the mask. KILL and STOP are refused, which is of no account.
    unsafe {
        libc::syscall(
            libc::SYS_rt_sigaction,
            signal,
            action.as_ptr(),
            std::ptr::null_mut::<u64>(),
            8usize,
        );
    }
}
