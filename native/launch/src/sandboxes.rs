//! The sandboxes that run, and how their ends are noticed.

use std::collections::{BTreeMap, HashMap};
use std::ops::Bound;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
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

/// What is asked about at times when thousands run. The rest is read from the record: every page of this daemon is shared with a
/// worker, and costs at each launch.
struct Sandbox {
    pid: i32,
    start_ticks: u64,
    lowers: Rc<[String]>,
    view: Option<ResourceView>,
    view_server: Option<i32>,
    /// Kills for memory that were counted before its cgroup was about to go.
    oom_kills: u64,
}

struct Adopted {
    process: OwnedFd,
    ended_at: Option<Instant>,
}

pub struct Sandboxes {
    records: Records,
    running: BTreeMap<Rc<str>, Sandbox>,
    /// Lists of layers: most sandboxes have the same.
    lowers: Vec<Rc<[String]>>,
    /// Agents that an earlier daemon started: not our children, so they are watched instead of reaped. Apart from the others,
    /// so that a daemon with none does not look through all that run at each turn.
    adopted: BTreeMap<String, Adopted>,
    by_pid: HashMap<i32, Rc<str>>,
    /// Children that ended before the worker that made them had reported.
    unclaimed: HashMap<i32, i32>,
}

impl Sandboxes {
    /// Takes over what an earlier daemon has left. Also returns the ends that it missed.
    pub fn adopt(records: Records) -> Result<(Sandboxes, Vec<ExitEvent>)> {
        let mut sandboxes = Sandboxes {
            records,
            running: BTreeMap::new(),
            lowers: Vec::new(),
            adopted: BTreeMap::new(),
            by_pid: HashMap::new(),
            unclaimed: HashMap::new(),
        };
        let mut events = Vec::new();
        for record in sandboxes.records.read_all()? {
            match process::find(record.pid, record.start_ticks) {
                Some(process) => {
                    let adopted = Adopted {
                        process,
                        ended_at: None,
                    };
                    sandboxes.adopted.insert(record.sandbox.clone(), adopted);
                    sandboxes.note(&record);
                }
                None => {
                    events.push(event(
                        &record.sandbox,
                        record.pid,
                        STATUS_UNKNOWN,
                        record.oom_kills(),
                    ));
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
            .map(|sandbox| (sandbox.pid, sandbox.start_ticks))
    }

    /// One for which `test` is true, given what it is to be shown and the lxcfs of what it is shown.
    pub fn find_by_view(
        &self,
        test: impl Fn(Option<&ResourceView>, Option<i32>) -> bool,
    ) -> Option<(String, ResourceView)> {
        self.running.iter().find_map(|(name, sandbox)| {
            let found = test(sandbox.view.as_ref(), sandbox.view_server);
            found.then_some((name.to_string(), sandbox.view?))
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
        let Some(running) = self.running.get_mut(sandbox) else {
            return Ok(()); // it has ended meanwhile
        };
        running.view = Some(view);
        running.view_server = server;
        let mut record = self.records.read(sandbox)?;
        record.view = Some(view);
        record.view_kind = kind;
        record.view_server = server;
        self.records.write(&record)
    }

    /// None of them runs any more, whether or not their ends have been told.
    pub fn all_have_ended(&self) -> bool {
        let mut running = self.running.values();
        !running.any(|sandbox| process::runs(sandbox.pid, sandbox.start_ticks))
    }

    pub fn uses_layer(&self, digest: &str) -> bool {
        self.running
            .values()
            .any(|sandbox| sandbox.lowers.iter().any(|lower| lower == digest))
    }

    /// At most `limit` of those whose names come after `after`, and whether there are more.
    pub fn list(&self, after: &str, limit: usize) -> (Vec<ListedSandbox>, bool) {
        let listed = |(name, sandbox): (&Rc<str>, &Sandbox)| ListedSandbox {
            sandbox: name.to_string(),
            pid: sandbox.pid,
            start_ticks: sandbox.start_ticks,
        };
        let beyond = (Bound::Excluded(after), Bound::Unbounded);
        let mut left = self.running.range::<str, _>(beyond);
        let page = left.by_ref().take(limit).map(listed).collect();
        (page, left.next().is_some())
    }

    /// A launch has succeeded. Its end is returned if it has come already.
    pub fn add(&mut self, record: Record) -> Result<Option<ExitEvent>> {
        if let Some(status) = self.unclaimed.remove(&record.pid) {
            // Unless the number was another's before.
            if process::find(record.pid, record.start_ticks).is_none() {
                let kills = record.oom_kills();
                return Ok(Some(event(&record.sandbox, record.pid, status, kills)));
            }
        }
        self.records.write(&record)?;
        let name = self.note(&record);
        self.by_pid.insert(record.pid, name);
        Ok(None)
    }

    fn note(&mut self, record: &Record) -> Rc<str> {
        let name: Rc<str> = record.sandbox.as_str().into();
        let sandbox = Sandbox {
            pid: record.pid,
            start_ticks: record.start_ticks,
            lowers: self.lowers_of(record),
            view: record.view,
            view_server: record.view_server,
            oom_kills: 0,
        };
        self.running.insert(name.clone(), sandbox);
        name
    }

    fn lowers_of(&mut self, record: &Record) -> Rc<[String]> {
        let known = self
            .lowers
            .iter()
            .find(|known| ***known == record.lowers[..]);
        if let Some(known) = known {
            return known.clone();
        }
        self.lowers.retain(|lowers| Rc::strong_count(lowers) > 1);
        let lowers: Rc<[String]> = record.lowers.as_slice().into();
        self.lowers.push(lowers.clone());
        lowers
    }

    /// The sandbox is about to be destroyed: what its cgroups count is read while they are there.
    pub fn count_oom_kills(&mut self, sandbox: &str) {
        let kills = self.records.oom_kills(sandbox);
        if let Some(sandbox) = self.running.get_mut(sandbox) {
            sandbox.oom_kills = kills;
        }
    }

    /// A child has been reaped that is no worker: the agent of a sandbox, or of one whose launch is not reported yet.
    pub fn reaped(&mut self, pid: i32, status: i32) -> Result<Option<ExitEvent>> {
        let name = self.by_pid.remove(&pid);
        match name.and_then(|name| self.running.remove_entry(&name)) {
            Some((name, sandbox)) => {
                let kills = self.records.oom_kills(&name).max(sandbox.oom_kills);
                self.records.remove(&name)?;
                Ok(Some(event(&name, pid, status, kills)))
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
        self.adopted
            .values()
            .filter(|adopted| adopted.ended_at.is_none())
            .map(|adopted| adopted.process.as_fd())
    }

    /// True while the status of an ended one is awaited.
    pub fn await_status(&self) -> bool {
        self.adopted
            .values()
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
        for (name, adopted) in &mut self.adopted {
            // The same order as above: of the one map.
            if adopted.ended_at.is_none() && news.next() != Some(true) {
                continue;
            }
            let Some(sandbox) = self.running.get(name.as_str()) else {
                continue;
            };
            let ended_at = *adopted.ended_at.get_or_insert(now);
            let status = match exit_status(adopted.process.as_fd()) {
                Some(status) => status,
                None if now - ended_at > STATUS_PATIENCE => STATUS_UNKNOWN,
                None => continue,
            };
            let kills = self.records.oom_kills(name).max(sandbox.oom_kills);
            events.push(event(name, sandbox.pid, status, kills));
        }
        for event in &events {
            self.running.remove(event.sandbox.as_str());
            self.adopted.remove(&event.sandbox);
            self.records.remove(&event.sandbox)?;
        }
        Ok(events)
    }
}

fn event(sandbox: &str, pid: i32, status: i32, oom_kills: u64) -> ExitEvent {
    ExitEvent {
        sandbox: sandbox.into(),
        pid,
        status,
        oom_kills,
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
            sandboxes.note(&record);
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
