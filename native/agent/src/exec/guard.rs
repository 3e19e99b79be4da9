//! A second thread for as long as commands are started: it ends a start that does not come to its end.
//!
//! Between clone and exec the child is a process like any other to root of the sandbox, who can stop it, and we are stopped
//! with it: no timeout would be kept and nobody answered. The thread sleeps in steps, so that a start costs no wake-up, and
//! goes when nothing is started for a while.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use dsec_sys::process::kill;
use dsec_sys::signals::{CONT, KILL};
use dsec_sys::threads::spawn;

const STEP: Duration = Duration::from_millis(250);
/// A program may be long in coming from a busy disk; beyond this, not being answered is worse.
const STEPS_BEFORE_KILL: u32 = 40;
const STEPS_IDLE_MAX: u32 = 40;
const STACK_BYTES: usize = 64 << 10;

#[derive(Default)]
pub struct StartGuard {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    /// Of the child that is being started, written by the kernel; 0 when there is none.
    pid: AtomicI32,
    killed: AtomicBool,
    thread: Mutex<Thread>,
}

#[derive(Default)]
struct Thread {
    runs: bool,
    /// Starts so far.
    starts: u64,
}

impl StartGuard {
    /// Before a start, which writes the child's pid to the place given. `end` must follow.
    pub fn begin(&self) -> io::Result<&AtomicI32> {
        let mut state = self.shared.lock();
        if !state.runs {
            let shared = Arc::clone(&self.shared);
            spawn(STACK_BYTES, move || watch(&shared))?;
            state.runs = true;
        }
        state.starts += 1;
        drop(state);
        self.shared.killed.store(false, Ordering::SeqCst);
        Ok(&self.shared.pid)
    }

    /// After a start. True: it took so long that the child was killed.
    pub fn end(&self) -> bool {
        self.shared.pid.store(0, Ordering::SeqCst);
        self.shared.killed.load(Ordering::SeqCst)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Thread> {
        self.thread.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn watch(shared: &Shared) {
    let mut seen = 0;
    let mut steps = 0;
    loop {
        thread::sleep(STEP);
        let mut state = shared.lock();
        let pid = shared.pid.load(Ordering::SeqCst);
        if state.starts != seen {
            (seen, steps) = (state.starts, 0);
            continue;
        }
        steps += 1;
        match pid {
            0 if steps >= STEPS_IDLE_MAX => {
                state.runs = false;
                return;
            }
            0 => {}
            _ if steps < STEPS_BEFORE_KILL => drop(kill(pid, CONT)),
            _ => {
                shared.killed.store(true, Ordering::SeqCst);
                drop(kill(pid, KILL));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_start_that_ends_in_time_is_left_alone() {
        let guard = StartGuard::default();

        guard.begin().unwrap().store(i32::MAX, Ordering::SeqCst);
        thread::sleep(STEP * 4);

        assert!(!guard.end());
        assert!(guard.shared.lock().runs);
    }
}
