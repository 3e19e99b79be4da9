//! Which processors a process may run on.

use std::io;

use crate::result::check;

/// Processors that can be named: as many as the C library's own sets have.
pub const PROCESSORS_MAX: usize = 1024;
const WORDS: usize = PROCESSORS_MAX / 64;

/// A set of processors, in the kernel's layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct ProcessorSet {
    words: [u64; WORDS],
}

impl ProcessorSet {
    pub const EMPTY: ProcessorSet = ProcessorSet { words: [0; WORDS] };
    pub const ALL: ProcessorSet = ProcessorSet {
        words: [u64::MAX; WORDS],
    };

    pub fn contains(&self, processor: usize) -> bool {
        processor < PROCESSORS_MAX && self.words[processor / 64] >> (processor % 64) & 1 == 1
    }

    /// Numbers that cannot be named are left out.
    pub fn insert(&mut self, processor: usize) {
        if processor < PROCESSORS_MAX {
            self.words[processor / 64] |= 1 << (processor % 64);
        }
    }

    pub fn remove(&mut self, processor: usize) {
        if processor < PROCESSORS_MAX {
            self.words[processor / 64] &= !(1 << (processor % 64));
        }
    }

    pub fn count(&self) -> usize {
        self.words
            .iter()
            .map(|word| word.count_ones() as usize)
            .sum()
    }

    /// `count` of these, the first of them `start` or the next above it, beginning again at the lowest.
    pub fn some_from(&self, start: usize, count: usize) -> ProcessorSet {
        let mut chosen = ProcessorSet::EMPTY;
        let order = (start..PROCESSORS_MAX).chain(0..start.min(PROCESSORS_MAX));
        order
            .filter(|&processor| self.contains(processor))
            .take(count)
            .for_each(|processor| chosen.insert(processor));
        chosen
    }
}

/// Those that the calling thread may run on.
pub fn allowed() -> io::Result<ProcessorSet> {
    let mut set = ProcessorSet::EMPTY;
    // SAFETY: the kernel writes at most the given number of bytes into the set, which is plain numbers.
    check(unsafe {
        libc::syscall(
            libc::SYS_sched_getaffinity,
            0,
            std::mem::size_of::<ProcessorSet>(),
            &raw mut set,
        )
    } as i32)?;
    Ok(set)
}

/// What the calling thread has asked for, as far as that shows: all, unless it may run on less than its cpuset has. It is
/// tried, since the kernel tells only what both allow, and who begins here may go on in another cpuset.
pub fn unchanged() -> io::Result<ProcessorSet> {
    let here = allowed()?;
    restrict(&ProcessorSet::ALL)?;
    if allowed()? == here {
        return Ok(ProcessorSet::ALL);
    }
    restrict(&here)?;
    Ok(here)
}

/// From now on the calling thread, and what it starts, runs on these only.
pub fn restrict(processors: &ProcessorSet) -> io::Result<()> {
    restrict_thread(0, processors)
}

/// As `restrict`, another thread.
fn restrict_thread(thread: i32, processors: &ProcessorSet) -> io::Result<()> {
    // SAFETY: the kernel reads at most the given number of bytes of the set, which is plain numbers.
    check(unsafe {
        libc::syscall(
            libc::SYS_sched_setaffinity,
            thread,
            std::mem::size_of::<ProcessorSet>(),
            std::ptr::from_ref(processors),
        )
    } as i32)?;
    Ok(())
}

/// From now on the calling thread runs only where it does now, and `other` anywhere else of `all`. The kernel wakes a thread
/// where its waker runs, in the belief that this one is about to sleep: of two that go on, one would wait for the other.
/// On an error, as where there is but one processor, nothing has changed.
pub fn part_from(other: i32, all: &ProcessorSet) -> io::Result<()> {
    let here = current();
    let mut elsewhere = *all;
    elsewhere.remove(here);
    restrict_thread(other, &elsewhere)?;
    let mut only = ProcessorSet::EMPTY;
    only.insert(here);
    restrict(&only).or_else(|error| restrict_thread(other, all).and(Err(error)))
}

/// The one that the calling thread runs on just now.
pub fn current() -> usize {
    // SAFETY: no pointers.
    usize::try_from(unsafe { libc::sched_getcpu() }).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(processors: &[usize]) -> ProcessorSet {
        let mut set = ProcessorSet::EMPTY;
        processors.iter().for_each(|&one| set.insert(one));
        set
    }

    #[test]
    fn some_are_taken_from_where_we_are_and_round() {
        let all = set(&[0, 1, 2, 3, 70]);
        assert_eq!(all.some_from(2, 2), set(&[2, 3]));
        assert_eq!(all.some_from(3, 3), set(&[3, 70, 0]));
        assert_eq!(all.some_from(5, 1), set(&[70]));
        assert_eq!(all.some_from(0, 99), all);
        assert_eq!(all.some_from(usize::MAX, 1), set(&[0]));
        assert_eq!(ProcessorSet::EMPTY.some_from(0, 1).count(), 0);
    }

    #[test]
    fn two_that_part_run_on_different_ones() {
        let all = allowed().unwrap();
        let (told, tell) = std::sync::mpsc::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let other = std::thread::spawn(move || {
            // SAFETY: no pointers.
            told.send(unsafe { libc::gettid() }).unwrap();
            let _ = ended.recv();
            allowed().unwrap()
        });
        let parted = part_from(tell.recv().unwrap(), &unchanged().unwrap());
        let ours = allowed().unwrap();
        drop(end);
        let theirs = other.join().unwrap();
        restrict(&all).unwrap();

        match parted {
            Ok(()) => {
                assert_eq!((ours.count(), theirs.count()), (1, all.count() - 1));
                assert!(
                    (0..PROCESSORS_MAX).all(|one| !(ours.contains(one) && theirs.contains(one)))
                );
            }
            Err(error) => {
                assert_eq!((error.raw_os_error(), all.count()), (Some(libc::EINVAL), 1));
                assert_eq!((ours, theirs), (all, all));
            }
        }
        assert_eq!(allowed().unwrap(), all);
    }

    #[test]
    fn the_kernel_tells_where_we_may_run() {
        let here = allowed().unwrap();
        assert!(here.count() > 0);
        assert!(here.contains(current()));
    }
}
