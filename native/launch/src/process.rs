//! Facts about a process: which one it is, and whether it is ending.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use dsec_sys::namespaces::open_process;

/// The kernel's mark of a task that is ending.
const PF_EXITING: u64 = 0x4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessStat {
    /// When it started, in ticks since boot: tells it from a later one with the same number.
    pub start_ticks: u64,
    pub exiting: bool,
}

pub fn stat_path(pid: i32) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}/stat"))
}

/// What the kernel says of the process, read in one go: it is asked for in each create and each destroy.
fn stat_text(pid: i32) -> io::Result<Vec<u8>> {
    let mut text = Vec::with_capacity(1024);
    File::open(stat_path(pid))?.read_to_end(&mut text)?;
    Ok(text)
}

/// Reads /proc/<pid>/stat. Its second field is a name that may hold anything, so fields are counted from its last bracket.
pub fn parse_stat(text: &[u8]) -> Option<ProcessStat> {
    let after = text.iter().rposition(|&byte| byte == b')')? + 1;
    let fields: Vec<&str> = std::str::from_utf8(text.get(after..)?)
        .ok()?
        .split_ascii_whitespace()
        .collect();
    let state = *fields.first()?;
    let flags: u64 = fields.get(6)?.parse().ok()?;
    let start_ticks = fields.get(19)?.parse().ok()?;
    Some(ProcessStat {
        start_ticks,
        exiting: flags & PF_EXITING != 0 || matches!(state, "Z" | "X"),
    })
}

/// The process that `pid` and its start name; None when it is gone, or the number is another's by now.
pub fn find(pid: i32, start_ticks: u64) -> Option<OwnedFd> {
    let process = open_process(pid).ok()?;
    // Opened first, compared then: what was compared is what is open.
    let stat = parse_stat(&stat_text(pid).ok()?)?;
    (stat.start_ticks == start_ticks).then_some(process)
}

/// Whether it is there and does not end just now.
pub fn runs(pid: i32, start_ticks: u64) -> bool {
    let text = stat_text(pid).unwrap_or_default();
    parse_stat(&text).is_some_and(|stat| stat.start_ticks == start_ticks && !stat.exiting)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_brackets_does_not_confuse() {
        let text = b"42 (a) b) S 1 2 3 4 5 4194564 7 8 9 10 11 12 13 14 15 16 17 18 777 20 21";

        let stat = parse_stat(text).unwrap();

        assert_eq!(
            stat,
            ProcessStat {
                start_ticks: 777,
                exiting: true
            }
        );
    }

    #[test]
    fn our_own_process_is_found_and_a_stranger_is_not() {
        let pid = std::process::id() as i32;
        let stat = parse_stat(&std::fs::read(stat_path(pid)).unwrap()).unwrap();

        assert!(!stat.exiting);
        assert!(find(pid, stat.start_ticks).is_some());
        assert!(find(pid, stat.start_ticks + 1).is_none());
        assert!(runs(pid, stat.start_ticks));
        assert!(!runs(pid, stat.start_ticks + 1));
    }
}
