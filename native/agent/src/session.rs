//! Sessions: lasting shells. A command is given by `eval` on the shell's stdin; its status comes back on descriptor 9.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::AsRawFd;

use dsec_protocol::codec::decode;
use dsec_protocol::exec::Exec as ExecArgs;
use dsec_protocol::limits::{ENV_ITEMS_MAX, SESSIONS_MAX};
use dsec_protocol::opening::Empty;
use dsec_protocol::session::{SessionList, SessionOpen, SessionRef, SessionState};
use dsec_sys::epoll::{Source, READ, WRITE};
use dsec_sys::pipes::{new_pipe, set_nonblocking};
use dsec_sys::process::{kill, Ended};
use dsec_sys::signals::KILL;
use serde_bytes::ByteBuf;

use crate::agent::Agent;
use crate::cgroup::ExecCgroup;
use crate::dispatch::{reply, Answer};
use crate::exec::output::Output;
use crate::exec::plan::{check_name, plan_command, shell_path, Context, Program};
use crate::exec::start::reading_pipe;
use crate::exec::Exec;
use crate::processes::ProcessTable;
use crate::refusal::Refusal;
use crate::token::Token;

const REPORT_FD: i32 = 9;
const REPORT_BYTES_MAX: usize = 4096;
/// Reads of output that nobody asked for, before a command starts.
const LEFTOVER_READS_MAX: usize = 16;

pub struct Session {
    pub name: String,
    pub pid: i32,
    pub cgroup: Option<ExecCgroup>,
    shell: Vec<u8>,
    command: Source,
    text: VecDeque<u8>,
    report: Source,
    reported: Vec<u8>,
    /// Here while no exec has them.
    out: Option<Source>,
    err: Option<Source>,
    /// Commands so far: the number that a report must carry.
    number: u64,
    /// The exec that has the shell, until it has read its output to the end.
    busy: Option<u32>,
}

#[derive(Default)]
pub struct Sessions {
    by_key: BTreeMap<u32, Session>,
    next_key: u32,
}

impl Sessions {
    pub fn get(&self, key: u32) -> Option<&Session> {
        self.by_key.get(&key)
    }

    pub fn get_mut(&mut self, key: u32) -> Option<&mut Session> {
        self.by_key.get_mut(&key)
    }

    pub fn len(&self) -> usize {
        self.by_key.len()
    }

    pub fn keys(&self) -> Vec<u32> {
        self.by_key.keys().copied().collect()
    }

    fn key_of(&self, name: &str) -> Option<u32> {
        let found = self.by_key.iter().find(|(_, s)| s.name == name);
        found.map(|(key, _)| *key)
    }

    fn key_of_pid(&self, pid: i32) -> Option<u32> {
        let found = self.by_key.iter().find(|(_, s)| s.pid == pid);
        found.map(|(key, _)| *key)
    }
}

impl Agent {
    pub fn op_session_open(&mut self, args: &[u8]) -> Result<Answer, Refusal> {
        let args: SessionOpen = decode(args)?;
        if let Some(key) = self.sessions.key_of(&args.name) {
            return reply(&self.session_state(key, true));
        }
        check_name(&args.name)?;
        if self.sessions.len() >= SESSIONS_MAX || self.shutting_down {
            return Err(Refusal::new("too_many_sessions", "too many sessions"));
        }
        if args.env.len() > ENV_ITEMS_MAX {
            return Err(Refusal::new("argument_too_long", "env is over its bound"));
        }
        let key = self.start_session(args)?;
        reply(&self.session_state(key, false))
    }

    pub fn op_session_close(&mut self, args: &[u8]) -> Result<Answer, Refusal> {
        let args: SessionRef = decode(args)?;
        let key = self.session_key(&args.name)?;
        self.close_session(key);
        reply(&Empty {})
    }

    pub fn op_sessions(&self) -> Result<Answer, Refusal> {
        let keys = self.sessions.keys();
        let states = keys.iter().map(|key| self.session_state(*key, false));
        reply(&SessionList {
            sessions: states.collect(),
        })
    }

    /// Gives the text of an exec to its session's shell.
    pub fn start_in_session(&mut self, name: &str, args: &ExecArgs) -> Result<u32, Refusal> {
        let key = self.session_key(name)?;
        let text = args.shell.as_deref().unwrap_or_default();
        if text.contains(&0) {
            return Err(Refusal::invalid("shell holds a zero byte"));
        }
        let exec_key = self.execs.next_key();
        let session = match self.sessions.get_mut(key) {
            Some(session) if session.busy.is_none() => session,
            _ => return Err(Refusal::new("session_busy", "a command runs in it")),
        };
        discard_leftovers(session, &mut self.scratch);
        let unwatched = |source: &mut Option<Source>| source.as_mut().map_or(Ok(()), |s| s.want(0));
        // Both, before either belongs to the exec. One that is not watched for a while is drained before a command.
        unwatched(&mut session.out)
            .and_then(|()| unwatched(&mut session.err))
            .map_err(|e| Refusal::system("spawn_failed", "session pipes", &e))?;
        let lend = |source: Option<Source>, token: Token| {
            let mut source = source?;
            source.retarget(token.pack()).ok()?; // not watched, so that is no more than another token
            Some(source)
        };
        let out = lend(session.out.take(), Token::ExecOut(exec_key));
        let err = lend(session.err.take(), Token::ExecErr(exec_key));
        session.number += 1;
        session.busy = Some(exec_key);
        let line = command_line(&session.shell, text, session.number, args.merge_stderr);
        session.text.extend(line);
        let pid = session.pid;
        let exec = Exec {
            pid,
            session: Some(key),
            session_name: Some(name.to_owned()),
            out: Output::reading(out),
            err: Output::reading(err),
            ..self.new_exec(args)
        };
        self.admit(exec_key, exec, args.timeout_s);
        self.feed_session(key);
        Ok(exec_key)
    }

    /// The shell takes more of its command.
    pub fn feed_session(&mut self, key: u32) {
        let Some(session) = self.sessions.get_mut(key) else {
            return;
        };
        while !session.text.is_empty() {
            match session.command.write(session.text.as_slices().0) {
                Ok(Some(count)) => drop(session.text.drain(..count)),
                Ok(None) => break,
                // The shell is gone: its end is about to be reaped.
                Err(_) => session.text.clear(),
            }
        }
        let interest = match session.text.is_empty() {
            true => 0,
            false => WRITE,
        };
        // A pipe that cannot be waited for shows as a command that does not start; its time limit or a kill ends it.
        let _ = session.command.want(interest);
    }

    /// The shell says that a command has ended.
    pub fn read_report(&mut self, key: u32) {
        let Some(session) = self.sessions.get_mut(key) else {
            return;
        };
        let mut buffer = [0u8; 512];
        match session.report.read(&mut buffer) {
            Ok(None) => return,
            Ok(Some(count)) if count > 0 => session.reported.extend_from_slice(&buffer[..count]),
            // Closed by the shell: what it does is seen by its end.
            _ => drop(session.report.want(0)),
        }
        let mut status = None;
        while let Some(end) = session.reported.iter().position(|b| *b == b'\n') {
            let line: Vec<u8> = session.reported.drain(..=end).collect();
            status = parse_report(&line, session.number).or(status);
        }
        if session.reported.len() > REPORT_BYTES_MAX {
            session.reported.clear();
        }
        let busy = session.busy;
        if let (Some(status), Some(exec)) = (status, busy) {
            if self.execs.get(exec).is_some_and(|exec| exec.running) {
                self.command_ended(exec, Ended::Exited(status));
            }
        }
    }

    /// Output while no command runs is nobody's.
    pub fn discard_session_output(&mut self, key: u32, error: bool) {
        let Some(session) = self.sessions.get_mut(key) else {
            return;
        };
        let source = match error {
            true => &mut session.err,
            false => &mut session.out,
        };
        let over = source
            .as_ref()
            .is_some_and(|s| matches!(s.read(&mut self.scratch), Ok(Some(0)) | Err(_)));
        if over {
            *source = None;
        }
    }

    /// An exec is done with the shell's pipes.
    pub fn give_back(&mut self, key: u32, lent: (Option<Source>, Option<Source>)) {
        let Some(session) = self.sessions.get_mut(key) else {
            return;
        };
        let take_back = |source: Option<Source>, token: Token| {
            let mut source = source?;
            // What cannot be watched is read before the next command.
            let _ = source.want(0);
            let _ = source.retarget(token.pack());
            let _ = source.want(READ);
            Some(source)
        };
        session.out = take_back(lent.0, Token::SessionOut(key));
        session.err = take_back(lent.1, Token::SessionErr(key));
        session.busy = None;
    }

    /// A child has ended; gives whether it was a session's shell.
    pub fn session_reaped(&mut self, pid: i32, ended: Ended) -> bool {
        let Some(key) = self.sessions.key_of_pid(pid) else {
            return false;
        };
        // A report may still be in the pipe: then the command had ended before its shell did.
        self.read_report(key);
        let Some(session) = self.sessions.by_key.remove(&key) else {
            return true;
        };
        if let Some(exec) = session.busy {
            self.shell_of_exec_ended(exec, ended);
        }
        if let (Some(work), Some(cgroup)) = (&mut self.work, session.cgroup) {
            work.remove(cgroup);
        }
        true
    }

    fn shell_of_exec_ended(&mut self, key: u32, ended: Ended) {
        let Some(exec) = self.execs.get_mut(key) else {
            return;
        };
        if exec.end.is_none() {
            exec.session_ended = true;
        }
        if exec.running {
            self.command_ended(key, ended);
        }
    }

    pub fn close_session(&mut self, key: u32) {
        let Some(session) = self.sessions.get(key) else {
            return;
        };
        let killed = match (&self.work, &session.cgroup) {
            (Some(work), Some(cgroup)) => work.kill(cgroup).is_ok(),
            _ => false,
        };
        let (pid, busy) = (session.pid, session.busy);
        if !killed {
            // The shell first: it reports no end of what is killed after it.
            let tree = ProcessTable::read().tree_of(pid);
            let _ = kill(pid, KILL);
            for process in tree {
                let _ = kill(process.pid, KILL);
            }
        }
        if let Some(exec) = busy.and_then(|key| self.execs.get_mut(key)) {
            exec.cause.get_or_insert(crate::exec::Cause::Killed);
            // Its shell goes with it, whichever of the two is seen to end first.
            exec.session_ended |= exec.end.is_none();
        }
        // The name is free at once; the pid keeps the entry until it is reaped.
        if let Some(session) = self.sessions.get_mut(key) {
            session.name.clear();
        }
    }

    fn start_session(&mut self, args: SessionOpen) -> Result<u32, Refusal> {
        let shell = args.shell.unwrap_or_else(shell_path);
        let context = Context {
            user: args.user.as_deref(),
            cwd: args.cwd.as_deref(),
            env: &args.env,
            terminal: false,
        };
        let argv = [ByteBuf::from(shell.clone())];
        let program = Program::Argv(&argv);
        let mut command = plan_command(&self.config, &self.own, &context, &program)?;
        let key = self.sessions.next_key + 1;
        self.sessions.next_key = key;
        let failed = |e: std::io::Error| Refusal::system("spawn_failed", "descriptors", &e);
        let (mut out, out_child) =
            reading_pipe(&self.poller, Token::SessionOut(key)).map_err(failed)?;
        let (mut err, err_child) =
            reading_pipe(&self.poller, Token::SessionErr(key)).map_err(failed)?;
        let (mut report, report_child) =
            reading_pipe(&self.poller, Token::SessionReport(key)).map_err(failed)?;
        let input = new_pipe().map_err(failed)?;
        set_nonblocking(&input.write).map_err(failed)?;
        command.descriptors = vec![
            (input.read.as_raw_fd(), 0),
            (out_child.as_raw_fd(), 1),
            (err_child.as_raw_fd(), 2),
            (report_child.as_raw_fd(), REPORT_FD),
        ];
        for source in [&mut out, &mut err, &mut report] {
            source.want(READ).map_err(failed)?;
        }
        let (pid, cgroup) = self.launch_in_cgroup(&mut command, &format!("s-{}", args.name))?;
        let session = Session {
            name: args.name,
            pid,
            cgroup,
            shell,
            command: Source::new(&self.poller, input.write, Token::SessionCommand(key).pack()),
            text: VecDeque::new(),
            report,
            reported: Vec::new(),
            out: Some(out),
            err: Some(err),
            number: 0,
            busy: None,
        };
        self.sessions.by_key.insert(key, session);
        Ok(key)
    }

    fn session_key(&self, name: &str) -> Result<u32, Refusal> {
        let key = self.sessions.key_of(name).filter(|_| !name.is_empty());
        key.ok_or_else(|| Refusal::new("session_not_found", "there is no session of this name"))
    }

    fn session_state(&self, key: u32, existing: bool) -> SessionState {
        let Some(session) = self.sessions.get(key) else {
            return SessionState::default();
        };
        let busy = session.busy.and_then(|key| self.execs.get(key));
        SessionState {
            name: session.name.clone(),
            pid: session.pid,
            busy: busy.map(|exec| exec.id.clone()),
            existing,
        }
    }
}

fn discard_leftovers(session: &mut Session, scratch: &mut [u8]) {
    for source in [&session.out, &session.err].into_iter().flatten() {
        for _ in 0..LEFTOVER_READS_MAX {
            if !matches!(source.read(scratch), Ok(Some(count)) if count > 0) {
                break;
            }
        }
    }
}

/// `command` takes from eval what makes a syntax error end a POSIX shell. Children do not get descriptor 9, and the
/// shell's own stdin, on which the next command will come, is kept from the command.
fn command_line(shell: &[u8], text: &[u8], number: u64, merge_stderr: bool) -> Vec<u8> {
    let eval: &[u8] = match shell.rsplit(|b| *b == b'/').next() {
        Some(b"zsh") => b"builtin eval '",
        _ => b"command eval '",
    };
    let mut line = eval.to_vec();
    for byte in text {
        match byte {
            b'\'' => line.extend_from_slice(b"'\\''"),
            _ => line.push(*byte),
        }
    }
    line.extend_from_slice(b"' 9>&- </dev/null");
    if merge_stderr {
        line.extend_from_slice(b" 2>&1");
    }
    line.extend_from_slice(format!("\necho \"{number} $?\" >&9\n").as_bytes());
    line
}

fn parse_report(line: &[u8], number: u64) -> Option<i32> {
    let text = std::str::from_utf8(line).ok()?;
    let (of, status) = text.trim_end().split_once(' ')?;
    match of.parse() == Ok(number) {
        true => status.parse().ok(),
        false => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes_of_a_command_stay_inside_it() {
        let line = command_line(b"/bin/sh", b"echo 'a'", 3, false);

        assert_eq!(
            line,
            b"command eval 'echo '\\''a'\\''' 9>&- </dev/null\necho \"3 $?\" >&9\n"
        );
    }

    #[test]
    fn a_report_of_another_command_is_none() {
        assert_eq!(parse_report(b"3 1\n", 3), Some(1));
        assert_eq!(parse_report(b"2 1\n", 3), None);
        assert_eq!(parse_report(b"3 x\n", 3), None);
        assert_eq!(parse_report(b"\xff\n", 3), None);
    }
}
