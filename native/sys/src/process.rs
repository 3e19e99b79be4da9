//! Children: reaping, signals, forked helpers.

use std::io;
use std::os::fd::RawFd;

use crate::result::{check, check_long};

#[derive(Clone, Copy, Debug)]
pub enum Ended {
    Exited(i32),
    Signaled(i32),
}

#[derive(Clone, Copy, Debug)]
pub struct Reaped {
    pub pid: i32,
    pub ended: Ended,
    pub user_us: u64,
    pub system_us: u64,
    pub max_rss_bytes: u64,
}

/// One ended child, without waiting.
pub fn reap_one() -> Option<Reaped> {
    let mut status = 0;
    // SAFETY: rusage is plain data for which zeroes are valid; both pointers are valid during the call.
    let (pid, usage) = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        let pid = libc::wait4(-1, &raw mut status, libc::WNOHANG, &raw mut usage);
        (pid, usage)
    };
    if pid <= 0 {
        return None;
    }
    let micros = |t: libc::timeval| {
        u64::try_from(t.tv_sec).unwrap_or(0) * 1_000_000 + u64::try_from(t.tv_usec).unwrap_or(0)
    };
    Some(Reaped {
        pid,
        ended: match libc::WIFSIGNALED(status) {
            true => Ended::Signaled(libc::WTERMSIG(status)),
            false => Ended::Exited(libc::WEXITSTATUS(status)),
        },
        user_us: micros(usage.ru_utime),
        system_us: micros(usage.ru_stime),
        max_rss_bytes: u64::try_from(usage.ru_maxrss).unwrap_or(0) * 1024,
    })
}

/// `pid` as in kill(2): negative for a group, -1 for everything that may be reached.
pub fn kill(pid: i32, signal: i32) -> io::Result<()> {
    // SAFETY: no pointers.
    check(unsafe { libc::kill(pid, signal) }).map(drop)
}

/// Everybody whose priority is not as low goes first; `by` is at most 19.
pub fn lower_priority(by: i32) -> io::Result<()> {
    // SAFETY: no pointers.
    check(unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, by) }).map(drop)
}

/// Orphaned descendants become our children, as they would under pid 1.
pub fn become_subreaper() -> io::Result<()> {
    // SAFETY: no pointers.
    check(unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) }).map(drop)
}

/// Runs `work` in a forked child, which ends with the code it gives. The child keeps `keep` and 0, 1, 2, no other
/// descriptors. For single-threaded programs only.
pub fn fork_helper(keep: &[RawFd], work: impl FnOnce() -> i32) -> io::Result<i32> {
    // SAFETY: the process is single-threaded, so the child's copy of the heap and of every lock is consistent.
    let pid = check(unsafe { libc::fork() })?;
    if pid != 0 {
        return Ok(pid);
    }
    let code = match prepare_helper(keep) {
        Ok(()) => work(),
        Err(_) => 125,
    };
    // SAFETY: never returns; runs no exit handlers, which belong to the parent.
    unsafe { libc::_exit(code) }
}

fn prepare_helper(keep: &[RawFd]) -> io::Result<()> {
    close_all_but(keep)?;
    // SAFETY: an emptied set is a valid mask.
    unsafe {
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        check(libc::sigprocmask(
            libc::SIG_SETMASK,
            &raw const none,
            std::ptr::null_mut(),
        ))?;
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
    }
    Ok(())
}

/// Closes a forked process's copies of all descriptors but `keep` and the standard ones, whose records it will never drop.
pub fn close_all_but(keep: &[RawFd]) -> io::Result<()> {
    let mut keep: Vec<RawFd> = keep.iter().copied().filter(|fd| *fd > 2).collect();
    keep.sort_unstable();
    let mut from = 3;
    for fd in keep {
        close_range(from, fd - 1)?;
        from = fd + 1;
    }
    close_range(from, i32::MAX)
}

fn close_range(first: RawFd, last: RawFd) -> io::Result<()> {
    if first > last {
        return Ok(());
    }
    // SAFETY: only called in a child that has said which descriptors it still uses.
    check_long(unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) }).map(drop)
}

/// Soft limit of open files up to the hard one; gives (soft before, hard).
pub fn raise_open_files() -> io::Result<(u64, u64)> {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the record is valid during both calls.
    unsafe {
        check(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit))?;
        let before = limit.rlim_cur;
        limit.rlim_cur = limit.rlim_max;
        check(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit))?;
        Ok((before, limit.rlim_max))
    }
}

pub fn set_umask(mask: u32) -> u32 {
    // SAFETY: cannot fail, no pointers.
    unsafe { libc::umask(mask) }
}
