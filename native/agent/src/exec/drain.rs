//! Reading what an exec writes, and deciding when it is over.

use dsec_protocol::frames::{CHANNEL_ERR, CHANNEL_OUT};
use dsec_protocol::limits::{DRAIN_AFTER_EXIT_MS, EXEC_UNACKED_BYTES_MAX};
use dsec_sys::epoll::READ;
use dsec_sys::pipes::readable_bytes;
use dsec_sys::process::{Ended, Reaped};

use super::output::Taken;
use super::{Cause, Exec, Killing};
use crate::agent::Agent;
use crate::timers::Timer;

/// Over all execs. Beyond it each may hold only a little, so that a thousand of them do not fill the sandbox's memory.
const HELD_BYTES_MAX: usize = 64 << 20;
const STARVED_BYTES_MAX: usize = 32 << 10;
/// A process that lives on and writes for ever does not keep its exec open for ever.
const DRAIN_END_MS: u64 = 2_000;
const LAST_READS_MAX: usize = 64;
/// How often it is looked for output that the kernel cannot tell of.
const UNWATCHED_MS: u64 = 20;
/// How often it is looked whether killed processes are gone.
const GONE_POLL_MS: u64 = 10;

/// After the leader's end: bytes that were in the pipes at that moment. They are read whatever the clock says.
#[derive(Clone, Copy, Debug, Default)]
pub struct Drain {
    pub out_left: usize,
    pub err_left: usize,
}

impl Agent {
    /// Something can be read on a channel. Gives whether something was.
    pub fn read_output(&mut self, key: u32, channel: u8) -> bool {
        let limit = self.held_limit();
        let Some(exec) = self.execs.get_mut(key) else {
            return false;
        };
        let room = exec.room(limit).min(self.scratch.len());
        if room == 0 {
            self.set_output_interest(key);
            return false;
        }
        let held = exec.held_bytes();
        match exec.output(channel).take(&mut self.scratch[..room]) {
            Taken::Nothing => false,
            Taken::End => {
                exec.output(channel).source = None;
                self.end_if_drained(key);
                false
            }
            Taken::Bytes(count) => {
                keep(exec, channel, &self.scratch[..count]);
                if exec.disowned {
                    exec.output(channel).acknowledge(u64::MAX);
                }
                self.execs.held_bytes += exec_growth(self.execs.get(key), held);
                self.output_grew(key, channel, count);
                true
            }
        }
    }

    fn output_grew(&mut self, key: u32, channel: u8, count: usize) {
        let Some(exec) = self.execs.get(key) else {
            return;
        };
        if let Some(stream) = exec.stream {
            self.ready.insert(stream);
        }
        let produced = exec.out.produced() + exec.err.produced();
        let over = exec.output_bytes_max.is_some_and(|max| produced > max);
        if over && exec.running {
            self.kill_exec(key, Cause::OutputBudget);
        }
        self.set_output_interest(key);
        self.count_drained(key, channel, count);
    }

    fn held_limit(&self) -> usize {
        match self.execs.held_bytes < HELD_BYTES_MAX {
            true => EXEC_UNACKED_BYTES_MAX,
            false => STARVED_BYTES_MAX,
        }
    }

    /// Reads on, or leaves the process waiting.
    pub fn set_output_interest(&mut self, key: u32) {
        let limit = self.held_limit();
        let Some(exec) = self.execs.get_mut(key) else {
            return;
        };
        let full = exec.room(limit) == 0;
        let interest = match full || exec.end.is_some() {
            true => 0,
            false => READ,
        };
        let changed = exec.out.want(interest).and(exec.err.want(interest));
        self.execs.starved |= full && limit == STARVED_BYTES_MAX;
        if changed.is_err() {
            // No memory in the kernel, or too many watched already: that passes, and nothing is lost meanwhile.
            self.timers.set_in(Timer::ReadAgain(key), UNWATCHED_MS);
        }
        self.set_drain_timers(key, full);
    }

    /// Reads what could not be waited for, and tries to wait for it again.
    pub fn read_unwatched(&mut self, key: u32) {
        for channel in [CHANNEL_OUT, CHANNEL_ERR] {
            self.read_output(key, channel);
        }
        self.set_output_interest(key);
    }

    /// After output was acknowledged or dropped.
    pub fn output_released(&mut self, key: u32) {
        self.set_output_interest(key);
        if self.execs.starved && self.execs.held_bytes < HELD_BYTES_MAX {
            self.execs.starved = false;
            let keys: Vec<u32> = self.execs.iter().map(|(key, _)| key).collect();
            for key in keys {
                self.set_output_interest(key);
            }
        }
    }

    /// The leader of an exec has ended.
    pub fn leader_ended(&mut self, key: u32, reaped: &Reaped) {
        let now_us = self.timers.now_us();
        if let Some(exec) = self.execs.get_mut(key) {
            exec.usage.user_us = reaped.user_us;
            exec.usage.system_us = reaped.system_us;
            exec.usage.max_rss_bytes = reaped.max_rss_bytes;
            exec.usage.wall_us = now_us - exec.started_us;
        }
        self.command_ended(key, reaped.ended);
    }

    /// The command of an exec (its leader, or a session's text) has ended: what it wrote is still to be read.
    pub fn command_ended(&mut self, key: u32, ended: Ended) {
        let now_us = self.timers.now_us();
        let has_machine = self.has_machine;
        self.timers.clear(Timer::Timeout(key));
        let Some(exec) = self.execs.get_mut(key) else {
            return;
        };
        exec.running = false;
        exec.ended = Some(ended);
        // Outside of a machine of our own the node knows the limit that was hit.
        let failed = !matches!(ended, Ended::Exited(0));
        if let (true, None, Some(work), Some(cgroup)) =
            (failed && has_machine, exec.cause, &self.work, &exec.cgroup)
        {
            exec.cause = work.was_out_of_memory(cgroup).then_some(super::Cause::Oom);
        }
        exec.usage.wall_us = now_us - exec.started_us;
        exec.drain = Drain {
            out_left: exec.out.source.as_ref().map_or(0, readable_bytes),
            err_left: exec.err.source.as_ref().map_or(0, readable_bytes),
        };
        self.set_output_interest(key);
        self.end_if_drained(key);
    }

    fn count_drained(&mut self, key: u32, channel: u8, count: usize) {
        let Some(exec) = self.execs.get_mut(key) else {
            return;
        };
        if exec.running {
            return;
        }
        let left = match channel {
            CHANNEL_ERR => &mut exec.drain.err_left,
            _ => &mut exec.drain.out_left,
        };
        *left = left.saturating_sub(count);
        self.timers.set_in(Timer::Quiet(key), DRAIN_AFTER_EXIT_MS);
        self.end_if_drained(key);
    }

    /// While the exec may not read, no time runs against what is in its pipes.
    fn set_drain_timers(&mut self, key: u32, full: bool) {
        let Some(exec) = self.execs.get(key) else {
            return;
        };
        let draining = !exec.running && exec.end.is_none();
        if full || !draining {
            self.timers.clear(Timer::Quiet(key));
            self.timers.clear(Timer::DrainEnd(key));
            return;
        }
        if !self.timers.is_set(Timer::Quiet(key)) {
            self.timers.set_in(Timer::Quiet(key), DRAIN_AFTER_EXIT_MS);
        }
        if !self.timers.is_set(Timer::DrainEnd(key)) {
            self.timers.set_in(Timer::DrainEnd(key), DRAIN_END_MS);
        }
    }

    /// A session's pipes stay open, so its exec is over when what was in them has been read.
    fn end_if_drained(&mut self, key: u32) {
        let Some(exec) = self.execs.get(key) else {
            return;
        };
        if exec.running || exec.end.is_some() {
            return;
        }
        let closed = exec.out.source.is_none() && exec.err.source.is_none();
        let read = exec.session.is_some() && exec.drain.out_left == 0 && exec.drain.err_left == 0;
        if closed || read {
            self.finish_exec(key);
        }
    }

    /// The time for what is left in the pipes is over. What is there all the same (the loop was late) is read first.
    pub fn drain_is_over(&mut self, key: u32) {
        for channel in [CHANNEL_OUT, CHANNEL_ERR] {
            for _ in 0..LAST_READS_MAX {
                if !self.read_output(key, channel) {
                    break;
                }
            }
        }
        let limit = self.held_limit();
        let full = self
            .execs
            .get(key)
            .is_some_and(|exec| exec.room(limit) == 0);
        if !full {
            self.finish_exec(key);
        }
    }

    /// Makes the end record; output of processes that live on is nobody's from here. Of a killed exec every process is
    /// gone first.
    pub fn finish_exec(&mut self, key: u32) {
        self.timers.clear(Timer::Quiet(key));
        self.timers.clear(Timer::DrainEnd(key));
        self.timers.clear(Timer::ReadAgain(key));
        let Some(exec) = self.execs.get(key) else {
            return;
        };
        if exec.end.is_some() {
            return;
        }
        if exec.killing != Killing::No && !self.tree_is_gone(key) {
            self.timers.set_in(Timer::KillAgain(key), GONE_POLL_MS);
            return;
        }
        self.timers.clear(Timer::KillAgain(key));
        self.timers.clear(Timer::Grace(key));
        let Some(exec) = self.execs.get_mut(key) else {
            return;
        };
        exec.finish();
        let lent = (exec.out.source.take(), exec.err.source.take());
        let (session, stream, cgroup) = (exec.session, exec.stream, exec.cgroup.take());
        if let Some(session) = session {
            self.give_back(session, lent);
        }
        if let Some(stream) = stream {
            self.ready.insert(stream);
        }
        if let (Some(work), Some(cgroup)) = (&mut self.work, cgroup) {
            work.remove(cgroup);
        }
        if self.execs.get(key).is_some_and(|exec| exec.disowned) {
            self.execs.remove(key);
        }
    }
}

fn exec_growth(exec: Option<&Exec>, before: usize) -> usize {
    exec.map_or(0, |exec| exec.held_bytes().saturating_sub(before))
}

fn keep(exec: &mut Exec, channel: u8, bytes: &[u8]) {
    let follows = exec.last_channel == Some(channel);
    let sequence = exec.next_sequence;
    if exec.output(channel).keep(bytes, sequence, follows) {
        exec.next_sequence += 1;
    }
    exec.last_channel = Some(channel);
}
