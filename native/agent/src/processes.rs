//! The process table of /proc: how a tree is found where there are no cgroups.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process {
    pub pid: i32,
    pub parent: i32,
    pub session: i32,
    /// With the pid it names one process for ever.
    pub start_ticks: u64,
}

pub struct ProcessTable {
    processes: Vec<Process>,
}

impl ProcessTable {
    /// All processes but zombies; empty without /proc.
    pub fn read() -> Self {
        let mut processes = Vec::new();
        for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
            let name = entry.file_name();
            let Some(pid) = name.to_str().and_then(|name| name.parse::<i32>().ok()) else {
                continue;
            };
            if let Ok(stat) = fs::read(format!("/proc/{pid}/stat")) {
                processes.extend(parse_stat(pid, &stat));
            }
        }
        Self { processes }
    }

    pub fn len(&self) -> usize {
        self.processes.len()
    }

    /// Descendants of `leader` and whoever is still in its session; not the leader itself.
    pub fn tree_of(&self, leader: i32) -> Vec<Process> {
        let session = self.processes.iter().filter(|p| p.session == leader);
        self.below(leader, session.map(|p| p.pid).collect())
    }

    pub fn descendants_of(&self, pid: i32) -> Vec<Process> {
        self.below(pid, Vec::new())
    }

    fn below(&self, root: i32, mut open: Vec<i32>) -> Vec<Process> {
        let mut children: BTreeMap<i32, Vec<i32>> = BTreeMap::new();
        for process in &self.processes {
            children
                .entry(process.parent)
                .or_default()
                .push(process.pid);
        }
        let mut found = BTreeSet::new();
        open.push(root);
        while let Some(pid) = open.pop() {
            if found.insert(pid) {
                open.extend(children.remove(&pid).unwrap_or_default());
            }
        }
        found.remove(&root);
        let members = self.processes.iter().filter(|p| found.contains(&p.pid));
        members.copied().collect()
    }

    pub fn holds(&self, process: &Process) -> bool {
        self.processes
            .iter()
            .any(|p| p.pid == process.pid && p.start_ticks == process.start_ticks)
    }
}

/// The name is in parentheses and may hold anything, so fields are counted from the last one.
fn parse_stat(pid: i32, stat: &[u8]) -> Option<Process> {
    let close = stat.iter().rposition(|b| *b == b')')?;
    let rest = std::str::from_utf8(&stat[close + 1..]).ok()?;
    let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
    if matches!(*fields.first()?, "Z" | "X") {
        return None;
    }
    Some(Process {
        pid,
        parent: fields.get(1)?.parse().ok()?,
        session: fields.get(3)?.parse().ok()?,
        start_ticks: fields.get(19)?.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_parentheses_is_no_trap() {
        let stat = b"7 (a) R 1 (b) S 3 7 5 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 4242 0 0";

        let process = parse_stat(7, stat).unwrap();

        assert_eq!(
            (process.parent, process.session, process.start_ticks),
            (3, 5, 4242)
        );
    }

    #[test]
    fn a_tree_is_descendants_and_session_members() {
        let process = |pid, parent, session| Process {
            pid,
            parent,
            session,
            start_ticks: 0,
        };
        let table = ProcessTable {
            processes: vec![
                process(2, 1, 2),
                process(3, 2, 2),
                process(4, 3, 4),
                process(5, 1, 2),
                process(6, 1, 6),
            ],
        };

        let mut tree: Vec<i32> = table.tree_of(2).iter().map(|p| p.pid).collect();
        tree.sort_unstable();

        assert_eq!(tree, [3, 4, 5]);
    }
}
