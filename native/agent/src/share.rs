//! The share of the machine that commands get to see and feel: how many processors, and who is ended first for memory.

use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};

use dsec_sys::processors::{allowed, current, ProcessorSet};
use dsec_sys::score::set_score;

use crate::setup::note;

/// What the sandbox shows its programs. Read at each start, since it changes when the sandbox is given another share.
const ONLINE: &str = "/sys/devices/system/cpu/online";

/// Of commands, far above that of the agent (0): as long as any runs, the kernel ends one of them. They can lower it to the
/// agent's, and then the largest goes, but not below: that takes a right over the host.
const COMMAND_SCORE: i32 = 900;
const AGENT_SCORE: i32 = 0;

/// Where a command may run when the sandbox shows fewer processors than there are: that many, from the one on which we are.
/// The kernel has just woken us there because it was the idlest, so commands spread over the machine by themselves.
pub fn processors_of_command() -> Option<ProcessorSet> {
    let shown = count(std::fs::read_to_string(ONLINE).ok()?.trim())?;
    let all = allowed().ok()?;
    (shown < all.count()).then(|| all.some_from(current(), shown))
}

/// How many a list such as "0-2,5" names.
fn count(list: &str) -> Option<usize> {
    list.split(',').try_fold(0, |sum, range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        Some(sum + last.checked_sub(first)? + 1)
    })
}

/// The file by which the agent's own score is set; commands inherit what it is when they are started.
pub struct Score {
    file: Option<File>,
}

impl Score {
    pub fn new(file: Option<File>) -> Score {
        Score { file }
    }

    /// Runs `start` with the score that its child is to have. The child gives us ours back at once (`Command::score`): it may
    /// be long before we run again.
    pub fn around<T>(&self, start: impl FnOnce() -> T) -> T {
        self.set(COMMAND_SCORE);
        let result = start();
        self.set(AGENT_SCORE);
        result
    }

    pub fn descriptor(&self) -> Option<RawFd> {
        self.file.as_ref().map(|file| file.as_raw_fd())
    }

    fn set(&self, score: i32) {
        if let Some(Err(error)) = self.file.as_ref().map(|file| set_score(file, score)) {
            note("setting the score for memory", &error);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_processors_are_counted() {
        assert_eq!(count("0"), Some(1));
        assert_eq!(count("0-3"), Some(4));
        assert_eq!(count("0-1,4,6-7"), Some(5));
        for wrong in ["", "x", "3-1", "1-", "-1", "0-1,"] {
            assert_eq!(count(wrong), None, "{wrong}");
        }
    }
}
