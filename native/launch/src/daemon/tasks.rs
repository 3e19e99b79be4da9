//! Tasks begin, each in a worker of its own.

use dsec_sys::seccomp::filter_bytes;

use super::{Daemon, FAIL_STEP};
use crate::agent;
use crate::destroy::destroy;
use crate::error::{Error, Result};
use crate::launch::launch;
use crate::steps::Job;
use crate::trash;
use crate::workers::{Origin, Report, Task, OURSELVES};

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
        let plan = match &task {
            Task::Launch(plan) => plan,
            Task::Destroy(_) | Task::CleanUp(..) | Task::View(_) => {
                self.setting.sandboxes.count_oom_kills(task.sandbox());
                return self
                    .workers
                    .start(task, origin, &self.setting.lock, |task| match task {
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
                    .start(task, origin, &self.setting.lock, |task| match task {
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
        let mut lowers = vec![self.setting.layers.skeleton(&plan.etc_files)?];
        for digest in &plan.lowers {
            lowers.push(self.setting.layers.find(digest)?);
        }
        let filter = |name: &Option<String>| match name {
            None => Ok(None),
            Some(name) => match self.filters.get(name) {
                Some(filter) => Ok(Some(filter.as_slice())),
                None => Err(Error::Refused {
                    why: format!("no filter {name}"),
                    errno: libc::ENOENT,
                }),
            },
        };
        let filter_agent = filter(&plan.filter_agent)?;
        let config = agent::config(
            plan,
            filter(&plan.filter_exec)?
                .map(filter_bytes)
                .unwrap_or_default(),
        )?;
        let fail_step = self.fail_step();
        let sysfs = self.setting.sysfs.tree(&plan.masks)?;
        let view = self.setting.views.show(plan.view.as_ref())?;
        let view_server = view.server;
        let setting = &self.setting;
        self.workers
            .start(task, origin, &setting.lock, move |task| {
                let Task::Launch(plan) = task else {
                    return Report::default();
                };
                let job = Job {
                    plan,
                    host_mounts: &setting.host_mounts,
                    bare_mounts: &setting.bare_mounts,
                    layers_by_name: setting.layers_by_name,
                    agent: &setting.agent.file,
                    lowers,
                    filter_agent,
                    sysfs,
                    lobby: setting.sysfs.lobby(),
                    view,
                    config,
                    fail_step,
                };
                match launch(system, &job) {
                    Ok(launched) => Report {
                        launched: Some(launched),
                        failure: None,
                        trash: None,
                    },
                    Err(failure) => Report {
                        launched: None,
                        failure: Some(failure),
                        trash: None,
                    },
                }
            })?;
        self.workers.note_view(view_server);
        Ok(())
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
