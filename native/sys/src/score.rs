//! How willingly the kernel ends a process when memory is short (oom_score_adj in proc(5)).

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;

use crate::paths::open_at;
use crate::result::check;

/// The file of our own score, `path`, open for writing. It goes on meaning this process after an execve, also where the new program
/// may not open it any more: it is owned by whoever may see into the process, which is nobody where that is forbidden.
pub fn open_own_score(path: &CStr) -> io::Result<OwnedFd> {
    set_dumpable(true)?;
    let file = open_at(None, path, libc::O_WRONLY, 0);
    set_dumpable(false)?;
    file
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
