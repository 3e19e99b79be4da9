//! One launch, from plan to agent, in a process of its own: all or nothing.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use dsec_sys::namespaces::{Clone, Origin, Side, NEW_PID, NEW_USER};

use crate::error::{Doing, Error, Result};
use crate::process::{self, ProcessStat};
use crate::steps::cgroups::{self, Cgroups};
use crate::steps::check::{check, IDS_PER_SANDBOX};
use crate::steps::inside::{self, Inside};
use crate::steps::volumes::{self, Volume};
use crate::steps::{root, state, view, Clock, Job, Step};
use crate::system::System;
use crate::undo::{Made, Undo};
use crate::wire::{LaunchFailure, Launched};

/// How long a new process may take for its own steps. Far more than it ever needs: this only ends a hang.
const INSIDE_MAX: Duration = Duration::from_secs(30);
const OWN_MOUNTS: &str = "/proc/self/ns/mnt";

/// Carries the plan out. When it fails, everything that was made is taken back first.
pub fn launch(system: &dyn System, job: &Job) -> std::result::Result<Launched, LaunchFailure> {
    let began = Instant::now();
    let mut clock = Clock::start(job.fail_step.clone());
    let mut undo = Undo::default();
    match carry_out(system, job, &mut clock, &mut undo) {
        Ok(mut launched) => {
            undo.keep();
            launched
                .steps_us
                .insert("total".into(), began.elapsed().as_micros() as u64);
            Ok(launched)
        }
        Err(error) => {
            let mut failure = error.into_failure(clock.step().name());
            let left = roll_back(system, job, &mut undo);
            if !left.is_empty() {
                failure.detail = format!("{}; left behind: {}", failure.detail, left.join(", "));
            }
            Err(failure)
        }
    }
}

/// Takes everything back from where and as who it was made.
fn roll_back(system: &dyn System, job: &Job, undo: &mut Undo) -> Vec<String> {
    let mut left = Vec::new();
    let back = system
        .act_as(0)
        .and_then(|()| system.enter_mounts(job.host_mounts.as_fd()));
    left.extend(back.err().map(|error| format!("way back: {error}")));
    left.extend(undo.roll_back(system));
    left
}

fn carry_out(
    system: &dyn System,
    job: &Job,
    clock: &mut Clock,
    undo: &mut Undo,
) -> Result<Launched> {
    let plan = job.plan;
    clock.begin(Step::Check)?;
    check(plan)?;
    clock.begin(Step::Cgroups)?;
    let cgroups = cgroups::make(system, plan, undo)?;
    clock.begin(Step::Socket)?;
    let socket = state::listen(system, plan, undo)?;

    clock.begin(Step::Clone)?;
    let covers = view::collect(system, &job.view.sources)?;
    let own = leave_host(system, job)?;
    clock.begin(Step::CgroupsV1)?;
    let given = Given {
        cgroups: &cgroups,
        socket: &socket,
        covers: &covers,
    };
    let (mut child, materials) = clone(system, job, clock, &given, &own, undo)?;
    drop((socket, covers));
    let built = build(system, job, clock, &cgroups, materials, &child);
    // A process that has failed on its own says why better than we, who only see that it no longer listens.
    let said = match built {
        Ok(()) => {
            clock.begin(Step::Agent)?;
            listen_to(system, &mut child)?
        }
        Err(error) => return Err(own_failure(system, &mut child).unwrap_or(error)),
    };
    if let Some(failure) = said.failure {
        return Err(failure);
    }
    let stat = running(system, &child)?;
    clock.end();
    let mut steps_us: std::collections::BTreeMap<String, u64> = clock
        .spent_us
        .iter()
        .map(|(name, &spent)| (name.to_string(), spent))
        .collect();
    for (step, spent) in said
        .times
        .into_iter()
        .filter(|(step, _)| *step != Step::Check)
    {
        steps_us.insert(step.name().into(), spent);
    }
    Ok(Launched {
        pid: child.pid,
        start_ticks: stat.start_ticks,
        cgroup_id: cgroups.inode,
        steps_us,
        view: job.view.kind,
    })
}

/// Into a mount namespace of this launch alone, and into the sandbox's range: as its owner everything from here on is made,
/// and limits that the kernel keeps by user are the sandbox's own (ruling 14). Gives the namespace.
fn leave_host(system: &dyn System, job: &Job) -> Result<OwnedFd> {
    system
        .enter_mounts(job.bare_mounts.as_fd())
        .doing("enter", "the bare mount namespace")?;
    system
        .unshare(dsec_sys::namespaces::NEW_MOUNT)
        .doing("make", "a mount namespace")?;
    let own = system
        .open_namespace(Path::new(OWN_MOUNTS))
        .doing_to("open", Path::new(OWN_MOUNTS))?;
    if job.plan.light {
        // The new process, which is not to see the host's, makes its own later.
        for (namespace, kind) in [
            (job.lobby.network, dsec_sys::namespaces::NEW_NET),
            (job.lobby.ipc, dsec_sys::namespaces::NEW_IPC),
        ] {
            system
                .enter(namespace, kind)
                .doing("enter", "the namespaces of light sandboxes")?;
        }
    }
    system
        .act_as(job.plan.id_base)
        .doing("act as", job.plan.id_base)?;
    Ok(own)
}

/// What the tree is made of.
struct Materials<'a> {
    parts: root::Parts,
    volumes: Vec<Volume<'a>>,
}

/// Back on the host for a moment, and as its root.
fn collect<'a>(
    system: &dyn System,
    job: &Job<'a>,
    clock: &mut Clock,
    own: &OwnedFd,
    undo: &mut Undo,
) -> Result<Materials<'a>> {
    clock.begin(Step::Directories)?;
    system.act_as(0).doing("act as", "root")?;
    system
        .enter_mounts(job.host_mounts.as_fd())
        .doing("enter", "the host's mount namespace")?;
    let holder = state::make(system, job.plan, undo)?;
    clock.begin(Step::Clone)?;
    let parts = root::collect(system, job, &holder)?;
    let volumes = volumes::collect(system, job)?;
    system
        .enter_mounts(own.as_fd())
        .doing("enter", "the launch's mount namespace")?;
    system
        .act_as(job.plan.id_base)
        .doing("act as", job.plan.id_base)?;
    clock.begin(Step::CgroupsV1)?;
    Ok(Materials { parts, volumes })
}

/// The new process, as seen from here.
struct Child {
    pid: i32,
    process: OwnedFd,
    go: OwnedFd,
    report: OwnedFd,
}

/// What the new process inherits, besides its pipes: nothing else of the sandbox's that is open by then, or it would keep it.
struct Given<'a> {
    cgroups: &'a Cgroups,
    socket: &'a OwnedFd,
    covers: &'a [view::Cover],
}

/// While it comes to be, what its tree is made of is collected.
fn clone<'a>(
    system: &dyn System,
    job: &Job<'a>,
    clock: &mut Clock,
    given: &Given,
    own: &OwnedFd,
    undo: &mut Undo,
) -> Result<(Child, Materials<'a>)> {
    let cgroups = given.cgroups;
    let (go_read, go_write) = system.pipe().doing("make", "a pipe")?;
    let (report_read, report_write) = system.pipe().doing("make", "a pipe")?;
    let tasks: Vec<_> = cgroups.v1_tasks.iter().map(|fd| fd.as_fd()).collect();
    // Not from agent/, or what is inside would not see its own work/.
    let origin = Origin {
        cgroup: cgroups.directory.as_ref().map(|fd| fd.as_fd()),
        tasks: &tasks,
    };
    let how = Clone {
        namespaces: NEW_USER | NEW_PID,
        cgroup: cgroups.agent.as_ref().map(|fd| fd.as_fd()),
        sibling: true, // a child of the daemon, which outlives this process
    };
    let mut materials = None;
    let side = system.clone(&origin, &how, &mut || {
        materials = Some(collect(system, job, clock, own, undo));
    });
    // What went wrong first is what is told.
    let materials = match materials.transpose() {
        Err(error) => {
            if let Ok(Side::Parent { pidfd, .. }) = side {
                undo.add(Made::Process(pidfd));
            }
            return Err(error);
        }
        Ok(materials) => materials,
    };
    match side.doing("clone", "the new process")? {
        Side::Child => {
            drop((go_write, report_read));
            let cgroup = cgroups.directory.as_ref();
            inside::run(
                system,
                Inside {
                    job,
                    go: go_read,
                    report: report_write,
                    socket: given.socket,
                    cgroup,
                    view: given.covers,
                },
            )
        }
        Side::Parent { pid, pidfd } => {
            let process = pidfd.try_clone().doing("duplicate", "a descriptor")?;
            undo.add(Made::Process(pidfd));
            let child = Child {
                pid,
                process,
                go: go_write,
                report: report_read,
            };
            let missing = || Error::Invalid("nothing was collected".into());
            Ok((child, materials.ok_or_else(missing)?))
        }
    }
}

/// What is done from outside while the new process makes its namespaces: its ids first, then its tree.
fn build(
    system: &dyn System,
    job: &Job,
    clock: &mut Clock,
    cgroups: &Cgroups,
    materials: Materials,
    child: &Child,
) -> Result<()> {
    let Materials { parts, volumes } = materials;
    clock.begin(Step::Maps)?;
    let map = format!("0 {} {IDS_PER_SANDBOX}", job.plan.id_base);
    for name in ["uid_map", "gid_map"] {
        let path = PathBuf::from(format!("/proc/{}/{name}", child.pid));
        system
            .write_file(&path, map.as_bytes())
            .doing_to("write to", &path)?;
    }
    let users = root::users_of(system, child.pid)?;
    system
        .write(child.go.as_fd(), b"m")
        .doing("start", "the new process")?;

    clock.begin(Step::Cgroups)?;
    // As the host's root, so that limits, which are files of the same directory, do not become the sandbox's.
    system.act_as(0).doing("act as", "root")?;
    cgroups::delegate(system, job.plan, cgroups)?;
    system
        .act_as(job.plan.id_base)
        .doing("act as", job.plan.id_base)?;
    clock.begin(Step::Overlay)?;
    let tree = root::overlay(system, &parts, &users, job.layers_by_name)?;
    if !volumes.is_empty() {
        clock.begin(Step::Volumes)?;
        volumes::attach(system, &volumes, &users, &tree)?;
        drop(volumes);
    }
    clock.begin(Step::Binds)?;
    root::scratch(system, job.plan, &tree)?;
    root::binds(system, job.plan, &tree)?;
    clock.begin(Step::Etc)?;
    root::etc(system, job.plan, &tree)?;
    clock.begin(Step::Proc)?;
    let proc = root::proc(system, &tree, child.process.as_fd())?;
    clock.begin(Step::Masks)?;
    root::masks(system, job.plan, &proc)?;
    system
        .write(child.go.as_fd(), b"r")
        .doing("start", "the new process")?;
    // They go when this process ends, which nobody waits for.
    std::mem::forget(parts);
    Ok(())
}

/// Everything that the new process says until its end of the pipe is closed: by success, or by its end.
fn listen_to(system: &dyn System, child: &mut Child) -> Result<inside::Said> {
    let deadline = Instant::now() + INSIDE_MAX;
    let mut bytes = Vec::new();
    loop {
        let rest = deadline.saturating_duration_since(Instant::now());
        system
            .wait_readable(child.report.as_fd(), rest)
            .doing("wait for", "the new process")?;
        let mut part = [0; 1024];
        match system
            .read(child.report.as_fd(), &mut part)
            .doing("listen to", "the new process")?
        {
            0 => return Ok(inside::decode(&bytes)),
            length => bytes.extend_from_slice(&part[..length]),
        }
    }
}

/// Why the new process failed, if it did so on its own. It is ended first: then its report is complete.
fn own_failure(system: &dyn System, child: &mut Child) -> Option<Error> {
    // It may have ended already, which is what we want to learn.
    let _ = system.kill(child.process.as_fd());
    listen_to(system, child).ok()?.failure
}

/// The facts of the process, which must be the agent by now: an end looks like success from the pipe alone.
fn running(system: &dyn System, child: &Child) -> Result<ProcessStat> {
    let path = process::stat_path(child.pid);
    let text = system.read_file(&path).doing_to("read", &path)?;
    let stat = process::parse_stat(&text)
        .ok_or_else(|| Error::Invalid(format!("{}: not understood", path.display())))?;
    match stat.exiting {
        false => Ok(stat),
        true => Err(Error::Vanished),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::{Fake, Parts};

    #[test]
    fn what_later_steps_need_comes_first() {
        let (parts, system) = (Parts::new(), Fake::new(None));

        let launched = launch(&system, &parts.job(None)).unwrap();

        assert_eq!(
            (launched.pid, launched.start_ticks, launched.cgroup_id),
            (4242, 777, 7)
        );
        let order = [
            "make_dir /cg2/s",
            "write_file /cg2/s/pids.max",
            "write_file /cg1/cpuset/s/cpuset.",
            "write_file /cg1/cpuset/s/a",
            "listen",
            "enter_mounts",
            "act_as 1879048192",
            "clone",
            "make_dir /state/s ",
            "attach_at \"/state/s/disk\"",
            "make_dir /state/s/disk/upper",
            "clone_mount \"/layers/base\"",
            "cloned",
            "write_file /proc/4242/uid_map 0 1879048192 65536",
            "open_namespace /proc/4242/ns/user",
            "write m",
            "map_ids",
            "make_mount \"overlay\" 0x4",
            "attach_at \"/root\"",
            "resolve \"/data\"",
            "resolve \"/data/in\"",
            "resolve \"/usr\"",
            "resolve \"/usr/bin\"",
            "resolve \"/usr/bin/tool\"",
            "resolve \"/etc/hosts\"",
            "make_proc 0xe",
            "bind \"/empty/directory\" \"kcore\"",
            "write r",
            "read_file /proc/4242/stat",
        ];
        let places: Vec<usize> = order
            .iter()
            .map(|call| match *call {
                "clone" => system
                    .log
                    .borrow()
                    .iter()
                    .position(|entry| entry == "clone")
                    .unwrap(),
                call => system.place(call),
            })
            .collect();
        assert!(
            places.windows(2).all(|pair| pair[0] < pair[1]),
            "{places:?} {:#?}",
            system.log.borrow()
        );
        assert!(
            system.place("write_file /cg1/cpuset/s/a")
                > system.place("write_file /cg1/cpuset/s/cpuset.mems")
        );
    }

    #[test]
    fn a_kept_cgroup_is_taken_as_it_is() {
        let (parts, system) = (Parts::with_kept_cgroup(), Fake::new(None));

        launch(&system, &parts.job(None)).unwrap();

        let (renamed, joined) = (
            system.place("rename /cg1/cpuset/kept"),
            system.place("open /cg1/cpuset/s/tasks"),
        );
        assert!(renamed < joined);
        let log = system.log.borrow();
        let touched = |call: &str| log.iter().any(|entry| entry.starts_with(call));
        assert!(!touched("make_dir /cg1/cpuset") && !touched("write_file /cg1/cpuset"));
        assert!(touched("make_dir /cg1/memory/s"));
    }

    #[test]
    fn a_light_sandbox_begins_in_namespaces_that_are_nobodys() {
        let (parts, system) = (Parts::light(), Fake::new(None));

        launch(&system, &parts.job(None)).unwrap();

        let (network, ipc) = (
            system.place("enter 0x40000000"),
            system.place("enter 0x8000000"),
        );
        let clone = system
            .log
            .borrow()
            .iter()
            .position(|entry| entry == "clone");
        assert!(Some(network.max(ipc)) < clone);
    }

    #[test]
    fn layers_by_name_are_in_sight_only_while_the_overlay_is_made() {
        let (parts, system) = (Parts::new(), Fake::new(None));
        let job = Job {
            layers_by_name: true,
            ..parts.job(None)
        };

        launch(&system, &job).unwrap();

        let order = [
            "act_as 1879048192",
            "attach_at \"/scratch\"",
            "make_mount \"overlay\"",
            "detach_at /scratch",
            "attach_at \"/root\"",
        ];
        let places: Vec<usize> = order.iter().map(|call| system.place(call)).collect();
        assert!(
            places.windows(2).all(|pair| pair[0] < pair[1]),
            "{places:?} {:#?}",
            system.log.borrow()
        );
    }

    #[test]
    fn no_process_is_moved_by_a_list_of_processes() {
        let (parts, system) = (Parts::new(), Fake::new(None));

        launch(&system, &parts.job(None)).unwrap();

        let log = system.log.borrow();
        let moving =
            |entry: &&String| entry.contains("cgroup.procs") && !entry.starts_with("change_owner");
        assert_eq!(log.iter().find(moving), None);
        assert!(log
            .iter()
            .any(|entry| entry == "open /cg1/cpuset/s/tasks Write"));
    }

    #[test]
    fn limits_are_not_given_away() {
        let (parts, system) = (Parts::new(), Fake::new(None));

        launch(&system, &parts.job(None)).unwrap();

        let log = system.log.borrow();
        let given: Vec<&String> = log
            .iter()
            .filter(|entry| entry.starts_with("change_owner"))
            .collect();
        let good = |entry: &str| {
            let path = entry.split(' ').nth(1).unwrap();
            let file = path.rsplit('/').next().unwrap();
            matches!(
                file,
                "" | "work" | "cgroup.procs" | "cgroup.threads" | "cgroup.subtree_control"
            )
        };
        assert!(
            given.iter().all(|entry| good(entry)) && given.len() == 8,
            "{given:?}"
        );
    }

    #[test]
    fn a_launch_that_fails_at_any_call_leaves_nothing() {
        for layers_by_name in [false, true] {
            fails_at_every_call(Parts::new(), layers_by_name);
        }
        fails_at_every_call(Parts::light(), false);
        fails_at_every_call(Parts::with_kept_cgroup(), false);
    }

    fn fails_at_every_call(parts: Parts, layers_by_name: bool) {
        let mut number = 0;
        loop {
            let system = Fake::new(Some(number));
            let job = Job {
                layers_by_name,
                ..parts.job(None)
            };
            let result = launch(&system, &job);
            if !system.has_failed() {
                assert!(result.is_ok());
                break;
            }
            let failure = result.unwrap_err();
            assert_eq!(
                failure.errno.as_deref(),
                Some("EIO"),
                "call {number}: {failure:?}"
            );
            let left = system.things.borrow();
            assert!(
                left.is_empty(),
                "call {number} leaves {left:?} of {:#?}",
                system.log.borrow()
            );
            number += 1;
        }
        assert!(number > 80, "only {number} calls");
    }

    #[test]
    fn the_failing_step_is_named() {
        let outside =
            "check cgroups directories socket clone cgroups_v1 maps overlay volumes binds etc proc masks agent";
        for name in outside.split(' ') {
            let (parts, system) = (Parts::new(), Fake::new(None));

            let failure = launch(&system, &parts.job(Some(name))).unwrap_err();

            assert_eq!(
                (failure.step.as_str(), failure.errno.as_deref()),
                (name, Some("EIO"))
            );
            assert!(
                system.things.borrow().is_empty(),
                "{name} leaves {:?}",
                system.things.borrow()
            );
        }
    }
}
