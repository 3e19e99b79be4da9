//! How willingly the kernel ends a process when memory is short (oom_score_adj in proc(5)).

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;

use crate::result::check;

/// The file of our own score, open for writing. It goes on meaning this process after an execve, also where the new program
/// may not open it any more: it is owned by whoever may see into the process, which is nobody where that is forbidden.
pub fn open_own_score() -> io::Result<OwnedFd> {
    set_dumpable(true)?;
    let file = OpenOptions::new()
        .write(true)
        .open("/proc/self/oom_score_adj");
    set_dumpable(false)?;
    file.map(OwnedFd::from)
}

/// Sets the score behind `file`, between -1000 and 1000. Children inherit it.
pub fn set_score(mut file: &File, score: i32) -> io::Result<()> {
    use std::io::Write;
    file.write_all(score.to_string().as_bytes())
}

fn set_dumpable(on: bool) -> io::Result<()> {
    // SAFETY: no pointers.
    check(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, libc::c_ulong::from(on), 0, 0, 0) }).map(drop)
}
