//! The steps that the new process takes itself, from its first instruction to the agent's.

use std::ffi::CStr;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use dsec_sys::identity::{resource, CapabilitySets};
use dsec_sys::mounts::attr;
use dsec_sys::namespaces::{exit_now, NEW_IPC, NEW_MOUNT, NEW_NET, NEW_UTS};

use crate::error::{missing_is_fine, Doing, Error, Result};
use crate::prepare::Ordered;
use crate::steps::check::IDS_PER_SANDBOX;
use crate::steps::light::{caps_agent, is_of_ipc, TERMINALS};
use crate::steps::view::{self, Cover};
use crate::steps::{root, Clock, Job, Step};
use crate::system::{c_text, Access, MountOption, System};
use crate::wire::LaunchPlan;

/// The agent runs under this id, so that root inside has no more rights over it than over a stranger (ruling 9).
const AGENT_ID: u32 = IDS_PER_SANDBOX - 1;
const CAP_SYS_ADMIN: u64 = 1 << 21;

/// What the new process has been given.
pub struct Inside<'a> {
    pub job: &'a Job<'a>,
    /// Of a sandbox made ahead the rest of the job comes by `go`, when there is one.
    pub ahead: bool,
    /// Of these it has written `sysctls` already.
    pub written: Option<&'a LaunchPlan>,
    /// A byte comes each time when it may go on; the end of file means that its maker has gone.
    pub go: &'a OwnedFd,
    /// Takes times and failures; closed by the execve that succeeds.
    pub report: &'a OwnedFd,
    pub socket: &'a OwnedFd,
    pub cgroup: Option<&'a OwnedFd>,
    pub view: &'a [Cover],
}

/// Becomes the agent, or reports why not and ends.
pub fn run(system: &dyn System, inside: Inside) -> ! {
    let mut clock = Clock::start(inside.job.fail_step.clone());
    let error = become_agent(system, &inside, &mut clock);
    let step = clock.step();
    // If nobody reads it any more there is nobody to tell.
    let _ = system.write(inside.report.as_fd(), &encode_failure(step, &error));
    exit_now(1)
}

/// The steps in order. Returns only the error.
pub fn become_agent(system: &dyn System, inside: &Inside, clock: &mut Clock) -> Error {
    if let Err(error) = begin(system, inside, clock) {
        return error;
    }
    if !inside.ahead {
        return become_agent_of(system, inside, clock);
    }
    clock.end();
    let ordered = match Ordered::take(system, inside.go.as_fd()) {
        Ok(ordered) => ordered,
        Err(error) => return error,
    };
    match ordered.job(inside.job) {
        Ok(job) => {
            *clock = Clock::start(job.fail_step.clone());
            let (job, view) = (&job, &*ordered.covers);
            become_agent_of(
                system,
                &Inside {
                    job,
                    view,
                    written: Some(inside.job.plan),
                    ..*inside
                },
                clock,
            )
        }
        Err(error) => error,
    }
}

fn become_agent_of(system: &dyn System, inside: &Inside, clock: &mut Clock) -> Error {
    match finish(system, inside, clock) {
        Ok(ready) => execute(system, inside, clock, &ready),
        Err(error) => error,
    }
}

/// First all that needs no tree, while that is being built, and of that what is the same for all sandboxes.
fn begin(system: &dyn System, inside: &Inside, clock: &mut Clock) -> Result<()> {
    let plan = inside.job.plan;
    wait_for_go(system, inside)?; // maps are written
    clock.begin(Step::Ids)?;
    system.start_afresh().doing("start", "a session")?;
    system
        .become_user(0, false)
        .doing("become", "root of the user namespace")?;

    clock.begin(Step::CgroupNs)?;
    let ipc = if plan.light { 0 } else { NEW_IPC };
    system
        .unshare(ipc | NEW_UTS)
        .doing("make", "ipc and uts namespaces")?;
    clock.begin(Step::Network)?;
    if !plan.light {
        system
            .unshare(NEW_NET)
            .doing("make", "a network namespace")?;
        system
            .loopback_up()
            .doing("bring up", "the loopback device")?;
    }
    if inside.ahead {
        clock.end();
        let proc = take_proc(system, inside)?;
        clock.begin(Step::Sysctls)?;
        // By its descriptor: the order, which moves it, may be here already.
        system
            .change_directory(proc.as_fd())
            .doing("enter", "/proc")?;
        write_settings(system, inside, Path::new("sys"))?;
    }
    Ok(())
}

/// What the agent is run with.
struct Ready {
    program: OwnedFd,
    report: OwnedFd,
}

fn finish(system: &dyn System, inside: &Inside, clock: &mut Clock) -> Result<Ready> {
    let (job, plan) = (inside.job, inside.job.plan);
    clock.begin(Step::CgroupNs)?;
    system
        .set_hostname(&plan.hostname)
        .doing("set", "the host name")?;
    clock.begin(Step::Rlimits)?;
    limits(system, job)?;
    clock.begin(Step::Capabilities)?;
    // Only what execve may give; what this process has is not touched yet.
    system
        .bound_capabilities(caps_agent(plan) | plan.caps_exec)
        .doing("bound", "capabilities")?;
    let config = system
        .sealed_file(&job.config)
        .doing("make", "the agent's configuration")?;
    clock.end();

    wait_for_go(system, inside)?; // the tree is complete
    clock.begin(Step::Mounts)?;
    system
        .unshare(NEW_MOUNT)
        .doing("make", "a mount namespace")?;
    let tree = enter_tree(system)?;
    // The agent, into which nobody may see, could not open it any more.
    let score = system.own_score().doing("open", "the score for memory")?;
    if !plan.light {
        own_mounts(system, &tree)?;
    }
    clock.begin(Step::Sysctls)?;
    write_settings(system, inside, Path::new("proc/sys"))?;
    // Before it is read-only.
    let settings = match plan.light {
        true => Some(open_settings(system)?),
        false => None,
    };
    protect_settings(system, job)?;
    clock.begin(Step::View)?;
    view::attach(system, inside.view, tree.as_fd())?;
    clock.begin(Step::Root)?;
    system.change_root().doing("change to", "the new root")?;
    drop(tree);
    clock.begin(Step::Capabilities)?;
    if inside.ahead {
        system.run_on(&job.processors); // the launcher has parted from us
    }
    let kept = arrange(system, inside, config, score, settings)?;
    capabilities(system, job)?;
    clock.end();
    Ok(kept)
}

fn wait_for_go(system: &dyn System, inside: &Inside) -> Result<()> {
    let mut byte = [0];
    match system
        .read(inside.go.as_fd(), &mut byte)
        .doing("wait for", "the launcher")?
    {
        0 => Err(Error::Vanished),
        _ => Ok(()),
    }
}

/// Of a sandbox made ahead, as soon as it is there.
fn take_proc(system: &dyn System, inside: &Inside) -> Result<OwnedFd> {
    let (_, files) = system
        .take(inside.go.as_fd())
        .doing("wait for", "the launcher")?;
    files.into_iter().next().ok_or(Error::Vanished)
}

/// The tree, in this process's own copy of the launch's namespace. It is locked there, and what it hides is the bare
/// namespace: the empty places that the tree was made with.
fn enter_tree(system: &dyn System) -> Result<OwnedFd> {
    let tree = system
        .open(Path::new(root::ROOT_PATH), Access::Path)
        .doing("open", "the tree")?;
    system
        .change_directory(tree.as_fd())
        .doing("enter", "the tree")?;
    Ok(tree)
}

/// Mounts what only a process in the new namespaces can.
fn own_mounts(system: &dyn System, tree: &OwnedFd) -> Result<()> {
    let mount = |kind: &CStr, options: &[MountOption], flags: u64, path: &CStr| {
        let name = path.to_string_lossy();
        let made = system
            .make_mount(kind, options, flags)
            .doing("make", &name)?;
        let target = system
            .resolve(tree.as_fd(), path)
            .doing("find in the image", &name)?;
        system
            .attach(made.as_fd(), target.as_fd())
            .doing("mount", &name)
    };
    let terminals = TERMINALS.map(|(key, value)| MountOption::Text(key, value.into()));
    mount(
        c"devpts",
        &terminals,
        attr::NO_SUID | attr::NO_EXEC,
        c"/dev/pts",
    )?;
    mount(c"mqueue", &[], root::KERNEL_MOUNT, c"/dev/mqueue")
}

/// Kernel settings of the new namespaces, while /proc/sys can still be written: those that are not so already.
fn write_settings(system: &dyn System, inside: &Inside, place: &Path) -> Result<()> {
    let plan = inside.job.plan;
    let wanted = |name: &str, value: &String| {
        let written = inside.written.and_then(|plan| plan.sysctls.get(name));
        written != Some(value) && !(plan.light && is_of_ipc(name))
    };
    let settings = plan.sysctls.iter();
    let mut settings = settings.filter(|(name, value)| wanted(name, value));
    settings.try_for_each(|(name, value)| {
        let path = place.join(name.replace('.', "/"));
        system
            .write_file(&path, value.as_bytes())
            .doing_to("write to", &path)
    })
}

fn open_settings(system: &dyn System) -> Result<OwnedFd> {
    system
        .open(Path::new("proc/sys"), Access::Path)
        .doing("open", "/proc/sys")
}

fn protect_settings(system: &dyn System, job: &Job) -> Result<()> {
    let ours = job.plan.readonly_proc.iter();
    for path in ours.filter(|path| root::is_setting(path)) {
        let below = c_text(&path[1..]).doing("name", path)?;
        missing_is_fine(root::read_only(system, &below)).doing("make read-only", path)?;
    }
    Ok(())
}

fn limits(system: &dyn System, job: &Job) -> Result<()> {
    job.plan.rlimits.iter().try_for_each(|(name, values)| {
        let number =
            resource(name).ok_or_else(|| Error::Invalid(format!("no resource limit {name:?}")))?;
        system
            .set_limit(number, values[0], values[1])
            .doing("set the limit", name)
    })
}

/// Gives the descriptors the numbers that the agent expects. Returns the program and the report pipe under numbers above.
fn arrange(
    system: &dyn System,
    inside: &Inside,
    config: OwnedFd,
    score: OwnedFd,
    settings: Option<OwnedFd>,
) -> Result<Ready> {
    // Never closed by us: by then their numbers belong to other files.
    let config = ManuallyDrop::new(config);
    let score = ManuallyDrop::new(score);
    let settings = ManuallyDrop::new(settings);
    let null = system
        .open(Path::new("/dev/null"), Access::ReadWrite)
        .doing("open", "/dev/null")?;
    let null = ManuallyDrop::new(null);
    let standard = Some(null.as_fd());
    let cgroup = inside.cgroup.map(|fd| fd.as_fd());
    let order: [Option<BorrowedFd>; 8] = [
        standard,
        standard,
        standard,
        Some(inside.socket.as_fd()),
        cgroup,
        Some(config.as_fd()),
        Some(score.as_fd()),
        settings.as_ref().map(|directory| directory.as_fd()),
    ];
    let keep = [inside.job.agent.as_fd(), inside.report.as_fd()];
    let mut kept = system
        .arrange(&order, &keep)
        .doing("arrange", "descriptors")?
        .into_iter();
    match (kept.next(), kept.next()) {
        (Some(program), Some(report)) => Ok(Ready { program, report }),
        _ => Err(Error::Invalid("descriptors got lost".into())),
    }
}

/// Becomes the agent's user. What execve leaves of the capabilities of a user that is not root is the ambient set; the
/// right to load a filter is kept until then.
fn capabilities(system: &dyn System, job: &Job) -> Result<()> {
    let agent = caps_agent(job.plan);
    system
        .become_user(AGENT_ID, true)
        .doing("become", "the agent's user")?;
    let held = agent | CAP_SYS_ADMIN;
    let sets = CapabilitySets {
        effective: held,
        permitted: held,
        inheritable: agent,
    };
    system.set_capabilities(sets).doing("set", "capabilities")?;
    system
        .raise_ambient(agent)
        .doing("raise", "ambient capabilities")
}

fn execute(system: &dyn System, inside: &Inside, clock: &mut Clock, ready: &Ready) -> Error {
    match confine(system, inside, clock, &ready.report) {
        Ok(()) => {
            let source = system.run(ready.program.as_fd(), &[c"dsec-agent", c"--fd"]);
            Error::Call {
                doing: "run",
                on: "the agent".into(),
                source,
            }
        }
        Err(error) => error,
    }
}

fn confine(
    system: &dyn System,
    inside: &Inside,
    clock: &mut Clock,
    report: &OwnedFd,
) -> Result<()> {
    clock.begin(Step::Seccomp)?;
    // Before the filter, which need not allow anything but execve from here on.
    system
        .write(report.as_fd(), &encode_times(clock))
        .doing("report", "times")?;
    if let Some(filter) = inside.job.filter_agent {
        system.load_filter(filter).doing("load", "the filter")?;
    }
    clock.begin(Step::Agent)
}

const TIMES: u8 = b'T';
const FAILURE: u8 = b'F';
const TEXT_BYTES_MAX: usize = 900;

fn encode_times(clock: &Clock) -> Vec<u8> {
    let mut bytes = vec![TIMES, clock.spent_us.len() as u8];
    for number in 0.. {
        let Some(step) = Step::from_number(number) else {
            break;
        };
        if let Some(&spent) = clock.spent_us.get(step.name()) {
            bytes.push(number);
            bytes.extend_from_slice(&u32::try_from(spent).unwrap_or(u32::MAX).to_be_bytes());
        }
    }
    bytes
}

fn encode_failure(step: Step, error: &Error) -> Vec<u8> {
    let mut bytes = vec![FAILURE, step as u8];
    bytes.extend_from_slice(&error.errno().unwrap_or(0).to_be_bytes());
    bytes.extend(error.to_string().bytes().take(TEXT_BYTES_MAX));
    bytes
}

/// What the new process said, once its end of the pipe is closed.
#[derive(Debug, Default)]
pub struct Said {
    pub times: Vec<(Step, u64)>,
    pub failure: Option<Error>,
}

/// Reads what `encode_times` and `encode_failure` have written, in this order if both are there.
pub fn decode(mut bytes: &[u8]) -> Said {
    let mut said = Said::default();
    if let [TIMES, count, rest @ ..] = bytes {
        let length = usize::from(*count) * 5;
        let (times, after) = rest.split_at(length.min(rest.len()));
        for entry in times.chunks_exact(5) {
            let spent = u32::from_be_bytes([entry[1], entry[2], entry[3], entry[4]]);
            said.times
                .extend(Step::from_number(entry[0]).map(|step| (step, u64::from(spent))));
        }
        bytes = after;
    }
    if let [FAILURE, step, a, b, c, d, text @ ..] = bytes {
        let step = Step::from_number(*step)
            .map_or("agent", Step::name)
            .to_string();
        let errno = i32::from_be_bytes([*a, *b, *c, *d]);
        said.failure = Some(Error::Inside {
            step,
            errno,
            detail: String::from_utf8_lossy(text).into_owned(),
        });
    }
    said
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::{null, Fake, Parts};

    fn fail(system: &Fake, fail_step: Option<&str>) -> (Step, Error) {
        fail_with(&Parts::new(), system, fail_step)
    }

    fn fail_with(parts: &Parts, system: &Fake, fail_step: Option<&str>) -> (Step, Error) {
        let (job, file) = (parts.job(fail_step), null());
        let covers = view::collect(&Fake::new(None), &job.view.sources).unwrap();
        let mut clock = Clock::start(job.fail_step.clone());
        let inside = Inside {
            job: &job,
            ahead: false,
            written: None,
            go: &file,
            report: &file,
            socket: &file,
            cgroup: Some(&file),
            view: &covers,
        };
        let error = become_agent(system, &inside, &mut clock);
        (clock.step(), error)
    }

    #[test]
    fn rights_are_given_up_in_the_order_that_works() {
        let system = Fake::talking(None);

        let (step, error) = fail(&system, None);

        assert_eq!((step, error.errno()), (Step::Agent, Some(libc::ENOEXEC)));
        let order = [
            "start_afresh",
            "become_user 0 false",
            "unshare 0xc000000",
            "unshare 0x40000000",
            "loopback_up",
            "set_hostname sandbox",
            "set_limit",
            "bound_capabilities 0x81",
            "sealed_file",
            "unshare 0x20000",
            "open /root Path",
            "own_score",
            "make_mount \"mqueue\" 0xe",
            "write_file proc/sys/kernel/shmmni 1",
            "clone_tree \"proc/sys\"",
            "resolve \"/proc/meminfo\"",
            "change_root",
            "arrange",
            "become_user 65535 true",
            "set_capabilities",
            "raise_ambient 0x80",
            "load_filter",
            "run [\"dsec-agent\", \"--fd\"]",
        ];
        let places: Vec<usize> = order.iter().map(|call| system.place(call)).collect();
        assert!(
            places.windows(2).all(|pair| pair[0] < pair[1]),
            "{places:?} {:#?}",
            system.log.borrow()
        );
        assert_eq!(system.log.borrow().len(), places.last().unwrap() + 1);
    }

    #[test]
    fn a_light_sandbox_is_left_what_its_agent_needs_to_make_the_rest() {
        let system = Fake::talking(None);

        let (step, _) = fail_with(&Parts::light(), &system, None);

        assert_eq!(step, Step::Agent);
        let log = system.log.borrow();
        let has = |start: &str| log.iter().any(|entry| entry.starts_with(start));
        for later in [
            "unshare 0x40000000",
            "unshare 0xc000000",
            "loopback_up",
            "make_mount \"devpts\"",
            "make_mount \"mqueue\"",
            "write_file proc/sys/kernel/shmmni",
        ] {
            assert!(!has(later), "{later}");
        }
        assert!(has("unshare 0x4000000") && has("open proc/sys Path"));
        assert!(has("bound_capabilities 0x201081") && has("raise_ambient 0x201080"));
    }

    #[test]
    fn no_failure_ends_in_the_agent() {
        for number in 0.. {
            let system = Fake::talking(Some(number));
            let (_, error) = fail(&system, None);
            if !system.has_failed() {
                assert!(number > 30, "only {number} calls");
                break;
            }
            assert_eq!(error.errno(), Some(libc::EIO), "call {number}");
            let log = system.log.borrow();
            let last = log.last().unwrap();
            assert_eq!(
                log.len(),
                number + 1,
                "something was done after the failure: {last}"
            );
        }
    }

    #[test]
    fn the_failing_step_is_named() {
        let all =
            "ids cgroupns network mounts sysctls view root rlimits capabilities seccomp agent";
        for name in all.split(' ') {
            let system = Fake::talking(None);

            let (step, error) = fail(&system, Some(name));

            assert_eq!((step.name(), error.errno()), (name, Some(libc::EIO)));
        }
    }

    #[test]
    fn a_launcher_that_has_gone_ends_the_new_process() {
        let (_, error) = fail(&Fake::new(None), None);

        assert!(matches!(error, Error::Vanished));
    }

    #[test]
    fn times_and_failure_come_back_as_they_were_sent() {
        let mut clock = Clock::start(None);
        clock.begin(Step::Ids).unwrap();
        clock.begin(Step::Mounts).unwrap();
        clock.end();
        let mut bytes = encode_times(&clock);
        bytes.extend(encode_failure(
            Step::Agent,
            &Error::Refused {
                why: "busy".into(),
                errno: libc::EBUSY,
            },
        ));

        let said = decode(&bytes);

        assert_eq!(
            said.times.iter().map(|time| time.0).collect::<Vec<_>>(),
            [Step::Check, Step::Ids, Step::Mounts]
        );
        let failure = said.failure.unwrap().into_failure("x");
        assert_eq!(
            (failure.step.as_str(), failure.errno.as_deref()),
            ("agent", Some("EBUSY"))
        );
        assert_eq!(failure.detail, "busy");
    }

    #[test]
    fn a_cut_report_is_no_panic() {
        for length in 0..6 {
            decode(&[TIMES, 9, 0, 0, 0, 0, 0][..length]);
            decode(&[FAILURE, 200, 0, 0, 0, 1][..length]);
        }
    }
}
