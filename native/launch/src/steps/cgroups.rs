//! Step `cgroups`: where the sandbox is counted and limited.

use std::ffi::CStr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use crate::error::{Doing, Error, Result};
use crate::system::{Access, Entry, System};
use crate::undo::{Made, Undo};
use crate::wire::LaunchPlan;

/// Files whose owner may make cgroups below, and move processes there, but change no limit.
const DELEGATED: [&CStr; 3] = [
    c"cgroup.procs",
    c"cgroup.threads",
    c"cgroup.subtree_control",
];
const DELEGATED_WORK: [&CStr; 3] = [
    c"work/cgroup.procs",
    c"work/cgroup.threads",
    c"work/cgroup.subtree_control",
];
/// These two come before all others of their controller: nothing can join a cpuset without them.
const FIRST: [&str; 2] = ["cpuset.cpus", "cpuset.mems"];

/// The cgroups of a sandbox, opened as far as later steps need them. Whether a write is allowed was settled at opening, so
/// the child may use them after it has given up its rights.
pub struct Cgroups {
    /// The sandbox's own directory, opened for reading: what the agent gets.
    pub directory: Option<OwnedFd>,
    pub inode: u64,
    /// `agent/`, where the new process is born.
    pub agent: Option<OwnedFd>,
    /// `tasks` of each version 1 directory, opened for writing.
    pub v1_tasks: Vec<OwnedFd>,
}

pub fn make(system: &dyn System, plan: &LaunchPlan, undo: &mut Undo) -> Result<Cgroups> {
    let mut cgroups = Cgroups {
        directory: None,
        inode: 0,
        agent: None,
        v1_tasks: Vec::new(),
    };
    if let Some(path) = &plan.cgroup2 {
        make_v2(system, plan, Path::new(path), undo, &mut cgroups)?;
    }
    for (controller, path) in &plan.cgroup1 {
        let path = Path::new(path);
        let kept = plan.cgroup1_from.get(controller).map(Path::new);
        match kept {
            Some(kept) => {
                system.rename(kept, path).doing_to("rename", kept)?;
                undo.add(Made::Cgroup(path.to_path_buf()));
            }
            None => make_directory(system, path, undo)?,
        }
        if let (None, Some(files)) = (kept, plan.cgroup1_files.get(controller)) {
            let (first, rest): (Vec<_>, Vec<_>) = files
                .iter()
                .partition(|(name, _)| FIRST.contains(&name.as_str()));
            first
                .into_iter()
                .chain(rest)
                .try_for_each(|(name, value)| set(system, &path.join(name), value))?;
        }
        let tasks = path.join("tasks");
        let file = system
            .open(&tasks, Access::Write)
            .doing_to("open", &tasks)?;
        cgroups.v1_tasks.push(file);
    }
    Ok(cgroups)
}

/// Writes those limits that differ from what they were made with.
pub fn set_again(system: &dyn System, plan: &LaunchPlan, before: &LaunchPlan) -> Result<()> {
    let none = std::collections::BTreeMap::new();
    let second = plan
        .cgroup2
        .iter()
        .map(|path| (path, &plan.cgroup2_files, &before.cgroup2_files));
    let first = plan.cgroup1.iter().map(|(controller, path)| {
        let files = plan.cgroup1_files.get(controller).unwrap_or(&none);
        (
            path,
            files,
            before.cgroup1_files.get(controller).unwrap_or(&none),
        )
    });
    let mut differ = Vec::new();
    for (path, files, made_with) in second.chain(first) {
        let others = files
            .iter()
            .filter(|(name, value)| made_with.get(*name) != Some(value));
        differ.extend(others.map(|(name, value)| (Path::new(path).join(name), value.as_str())));
    }
    replace(system, &differ)
}

/// Writes limits over others. Version 1 refuses some while another is still what it was (memory with swap is never below memory
/// alone), so what is refused is tried once more after the rest.
pub fn replace(system: &dyn System, limits: &[(PathBuf, &str)]) -> Result<()> {
    let mut refused = Vec::new();
    for (path, value) in limits {
        match set(system, path, value) {
            Err(error) if error.errno() == Some(libc::EINVAL) => refused.push((path, value)),
            other => other?,
        }
    }
    refused
        .into_iter()
        .try_for_each(|(path, value)| set(system, path, value))
}

fn make_v2(
    system: &dyn System,
    plan: &LaunchPlan,
    path: &Path,
    undo: &mut Undo,
    cgroups: &mut Cgroups,
) -> Result<()> {
    make_directory(system, path, undo)?;
    plan.cgroup2_files
        .iter()
        .try_for_each(|(name, value)| set(system, &path.join(name), value))?;
    // Made later, once the new process is busy with itself.
    undo.add(Made::Cgroup(path.join("work")));
    let agent = path.join("agent");
    make_directory(system, &agent, undo)?;
    cgroups.agent = Some(
        system
            .open(&agent, Access::Directory)
            .doing_to("open", &agent)?,
    );
    let directory = system
        .open(path, Access::Directory)
        .doing_to("open", path)?;
    cgroups.inode = system.inode(directory.as_fd()).doing_to("stat", path)?;
    cgroups.directory = Some(directory);
    Ok(())
}

/// Makes `work/`, below which commands have cgroups of their own, and gives it to the sandbox. By descriptor, since by now the
/// host's paths are out of sight; it goes with its parent's removal.
pub fn delegate(system: &dyn System, plan: &LaunchPlan, cgroups: &Cgroups) -> Result<()> {
    let Some(directory) = cgroups.directory.as_ref().map(|fd| fd.as_fd()) else {
        return Ok(());
    };
    system
        .put(directory, c"work", Entry::Directory { mode: 0o755 })
        .doing("make", "work/")?;
    for name in [c"", c"work"]
        .iter()
        .chain(&DELEGATED)
        .chain(&DELEGATED_WORK)
    {
        let shown = name.to_string_lossy();
        system
            .change_owner(directory, name, plan.id_base)
            .doing("change the owner of", shown)?;
    }
    Ok(())
}

fn make_directory(system: &dyn System, path: &Path, undo: &mut Undo) -> Result<()> {
    system.make_dir(path, 0o755).doing_to("make", path)?;
    undo.add(Made::Cgroup(path.to_path_buf()));
    Ok(())
}

fn set(system: &dyn System, path: &Path, value: &str) -> Result<()> {
    // One write a line: some files take a single rule at a time (devices.allow, io.max).
    value
        .split('\n')
        .filter(|line| !line.is_empty())
        .try_for_each(|line| {
            system
                .write_file(path, line.as_bytes())
                .map_err(|source| Error::Call {
                    doing: "write to",
                    on: format!("{} the value {line:?}", path.display()),
                    source,
                })
        })
}
