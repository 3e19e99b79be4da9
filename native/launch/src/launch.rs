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
use crate::system::{Access, System};
use crate::undo::{Made, Undo};
use crate::wire::{LaunchFailure, LaunchPlan, Launched};

/// How long a new process may take for its own steps. Far more than it ever needs: this only ends a hang.
const INSIDE_MAX: Duration = Duration::from_secs(30);
const OWN_MOUNTS: &str = "/proc/self/ns/mnt";

/// Carries the plan out. When it fails, everything that was made is taken back first.
pub fn launch(system: &dyn System, job: &Job) -> std::result::Result<Launched, LaunchFailure> {
    let began = Instant::now();
    let mut clock = Clock::start(job.fail_step.clone());
    let mut undo = Undo::default();
    let launched = begin(system, job, false, &mut clock, &mut undo).and_then(|(begun, copies)| {
        let copies = copies.ok_or_else(|| Error::Invalid("no mounts were copied".into()))?;
        finish(system, job, &mut clock, begun, copies)
    });
    conclude(system, job, launched, &clock, undo, began)
}

/// What was launched stays; of what could not be, nothing does.
pub fn conclude(
    system: &dyn System,
    job: &Job,
    launched: Result<Launched>,
    clock: &Clock,
    mut undo: Undo,
    began: Instant,
) -> std::result::Result<Launched, LaunchFailure> {
    match launched {
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
pub fn roll_back(system: &dyn System, job: &Job, undo: &mut Undo) -> Vec<String> {
    let mut left = Vec::new();
    let back = system
        .act_as(0)
        .and_then(|()| system.enter_mounts(job.host_mounts.as_fd()));
    left.extend(back.err().map(|error| format!("way back: {error}")));
    left.extend(undo.roll_back(system));
    left
}

/// A sandbox of which all is there that does not depend on what is to run in it.
pub struct Begun {
    pub cgroups: Cgroups,
    pub child: Child,
    /// The directory with `upper` and `work`.
    pub holder: PathBuf,
    /// The mount namespace of this launch.
    own: OwnedFd,
    users: OwnedFd,
    scratch: OwnedFd,
    proc: OwnedFd,
}

/// Makes what is the same whatever will run in it. `ahead`: what that is will be told later; else copies of its mounts are
/// taken, too.
pub fn begin<'a>(
    system: &dyn System,
    job: &Job<'a>,
    ahead: bool,
    clock: &mut Clock,
    undo: &mut Undo,
) -> Result<(Begun, Option<Copies<'a>>)> {
    let plan = job.plan;
    clock.begin(Step::Check)?;
    check(plan)?;
    clock.begin(Step::Cgroups)?;
    let cgroups = cgroups::make(system, plan, undo)?;
    clock.begin(Step::Socket)?;
    let socket = state::listen(system, plan, undo)?;

    clock.begin(Step::Clone)?;
    let covers = match ahead {
        true => Vec::new(),
        false => view::collect(system, &job.view.sources)?,
    };
    let own = leave_host(system, job)?;
    clock.begin(Step::CgroupsV1)?;
    let given = Given {
        ahead,
        cgroups: &cgroups,
        socket: &socket,
        covers: &covers,
    };
    let (mut child, (holder, copies)) = clone(system, job, clock, &given, &own, undo)?;
    drop((socket, covers));
    match surround(system, job, clock, &cgroups, &child) {
        Ok((users, scratch, proc)) => {
            if ahead {
                let told = system.pass(child.go.as_fd(), b"p", &[proc.as_fd()]);
                if let Err(error) = told.doing("start", "the new process") {
                    return Err(why(system, &mut child, error));
                }
            }
            let begun = Begun {
                cgroups,
                child,
                holder,
                own,
                users,
                scratch,
                proc,
            };
            Ok((begun, copies))
        }
        Err(error) => Err(why(system, &mut child, error)),
    }
}

/// Makes the rest, and the agent of the new process.
pub fn finish(
    system: &dyn System,
    job: &Job,
    clock: &mut Clock,
    begun: Begun,
    copies: Copies,
) -> Result<Launched> {
    let built = build(system, job, clock, &begun, copies);
    let Begun {
        cgroups,
        mut child,
        holder: _,
        own,
        users,
        scratch,
        proc,
    } = begun;
    let rest = (own, users, scratch, proc);
    // A process that has failed on its own says why better than we, who only see that it no longer listens.
    let said = match built {
        Ok(()) => {
            clock.begin(Step::Agent)?;
            listen_to(system, &mut child)?
        }
        Err(error) => return Err(why(system, &mut child, error)),
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
    let launched = Launched {
        pid: child.pid,
        start_ticks: stat.start_ticks,
        cgroup_id: cgroups.inode,
        steps_us,
        view: job.view.kind,
    };
    // It goes when this process ends, which nobody waits for.
    std::mem::forget((cgroups, child, rest));
    Ok(launched)
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

/// Back on the host for a moment, and as its root.
fn on_host<T>(
    system: &dyn System,
    job: &Job,
    own: &OwnedFd,
    work: impl FnOnce() -> Result<T>,
) -> Result<T> {
    system.act_as(0).doing("act as", "root")?;
    system
        .enter_mounts(job.host_mounts.as_fd())
        .doing("enter", "the host's mount namespace")?;
    let result = work()?;
    system
        .enter_mounts(own.as_fd())
        .doing("enter", "the launch's mount namespace")?;
    system
        .act_as(job.plan.id_base)
        .doing("act as", job.plan.id_base)?;
    Ok(result)
}

/// Copies of the mounts that the tree is made of.
pub struct Copies<'a> {
    parts: root::Parts,
    volumes: Vec<Volume<'a>>,
}

impl<'a> Copies<'a> {
    fn take(system: &dyn System, job: &Job<'a>, holder: &Path) -> Result<Copies<'a>> {
        Ok(Copies {
            parts: root::collect(system, job, holder)?,
            volumes: volumes::collect(system, job)?,
        })
    }
}

/// What was left out when it was begun: limits as `job` has them, and copies of what covers the kernel's files and of mounts.
pub fn catch_up<'a>(
    system: &dyn System,
    job: &Job<'a>,
    before: &LaunchPlan,
    begun: &Begun,
    clock: &mut Clock,
) -> Result<(Vec<view::Cover>, Copies<'a>)> {
    on_host(system, job, &begun.own, || {
        still_there(system, job.plan, &begun.holder)?;
        clock.begin(Step::Cgroups)?;
        cgroups::set_again(system, job.plan, before)?;
        clock.begin(Step::Clone)?;
        let covers = view::collect(system, &job.view.sources)?;
        Ok((covers, Copies::take(system, job, &begun.holder)?))
    })
}

/// It may have waited for hours. Without its socket or `work/` it would come to be, and nobody could use it.
fn still_there(system: &dyn System, plan: &LaunchPlan, holder: &Path) -> Result<()> {
    // The other cgroups hold the new process: nobody can remove them.
    let cgroup2 = plan.cgroup2.iter().map(|path| Path::new(path).join("work"));
    let own = [
        PathBuf::from(&plan.socket),
        holder.join("upper"),
        holder.join("work"),
    ];
    own.into_iter()
        .chain(cgroup2)
        .try_for_each(|path| match system.open(&path, Access::Path) {
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR)) => {
                Err(Error::Damaged(path.display().to_string()))
            }
            other => other.map(drop).doing_to("look for", &path),
        })
}

/// The new process, as seen from here.
pub struct Child {
    pub pid: i32,
    process: OwnedFd,
    pub go: OwnedFd,
    pub report: OwnedFd,
}

/// What the new process inherits, besides its pipes: nothing else of the sandbox's that is open by then, or it would keep it.
struct Given<'a> {
    ahead: bool,
    cgroups: &'a Cgroups,
    socket: &'a OwnedFd,
    covers: &'a [view::Cover],
}

/// The directory with `upper` and `work`, and unless it is made ahead, copies of mounts.
type Found<'a> = (PathBuf, Option<Copies<'a>>);

/// While it comes to be, what its tree is made of is collected.
fn clone<'a>(
    system: &dyn System,
    job: &Job<'a>,
    clock: &mut Clock,
    given: &Given,
    own: &OwnedFd,
    undo: &mut Undo,
) -> Result<(Child, Found<'a>)> {
    let cgroups = given.cgroups;
    let (go_read, go_write) = match given.ahead {
        true => system.pair(), // the rest of the job, with files, comes by it
        false => system.pipe(),
    }
    .doing("make", "a pipe")?;
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
    let mut found = None;
    let side = system.clone(&origin, &how, &mut || {
        found = Some(on_host(system, job, own, || {
            clock.begin(Step::Directories)?;
            let holder = state::make(system, job.plan, undo)?;
            clock.begin(Step::Clone)?;
            let copies = match given.ahead {
                true => None,
                false => Some(Copies::take(system, job, &holder)?),
            };
            clock.begin(Step::CgroupsV1)?;
            Ok((holder, copies))
        }));
    });
    // What went wrong first is what is told.
    let found = match found.transpose() {
        Err(error) => {
            if let Ok(Side::Parent { pidfd, .. }) = side {
                undo.add(Made::Process(pidfd));
            }
            return Err(error);
        }
        Ok(found) => found,
    };
    match side.doing("clone", "the new process")? {
        Side::Child => {
            drop((go_write, report_read));
            let cgroup = cgroups.directory.as_ref();
            inside::run(
                system,
                Inside {
                    job,
                    ahead: given.ahead,
                    written: None,
                    go: &go_read,
                    report: &report_write,
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
            Ok((child, found.ok_or_else(missing)?))
        }
    }
}

/// What is done from outside while the new process makes its namespaces: its ids first, then what its tree has of the kernel.
/// Gives its user namespace, the file system of `/dev` and `/etc`, and `/proc`.
fn surround(
    system: &dyn System,
    job: &Job,
    clock: &mut Clock,
    cgroups: &Cgroups,
    child: &Child,
) -> Result<(OwnedFd, OwnedFd, OwnedFd)> {
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
    clock.begin(Step::Binds)?;
    let scratch = root::scratch(system, job.plan)?;
    clock.begin(Step::Proc)?;
    let proc = root::proc(system, child.process.as_fd())?;
    clock.begin(Step::Masks)?;
    root::masks(system, job.plan, &proc)?;
    Ok((users, scratch, proc))
}

/// The tree, while the new process gets ready to enter it.
fn build(
    system: &dyn System,
    job: &Job,
    clock: &mut Clock,
    begun: &Begun,
    copies: Copies,
) -> Result<()> {
    let Copies { parts, volumes } = copies;
    clock.begin(Step::Overlay)?;
    let tree = root::overlay(system, &parts, &begun.users, job.layers_by_name)?;
    if !volumes.is_empty() {
        clock.begin(Step::Volumes)?;
        volumes::attach(system, &volumes, &begun.users, &tree)?;
        drop(volumes);
    }
    clock.begin(Step::Binds)?;
    root::devices(system, job.plan, &begun.scratch, &tree)?;
    clock.begin(Step::Proc)?;
    root::attach_inside(system, &tree, &begun.proc, Path::new("/proc"))?;
    clock.begin(Step::Binds)?;
    root::binds(system, job.plan, &tree)?;
    clock.begin(Step::Etc)?;
    root::etc(system, job.plan, &begun.scratch, &tree)?;
    system
        .write(begun.child.go.as_fd(), b"r")
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

/// What `error`, met while the new process was being served, comes from: that one's own failure, or its end without a word.
pub fn why(system: &dyn System, child: &mut Child, error: Error) -> Error {
    let gone = error.errno() == Some(libc::EPIPE);
    own_failure(system, child).unwrap_or(if gone { Error::Vanished } else { error })
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
    let text = match system.read_file(&path) {
        // Even its parent knows already.
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH)) => {
            return Err(Error::Vanished)
        }
        other => other.doing_to("read", &path)?,
    };
    let stat = process::parse_stat(&text)
        .ok_or_else(|| Error::Invalid(format!("{}: not understood", path.display())))?;
    match stat.exiting {
        false => Ok(stat),
        true => Err(Error::Vanished),
    }
}

#[cfg(test)]
mod tests;
