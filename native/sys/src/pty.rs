//! Terminals.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

use crate::result::check;

pub struct Terminal {
    pub master: OwnedFd,
    pub slave: OwnedFd,
}

/// A new terminal of the devpts behind /dev/ptmx (or /dev/pts/ptmx). The slave comes by descriptor, so that no path is
/// looked up in a tree that others can change.
pub fn open_terminal(cols: u16, rows: u16) -> io::Result<Terminal> {
    let master = open_master("/dev/ptmx").or_else(|_| open_master("/dev/pts/ptmx"))?;
    let unlock: libc::c_int = 0;
    // SAFETY: TIOCSPTLCK reads one int; TIOCGPTPEER gives a new descriptor that is ours.
    let slave = unsafe {
        check(libc::ioctl(
            master.as_raw_fd(),
            libc::TIOCSPTLCK,
            &raw const unlock,
        ))?;
        let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC;
        OwnedFd::from_raw_fd(check(libc::ioctl(
            master.as_raw_fd(),
            libc::TIOCGPTPEER,
            flags,
        ))?)
    };
    set_size(&master, cols, rows)?;
    Ok(Terminal {
        master: master.into(),
        slave,
    })
}

fn open_master(path: &str) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NOCTTY | libc::O_NONBLOCK)
        .open(path)
}

pub fn set_size(master: &impl AsRawFd, cols: u16, rows: u16) -> io::Result<()> {
    let size = libc::winsize {
        ws_row: rows,
        ws_col: cols,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    // SAFETY: TIOCSWINSZ reads one winsize.
    check(unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCSWINSZ, &raw const size) }).map(drop)
}
