//! Starting an exec: pipes or a terminal, a cgroup, the child.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use dsec_protocol::exec::{Exec as ExecArgs, Tty};
use dsec_sys::epoll::{Poller, Source, READ};
use dsec_sys::launch_child::{launch, Command};
use dsec_sys::pipes::{new_pipe, set_nonblocking};
use dsec_sys::pty::open_terminal;

use super::input::Input;
use super::output::Output;
use super::plan::{add_limits, plan_command, refuse_launch, Context, Program};
use super::Exec;
use crate::agent::Agent;
use crate::cgroup::ExecCgroup;
use crate::refusal::Refusal;
use crate::share::processors_of_command;
use crate::timers::Timer;
use crate::token::Token;

/// Our ends and the child's ends of an exec's descriptors.
struct Wiring {
    out: Option<OwnedFd>,
    err: Option<OwnedFd>,
    input: Option<OwnedFd>,
    /// Closed here once the child has them.
    child: Vec<OwnedFd>,
    places: Vec<(RawFd, RawFd)>,
}

impl Agent {
    /// Starts the process of an exec that is not known yet.
    pub fn start_exec(&mut self, args: &ExecArgs) -> Result<u32, Refusal> {
        let context = Context {
            user: args.user.as_deref(),
            cwd: args.cwd.as_deref(),
            env: &args.env,
            terminal: args.tty.is_some(),
        };
        let program = match (&args.argv, &args.shell) {
            (Some(argv), _) => Program::Argv(argv),
            (None, shell) => Program::Shell(shell.as_deref().unwrap_or_default()),
        };
        let mut command = plan_command(&self.config, &self.own, &context, &program)?;
        add_limits(&mut command, &args.rlimits)?;
        let wiring = match &args.tty {
            Some(tty) => wire_terminal(*tty, &command),
            None => wire_pipes(args),
        };
        let wiring = wiring.map_err(|e| Refusal::system("spawn_failed", "descriptors", &e))?;
        command.descriptors.clone_from(&wiring.places);
        let record = self.new_exec(args);
        let key = self.execs.next_key();
        let source = |fd: Option<OwnedFd>, token: Token| {
            fd.map(|fd| Source::new(&self.poller, fd, token.pack()))
        };
        let mut out = Output::reading(source(wiring.out, Token::ExecOut(key)));
        let mut err = Output::reading(source(wiring.err, Token::ExecErr(key)));
        // Before the command is there: output that cannot be waited for would be lost, and nobody told.
        out.want(READ)
            .and(err.want(READ))
            .map_err(|e| Refusal::system("spawn_failed", "waiting for output", &e))?;
        let input = source(wiring.input, Token::ExecIn(key));
        let (pid, cgroup) = self.launch_in_cgroup(&mut command, &args.id)?;
        let exec = Exec {
            pid,
            out,
            err,
            input: input.map(|source| Input::new(source, args.tty.is_some())),
            terminal: args.tty.is_some(),
            cgroup,
            ..record
        };
        self.admit(key, exec, args.timeout_s);
        Ok(key)
    }

    /// The record of an exec without a process.
    pub fn new_exec(&self, args: &ExecArgs) -> Exec {
        Exec {
            id: args.id.clone(),
            running: true,
            started_us: self.timers.now_us(),
            grace_ms: millis(args.grace_s),
            output_bytes_max: args.output_bytes_max,
            ..Exec::default()
        }
    }

    /// From here the exec is known, its time runs and its output is read.
    pub fn admit(&mut self, key: u32, exec: Exec, timeout_s: Option<f64>) {
        self.execs.insert(key, exec);
        if let Some(timeout_s) = timeout_s {
            self.timers.set_in(Timer::Timeout(key), millis(timeout_s));
        }
        self.set_output_interest(key);
        self.has_started = true;
    }

    /// Starts the command in a cgroup of its own where there are cgroups; without, as parent of its orphans.
    pub fn launch_in_cgroup(
        &mut self,
        command: &mut Command,
        name: &str,
    ) -> Result<(i32, Option<ExecCgroup>), Refusal> {
        command.processors = processors_of_command();
        command.score = self.score.descriptor();
        let Some(work) = &mut self.work else {
            command.subreaper = true;
            let pid = self.launch_guarded(command)?;
            return Ok((pid, None));
        };
        let (cgroup, directory) = work
            .create(name)
            .map_err(|e| Refusal::system("spawn_failed", "step Cgroup", &e))?;
        command.cgroup = Some(directory.as_raw_fd());
        match self.launch_guarded(command) {
            Ok(pid) => Ok((pid, Some(cgroup))),
            Err(refusal) => {
                if let Some(work) = &mut self.work {
                    work.remove(cgroup);
                }
                Err(refusal)
            }
        }
    }

    fn launch_guarded(&self, command: &Command) -> Result<i32, Refusal> {
        let started = self
            .starts
            .begin()
            .map_err(|e| Refusal::system("spawn_failed", "the guard of a start", &e))?;
        let result = self
            .score
            .around(|| launch(command, self.own.permitted, started));
        match (self.starts.end(), result) {
            (true, _) => Err(Refusal::system(
                "spawn_failed",
                "the start took too long and was given up",
                &io::Error::from_raw_os_error(libc::ETIMEDOUT),
            )),
            (false, result) => result.map_err(|failure| refuse_launch(&failure, command)),
        }
    }
}

pub fn millis(seconds: f64) -> u64 {
    (seconds * 1000.0).ceil() as u64
}

fn wire_pipes(args: &ExecArgs) -> io::Result<Wiring> {
    let out = new_pipe()?;
    set_nonblocking(&out.read)?;
    let mut wiring = Wiring {
        out: Some(out.read),
        err: None,
        input: None,
        places: vec![(out.write.as_raw_fd(), 1)],
        child: vec![],
    };
    if args.merge_stderr {
        wiring.places.push((out.write.as_raw_fd(), 2));
    } else {
        let err = new_pipe()?;
        set_nonblocking(&err.read)?;
        wiring.err = Some(err.read);
        wiring.places.push((err.write.as_raw_fd(), 2));
        wiring.child.push(err.write);
    }
    wiring.child.push(out.write);
    if args.stdin {
        let input = new_pipe()?;
        set_nonblocking(&input.write)?;
        wiring.input = Some(input.write);
        wiring.places.push((input.read.as_raw_fd(), 0));
        wiring.child.push(input.read);
    } else {
        let null = null_input()?;
        wiring.places.push((null.as_raw_fd(), 0));
        wiring.child.push(null);
    }
    Ok(wiring)
}

/// An image may have no /dev/null; the end of a pipe that nobody writes reads the same.
pub fn null_input() -> io::Result<OwnedFd> {
    match OpenOptions::new().read(true).open("/dev/null") {
        Ok(file) => Ok(file.into()),
        Err(_) => new_pipe().map(|pipe| pipe.read),
    }
}

fn wire_terminal(tty: Tty, command: &Command) -> io::Result<Wiring> {
    let terminal = open_terminal(tty.cols, tty.rows)?;
    if let Some(identity) = &command.identity {
        // The user must be able to open its own terminal again; where we may not give it away, it works all the same.
        let _ = std::os::unix::fs::fchown(&terminal.slave, Some(identity.uid), None);
    }
    let input = terminal.master.try_clone()?;
    let slave = terminal.slave.as_raw_fd();
    Ok(Wiring {
        out: Some(terminal.master),
        err: None,
        input: Some(input),
        places: vec![(slave, 0), (slave, 1), (slave, 2)],
        child: vec![terminal.slave],
    })
}

/// For sessions: a pipe whose read end is ours.
pub fn reading_pipe(poller: &Poller, token: Token) -> io::Result<(Source, OwnedFd)> {
    let pipe = new_pipe()?;
    set_nonblocking(&pipe.read)?;
    Ok((Source::new(poller, pipe.read, token.pack()), pipe.write))
}
