//! Launches and destructions in progress: a forked process for each, so that none keeps the daemon from serving the others.

use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};

use dsec_sys::namespaces::{clone, exit_now, give_way, Clone, Side};
use dsec_sys::paths::{close_copy, read_once, write_once};
use dsec_sys::process::close_all_but;
use dsec_sys::seqpacket::pipe;
use serde::{Deserialize, Serialize};

use crate::error::{Doing, Error, Result};
use crate::wire::{
    encode, DestroyArgs, LaunchFailure, LaunchPlan, Launched, ResourceView, ViewKind,
};

/// Tasks that wait for a free worker; beyond, they are refused.
const WAITING_MAX: usize = 4096;
/// A report is written by one write(2) that cannot block: a pipe holds at least this much.
const REPORT_BYTES_MAX: usize = 4096;

/// Something asked for that takes a while.
pub enum Task {
    Launch(Box<LaunchPlan>),
    /// What can be made of it ahead. Nobody waits for this one, which waits for a launch of the same sandbox.
    Prepare(Box<LaunchPlan>),
    Destroy(DestroyArgs),
    /// A worker died in the middle: what its launch had made is removed, then the failure is told.
    CleanUp(DestroyArgs, LaunchFailure),
    /// Nobody waits for this one, and it gives way to all others.
    Empty(PathBuf),
    /// A running sandbox is shown another share of the machine.
    View(Given),
}

/// What the task of emptying trash is called among sandboxes: one at a time.
const OF_NOBODY: &str = ".trash";

impl Task {
    pub fn sandbox(&self) -> &str {
        match self {
            Task::Launch(plan) | Task::Prepare(plan) => &plan.sandbox,
            Task::Destroy(args) | Task::CleanUp(args, _) => &args.sandbox,
            Task::Empty(_) => OF_NOBODY,
            Task::View(given) => &given.sandbox,
        }
    }

    fn is_awaited(&self) -> bool {
        !matches!(self, Task::Empty(_) | Task::Prepare(_))
    }
}

/// What a running sandbox is given to see, and the lxcfs that it comes from.
pub struct Given {
    pub sandbox: String,
    pub view: ResourceView,
    pub kind: ViewKind,
    pub server: Option<i32>,
}

impl Given {
    /// What is wanted; how and from where it comes is seen when it is done.
    pub fn wanted(sandbox: String, view: ResourceView) -> Given {
        Given {
            sandbox,
            view,
            kind: ViewKind::Static,
            server: None,
        }
    }
}

/// Who asked.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Origin {
    pub connection: u64,
    pub request: u64,
}

/// Nobody: no connection has this number.
pub const OURSELVES: Origin = Origin {
    connection: 0,
    request: 0,
};

/// What a worker says at its end.
#[derive(Default, Serialize, Deserialize)]
pub struct Report {
    pub launched: Option<Launched>,
    pub failure: Option<LaunchFailure>,
    /// Of a destroy: what it has left to be emptied.
    pub trash: Option<PathBuf>,
}

impl From<std::result::Result<Launched, LaunchFailure>> for Report {
    fn from(result: std::result::Result<Launched, LaunchFailure>) -> Report {
        let (launched, failure) = match result {
            Ok(launched) => (Some(launched), None),
            Err(failure) => (None, Some(failure)),
        };
        Report {
            launched,
            failure,
            trash: None,
        }
    }
}

pub struct Worker {
    pub pid: i32,
    /// By which one that makes a sandbox ahead is told what becomes of it.
    pub channel: Option<OwnedFd>,
    /// The lxcfs that the launch's live view comes from.
    pub view_server: Option<i32>,
    pub result: OwnedFd,
    pub task: Task,
    pub origin: Origin,
}

impl Worker {
    /// What it had to say; None when it died without a word.
    pub fn report(&self) -> Option<Report> {
        let mut bytes = [0; REPORT_BYTES_MAX];
        let length = read_once(self.result.as_fd(), &mut bytes).ok()?;
        rmp_serde::from_slice(&bytes[..length]).ok()
    }
}

pub struct Workers {
    pub running: Vec<Worker>,
    waiting: VecDeque<(Task, Origin)>,
    running_max: usize,
}

impl Workers {
    pub fn new() -> Workers {
        // More than the processors can carry would only make each of them slower.
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Workers {
            running: Vec::new(),
            waiting: VecDeque::new(),
            running_max: (2 * processors).clamp(4, 64),
        }
    }

    pub fn add(&mut self, task: Task, origin: Origin) -> Result<()> {
        if self.waiting.len() == WAITING_MAX {
            let why = format!("{WAITING_MAX} requests are waiting already");
            return Err(Error::Refused {
                why,
                errno: libc::EAGAIN,
            });
        }
        self.waiting.push_back((task, origin));
        Ok(())
    }

    /// The next task that may start now: there is room, and nothing else goes on with its sandbox.
    pub fn next(&mut self) -> Option<(Task, Origin)> {
        let awaited = self
            .running
            .iter()
            .filter(|worker| worker.task.is_awaited());
        if awaited.count() >= self.running_max {
            return None;
        }
        let busy = |sandbox: &str| {
            self.running
                .iter()
                .any(|worker| worker.task.sandbox() == sandbox)
        };
        let index = self
            .waiting
            .iter()
            .position(|(task, _)| !busy(task.sandbox()))?;
        self.waiting.remove(index)
    }

    /// Whether the trash is going to be emptied, by a task that begins only now.
    pub fn will_empty(&self, trash: &Path) -> bool {
        self.waiting
            .iter()
            .any(|(task, _)| matches!(task, Task::Empty(path) if path == trash))
    }

    /// Of the worker that was started last.
    pub fn note_channel(&mut self, channel: OwnedFd) {
        if let Some(worker) = self.running.last_mut() {
            worker.channel = Some(channel);
        }
    }

    /// Where in `running` the worker is that has made this sandbox ahead.
    pub fn prepared(&self, sandbox: &str) -> Option<usize> {
        self.running.iter().position(
            |worker| matches!(&worker.task, Task::Prepare(plan) if plan.sandbox == sandbox),
        )
    }

    /// True while something goes on with this sandbox, or is about to.
    pub fn are_at(&self, sandbox: &str) -> bool {
        let running = self.running.iter().map(|worker| &worker.task);
        let mut tasks = running.chain(self.waiting.iter().map(|(task, _)| task));
        tasks.any(|task| task.sandbox() == sandbox)
    }

    /// Of the launch that was started last.
    pub fn note_view(&mut self, server: Option<i32>) {
        if let Some(worker) = self.running.last_mut() {
            worker.view_server = server;
        }
    }

    /// True while a sandbox is being given another view.
    pub fn have_views(&self) -> bool {
        let running = self.running.iter().map(|worker| &worker.task);
        running
            .chain(self.waiting.iter().map(|(task, _)| task))
            .any(|task| matches!(task, Task::View(_)))
    }

    pub fn are_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// Layers of launches that wait or go on.
    pub fn lowers(&self) -> impl Iterator<Item = &String> {
        let running = self.running.iter().map(|worker| &worker.task);
        let tasks = running.chain(self.waiting.iter().map(|(task, _)| task));
        tasks.flat_map(|task| match task {
            Task::Launch(plan) => plan.lowers.as_slice(),
            _ => &[],
        })
    }

    /// Forks a process that does `work` and reports. Only the parent returns. `lock` stays with the parent: a daemon that is
    /// started after its death must not be kept out by a worker that goes on. Of what nobody waits for, only `keep` stays open.
    pub fn start(
        &mut self,
        task: Task,
        origin: Origin,
        lock: &OwnedFd,
        keep: &[RawFd],
        work: impl FnOnce(&Task) -> Report,
    ) -> Result<()> {
        let (result, report_to) = pipe().doing("make", "a pipe")?;
        match clone(&Clone::default()).doing("clone", "a worker")? {
            Side::Child => {
                drop(result);
                close_copy(lock.as_fd());
                // Or those that wait would not see that nobody wants them for as long as this one goes on.
                let channels = self.running.iter().flat_map(|worker| &worker.channel);
                channels.for_each(|channel| close_copy(channel.as_fd()));
                if !task.is_awaited() {
                    if matches!(task, Task::Empty(_)) {
                        give_way();
                    }
                    // It may outlive the daemon by far: nodes must see that the daemon has gone, and the next one must not
                    // find its places taken.
                    let needed = [keep, &[report_to.as_raw_fd()]].concat();
                    if close_all_but(&needed).is_err() {
                        exit_now(1);
                    }
                }
                let report = work(&task);
                // A daemon that has died learns of it by its own search after the restart.
                let sent = encode(&report).map(|bytes| write_once(report_to.as_fd(), &bytes));
                exit_now(if matches!(sent, Ok(Ok(()))) { 0 } else { 1 })
            }
            Side::Parent { pid, .. } => {
                self.running.push(Worker {
                    pid,
                    channel: None,
                    view_server: None,
                    result,
                    task,
                    origin,
                });
                Ok(())
            }
        }
    }
}
