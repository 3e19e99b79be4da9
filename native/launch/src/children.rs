//! Which children have ended. Looking at all of them takes the kernel as long as a launch when there are thousands, so those
//! are asked about that are told to have ended, or are about to.

use std::time::{Duration, Instant};

use dsec_sys::namespaces::{fate_of, reap, Fate};

/// The kernel may have told of one of several: so long after an end all are looked at.
const SWEEP_AFTER: Duration = Duration::from_millis(250);

/// A process that has been reaped, and its wait status.
pub type End = (i32, i32);

#[derive(Default)]
pub struct Children {
    told: Vec<i32>,
    /// Workers that have reported; how they end says nothing more.
    leaving: Vec<i32>,
    sweep_at: Option<Instant>,
}

impl Children {
    /// The kernel says that this one has ended, and perhaps others.
    pub fn signaled(&mut self, pid: i32) {
        self.told.push(pid);
        self.sweep_at
            .get_or_insert_with(|| Instant::now() + SWEEP_AFTER);
    }

    /// This one was waited for by a worker.
    pub fn ended(&mut self, pid: i32) {
        self.told.push(pid);
    }

    pub fn leaves(&mut self, worker: i32) {
        self.leaving.push(worker);
    }

    /// How long until `take` must be called at the latest.
    pub fn patience(&self) -> Option<Duration> {
        self.sweep_at
            .map(|at| at.saturating_duration_since(Instant::now()))
    }

    /// Reaps those that are known to have ended; now and then all that have.
    pub fn take(&mut self) -> Vec<End> {
        // A number that is nobody's any more may soon be another's: it is not kept.
        self.leaving
            .retain(|&pid| matches!(fate_of(pid), Fate::Runs));
        let mut ends = Vec::new();
        for pid in std::mem::take(&mut self.told) {
            if let Fate::Ended(status) = fate_of(pid) {
                ends.push((pid, status));
            }
        }
        if self.sweep_at.is_some_and(|at| at <= Instant::now()) {
            ends.extend(self.sweep());
        }
        ends
    }

    /// Reaps every child that has ended.
    pub fn sweep(&mut self) -> Vec<End> {
        self.sweep_at = None;
        let mut ends = Vec::new();
        // An error means that there are no children.
        while let Ok(Some((pid, status))) = reap() {
            match self.leaving.iter().position(|&left| left == pid) {
                Some(index) => drop(self.leaving.swap_remove(index)),
                None => ends.push((pid, status)),
            }
        }
        ends
    }
}
