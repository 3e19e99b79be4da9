//! Execs: one command each, its output kept until acknowledged, its record until the host has it.

pub mod drain;
pub mod guard;
pub mod input;
pub mod kill;
pub mod output;
pub mod plan;
pub mod requests;
pub mod start;
mod trial;

use std::collections::BTreeMap;

use dsec_protocol::exec::{ExecEnd, ExecStarted, ExecState, ExecUsage};
use dsec_sys::process::Ended;

use crate::cgroup::ExecCgroup;
use crate::processes::Process;
use input::Input;
use output::Output;

const BYTES_PER_MARK_MIN: usize = 64;

/// Why it was killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    TimedOut,
    OutputBudget,
    Killed,
    /// By the kernel, for memory.
    Oom,
}

impl Cause {
    pub fn word(self) -> &'static str {
        match self {
            Self::TimedOut => "timed_out",
            Self::OutputBudget => "output_budget",
            Self::Killed => "killed",
            Self::Oom => "oom",
        }
    }
}

/// How far killing has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Killing {
    #[default]
    No,
    /// TERM is sent, the grace runs.
    Term,
    /// KILL is sent. Of a session, the shell is still spared.
    Kill,
    /// KILL is sent to the session's shell too.
    All,
}

#[derive(Default)]
pub struct Exec {
    pub id: String,
    pub pid: i32,
    pub session: Option<u32>,
    pub session_name: Option<String>,
    /// The leader (or the session's command) runs.
    pub running: bool,
    pub ended: Option<Ended>,
    pub usage: ExecUsage,
    pub started_us: u64,
    pub out: Output,
    pub err: Output,
    pub next_sequence: u64,
    /// Channel of the last chunk.
    pub last_channel: Option<u8>,
    pub input: Option<Input>,
    /// Master side of the terminal, for its size.
    pub terminal: bool,
    pub stream: Option<u32>,
    pub grace_ms: u64,
    pub output_bytes_max: Option<u64>,
    pub cause: Option<Cause>,
    pub killing: Killing,
    pub cgroup: Option<ExecCgroup>,
    /// Without a cgroup: what was to be killed when the leader was still there to name its descendants.
    pub doomed: Vec<Process>,
    pub session_ended: bool,
    pub drain: drain::Drain,
    pub end: Option<ExecEnd>,
    /// It was of whom this agent served before: what it says goes nowhere, and nobody is told of its end.
    pub disowned: bool,
}

impl Exec {
    pub fn output(&mut self, channel: u8) -> &mut Output {
        match channel {
            dsec_protocol::frames::CHANNEL_ERR => &mut self.err,
            _ => &mut self.out,
        }
    }

    pub fn held_bytes(&self) -> usize {
        self.out.held_bytes() + self.err.held_bytes()
    }

    /// Output bytes that may still be kept. None when there are too many marks: one-byte writes must not make the marks
    /// outgrow the bytes.
    pub fn room(&self, limit: usize) -> usize {
        match self.out.marks() + self.err.marks() < limit / BYTES_PER_MARK_MIN {
            true => limit.saturating_sub(self.out.kept_bytes() + self.err.kept_bytes()),
            false => 0,
        }
    }

    pub fn stdin_taken(&self) -> u64 {
        self.input.as_ref().map_or(0, |input| input.taken)
    }

    pub fn state(&self) -> ExecState {
        ExecState {
            id: self.id.clone(),
            pid: self.pid,
            out: self.out.produced(),
            err: self.err.produced(),
            stdin: self.stdin_taken(),
            end: self.end.clone(),
            session: self.session_name.clone(),
        }
    }

    pub fn started(&self, existing: bool) -> ExecStarted {
        ExecStarted {
            id: self.id.clone(),
            pid: self.pid,
            existing,
            stdin: self.stdin_taken(),
            out: self.out.sent,
            err: self.err.sent,
        }
    }

    /// The record of the end, once nothing more can come.
    pub fn finish(&mut self) {
        let mut end = ExecEnd {
            status: "unknown".to_owned(),
            cause: self.cause.map(|cause| cause.word().to_owned()),
            out_bytes: self.out.produced(),
            err_bytes: self.err.produced(),
            usage: self.usage,
            session_ended: self.session_ended,
            ..ExecEnd::default()
        };
        match self.ended {
            Some(Ended::Exited(code)) => {
                end.status = "exited".to_owned();
                end.code = Some(code);
            }
            Some(Ended::Signaled(signal)) => {
                end.status = "signaled".to_owned();
                end.signal = Some(signal);
            }
            None => {}
        }
        self.input = None;
        self.end = Some(end);
    }
}

/// All that are known, by a number of their own that tokens and timers carry.
#[derive(Default)]
pub struct Execs {
    by_key: BTreeMap<u32, Exec>,
    by_id: BTreeMap<String, u32>,
    by_pid: BTreeMap<i32, u32>,
    next_key: u32,
    /// Bytes of output held over all execs.
    pub held_bytes: usize,
    /// Some exec does not read because all together hold too much.
    pub starved: bool,
}

impl Execs {
    pub fn next_key(&mut self) -> u32 {
        self.next_key += 1;
        self.next_key
    }

    pub fn insert(&mut self, key: u32, exec: Exec) {
        self.by_id.insert(exec.id.clone(), key);
        if exec.session.is_none() {
            self.by_pid.insert(exec.pid, key);
        }
        self.by_key.insert(key, exec);
    }

    pub fn get(&self, key: u32) -> Option<&Exec> {
        self.by_key.get(&key)
    }

    pub fn get_mut(&mut self, key: u32) -> Option<&mut Exec> {
        self.by_key.get_mut(&key)
    }

    pub fn key_of(&self, id: &str) -> Option<u32> {
        self.by_id.get(id).copied()
    }

    /// The exec whose leader this is; the pid means nothing afterwards.
    pub fn take_pid(&mut self, pid: i32) -> Option<u32> {
        self.by_pid.remove(&pid)
    }

    pub fn remove(&mut self, key: u32) -> Option<Exec> {
        let exec = self.by_key.remove(&key)?;
        if !exec.disowned {
            self.by_id.remove(&exec.id);
        }
        self.held_bytes -= exec.held_bytes();
        Some(exec)
    }

    /// It runs on, by no name.
    pub fn disown(&mut self, key: u32) {
        let Some(exec) = self.by_key.get_mut(&key) else {
            return;
        };
        self.held_bytes -= exec.held_bytes();
        exec.disowned = true;
        exec.out.acknowledge(u64::MAX);
        exec.err.acknowledge(u64::MAX);
        self.by_id.remove(&exec.id);
    }

    /// Those that are somebody's.
    pub fn states(&self) -> Vec<ExecState> {
        let own = self.by_key.values().filter(|exec| !exec.disowned);
        own.map(Exec::state).collect()
    }

    pub fn iter(&self) -> impl Iterator<Item = (u32, &Exec)> {
        self.by_key.iter().map(|(key, exec)| (*key, exec))
    }

    pub fn live(&self) -> usize {
        self.by_key.values().filter(|e| e.end.is_none()).count()
    }

    pub fn ended(&self) -> usize {
        self.by_key.len() - self.live()
    }
}
