//! The sandboxes that run, and how their ends are noticed.

use std::collections::{BTreeMap, HashMap};
use std::ops::Bound;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use dsec_sys::namespaces::exit_status;
use dsec_sys::seqpacket::{wait_ready, Interest};

use crate::error::{Doing, Result};
use crate::process;
use crate::records::{Record, Records};
use crate::wire::{ExitEvent, ListedSandbox, ResourceView, ViewKind};

/// How long the kernel may take to tell the status of a process that somebody else reaps.
const STATUS_PATIENCE: Duration = Duration::from_secs(5);
/// The status of an end that nobody saw.
pub const STATUS_UNKNOWN: i32 = -1;

struct Sandbox {
    record: Record,
    /// Of an agent that an earlier daemon started: not our child, so it is watched instead of reaped.
    adopted: Option<Adopted>,
    /// Kills for memory that were counted before its cgroup was about to go.
    oom_kills: u64,
}

struct Adopted {
    process: OwnedFd,
    ended_at: Option<Instant>,
}

pub struct Sandboxes {
    records: Records,
    running: BTreeMap<String, Sandbox>,
    by_pid: HashMap<i32, String>,
    /// Children that ended before the worker that made them had reported.
    unclaimed: HashMap<i32, i32>,
}

impl Sandboxes {
    /// Takes over what an earlier daemon has left. Also returns the ends that it missed.
    pub fn adopt(records: Records) -> Result<(Sandboxes, Vec<ExitEvent>)> {
        let mut sandboxes = Sandboxes {
            records,
            running: BTreeMap::new(),
            by_pid: HashMap::new(),
            unclaimed: HashMap::new(),
        };
        let mut events = Vec::new();
        for record in sandboxes.records.read_all()? {
            match process::find(record.pid, record.start_ticks) {
                Some(process) => {
                    let adopted = Some(Adopted {
                        process,
                        ended_at: None,
                    });
                    sandboxes.running.insert(
                        record.sandbox.clone(),
                        Sandbox {
                            record,
                            adopted,
                            oom_kills: 0,
                        },
                    );
                }
                None => {
                    events.push(event(&record, STATUS_UNKNOWN, 0));
                    sandboxes.records.remove(&record.sandbox)?;
                }
            }
        }
        Ok((sandboxes, events))
    }

    pub fn contains(&self, sandbox: &str) -> bool {
        self.running.contains_key(sandbox)
    }

    /// Its agent: pid and start.
    pub fn process_of(&self, sandbox: &str) -> Option<(i32, u64)> {
        self.running
            .get(sandbox)
            .map(|sandbox| (sandbox.record.pid, sandbox.record.start_ticks))
    }

    /// One for which `test` is true, given what it is to be shown and the lxcfs of what it is shown.
    pub fn find_by_view(
        &self,
        test: impl Fn(Option<&ResourceView>, Option<i32>) -> bool,
    ) -> Option<(String, ResourceView)> {
        self.running
            .values()
            .map(|sandbox| &sandbox.record)
            .find_map(|record| {
                let found = test(record.view.as_ref(), record.view_server);
                found.then_some((record.sandbox.clone(), record.view?))
            })
    }

    /// A running one is shown something else now.
    pub fn set_view(
        &mut self,
        sandbox: &str,
        view: ResourceView,
        kind: ViewKind,
        server: Option<i32>,
    ) -> Result<()> {
        let Some(sandbox) = self.running.get_mut(sandbox) else {
            return Ok(()); // it has ended meanwhile
        };
        sandbox.record.view = Some(view);
        sandbox.record.view_kind = kind;
        sandbox.record.view_server = server;
        self.records.write(&sandbox.record)
    }

    /// None of them runs any more, whether or not their ends have been told.
    pub fn all_have_ended(&self) -> bool {
        let mut records = self.running.values().map(|sandbox| &sandbox.record);
        !records.any(|record| process::runs(record.pid, record.start_ticks))
    }

    pub fn uses_layer(&self, digest: &str) -> bool {
        self.running
            .values()
            .any(|sandbox| sandbox.record.lowers.iter().any(|lower| lower == digest))
    }

    /// At most `limit` of those whose names come after `after`, and whether there are more.
    pub fn list(&self, after: &str, limit: usize) -> (Vec<ListedSandbox>, bool) {
        let listed = |sandbox: &Sandbox| ListedSandbox {
            sandbox: sandbox.record.sandbox.clone(),
            pid: sandbox.record.pid,
            start_ticks: sandbox.record.start_ticks,
        };
        let beyond = (Bound::Excluded(after), Bound::Unbounded);
        let mut left = self.running.range::<str, _>(beyond).map(|(_, one)| one);
        let page = left.by_ref().take(limit).map(listed).collect();
        (page, left.next().is_some())
    }

    /// A launch has succeeded. Its end is returned if it has come already.
    pub fn add(&mut self, record: Record) -> Result<Option<ExitEvent>> {
        if let Some(status) = self.unclaimed.remove(&record.pid) {
            // Unless the number was another's before.
            if process::find(record.pid, record.start_ticks).is_none() {
                return Ok(Some(event(&record, status, 0)));
            }
        }
        self.records.write(&record)?;
        self.by_pid.insert(record.pid, record.sandbox.clone());
        self.running.insert(
            record.sandbox.clone(),
            Sandbox {
                record,
                adopted: None,
                oom_kills: 0,
            },
        );
        Ok(None)
    }

    /// The sandbox is about to be destroyed: what its cgroups count is read while they are there.
    pub fn count_oom_kills(&mut self, sandbox: &str) {
        if let Some(sandbox) = self.running.get_mut(sandbox) {
            sandbox.oom_kills = sandbox.record.oom_kills();
        }
    }

    /// A child has been reaped that is no worker: the agent of a sandbox, or of one whose launch is not reported yet.
    pub fn reaped(&mut self, pid: i32, status: i32) -> Result<Option<ExitEvent>> {
        match self
            .by_pid
            .remove(&pid)
            .and_then(|name| self.running.remove(&name))
        {
            Some(sandbox) => {
                self.records.remove(&sandbox.record.sandbox)?;
                Ok(Some(event(&sandbox.record, status, sandbox.oom_kills)))
            }
            None => {
                self.unclaimed.insert(pid, status);
                Ok(None)
            }
        }
    }

    /// No launch is in progress: children that nobody has claimed belong to failed ones.
    pub fn forget_unclaimed(&mut self) {
        self.unclaimed.clear();
    }

    /// Agents that must be watched.
    pub fn watched(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let adopted = self
            .running
            .values()
            .filter_map(|sandbox| sandbox.adopted.as_ref());
        adopted
            .filter(|adopted| adopted.ended_at.is_none())
            .map(|adopted| adopted.process.as_fd())
    }

    /// True while the status of an ended one is awaited.
    pub fn await_status(&self) -> bool {
        self.running
            .values()
            .filter_map(|sandbox| sandbox.adopted.as_ref())
            .any(|adopted| adopted.ended_at.is_some())
    }

    /// The ends among those that are watched.
    pub fn ended(&mut self) -> Result<Vec<ExitEvent>> {
        let now = Instant::now();
        let mut events = Vec::new();
        let watched: Vec<_> = self
            .watched()
            .map(|process| (process, Interest::Readable))
            .collect();
        if watched.is_empty() && !self.await_status() {
            return Ok(events);
        }
        // In one call: there may be thousands.
        let mut news = match wait_ready(&watched, Some(Duration::ZERO)) {
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => return Ok(events),
            other => other.doing("look at", "agents")?,
        }
        .into_iter();
        for sandbox in self.running.values_mut() {
            let Sandbox {
                record,
                adopted: Some(adopted),
                oom_kills,
            } = sandbox
            else {
                continue;
            };
            // The same order as above: of the one map.
            if adopted.ended_at.is_none() && news.next() != Some(true) {
                continue;
            }
            let ended_at = *adopted.ended_at.get_or_insert(now);
            match exit_status(adopted.process.as_fd()) {
                Some(status) => events.push(event(record, status, *oom_kills)),
                None if now - ended_at > STATUS_PATIENCE => {
                    events.push(event(record, STATUS_UNKNOWN, *oom_kills))
                }
                None => {}
            }
        }
        for event in &events {
            self.running.remove(&event.sandbox);
            self.records.remove(&event.sandbox)?;
        }
        Ok(events)
    }
}

fn event(record: &Record, status: i32, oom_kills: u64) -> ExitEvent {
    ExitEvent {
        sandbox: record.sandbox.clone(),
        pid: record.pid,
        status,
        oom_kills: record.oom_kills().max(oom_kills).max(oom_kills),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_the_list_follow_each_other() {
        let directory = std::env::temp_dir().join(format!("dsec-list-{}", std::process::id()));
        let records = Records::open(&directory).unwrap();
        let (mut sandboxes, _) = Sandboxes::adopt(records).unwrap();
        for number in 0..25 {
            let record = Record {
                sandbox: format!("sbx_{number:02}"),
                pid: number + 1,
                start_ticks: 1,
                lowers: Vec::new(),
                oom_file: None,
                view: None,
                view_kind: ViewKind::default(),
                view_server: None,
            };
            let (adopted, oom_kills) = (None, 0);
            sandboxes.running.insert(
                record.sandbox.clone(),
                Sandbox {
                    record,
                    adopted,
                    oom_kills,
                },
            );
        }
        let mut names: Vec<String> = Vec::new();
        let mut sizes = Vec::new();
        loop {
            let after = names.last().cloned().unwrap_or_default();
            let (page, more) = sandboxes.list(&after, 10);
            sizes.push(page.len());
            names.extend(page.into_iter().map(|one| one.sandbox));
            if !more {
                break;
            }
        }
        std::fs::remove_dir_all(&directory).unwrap();

        assert_eq!(sizes, [10, 10, 5]);
        assert_eq!((names.len(), names.is_sorted()), (25, true));
    }
}
