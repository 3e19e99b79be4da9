//! Tasks begin, each in a worker of its own.

use std::path::PathBuf;

use dsec_sys::seccomp::{filter_bytes, Instruction};

use super::{Daemon, FAIL_STEP};
use crate::agent;
use crate::destroy::destroy;
use crate::error::{Error, Result};
use crate::launch::launch;
use crate::steps::Job;
use crate::trash;
use crate::view::Shown;
use crate::wire::LaunchPlan;
use crate::workers::{Origin, Report, Task, OURSELVES};

/// See `Daemon::parts`.
pub(super) struct Parts {
    /// Mount points of the layers, the lowest first, the skeleton before all.
    pub lowers: Vec<PathBuf>,
    /// The compiled filter of commands.
    pub filter_exec: Vec<u8>,
    pub view: Shown,
    pub fail_step: Option<String>,
}

impl Daemon<'_> {
    pub(super) fn start_workers(&mut self) -> Result<()> {
        while let Some((task, origin)) = self.workers.next() {
            if let Err(error) = self.start(task, origin) {
                if origin == OURSELVES {
                    self.viewed = Some(self.setting.views.lxcfs().server());
                }
                self.fail(origin, &error.into_failure("check"))?;
            }
        }
        Ok(())
    }

    pub(super) fn start(&mut self, task: Task, origin: Origin) -> Result<()> {
        let mut task = match task {
            Task::View(given) => return self.start_view(given, origin),
            other => other,
        };
        let system = self.setting.system;
        if let Task::Destroy(args) = &mut task {
            // Who lost the answer of a launch does not know the process; we do.
            if let Some((pid, start_ticks)) = self.setting.sandboxes.process_of(&args.sandbox) {
                args.pid.get_or_insert(pid);
                args.start_ticks.get_or_insert(start_ticks);
            }
        }
        let plan =
            match &task {
                Task::Launch(plan) => plan,
                Task::Destroy(_) | Task::CleanUp(..) | Task::View(_) | Task::Prepare(_) => {
                    self.setting.sandboxes.count_oom_kills(task.sandbox());
                    return self
                        .workers
                        .start(task, origin, &self.setting.lock, &[], |task| match task {
                            Task::Destroy(args) | Task::CleanUp(args, _) => {
                                match destroy(system, args) {
                                    Ok(trash) => Report {
                                        trash,
                                        ..Report::default()
                                    },
                                    Err(failure) => Report {
                                        failure: Some(failure),
                                        ..Report::default()
                                    },
                                }
                            }
                            _ => Report::default(),
                        });
                }
                Task::Empty(_) => {
                    return self
                        .workers
                        .start(task, origin, &self.setting.lock, &[], |task| match task {
                            Task::Empty(trash) => Report {
                                failure: trash::empty(system, trash)
                                    .err()
                                    .map(|error| error.into_failure("trash")),
                                ..Report::default()
                            },
                            _ => Report::default(),
                        });
                }
            };
        if self.setting.sandboxes.contains(&plan.sandbox) {
            return Err(Error::Refused {
                why: format!("{} runs already", plan.sandbox),
                errno: libc::EEXIST,
            });
        }
        let filter_agent = self.compiled(&plan.filter_agent)?.map(<[_]>::to_vec);
        let parts = self.parts(plan)?;
        let config = agent::config(plan, parts.filter_exec)?;
        let sysfs = self.setting.sysfs.tree(&plan.masks)?;
        let view_server = parts.view.server;
        let setting = &self.setting;
        self.workers
            .start(task, origin, &setting.lock, &[], move |task| {
                let Task::Launch(plan) = task else {
                    return Report::default();
                };
                let job = Job {
                    lowers: parts.lowers,
                    view: parts.view,
                    config,
                    fail_step: parts.fail_step,
                    ..setting.job(plan, filter_agent.as_deref(), sysfs)
                };
                launch(system, &job).into()
            })?;
        self.workers.note_view(view_server);
        Ok(())
    }

    /// What a launch of this plan needs besides: looked up, or made once for all. Errors are the plan's.
    pub(super) fn parts(&mut self, plan: &LaunchPlan) -> Result<Parts> {
        let mut lowers = vec![self.setting.layers.skeleton(&plan.etc_files)?];
        for digest in &plan.lowers {
            lowers.push(self.setting.layers.find(digest)?);
        }
        let filter_exec = self.compiled(&plan.filter_exec)?;
        Ok(Parts {
            lowers,
            filter_exec: filter_exec.map(filter_bytes).unwrap_or_default(),
            view: self.setting.views.show(plan.view.as_ref())?,
            fail_step: self.fail_step(),
        })
    }

    pub(super) fn compiled(&self, name: &Option<String>) -> Result<Option<&[Instruction]>> {
        let Some(name) = name else {
            return Ok(None);
        };
        match self.filters.get(name) {
            Some(filter) => Ok(Some(filter)),
            None => Err(Error::Refused {
                why: format!("no filter {name}"),
                errno: libc::ENOENT,
            }),
        }
    }

    /// The step that the test hook makes fail: of the file, else of the environment.
    pub(super) fn fail_step(&self) -> Option<String> {
        if !self.setting.test_hooks {
            return None;
        }
        let file = std::fs::read_to_string(self.setting.run.join(FAIL_STEP)).ok();
        file.or_else(|| std::env::var("DSEC_LAUNCH_FAIL_STEP").ok())
            .map(|text| text.trim().to_string())
    }
}
