//! Deadlines: one per (kind, owner), in milliseconds of the monotonic clock.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Timer {
    /// The time of an exec is over.
    Timeout(u32),
    /// Its grace after TERM is over.
    Grace(u32),
    /// Killed processes are still there: again.
    KillAgain(u32),
    /// Its pipes were quiet after the leader's end.
    Quiet(u32),
    /// Its pipes have had long enough after the leader's end, quiet or not.
    DrainEnd(u32),
    /// Its pipes, which the kernel does not watch for us, may have something.
    ReadAgain(u32),
    /// A connection has not shown its preamble.
    Preamble(u32),
    /// What was moved and has not arrived has left the watched trees.
    Departures,
    /// The grace of a shutdown is over.
    Shutdown,
    /// Nobody has asked for the next page of a directory.
    Names,
    /// One turn of the wait for `clock` after `freeze_prepare` is over.
    Clock,
}

pub struct Timers {
    origin: Instant,
    due: BTreeSet<(u64, Timer)>,
    at: BTreeMap<Timer, u64>,
}

impl Timers {
    pub fn new() -> Self {
        Self {
            origin: Instant::now(),
            due: BTreeSet::new(),
            at: BTreeMap::new(),
        }
    }

    pub fn now_ms(&self) -> u64 {
        self.origin.elapsed().as_millis() as u64
    }

    pub fn now_us(&self) -> u64 {
        self.origin.elapsed().as_micros() as u64
    }

    pub fn set_in(&mut self, timer: Timer, delay_ms: u64) {
        self.clear(timer);
        let at = self.now_ms().saturating_add(delay_ms);
        self.at.insert(timer, at);
        self.due.insert((at, timer));
    }

    pub fn clear(&mut self, timer: Timer) {
        if let Some(at) = self.at.remove(&timer) {
            self.due.remove(&(at, timer));
        }
    }

    pub fn is_set(&self, timer: Timer) -> bool {
        self.at.contains_key(&timer)
    }

    pub fn at(&self, timer: Timer) -> Option<u64> {
        self.at.get(&timer).copied()
    }

    pub fn is_due(&self, timer: Timer) -> bool {
        self.at(timer).is_some_and(|at| at <= self.now_ms())
    }

    pub fn next_ms(&self) -> Option<u64> {
        self.due.first().map(|(at, _)| *at)
    }

    pub fn pop_due(&mut self) -> Option<Timer> {
        let (at, timer) = *self.due.first()?;
        if at > self.now_ms() {
            return None;
        }
        self.clear(timer);
        Some(timer)
    }

    /// All deadlines later: the sandbox stood still for that long.
    pub fn shift(&mut self, by_ms: u64) {
        for at in self.at.values_mut() {
            *at = at.saturating_add(by_ms);
        }
        self.due = self.at.iter().map(|(timer, at)| (*at, *timer)).collect();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timer_that_is_set_again_fires_once_at_its_last_time() {
        let mut timers = Timers::new();
        timers.set_in(Timer::Timeout(1), 0);
        timers.set_in(Timer::Timeout(1), 60_000);

        assert_eq!(timers.pop_due(), None);
        timers.set_in(Timer::Timeout(1), 0);
        assert_eq!(timers.pop_due(), Some(Timer::Timeout(1)));
        assert_eq!(timers.pop_due(), None);
    }

    #[test]
    fn a_pause_moves_every_deadline() {
        let mut timers = Timers::new();
        timers.set_in(Timer::Timeout(1), 0);
        timers.set_in(Timer::Shutdown, 5);

        timers.shift(60_000);

        assert_eq!(timers.pop_due(), None);
        assert!(timers.next_ms() >= Some(60_000));
    }
}
