//! What sandboxes are shown of the machine, each its own share (ruling 16): files made once for all sandboxes of a share, and
//! where lxcfs runs, its file of memory that is true at each read.

mod live;
mod text;

use std::borrow::Cow;
use std::collections::VecDeque;
use std::ffi::CStr;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use dsec_sys::processors::allowed;

use crate::error::{Doing, Error, Result};
use crate::steps::view;
use crate::system::System;
pub use crate::view::live::{end_left_over, Live};
use crate::wire::{ResourceView, ViewKind};

const SHAPES: &str = ".views";
/// Shapes that are kept. A sandbox holds the files that it was given, so older ones may go.
const SHAPES_MAX: usize = 1024;

/// A file or mount of ours, and the path that it covers in a sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    pub path: PathBuf,
    pub target: Cow<'static, CStr>,
}

/// The files of all shares.
pub struct Views<'a> {
    system: &'a dyn System,
    directory: PathBuf,
    /// Names of what is there, the oldest first.
    made: VecDeque<String>,
    cpuinfo: String,
    live: Live<'a>,
}

/// What one sandbox is to be shown.
pub struct Shown {
    pub sources: Vec<Source>,
    pub kind: ViewKind,
    /// The lxcfs that a live one comes from.
    pub server: Option<i32>,
}

impl Shown {
    /// But the machine.
    pub fn nothing() -> Shown {
        Shown {
            sources: Vec::new(),
            kind: ViewKind::Host,
            server: None,
        }
    }
}

impl<'a> Views<'a> {
    /// `below` is the directory of layers in the pinned namespace, `run` that of the daemon.
    pub fn open(
        system: &'a dyn System,
        below: &Path,
        run: &Path,
        lxcfs: Option<PathBuf>,
    ) -> Result<Views<'a>> {
        let directory = below.join(SHAPES);
        system
            .remove_tree(&directory)
            .doing_to("remove", &directory)?;
        system
            .make_dir(&directory, 0o755)
            .doing_to("make", &directory)?;
        let path = "/proc/cpuinfo";
        let cpuinfo = std::fs::read_to_string(path).doing("read", path)?;
        Ok(Views {
            system,
            directory,
            made: VecDeque::new(),
            cpuinfo,
            live: Live::open(system, below, run, lxcfs)?,
        })
    }

    /// The files for `wanted`, made if no other sandbox has the same. Live ones where that is wanted and can be had.
    pub fn show(&mut self, wanted: Option<&ResourceView>) -> Result<Shown> {
        let Some(wanted) = wanted else {
            return Ok(Shown::nothing());
        };
        let mut sources = self.of_processors(wanted.cpus)?;
        let live = wanted.live.then(|| self.live.memory()).flatten();
        let (kind, server) = match live {
            Some(_) => (ViewKind::Live, self.live.server()),
            None => (ViewKind::Static, None),
        };
        let path = match live {
            Some(path) => path,
            None => self.of_memory(wanted.memory_bytes)?,
        };
        sources.push(Source {
            path,
            target: c"/proc/meminfo".into(),
        });
        Ok(Shown {
            sources,
            kind,
            server,
        })
    }

    /// True when a sandbox was given something else than it would be given now: `server` is the lxcfs of what it was given.
    pub fn is_stale(&self, wanted: Option<&ResourceView>, server: Option<i32>) -> bool {
        let wants_live = wanted.is_some_and(|wanted| wanted.live);
        wants_live && !self.live.is_starting() && server != self.live.server()
    }

    pub fn live(&mut self) -> &mut Live<'a> {
        &mut self.live
    }

    pub fn lxcfs(&self) -> &Live<'a> {
        &self.live
    }

    fn of_processors(&mut self, cpus: u32) -> Result<Vec<Source>> {
        let there = allowed()
            .map_or(usize::MAX, |set| set.count())
            .min(text::processors(&self.cpuinfo).max(1));
        let cpus = usize::try_from(cpus).unwrap_or(usize::MAX).clamp(1, there);
        let name = format!("processors-{cpus}");
        let directory = self.directory.join(&name);
        if !self.made.contains(&name) {
            let stat = std::fs::read_to_string("/proc/stat").doing("read", "/proc/stat")?;
            self.make(
                name,
                &[
                    ("cpuinfo", text::cpuinfo(&self.cpuinfo, cpus)),
                    ("stat", text::stat(&stat, cpus)),
                    ("list", text::processor_list(cpus)),
                    ("loadavg", text::LOAD.into()),
                ],
            )?;
        }
        let source = |(name, target): (&str, &'static CStr)| Source {
            path: directory.join(name),
            target: target.into(),
        };
        Ok([
            ("cpuinfo", c"/proc/cpuinfo"),
            ("stat", c"/proc/stat"),
            ("loadavg", c"/proc/loadavg"),
            ("list", c"/sys/devices/system/cpu/online"),
            ("list", c"/sys/devices/system/cpu/possible"),
            ("list", c"/sys/devices/system/cpu/present"),
        ]
        .map(source)
        .to_vec())
    }

    fn of_memory(&mut self, memory_bytes: u64) -> Result<PathBuf> {
        let name = format!("memory-{}", memory_bytes / 1024);
        let path = self.directory.join(&name).join("meminfo");
        if !self.made.contains(&name) {
            let host = std::fs::read_to_string("/proc/meminfo").doing("read", "/proc/meminfo")?;
            self.make(name, &[("meminfo", text::meminfo(&host, memory_bytes))])?;
        }
        Ok(path)
    }

    fn make(&mut self, name: String, files: &[(&str, String)]) -> Result<()> {
        if self.made.len() >= SHAPES_MAX {
            if let Some(oldest) = self.made.pop_front() {
                let path = self.directory.join(oldest);
                self.system.remove_tree(&path).doing_to("remove", &path)?;
            }
        }
        let directory = self.directory.join(&name);
        // What a failure has left of it before.
        self.system
            .remove_tree(&directory)
            .doing_to("remove", &directory)?;
        self.system
            .make_dir(&directory, 0o755)
            .doing_to("make", &directory)?;
        for (file, content) in files {
            let path = directory.join(file);
            write_readable(&path, content).doing_to("write", &path)?;
        }
        self.made.push_back(name);
        Ok(())
    }
}

/// For everybody to read, and for nobody to write: inside a sandbox its owner has no rights.
fn write_readable(path: &Path, content: &str) -> std::io::Result<()> {
    use std::io::Write;
    use std::os::unix::fs::OpenOptionsExt;
    std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o444)
        .open(path)?
        .write_all(content.as_bytes())
}

/// Gives a sandbox that runs, whose agent is `pid`, other files. By a process of its own, since it enters the sandbox's
/// mount namespace.
pub fn give(system: &dyn System, process: (i32, u64), sources: &[Source]) -> Result<()> {
    let (pid, start_ticks) = process;
    let gone = || Error::Refused {
        why: "the sandbox has ended".into(),
        errno: libc::ESRCH,
    };
    let covers = view::collect(system, sources)?;
    let path = PathBuf::from(format!("/proc/{pid}/ns/mnt"));
    let namespace = system.open_namespace(&path).map_err(|_| gone())?;
    // The root of its namespace is another.
    let root = PathBuf::from(format!("/proc/{pid}/root"));
    let root = system.open_namespace(&root).map_err(|_| gone())?;
    // Compared after opening: what was opened is of the process that is meant.
    crate::process::find(pid, start_ticks).ok_or_else(gone)?;
    system
        .enter_mounts(namespace.as_fd())
        .doing("enter", "the sandbox's mount namespace")?;
    view::replace(system, &covers, &root)
}
