//! lxcfs: one for this run directory, a child of the daemon that outlives it as the sandboxes do.
//!
//! A file of lxcfs is a request to a process, so nobody here ever reads one: a helper does, in a process of its own, and when
//! it gets no answer in time lxcfs is killed. That ends all waiting at once, since the kernel then answers for it (ENOTCONN).

use std::collections::BTreeSet;
use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use dsec_sys::mounts::attr;
use dsec_sys::namespaces::{clone, exit_now, signal_process, Clone, Side};
use dsec_sys::process::lower_priority;
use dsec_sys::seqpacket::{wait_ready, Interest};

use crate::error::{Doing, Result};
use crate::process::{self, ProcessStat};
use crate::system::{c_path, Access, System};

/// Where lxcfs is mounted and its file bound, below the directory of layers; whose it is, in the run directory.
const PLACE: &str = ".lxcfs";
const BOUND: &str = ".live";
const FILE: &str = "meminfo";
const OWN: &str = "lxcfs.own";
const PID_FILE: &str = "lxcfs.pid";

/// Of its address space: what hostile readers can make it hold is the host's memory. It needs some 100 MiB for its threads.
const MEMORY_MAX: u64 = 1 << 30;
/// Readers cost processor time that no sandbox is charged for, so everybody else goes first.
const PRIORITY: i32 = 15;
/// How long it may take to answer, and how often it is asked.
const ANSWER_MAX: Duration = Duration::from_secs(10);
const CHECK_INTERVAL: Duration = Duration::from_secs(15);
/// Before it is started again: doubled with each failure that follows another.
const RETRY_MIN: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_secs(60);
/// One that ran that long did not fail because of how it was started.
const GOOD_RUN: Duration = Duration::from_secs(60);
const LOOK_AGAIN: Duration = Duration::from_millis(2);

pub struct Live<'a> {
    system: &'a dyn System,
    /// None: nobody wants live views.
    program: Option<PathBuf>,
    run: PathBuf,
    place: PathBuf,
    bound: PathBuf,
    server: Option<Server>,
    helper: Option<Helper>,
    /// Processes of ours that are still to be reaped.
    children: BTreeSet<i32>,
    failures: u32,
    start_at: Option<Instant>,
    check_at: Option<Instant>,
}

struct Server {
    pid: i32,
    process: OwnedFd,
    since: Instant,
    ready: bool,
}

/// A process that reads from lxcfs in our place.
struct Helper {
    pid: i32,
    process: OwnedFd,
    until: Instant,
}

impl<'a> Live<'a> {
    /// Takes over the lxcfs of an earlier daemon, if it still runs and is wanted.
    pub fn open(
        system: &'a dyn System,
        below: &Path,
        run: &Path,
        program: Option<PathBuf>,
    ) -> Result<Live<'a>> {
        let mut live = Live {
            system,
            run: run.to_path_buf(),
            place: below.join(PLACE),
            bound: below.join(BOUND),
            server: None,
            helper: None,
            children: BTreeSet::new(),
            failures: 0,
            start_at: program.is_some().then(Instant::now),
            check_at: None,
            program,
        };
        for directory in [&live.place, &live.bound] {
            match system.make_dir(directory, 0o755) {
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                other => other.doing_to("make", directory)?,
            }
        }
        let file = live.file();
        if !live.bound_is_there() {
            std::fs::write(&file, "").doing_to("make", &file)?;
        }
        match left_over(run) {
            Some((pid, process)) if live.program.is_some() => live.watch(pid, process)?,
            _ => {
                end_left_over(run);
                live.take_down()?
            }
        }
        Ok(live)
    }

    /// The file of memory, when lxcfs answers.
    pub fn memory(&self) -> Option<PathBuf> {
        self.server().map(|_| self.file())
    }

    /// The lxcfs that answers.
    pub fn server(&self) -> Option<i32> {
        self.server
            .as_ref()
            .filter(|server| server.ready)
            .map(|server| server.pid)
    }

    /// True while it is not known whether the lxcfs that runs will answer.
    pub fn is_starting(&self) -> bool {
        self.server.as_ref().is_some_and(|server| !server.ready)
    }

    /// Why there is no live view; None when there is.
    pub fn missing(&self) -> Option<String> {
        match (&self.program, self.server()) {
            (None, _) => Some("not asked for".into()),
            (_, Some(_)) => None,
            (Some(_), None) if self.failures > 0 => {
                Some(format!("lxcfs has failed {} times", self.failures))
            }
            (Some(_), None) => Some("lxcfs is starting".into()),
        }
    }

    /// Does what is due: notices its end, starts it, asks it whether it answers.
    pub fn tend(&mut self) -> Result<()> {
        let now = Instant::now();
        if self.server.as_ref().is_some_and(has_ended) {
            self.fall()?;
        }
        if self
            .helper
            .as_ref()
            .is_some_and(|helper| helper.until <= now)
        {
            self.kill();
        }
        if self.server.is_none() && self.start_at.is_some_and(|at| at <= now) {
            self.start_at = None;
            if let Err(error) = self.start() {
                eprintln!("dsec-launch: {error}");
                self.fall()?;
            }
        }
        if self.server().is_some()
            && self.helper.is_none()
            && self.check_at.is_some_and(|at| at <= now)
        {
            self.check_at = None;
            self.ask()?;
        }
        Ok(())
    }

    /// A child has ended: true if it was one of ours.
    pub fn reaped(&mut self, pid: i32, status: i32) -> bool {
        if self.helper.as_ref().is_some_and(|helper| helper.pid == pid) {
            self.helper = None;
            match (status, &mut self.server) {
                (0, Some(server)) => {
                    server.ready = true;
                    self.check_at = Some(Instant::now() + CHECK_INTERVAL);
                }
                _ => self.kill(),
            }
        }
        self.children.remove(&pid)
    }

    pub fn watched(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.server.iter().map(|server| server.process.as_fd())
    }

    /// When `tend` has something to do, if nothing happens before.
    pub fn patience(&self) -> Option<Duration> {
        let due = [
            self.start_at,
            self.check_at,
            self.helper.as_ref().map(|helper| helper.until),
        ];
        let first = due.into_iter().flatten().min()?;
        Some(first.saturating_duration_since(Instant::now()))
    }

    /// Ends it: nobody needs it any more.
    pub fn end(&mut self) -> Result<()> {
        self.start_at = None;
        self.take_down()
    }

    fn file(&self) -> PathBuf {
        self.bound.join(FILE)
    }

    fn bound_is_there(&self) -> bool {
        self.system.open(&self.file(), Access::Path).is_ok()
    }

    fn start(&mut self) -> Result<()> {
        let Some(program) = &self.program else {
            return Ok(());
        };
        let file = self
            .system
            .open(program, Access::Path)
            .doing_to("open", program)?;
        let text = |path: &Path| c_path(path).doing_to("name", path);
        let (pid_file, place) = (text(&self.run.join(PID_FILE))?, text(&self.place)?);
        let arguments: [&CStr; 6] = [c"lxcfs", c"-f", c"-u", c"-p", &pid_file, &place];
        match clone(&Clone::default()).doing("clone", "the starter of lxcfs")? {
            Side::Child => exit_now(become_lxcfs(self.system, &file, &arguments)),
            Side::Parent { pid, pidfd } => {
                self.children.insert(pid);
                let path = process::stat_path(pid);
                let stat = std::fs::read(&path).doing_to("read", &path)?;
                let ticks = process::parse_stat(&stat)
                    .map_or(0, |ProcessStat { start_ticks, .. }| start_ticks);
                let own = self.run.join(OWN);
                crate::write_own(&own, &format!("{pid} {ticks}\n")).doing_to("write", &own)?;
                self.watch(pid, pidfd)
            }
        }
    }

    fn watch(&mut self, pid: i32, process: OwnedFd) -> Result<()> {
        self.start_at = None;
        self.server = Some(Server {
            pid,
            process,
            since: Instant::now(),
            ready: false,
        });
        self.ask()
    }

    /// A helper waits for its mount, binds the file if that is not done, and reads it.
    fn ask(&mut self) -> Result<()> {
        let (place, bound) = (self.place.clone(), self.file());
        match clone(&Clone::default()).doing("clone", "a reader of lxcfs")? {
            Side::Child => exit_now(match read_from(self.system, &place, &bound) {
                Ok(()) => 0,
                Err(_) => 1,
            }),
            Side::Parent { pid, pidfd } => {
                self.children.insert(pid);
                self.helper = Some(Helper {
                    pid,
                    process: pidfd,
                    until: Instant::now() + ANSWER_MAX,
                });
                Ok(())
            }
        }
    }

    /// The helper too: it may still wait for a mount that will not come. If it waits for an answer, lxcfs's end is its own.
    fn kill(&mut self) {
        let helper = self.helper.take().map(|helper| helper.process);
        let server = self.server.as_ref().map(|server| &server.process);
        for process in helper.iter().chain(server) {
            // It may have ended by itself.
            let _ = signal_process(process.as_fd(), libc::SIGKILL);
        }
    }

    /// It has ended: what is left of it goes, and it is tried again later.
    fn fall(&mut self) -> Result<()> {
        let lasted = self
            .server
            .as_ref()
            .is_some_and(|server| server.since.elapsed() > GOOD_RUN);
        self.failures = if lasted {
            1
        } else {
            self.failures.saturating_add(1)
        };
        let pause = RETRY_MIN
            .saturating_mul(1 << (self.failures - 1).min(10))
            .min(RETRY_MAX);
        self.start_at = Some(Instant::now() + pause);
        self.take_down()
    }

    fn take_down(&mut self) -> Result<()> {
        self.kill();
        self.server = None;
        self.check_at = None;
        for path in [self.file(), self.place.clone()] {
            // What is mounted twice, by a helper that was killed in between, goes twice.
            while let Ok(()) = self.system.detach_at(&path) {}
        }
        for name in [PID_FILE, OWN] {
            let path = self.run.join(name);
            match std::fs::remove_file(&path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(error).doing_to("remove", &path)
                }
                _ => {}
            }
        }
        Ok(())
    }
}

fn has_ended(server: &Server) -> bool {
    let interest = [(server.process.as_fd(), Interest::Readable)];
    wait_ready(&interest, Some(Duration::ZERO)).is_ok_and(|ready| ready[0])
}

/// Pid and descriptor of the lxcfs that `run` says is its own.
fn left_over(run: &Path) -> Option<(i32, OwnedFd)> {
    let text = std::fs::read_to_string(run.join(OWN)).ok()?;
    let (pid, ticks) = text.trim().split_once(' ')?;
    let pid = pid.parse().ok()?;
    Some((pid, process::find(pid, ticks.parse().ok()?)?))
}

/// Ends the lxcfs of a run directory that no daemon serves.
pub fn end_left_over(run: &Path) {
    if let Some((_, process)) = left_over(run) {
        // It may have ended just now.
        let _ = signal_process(process.as_fd(), libc::SIGKILL);
    }
}

fn become_lxcfs(system: &dyn System, program: &OwnedFd, arguments: &[&CStr]) -> i32 {
    let prepared = system
        .start_afresh()
        .and_then(|()| system.set_limit(libc::RLIMIT_AS, MEMORY_MAX, MEMORY_MAX))
        .and_then(|()| lower_priority(PRIORITY));
    let error = prepared
        .err()
        .unwrap_or_else(|| system.run(program.as_fd(), arguments));
    eprintln!("dsec-launch: lxcfs cannot be run: {error}");
    1
}

fn read_from(system: &dyn System, place: &Path, bound: &Path) -> std::io::Result<()> {
    use std::io::Read;
    let file: CString = c_path(&place.join("proc").join(FILE))?;
    let target = c_path(bound)?;
    let mut content = [0; 16];
    // Until its mount is there, an empty file is.
    while std::fs::File::open(bound)?.read(&mut content)? == 0 {
        match system.clone_mount(&file) {
            Ok(mount) => {
                let flags = attr::READ_ONLY | attr::NO_SUID | attr::NO_DEVICES | attr::NO_EXEC;
                system.set_attributes(mount.as_fd(), flags)?;
                system.attach_at(mount.as_fd(), &target)?;
            }
            Err(_) => std::thread::sleep(LOOK_AGAIN),
        }
    }
    match content.starts_with(b"MemTotal:") {
        true => Ok(()),
        false => Err(std::io::ErrorKind::InvalidData.into()),
    }
}
