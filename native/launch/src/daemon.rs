//! The daemon: one thread that serves nodes, starts workers and reaps agents.

mod preparing;
mod tasks;
mod views;

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use dsec_sys::processors::{unchanged, ProcessorSet};
use dsec_sys::seccomp::Instruction;
use dsec_sys::seqpacket::{next_signal, wait_ready, Interest};
use serde::Serialize;

use crate::agent::Agent;
use crate::children::{Children, End};
use crate::claim::claim;
use crate::connections::Connections;
use crate::error::{Doing, Error, Result};
use crate::filter::compile;
use crate::layers::Layers;
use crate::records::Record;
use crate::sandboxes::Sandboxes;
use crate::steps::check::{check_name, check_path};
use crate::steps::Job;
use crate::sysfs::Sysfs;
use crate::system::Kernel;
use crate::trash;
use crate::view::{Shown, Views};
use crate::wire::{
    self, DestroyArgs, ExitEvent, LaunchFailure, LaunchPlan, Launched, Nothing, LAUNCH_VERSION,
};
use crate::workers::{Origin, Report, Task, Worker, Workers};

/// Different filters that are kept; they depend on the software's version and policy, not on sandboxes.
const FILTERS_MAX: usize = 256;
/// An answer is one message of at most 128 KiB: a name, a pid and a start time are below 100 bytes.
const LISTED_MAX: usize = 800;
const STATUS_INTERVAL: Duration = Duration::from_millis(50);
/// The test hook's file in the run directory: its content names the step that fails.
const FAIL_STEP: &str = "fail_step";

/// What `main` has prepared.
pub struct Setting<'a> {
    pub system: &'a Kernel,
    pub run: PathBuf,
    pub agent: Agent,
    pub layers: Layers<'a>,
    pub views: Views<'a>,
    pub sysfs: Sysfs<'a>,
    pub sandboxes: Sandboxes,
    pub host_mounts: OwnedFd,
    pub bare_mounts: OwnedFd,
    /// The daemon's own uts namespace.
    pub own_names: OwnedFd,
    pub layers_by_name: bool,
    pub listener: OwnedFd,
    pub signals: OwnedFd,
    /// Held as long as the daemon lives; its workers let go of it.
    pub lock: OwnedFd,
    pub test_hooks: bool,
}

impl Setting<'_> {
    /// What every launch is given, with nothing of what will run yet.
    fn job<'b>(
        &'b self,
        plan: &'b LaunchPlan,
        filter_agent: Option<&'b [Instruction]>,
        sysfs: PathBuf,
    ) -> Job<'b> {
        Job {
            plan,
            host_mounts: &self.host_mounts,
            bare_mounts: &self.bare_mounts,
            layers_by_name: self.layers_by_name,
            agent: &self.agent.file,
            lowers: Vec::new(),
            filter_agent,
            sysfs,
            lobby: self.sysfs.lobby(),
            processors: unchanged().unwrap_or(ProcessorSet::ALL), // of a worker: it is tried there
            view: Shown::nothing(),
            config: Vec::new(),
            fail_step: None,
        }
    }
}

pub struct Daemon<'a> {
    setting: Setting<'a>,
    connections: Connections,
    workers: Workers,
    filters: BTreeMap<String, Vec<Instruction>>,
    children: Children,
    stopping: bool,
    /// The lxcfs that live views came from when they were looked through last; None: never.
    viewed: Option<Option<i32>>,
}

impl<'a> Daemon<'a> {
    pub fn new(setting: Setting<'a>, missed: Vec<ExitEvent>) -> Result<Daemon<'a>> {
        let mut daemon = Daemon {
            setting,
            connections: Connections::default(),
            workers: Workers::new(),
            filters: BTreeMap::new(),
            children: Children::default(),
            stopping: false,
            viewed: None,
        };
        missed.iter().try_for_each(|event| daemon.tell(event))?;
        Ok(daemon)
    }

    /// Serves until it is told to stop; what is in progress then is finished.
    pub fn serve(&mut self) -> Result<()> {
        while !(self.stopping && self.workers.are_idle()) {
            self.wait()?;
            self.take_signals();
            self.reap_children()?;
            self.finish_workers()?;
            self.setting.views.live().tend()?;
            for event in self.setting.sandboxes.ended()? {
                self.tell(&event)?;
            }
            self.connections.accept_all(self.setting.listener.as_fd());
            self.serve_requests()?;
            self.let_go_of_prepared();
            self.give_views()?;
            self.start_workers()?;
            self.connections.flush();
        }
        // Else they go on using it, and the next daemon takes it over.
        if self.setting.sandboxes.all_have_ended() {
            self.setting.views.live().end()?;
        }
        Ok(())
    }

    fn wait(&self) -> Result<()> {
        let mut interests: Vec<(BorrowedFd, Interest)> = vec![
            (self.setting.signals.as_fd(), Interest::Readable),
            (self.setting.listener.as_fd(), Interest::Readable),
        ];
        for connection in self.connections.iter() {
            interests.push((connection.socket(), Interest::Readable));
            if self.connections.is_waiting(connection) {
                interests.push((connection.socket(), Interest::Writable));
            }
        }
        interests.extend(
            self.workers
                .running
                .iter()
                .map(|worker| (worker.result.as_fd(), Interest::Readable)),
        );
        interests.extend(
            self.setting
                .sandboxes
                .watched()
                .map(|process| (process, Interest::Readable)),
        );
        let views = self.setting.views.lxcfs();
        interests.extend(views.watched().map(|process| (process, Interest::Readable)));
        let status = self.setting.sandboxes.await_status();
        let status = status.then_some(STATUS_INTERVAL);
        let timeout = [self.children.patience(), status, views.patience()]
            .into_iter()
            .flatten()
            .min();
        match wait_ready(&interests, timeout) {
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => Ok(()),
            other => other.map(drop).doing("wait for", "requests"),
        }
    }

    fn take_signals(&mut self) {
        while let Some(signal) = next_signal(self.setting.signals.as_fd()) {
            if signal.number != libc::SIGCHLD {
                self.stopping = true;
                continue;
            }
            self.children.signaled(signal.pid);
        }
    }

    fn reap_children(&mut self) -> Result<()> {
        let ends = self.children.take();
        self.reaped(ends)
    }

    fn reaped(&mut self, ends: Vec<End>) -> Result<()> {
        for (pid, status) in ends {
            if self.workers.running.iter().any(|worker| worker.pid == pid) {
                continue; // its pipe says the rest
            }
            if self.setting.views.live().reaped(pid, status) {
                continue;
            }
            if let Some(event) = self.setting.sandboxes.reaped(pid, status)? {
                self.tell(&event)?;
            }
        }
        Ok(())
    }

    fn finish_workers(&mut self) -> Result<()> {
        let interests: Vec<_> = self
            .workers
            .running
            .iter()
            .map(|worker| (worker.result.as_fd(), Interest::Readable))
            .collect();
        if interests.is_empty() {
            return Ok(());
        }
        let ready = match wait_ready(&interests, Some(Duration::ZERO)) {
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => return Ok(()),
            other => other.doing("look at", "workers")?,
        };
        for index in (0..ready.len()).rev().filter(|&index| ready[index]) {
            let worker = self.workers.running.swap_remove(index);
            self.children.leaves(worker.pid);
            self.finish(worker)?;
        }
        if !self
            .workers
            .running
            .iter()
            .any(|worker| matches!(worker.task, Task::Launch(_)))
        {
            self.setting.sandboxes.forget_unclaimed();
        }
        Ok(())
    }

    fn finish(&mut self, worker: Worker) -> Result<()> {
        let report = worker.report();
        let Worker {
            task,
            origin,
            view_server,
            ..
        } = worker;
        // What a worker has ended is gone when it is told: it reports only after the end of the process.
        match (&task, &report) {
            (
                Task::Launch(_),
                Some(Report {
                    launched: Some(_), ..
                }),
            )
            | (Task::View(_), _) => {}
            (
                Task::Destroy(DestroyArgs { pid: Some(pid), .. }),
                Some(Report { failure: None, .. }),
            ) => {
                self.children.ended(*pid);
                self.reap_children()?;
            }
            _ => {
                let ends = self.children.sweep();
                self.reaped(ends)?;
            }
        }
        match (task, report) {
            (
                Task::Launch(plan),
                Some(Report {
                    launched: Some(launched),
                    ..
                }),
            ) => self.launched(&plan, launched, view_server, origin),
            (Task::Launch(plan), None) => {
                let detail = "the process that carried out the launch died".to_string();
                let failure = LaunchFailure {
                    step: "worker".into(),
                    errno: None,
                    detail,
                };
                self.workers
                    .running
                    .retain(|worker| worker.task.sandbox() != plan.sandbox);
                self.enqueue(Task::CleanUp(clean_up(&plan), failure), origin)
            }
            // Nobody waits: a launch of it that comes now is carried out as any other.
            (Task::Prepare(plan), report) => self.not_prepared(&plan, report),
            (Task::CleanUp(_, failure), _) => self.fail(origin, &failure),
            (Task::Empty(trash), report) => {
                // Nobody waits. What resists is tried again with the next that comes there.
                if let Some(failure) = report.and_then(|report| report.failure) {
                    eprintln!("dsec-launch: {}: {}", trash.display(), failure.detail);
                }
                Ok(())
            }
            (
                Task::View(given),
                Some(Report {
                    failure: Some(failure),
                    ..
                }),
            ) => self.not_given(&given, &failure, origin),
            (
                _,
                Some(Report {
                    failure: Some(failure),
                    ..
                }),
            ) => self.fail(origin, &failure),
            (Task::Destroy(_), Some(Report { trash, .. })) => {
                trash.map_or(Ok(()), |trash| self.empty(trash))?;
                self.succeed(origin, Nothing {})
            }
            (Task::View(given), Some(_)) => self.given(given, origin),
            (_, _) => {
                let detail = "the process that did it died".to_string();
                self.fail(
                    origin,
                    &LaunchFailure {
                        step: "worker".into(),
                        errno: None,
                        detail,
                    },
                )
            }
        }
    }

    fn launched(
        &mut self,
        plan: &LaunchPlan,
        launched: Launched,
        view_server: Option<i32>,
        origin: Origin,
    ) -> Result<()> {
        if self.setting.views.is_stale(plan.view.as_ref(), view_server) {
            self.viewed = None; // lxcfs has come or gone while it was launched
        }
        match self
            .setting
            .sandboxes
            .add(Record::new(plan, &launched, view_server))
        {
            Ok(ended) => {
                self.succeed(origin, launched)?;
                ended.map_or(Ok(()), |event| self.tell(&event))
            }
            // Without a record its layers could be taken away under it after our death.
            Err(error) => {
                let (pid, start_ticks) = (Some(launched.pid), Some(launched.start_ticks));
                let args = DestroyArgs {
                    pid,
                    start_ticks,
                    ..clean_up(plan)
                };
                self.enqueue(Task::CleanUp(args, error.into_failure("record")), origin)
            }
        }
    }

    fn serve_requests(&mut self) -> Result<()> {
        let ids: Vec<u64> = self
            .connections
            .iter()
            .map(|connection| connection.id)
            .collect();
        for connection in ids {
            for message in self.connections.receive(connection) {
                self.request(connection, &message)?;
            }
        }
        Ok(())
    }

    fn request(&mut self, connection: u64, message: &[u8]) -> Result<()> {
        let (request, op) = match wire::decode_head(message) {
            Ok(head) => (head.id, head.op),
            Err(error) => {
                return self.fail(
                    Origin {
                        connection,
                        request: 0,
                    },
                    &error.into_failure("request"),
                )
            }
        };
        let origin = Origin {
            connection,
            request,
        };
        let done = match op.as_str() {
            "hello" => self.hello(origin, message),
            "filter" => self.filter(origin, message),
            "layer_mount" => self.layer_mount(origin, message),
            "layer_unmount" => self.layer_unmount(origin, message),
            "launch" => {
                wire::decode_args(message).and_then(|plan| self.launch(plan, message, origin))
            }
            "prepare" => wire::decode_args(message).and_then(|plan| self.prepare(plan, origin)),
            "destroy" => wire::decode_args(message).and_then(|args: DestroyArgs| {
                self.let_go_of(&args.sandbox);
                self.enqueue(Task::Destroy(args), origin)
            }),
            "claim" => self.claim(origin, message),
            "tidy" => self.tidy(origin, message),
            "view" => self.view(origin, message),
            "list" => self.list(origin, message),
            "shutdown" => wire::decode_args(message).and_then(|Nothing {}| {
                self.stopping = true;
                self.succeed(origin, Nothing {})
            }),
            op => Err(Error::Refused {
                why: format!("no operation {op:?}"),
                errno: libc::ENOSYS,
            }),
        };
        let step = match op.as_str() {
            "launch" | "prepare" | "destroy" => "check",
            "hello" => "version",
            op => op,
        };
        done.or_else(|error| self.fail(origin, &error.into_failure(step)))
    }

    fn hello(&mut self, origin: Origin, message: &[u8]) -> Result<()> {
        let wire::HelloArgs { version } = wire::decode_args(message)?;
        if version != LAUNCH_VERSION {
            return Err(Error::Invalid(format!(
                "version {version}; this launcher speaks {LAUNCH_VERSION}"
            )));
        }
        let agent_digest = self.setting.agent.digest.clone();
        let answer = wire::HelloAnswer {
            version: LAUNCH_VERSION,
            pid: std::process::id(),
            agent_digest: &agent_digest,
            views: true,
            no_live_view: self.setting.views.lxcfs().missing(),
            light: true,
            keeps_cgroups: true,
            prepares: true,
        };
        self.succeed(origin, answer)
    }

    fn filter(&mut self, origin: Origin, message: &[u8]) -> Result<()> {
        let wire::FilterArgs { name, spec } = wire::decode_args(message)?;
        check_name(&name)?;
        if !self.filters.contains_key(&name) {
            if self.filters.len() == FILTERS_MAX {
                let why = format!("{FILTERS_MAX} filters are kept already");
                return Err(Error::Refused {
                    why,
                    errno: libc::ENOSPC,
                });
            }
            self.filters.insert(name, compile(&spec)?);
        }
        self.succeed(origin, Nothing {})
    }

    fn layer_mount(&mut self, origin: Origin, message: &[u8]) -> Result<()> {
        self.setting.layers.mount(&wire::decode_args(message)?)?;
        self.succeed(origin, Nothing {})
    }

    fn layer_unmount(&mut self, origin: Origin, message: &[u8]) -> Result<()> {
        let wire::LayerRef { digest } = wire::decode_args(message)?;
        // The kernel would not mind, since an overlay has copies of its own; but mounting the layer again would be a second
        // superblock, with a page cache of its own.
        if self.setting.sandboxes.uses_layer(&digest)
            || self.workers.lowers().any(|lower| *lower == digest)
        {
            return Err(Error::Refused {
                why: format!("layer {digest} is in use"),
                errno: libc::EBUSY,
            });
        }
        self.setting.layers.unmount(&digest)?;
        self.succeed(origin, Nothing {})
    }

    /// At once: it is a few system calls, and somebody waits for the sandbox.
    fn claim(&mut self, origin: Origin, message: &[u8]) -> Result<()> {
        claim(
            self.setting.system,
            &self.setting.own_names,
            &wire::decode_args(message)?,
        )?;
        self.succeed(origin, Nothing {})
    }

    /// What an earlier daemon has not come round to.
    fn tidy(&mut self, origin: Origin, message: &[u8]) -> Result<()> {
        let wire::TidyArgs { sandboxes } = wire::decode_args(message)?;
        check_path(&sandboxes)?;
        self.empty(trash::trash_in(Path::new(&sandboxes)))?;
        self.succeed(origin, Nothing {})
    }

    /// One task that has not begun takes whatever comes before it does.
    fn empty(&mut self, trash: PathBuf) -> Result<()> {
        if self.workers.will_empty(&trash) {
            return Ok(());
        }
        let nobody = Origin {
            connection: 0,
            request: 0,
        };
        self.workers.add(Task::Empty(trash), nobody)
    }

    fn list(&mut self, origin: Origin, message: &[u8]) -> Result<()> {
        let wire::ListArgs { after } = wire::decode_args(message)?;
        let first = after.is_none();
        let (sandboxes, more) = self
            .setting
            .sandboxes
            .list(&after.unwrap_or_default(), LISTED_MAX);
        let listed = wire::Listed {
            sandboxes,
            more,
            layers: match first {
                true => self.setting.layers.list()?,
                false => Vec::new(),
            },
            filters: match first {
                true => self.filters.keys().cloned().collect(),
                false => Vec::new(),
            },
        };
        self.succeed(origin, listed)
    }

    fn enqueue(&mut self, task: Task, origin: Origin) -> Result<()> {
        check_name(task.sandbox())?;
        self.workers.add(task, origin)
    }

    fn succeed<T: Serialize>(&mut self, origin: Origin, ok: T) -> Result<()> {
        let message = wire::encode_ok(origin.request, &ok);
        self.connections.reply(origin.connection, message);
        Ok(())
    }

    fn fail(&mut self, origin: Origin, failure: &LaunchFailure) -> Result<()> {
        let message = wire::encode_error(origin.request, failure);
        self.connections.reply(origin.connection, message);
        Ok(())
    }

    fn tell(&mut self, event: &ExitEvent) -> Result<()> {
        self.connections.event(wire::encode_event(event)?);
        Ok(())
    }
}

/// What removes all that a launch may have made. The state directory stays: what was in it before is not known any more.
pub(super) fn clean_up(plan: &LaunchPlan) -> DestroyArgs {
    DestroyArgs {
        sandbox: plan.sandbox.clone(),
        directory: Some(plan.directory.clone()),
        remove_directory: false,
        socket: Some(plan.socket.clone()),
        cgroup2: plan.cgroup2.clone(),
        cgroup1: plan.cgroup1.clone(),
        ..DestroyArgs::default()
    }
}
