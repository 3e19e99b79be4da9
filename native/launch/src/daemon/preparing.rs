//! Sandboxes that are made ahead, as far as that goes without knowing what will run in them: each in a worker that waits.

use std::os::fd::{AsFd, AsRawFd};

use dsec_sys::passing::message_pair;
use dsec_sys::seqpacket::send;

use super::{clean_up, Daemon};
use crate::error::{Doing, Error, Result};
use crate::prepare::{prepare, serves, Order};
use crate::steps::check::{check, check_name};
use crate::steps::Job;
use crate::wire::{DestroyArgs, LaunchFailure, LaunchPlan, Nothing};
use crate::workers::{Origin, Report, Task, OURSELVES};

/// Each is two processes that wait, and takes part in each turn of the daemon.
const PREPARED_MAX: usize = 64;

impl Daemon<'_> {
    /// Begins to make one ahead, and answers at once. It lasts as long as the connection that has asked for it.
    pub(super) fn prepare(&mut self, plan: Box<LaunchPlan>, origin: Origin) -> Result<()> {
        check_name(&plan.sandbox)?;
        check(&plan)?;
        if !serves(&plan, &plan) {
            return Err(Error::Invalid(
                "light ones, kept cgroups and disks of their own cannot be prepared".into(),
            ));
        }
        let known = self.setting.sandboxes.contains(&plan.sandbox);
        if known || self.workers.are_at(&plan.sandbox) {
            return Err(Error::Refused {
                why: format!("{} is there already", plan.sandbox),
                errno: libc::EEXIST,
            });
        }
        let there = self.workers.running.iter();
        let there = there.filter(|worker| matches!(worker.task, Task::Prepare(_)));
        if there.count() >= PREPARED_MAX {
            return Err(Error::Refused {
                why: format!("{PREPARED_MAX} are prepared already"),
                errno: libc::EAGAIN,
            });
        }
        let filter_agent = self.compiled(&plan.filter_agent)?;
        let filter_agent = filter_agent.map(<[_]>::to_vec);
        let sysfs = self.setting.sysfs.tree(&plan.masks)?;
        let fail_step = self.fail_step();
        let (ours, theirs) = message_pair().doing("make", "a pair of sockets")?;
        let setting = &self.setting;
        let system = setting.system;
        let kept = [
            setting.host_mounts.as_raw_fd(),
            setting.bare_mounts.as_raw_fd(),
            setting.agent.file.as_raw_fd(),
            theirs.as_raw_fd(),
        ];
        let kept: Vec<_> = kept.into_iter().chain(system.descriptor()).collect();
        let task = Task::Prepare(plan);
        self.workers
            .start(task, origin, &setting.lock, &kept, |task| {
                let Task::Prepare(plan) = task else {
                    return Report::default();
                };
                let job = Job {
                    fail_step,
                    ..setting.job(plan, filter_agent.as_deref(), sysfs)
                };
                prepare(system, &job, &theirs)
            })?;
        self.workers.note_channel(ours);
        self.succeed(origin, Nothing {})
    }

    /// By the worker that has made it ahead, if there is one; else by a new one.
    pub(super) fn launch(
        &mut self,
        plan: Box<LaunchPlan>,
        message: &[u8],
        origin: Origin,
    ) -> Result<()> {
        let Some(index) = self.workers.prepared(&plan.sandbox) else {
            return self.enqueue(Task::Launch(plan), origin);
        };
        // Whatever happens now, it is used or not wanted any more.
        let channel = self.workers.running[index].channel.take();
        let serves = match &self.workers.running[index].task {
            Task::Prepare(made) => serves(made, &plan),
            _ => false,
        };
        let (Some(channel), true) = (channel, serves) else {
            return self.enqueue(Task::Launch(plan), origin);
        };
        let parts = self.parts(&plan)?;
        let view_server = parts.view.server;
        let order = Order::new(
            message,
            parts.lowers,
            parts.filter_exec,
            &parts.view,
            parts.fail_step,
        );
        let sent = order
            .encode()
            .is_some_and(|order| send(channel.as_fd(), &order).is_ok());
        if !sent {
            // It takes back what it has made, and only then the launch begins.
            return self.enqueue(Task::Launch(plan), origin);
        }
        let worker = &mut self.workers.running[index];
        worker.task = Task::Launch(plan);
        worker.origin = origin;
        worker.view_server = view_server;
        Ok(())
    }

    /// It is not wanted any more: its worker takes it back, and whatever else is to be done with it waits for that.
    pub(super) fn let_go_of(&mut self, sandbox: &str) {
        if let Some(index) = self.workers.prepared(sandbox) {
            self.workers.running[index].channel = None;
        }
    }

    /// Those whose connection is gone, or all of them when this daemon is about to end.
    pub(super) fn let_go_of_prepared(&mut self) {
        let (connections, stopping) = (&self.connections, self.stopping);
        for worker in &mut self.workers.running {
            let asked = worker.origin.connection;
            if worker.channel.is_some()
                && (stopping || !connections.iter().any(|open| open.id == asked))
            {
                worker.channel = None;
            }
        }
    }

    /// The worker has ended without a launch.
    pub(super) fn not_prepared(&mut self, plan: &LaunchPlan, report: Option<Report>) -> Result<()> {
        match report {
            Some(Report {
                failure: Some(failure),
                ..
            }) => {
                eprintln!(
                    "dsec-launch: {} could not be prepared: {}: {}",
                    plan.sandbox, failure.step, failure.detail
                );
                Ok(())
            }
            Some(_) => Ok(()),
            None => {
                let failure = LaunchFailure {
                    step: "worker".into(),
                    errno: None,
                    detail: "the process that prepared it died".into(),
                };
                let args = DestroyArgs {
                    remove_directory: true, // nobody has ever used it
                    ..clean_up(plan)
                };
                self.enqueue(Task::CleanUp(args, failure), OURSELVES)
            }
        }
    }
}
