//! From frames to operations.

use dsec_protocol::codec::{decode, encode};
use dsec_protocol::frames::{decode_data, Frame, FrameType};
use dsec_protocol::limits::STREAMS_MAX;
use dsec_protocol::opening::{Credit, Empty, Failure, Hello, HelloReply, NoArgs};
use dsec_protocol::raw::split_request;
use dsec_protocol::rest::{ClaimArgs, ClockArgs, ReseedArgs, UsageReply};
use dsec_protocol::{GENERATION_MAX, GENERATION_MIN};
use dsec_sys::rooted::disk_space;
use serde::Serialize;

use crate::agent::Agent;
use crate::machine;
use crate::processes::ProcessTable;
use crate::refusal::Refusal;
use crate::streams::Body;

/// What an operation gives: its RES, or a stream that goes on.
pub enum Answer {
    Reply(Vec<u8>),
    Opened,
}

pub fn reply<T: Serialize>(record: &T) -> Result<Answer, Refusal> {
    match encode(record) {
        Ok(body) => Ok(Answer::Reply(body)),
        Err(error) => Err(Refusal::new("internal", error.to_string())),
    }
}

/// The host broke the protocol: the channel is closed.
pub struct Violation;

const FEATURES: &[&str] = &["watch", "archive", "connect", "sessions", "tty", "listen"];

impl Agent {
    pub fn handle(&mut self, frame: &Frame) -> Result<(), Violation> {
        let greeted = self.link.as_ref().is_some_and(|link| link.greeted);
        match frame.kind {
            FrameType::Hello if !greeted && frame.stream == 0 => self.hello(&frame.body),
            _ if !greeted => Err(Violation),
            FrameType::Req => self.request(frame.stream, &frame.body),
            FrameType::Data => self.data(frame.stream, &frame.body),
            FrameType::Credit => self.credit(frame.stream, &frame.body),
            FrameType::End => {
                self.input_end(frame.stream, &frame.body);
                Ok(())
            }
            FrameType::Err => self.cancel(frame.stream, &frame.body),
            FrameType::Hello | FrameType::Res | FrameType::Event => Err(Violation),
        }
    }

    fn hello(&mut self, body: &[u8]) -> Result<(), Violation> {
        let hello: Hello = decode(body).map_err(|_| Violation)?;
        let generation = hello.generation_max.min(GENERATION_MAX);
        let refusal = if generation < hello.generation_min.max(GENERATION_MIN) {
            Some(("no_common_generation", "no generation is known to both"))
        } else if !self.config.sandbox.is_empty() && hello.sandbox != self.config.sandbox {
            Some(("wrong_sandbox", "this is another sandbox"))
        } else {
            None
        };
        let execs = self.execs.states();
        let Some(link) = self.link.as_deref_mut() else {
            return Ok(());
        };
        if let Some((code, message)) = refusal {
            link.refuse(0, Refusal::new(code, message));
            link.closing = true;
            return Ok(());
        }
        link.greeted = true;
        let answer = HelloReply {
            generation,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            boot_id: self.boot_id.clone(),
            execs,
            features: FEATURES.iter().map(|f| (*f).to_owned()).collect(),
        };
        link.send(FrameType::Hello, 0, &answer);
        Ok(())
    }

    fn request(&mut self, stream: u32, body: &[u8]) -> Result<(), Violation> {
        if stream % 2 == 0 || self.streams.contains_key(&stream) {
            return Err(Violation);
        }
        let request = split_request(body).map_err(|_| Violation)?;
        let answer = match self.streams.len() < STREAMS_MAX {
            true => self.operate(stream, request.op, request.args),
            false => Err(Refusal::new("too_many_streams", "too many open streams")),
        };
        match answer {
            Ok(Answer::Opened) => {}
            Ok(Answer::Reply(body)) => self.send_reply(stream, &body),
            Err(refusal) => self.refuse_stream(stream, refusal),
        }
        Ok(())
    }

    fn send_reply(&mut self, stream: u32, body: &[u8]) {
        let Some(link) = self.link.as_deref_mut() else {
            return;
        };
        if link.send_body(FrameType::Res, stream, body).is_err() {
            link.refuse(stream, Refusal::new("internal", "the answer is too long"));
        }
    }

    fn operate(&mut self, stream: u32, op: &str, args: &[u8]) -> Result<Answer, Refusal> {
        if self.config.spare && !serves_a_spare(op, self.has_machine) {
            return Err(Refusal::invalid("this agent serves no sandbox yet"));
        }
        if !takes_nothing_of_the_sandbox(op) {
            self.settle()?;
        }
        match op {
            "exec" => self.op_exec(stream, args),
            "attach" => self.op_attach(stream, args),
            "detach" => self.op_detach(args),
            "ack" => self.op_ack(args),
            "exit_ack" => self.op_exit_ack(args),
            "signal" => self.op_signal(args),
            "kill" => self.op_kill(args),
            "resize" => self.op_resize(args),
            "execs" => none(args).and_then(|()| self.op_execs()),
            "session_open" => self.op_session_open(args),
            "session_close" => self.op_session_close(args),
            "sessions" => none(args).and_then(|()| self.op_sessions()),
            "stat" => self.op_stat(args),
            "list" => self.op_list(stream, args),
            "read" => self.op_read(stream, args),
            "write" => self.op_write(stream, args),
            "mkdir" => self.op_mkdir(args),
            "move" => self.op_move(args),
            "remove" => self.op_remove(stream, args),
            "chmod" => self.op_chmod(args),
            "chown" => self.op_chown(args),
            "symlink" => self.op_symlink(args),
            "archive" => self.op_archive(stream, args),
            "extract" => self.op_extract(stream, args),
            "watch" => self.op_watch(stream, args),
            "connect" => self.op_connect(stream, args),
            "listen" => self.op_listen(args),
            "accept" => self.op_accept(stream, args),
            "usage" => none(args).and_then(|()| self.op_usage()),
            "clock" => self.op_clock(args),
            "reseed" => self.op_reseed(args),
            "freeze_prepare" => self.op_freeze_prepare(args),
            "claim" => self.op_claim(args),
            "shutdown" => none(args).and_then(|()| {
                self.begin_shutdown();
                reply(&Empty {})
            }),
            _ => Err(Refusal::new("unknown_op", "no such operation")),
        }
    }

    fn data(&mut self, id: u32, body: &[u8]) -> Result<(), Violation> {
        let data = decode_data(body).map_err(|_| Violation)?;
        let count = data.payload.len() as u64;
        match self.streams.get(&id) {
            // Crossed the stream's end.
            None => return Ok(()),
            Some(stream) if count == 0 || count > stream.window => return Err(Violation),
            Some(_) => {}
        }
        let Some(mut stream) = self.streams.remove(&id) else {
            return Ok(());
        };
        stream.window -= count;
        let result = match &stream.body {
            Body::Exec(key) => {
                let key = *key;
                self.streams.insert(id, stream);
                self.exec_input(key, &data)
                    .inspect_err(|_| self.forget_exec_stream(key))
            }
            Body::Write(_) => self.write_input(id, stream, &data),
            Body::Helper(_) => self.helper_input(id, stream, &data),
            Body::Connect(_) => self.connect_input(id, stream, &data),
            Body::Read(_) | Body::Watch | Body::Accept => {
                Err(Refusal::invalid("this stream takes no data"))
            }
        };
        if let Err(refusal) = result {
            self.refuse_stream(id, refusal);
        }
        Ok(())
    }

    fn credit(&mut self, id: u32, body: &[u8]) -> Result<(), Violation> {
        let credit: Credit = decode(body).map_err(|_| Violation)?;
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.credit = stream.credit.saturating_add(credit.bytes);
            self.ready.insert(id);
        }
        Ok(())
    }

    fn input_end(&mut self, id: u32, body: &[u8]) {
        let Some(stream) = self.streams.remove(&id) else {
            return;
        };
        let result = match &stream.body {
            Body::Exec(key) => {
                let key = *key;
                self.streams.insert(id, stream);
                self.exec_input_end(key, body)
                    .inspect_err(|_| self.forget_exec_stream(key))
            }
            Body::Write(_) => self.write_end(id, stream, body),
            Body::Helper(_) => {
                self.helper_input_end(id, stream);
                Ok(())
            }
            Body::Connect(_) => {
                self.connect_input_end(id, stream);
                Ok(())
            }
            Body::Watch => {
                self.unwatch(id);
                if let Some(link) = self.link.as_deref_mut() {
                    link.end(id);
                }
                Ok(())
            }
            Body::Read(_) | Body::Accept => {
                self.streams.insert(id, stream);
                Ok(())
            }
        };
        if let Err(refusal) = result {
            self.refuse_stream(id, refusal);
        }
    }

    fn cancel(&mut self, id: u32, body: &[u8]) -> Result<(), Violation> {
        let _: Failure = decode(body).map_err(|_| Violation)?;
        if let Some(stream) = self.streams.remove(&id) {
            self.abandon(id, stream);
            self.refuse_stream(id, Refusal::new("cancelled", "given up by the host"));
        }
        Ok(())
    }

    fn op_usage(&self) -> Result<Answer, Refusal> {
        let disk = disk_space(c"/").unwrap_or_default();
        reply(&UsageReply {
            processes: ProcessTable::read().len() as u64,
            execs: self.execs.live() as u64,
            sessions: self.sessions.len() as u64,
            agent_rss_bytes: own_rss_bytes(),
            disk_used_bytes: disk.used_bytes,
            disk_total_bytes: disk.total_bytes,
        })
    }

    /// Once: afterwards this agent is as one that was started for its sandbox.
    fn op_claim(&mut self, args: &[u8]) -> Result<Answer, Refusal> {
        let args: ClaimArgs = decode(args)?;
        if !self.config.spare {
            return Err(Refusal::invalid("this agent serves a sandbox already"));
        }
        self.config.spare = false;
        self.config.sandbox = args.sandbox;
        self.config.env = args.env;
        self.config.user = args.user;
        self.config.workdir = args.workdir;
        if self.has_machine {
            machine::name(&args.hostname.unwrap_or_default())?;
        }
        self.let_work_go_on();
        reply(&Empty {})
    }

    /// Without a machine of our own it is mixed in without being counted as entropy, which needs no right.
    fn op_reseed(&mut self, args: &[u8]) -> Result<Answer, Refusal> {
        let args: ReseedArgs = decode(args)?;
        let seed = &args.seed[..args.seed.len().min(4096)];
        match self.has_machine {
            true => {
                machine::reseed(seed)?;
                if args.another {
                    self.disown_execs();
                    self.config.spare = true;
                    self.config.sandbox.clear();
                }
                if self.config.spare {
                    // Every clone of a template, or of a snapshot, has been the same agent so far.
                    self.become_another();
                    machine::readdress()?;
                }
            }
            false => std::fs::write("/dev/urandom", seed)
                .map_err(|e| Refusal::system("reseed_failed", "/dev/urandom", &e))?,
        }
        reply(&Empty {})
    }

    fn op_freeze_prepare(&mut self, args: &[u8]) -> Result<Answer, Refusal> {
        none(args)?;
        self.hold_timers();
        self.hold_work();
        reply(&Empty {})
    }

    fn op_clock(&mut self, args: &[u8]) -> Result<Answer, Refusal> {
        let args: ClockArgs = decode(args)?;
        if !args.paused_s.is_finite() || args.paused_s < 0.0 {
            return Err(Refusal::invalid("paused_s is out of range"));
        }
        if let Some(wall_s) = args.wall_s.filter(|_| self.has_machine) {
            machine::set_clock(wall_s)?;
        }
        // The clock of a machine that was stopped has stood still with it.
        let paused_s = match self.has_machine {
            true => 0.0,
            false => args.paused_s.min(1e9),
        };
        self.clock_told((paused_s * 1000.0) as u64);
        self.let_work_go_on();
        reply(&Empty {})
    }
}

/// Operations of an agent that serves no sandbox yet. A machine may be rehearsed: a command of its image runs in it, so that what
/// the first one of a caller needs is in its memory.
fn serves_a_spare(op: &str, has_machine: bool) -> bool {
    match op {
        "claim" | "clock" | "reseed" | "usage" | "shutdown" => true,
        "exec" | "exit_ack" => has_machine,
        _ => false,
    }
}

/// Operations for which a light sandbox stays light: they neither start anything inside nor look at it.
fn takes_nothing_of_the_sandbox(op: &str) -> bool {
    matches!(
        op,
        "ack"
            | "exit_ack"
            | "detach"
            | "execs"
            | "sessions"
            | "usage"
            | "clock"
            | "reseed"
            | "freeze_prepare"
            | "claim"
            | "shutdown"
    )
}

fn none(args: &[u8]) -> Result<(), Refusal> {
    let NoArgs {} = decode(args)?;
    Ok(())
}

fn own_rss_bytes() -> u64 {
    const PAGE_BYTES: u64 = 4096;
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = text.split(' ').nth(1).and_then(|field| field.parse().ok());
    pages.unwrap_or(0u64) * PAGE_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spare_runs_nothing_unless_it_is_a_machine_that_is_rehearsed() {
        for op in ["claim", "clock", "reseed", "usage", "shutdown"] {
            assert!(serves_a_spare(op, false) && serves_a_spare(op, true));
        }
        for op in ["exec", "exit_ack"] {
            assert!(!serves_a_spare(op, false) && serves_a_spare(op, true));
        }
        for op in [
            "attach",
            "session_open",
            "read",
            "write",
            "listen",
            "connect",
            "freeze_prepare",
        ] {
            assert!(!serves_a_spare(op, false) && !serves_a_spare(op, true));
        }
    }
}
