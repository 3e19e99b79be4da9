//! Ending an exec: signals to its whole tree, by cgroup where there is one, else by a walk over /proc.

use dsec_sys::process::{kill, Ended};
use dsec_sys::signals::{KILL, STOP, TERM};

use super::{Cause, Killing};
use crate::agent::Agent;
use crate::cgroup::ExecCgroup;
use crate::processes::ProcessTable;
use crate::timers::Timer;

/// Processes may fork while they are being killed one by one.
const ROUNDS_MAX: usize = 50;
const AGAIN_MS: u64 = 50;
/// A session's shell has this long to notice that its command was killed; on a busy machine that is not at once.
const SHELL_ANSWER_MS: u64 = 2_000;
/// Killed processes that are still there after this are in the kernel's hands (a dead disk), or those of a tracer, who
/// hears of their end before we do: the exec ends without them.
const GONE_MS_MAX: u64 = 5_000;

/// What a tree hangs on.
struct Root {
    pid: i32,
    cgroup: Option<ExecCgroup>,
    /// The root is a session's shell, which survives its commands.
    spared: bool,
    /// The root is still there and is ours to signal.
    alive: bool,
}

impl Agent {
    /// The time of an exec is over: TERM to all of it, KILL after its grace.
    pub fn exec_timed_out(&mut self, key: u32) {
        let Some(exec) = self.execs.get_mut(key) else {
            return;
        };
        if !exec.running {
            return;
        }
        exec.cause.get_or_insert(Cause::TimedOut);
        exec.killing = Killing::Term;
        let grace_ms = exec.grace_ms;
        self.signal_tree(key, TERM);
        self.timers.set_in(Timer::Grace(key), grace_ms);
    }

    /// Kills at once.
    pub fn kill_exec(&mut self, key: u32, cause: Cause) {
        let Some(exec) = self.execs.get_mut(key) else {
            return;
        };
        if exec.end.is_some() || exec.killing >= Killing::Kill {
            return;
        }
        exec.cause.get_or_insert(cause);
        self.grace_is_over(key);
    }

    /// The next step of killing.
    pub fn grace_is_over(&mut self, key: u32) {
        let Some(exec) = self.execs.get_mut(key) else {
            return;
        };
        let in_session = exec.session.is_some();
        let waited = match exec.killing {
            Killing::No | Killing::Term => false,
            Killing::Kill => !in_session,
            Killing::All => true,
        };
        exec.killing = match exec.killing {
            Killing::No | Killing::Term => Killing::Kill,
            Killing::Kill | Killing::All => Killing::All,
        };
        let next_ms = match in_session && exec.killing == Killing::Kill {
            true => SHELL_ANSWER_MS,
            false => GONE_MS_MAX,
        };
        self.kill_tree(key);
        self.timers.set_in(Timer::KillAgain(key), AGAIN_MS);
        self.timers.set_in(Timer::Grace(key), next_ms);
        if waited {
            self.end_without_leader(key);
        }
    }

    /// Of a leader (or a session's shell) that was killed and that we cannot reap. Should that come after all, the pid
    /// means nothing to us by then.
    fn end_without_leader(&mut self, key: u32) {
        let (pid, session) = match self.execs.get(key) {
            Some(exec) if exec.running => (exec.pid, exec.session),
            _ => return,
        };
        match session {
            Some(_) => drop(self.session_reaped(pid, Ended::Signaled(KILL))),
            None => {
                self.execs.take_pid(pid);
                self.command_ended(key, Ended::Signaled(KILL));
            }
        }
        self.shutdown_if_done();
    }

    /// Killed, and perhaps not gone yet.
    pub fn kill_again(&mut self, key: u32) {
        let Some(exec) = self.execs.get(key) else {
            return;
        };
        if exec.killing >= Killing::Kill && !self.tree_is_gone(key) {
            self.kill_tree(key);
        }
        match self.execs.get(key) {
            Some(exec) if exec.running => self.timers.set_in(Timer::KillAgain(key), AGAIN_MS),
            Some(_) => self.drain_is_over(key),
            None => {}
        }
    }

    /// To every process of the exec; of a session's exec not to the shell.
    pub fn signal_tree(&mut self, key: u32, signal: i32) {
        let Some(root) = self.root_of(key) else {
            return;
        };
        for pid in self.tree_pids(key, &root) {
            // Gone in the meantime: what was wanted.
            let _ = kill(pid, signal);
        }
    }

    /// Whether nothing of the exec is left, a spared shell apart.
    pub fn tree_is_gone(&mut self, key: u32) -> bool {
        let given_up = self.execs.get(key).is_some_and(|exec| {
            exec.killing == Killing::All && exec.session.is_none() && !exec.running
        });
        match self.root_of(key) {
            Some(root) => given_up || self.tree_pids(key, &root).is_empty(),
            None => true,
        }
    }

    fn kill_tree(&mut self, key: u32) {
        let Some(root) = self.root_of(key) else {
            return;
        };
        if let (Some(work), Some(cgroup), false) = (&self.work, &root.cgroup, root.spared) {
            if work.kill(cgroup).is_ok() {
                return;
            }
        }
        if root.alive && !root.spared {
            // Stopped, it starts nothing new, and as the parent of its orphans it keeps them findable.
            let _ = kill(root.pid, STOP);
        }
        for _ in 0..ROUNDS_MAX {
            let pids = self.tree_pids(key, &root);
            let mut others = pids.iter().filter(|pid| **pid != root.pid).peekable();
            if others.peek().is_none() {
                break;
            }
            others.for_each(|pid| drop(kill(*pid, KILL)));
        }
        if root.alive && !root.spared {
            let _ = kill(root.pid, KILL);
        }
    }

    fn root_of(&self, key: u32) -> Option<Root> {
        let exec = self.execs.get(key)?;
        let Some(session) = exec.session else {
            return Some(Root {
                pid: exec.pid,
                cgroup: exec.cgroup.clone(),
                spared: false,
                alive: exec.running,
            });
        };
        let session = self.sessions.get(session)?;
        Some(Root {
            pid: session.pid,
            cgroup: session.cgroup.clone(),
            spared: exec.killing != Killing::All,
            alive: true,
        })
    }

    fn tree_pids(&mut self, key: u32, root: &Root) -> Vec<i32> {
        let mut pids = match (&self.work, &root.cgroup) {
            (Some(work), Some(cgroup)) => work.pids(cgroup),
            _ => self.walk_pids(key, root),
        };
        if root.spared {
            pids.retain(|pid| *pid != root.pid);
        }
        // 0 is a process of another namespace; ourselves are never meant.
        let own = std::process::id() as i32;
        pids.retain(|pid| *pid > 1 && *pid != own);
        pids
    }

    fn walk_pids(&mut self, key: u32, root: &Root) -> Vec<i32> {
        let table = ProcessTable::read();
        let mut tree = table.tree_of(root.pid);
        let Some(exec) = self.execs.get_mut(key) else {
            return Vec::new();
        };
        for known in exec.doomed.iter().filter(|known| table.holds(known)) {
            if !tree.contains(known) {
                tree.push(*known);
            }
        }
        if exec.killing != Killing::No {
            exec.doomed.clone_from(&tree);
        }
        let mut pids: Vec<i32> = tree.iter().map(|process| process.pid).collect();
        if root.alive {
            pids.push(root.pid);
        }
        pids
    }
}
