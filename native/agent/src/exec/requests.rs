//! Operations on execs.

use dsec_protocol::codec::decode;
use dsec_protocol::exec::{
    Ack, Attach, Exec as ExecArgs, ExecEnded, ExecList, ExecRef, Resize, Signal, StdinEnd,
};
use dsec_protocol::frames::{Data, FrameType, CHANNEL_ERR, CHANNEL_IN, CHANNEL_OUT};
use dsec_protocol::limits::{EXECS_KEPT_MAX, EXECS_LIVE_MAX};
use dsec_sys::process::kill;
use dsec_sys::pty::set_size;
use dsec_sys::signals::HIGHEST;

use super::input::INPUT_BYTES_MAX;
use super::plan::check_exec;
use super::Cause;
use crate::agent::Agent;
use crate::dispatch::{reply, Answer};
use crate::refusal::Refusal;
use crate::streams::{Body, Stream};
use dsec_protocol::opening::Empty;

type Answered = Result<Answer, Refusal>;

impl Agent {
    pub fn op_exec(&mut self, stream: u32, args: &[u8]) -> Answered {
        let args: ExecArgs = decode(args)?;
        if let Some(key) = self.execs.key_of(&args.id) {
            self.bind(stream, key, 0, 0, true);
            return Ok(Answer::Opened);
        }
        check_exec(&args)?;
        if self.shutting_down {
            return Err(Refusal::new("spawn_failed", "the agent is shutting down"));
        }
        if self.execs.live() >= EXECS_LIVE_MAX || self.execs.ended() >= EXECS_KEPT_MAX {
            return Err(Refusal::new(
                "too_many_execs",
                "too many execs run, or wait for exit_ack",
            ));
        }
        let key = match &args.session {
            Some(name) => self.start_in_session(name, &args)?,
            None => self.start_exec(&args)?,
        };
        self.bind(stream, key, 0, 0, false);
        Ok(Answer::Opened)
    }

    pub fn op_attach(&mut self, stream: u32, args: &[u8]) -> Answered {
        let args: Attach = decode(args)?;
        let key = self.known(&args.id)?;
        self.bind(stream, key, args.out, args.err, true);
        Ok(Answer::Opened)
    }

    pub fn op_detach(&mut self, args: &[u8]) -> Answered {
        let args: ExecRef = decode(args)?;
        let key = self.known(&args.id)?;
        self.unbind(key, "detached");
        reply(&Empty {})
    }

    pub fn op_ack(&mut self, args: &[u8]) -> Answered {
        let args: Ack = decode(args)?;
        let key = self.known(&args.id)?;
        if let Some(exec) = self.execs.get_mut(key) {
            let before = exec.held_bytes();
            exec.out.acknowledge(args.out);
            exec.err.acknowledge(args.err);
            let released = before - exec.held_bytes();
            let stream = exec.stream;
            self.execs.held_bytes -= released;
            self.ready.extend(stream);
        }
        self.output_released(key);
        reply(&Empty {})
    }

    pub fn op_exit_ack(&mut self, args: &[u8]) -> Answered {
        let args: ExecRef = decode(args)?;
        let Some(key) = self.execs.key_of(&args.id) else {
            return reply(&Empty {});
        };
        if self.execs.get(key).is_some_and(|exec| exec.end.is_none()) {
            return Err(Refusal::invalid("the exec is still running"));
        }
        self.unbind(key, "detached");
        self.execs.remove(key);
        self.output_released(key);
        reply(&Empty {})
    }

    pub fn op_signal(&mut self, args: &[u8]) -> Answered {
        let args: Signal = decode(args)?;
        let key = self.known(&args.id)?;
        if !(1..=HIGHEST).contains(&args.signal) {
            return Err(Refusal::invalid("no such signal"));
        }
        let (running, in_session, pid) = match self.execs.get(key) {
            Some(exec) => (exec.running, exec.session.is_some(), exec.pid),
            None => (false, false, 0),
        };
        if running && (args.tree || in_session) {
            self.signal_tree(key, args.signal);
        } else if running {
            // The group may be gone while the leader, which made another, lives.
            let _ = kill(-pid, args.signal).or_else(|_| kill(pid, args.signal));
        }
        reply(&Empty {})
    }

    pub fn op_kill(&mut self, args: &[u8]) -> Answered {
        let args: ExecRef = decode(args)?;
        let key = self.known(&args.id)?;
        self.kill_exec(key, Cause::Killed);
        reply(&Empty {})
    }

    pub fn op_resize(&mut self, args: &[u8]) -> Answered {
        let args: Resize = decode(args)?;
        let key = self.known(&args.id)?;
        let Some(exec) = self.execs.get(key) else {
            return reply(&Empty {});
        };
        if !exec.terminal {
            return Err(Refusal::invalid("the exec has no terminal"));
        }
        let source = exec.input.as_ref().and_then(|input| input.source());
        if let Some(source) = source {
            set_size(source, args.cols, args.rows)
                .map_err(|e| Refusal::system("invalid", "resizing", &e))?;
        }
        reply(&Empty {})
    }

    pub fn op_execs(&self) -> Answered {
        reply(&ExecList {
            execs: self.execs.states(),
        })
    }

    /// Whom this agent serves from here on is another: what runs goes on, by itself.
    pub fn disown_execs(&mut self) {
        let keys: Vec<u32> = self.execs.iter().map(|(key, _)| key).collect();
        for key in keys {
            self.unbind(key, "detached");
            if self.execs.get(key).is_some_and(|exec| exec.end.is_some()) {
                self.execs.remove(key);
                continue;
            }
            self.execs.disown(key);
            if let Some(input) = self.execs.get_mut(key).and_then(|exec| exec.input.as_mut()) {
                input.end();
            }
            self.advance_input(key, 0);
            self.output_released(key);
        }
    }

    /// Makes `stream` the exec's stream and answers RES; the one of before ends.
    fn bind(&mut self, stream: u32, key: u32, out: u64, err: u64, existing: bool) {
        self.unbind(key, "superseded");
        let Some(exec) = self.execs.get_mut(key) else {
            return;
        };
        exec.out.rewind(out);
        exec.err.rewind(err);
        exec.stream = Some(stream);
        let started = exec.started(existing);
        self.streams.insert(stream, Stream::new(Body::Exec(key)));
        self.send(FrameType::Res, stream, &started);
        self.ready.insert(stream);
    }

    fn unbind(&mut self, key: u32, code: &'static str) {
        let stream = self.execs.get_mut(key).and_then(|exec| exec.stream.take());
        if let Some(stream) = stream {
            self.refuse_stream(stream, Refusal::new(code, "the exec goes on"));
        }
    }

    /// Sends one chunk of output, or the end. Gives whether there may be more to send now.
    pub fn pump_exec(&mut self, id: u32, stream: &mut Stream, key: u32) -> Pumped {
        let (Some(exec), Some(link)) = (self.execs.get_mut(key), self.link.as_deref_mut()) else {
            return Pumped::Over;
        };
        let channel = match (exec.out.next_sequence(), exec.err.next_sequence()) {
            (Some(out), Some(err)) if err < out => CHANNEL_ERR,
            (Some(_), _) => CHANNEL_OUT,
            (None, Some(_)) => CHANNEL_ERR,
            (None, None) => match exec.end.clone() {
                Some(end) => {
                    exec.stream = None;
                    link.send(FrameType::End, id, &ExecEnded { end });
                    return Pumped::Over;
                }
                None => return Pumped::Idle,
            },
        };
        if stream.credit == 0 {
            return Pumped::Idle;
        }
        match exec.output(channel).send(link, id, channel, stream.credit) {
            Ok(sent) if sent > 0 => {
                stream.credit -= sent;
                Pumped::More
            }
            _ => Pumped::Idle,
        }
    }

    pub fn exec_input(&mut self, key: u32, data: &Data<'_>) -> Result<(), Refusal> {
        let input = match self.execs.get_mut(key) {
            Some(exec) if exec.end.is_some() => return Ok(()),
            Some(exec) => exec.input.as_mut(),
            None => None,
        };
        let Some(input) = input.filter(|_| data.channel == CHANNEL_IN) else {
            return Err(Refusal::invalid("the exec takes no input"));
        };
        if input.is_ended() {
            return Err(Refusal::invalid("input after its end"));
        }
        if data.offset > input.taken {
            return Err(Refusal::new("stdin_gap", "bytes before these are missing"));
        }
        let known = (input.taken - data.offset).min(data.payload.len() as u64) as usize;
        if input.waiting_bytes() + data.payload.len() > INPUT_BYTES_MAX {
            return Err(Refusal::invalid("more input than was granted"));
        }
        input.feed(&data.payload[known..]);
        self.advance_input(key, known as u64);
        Ok(())
    }

    pub fn exec_input_end(&mut self, key: u32, body: &[u8]) -> Result<(), Refusal> {
        let end: StdinEnd = decode(body)?;
        if let Some(input) = self.execs.get_mut(key).and_then(|exec| exec.input.as_mut()) {
            if end.offset > input.taken {
                return Err(Refusal::new(
                    "stdin_gap",
                    "bytes before the end are missing",
                ));
            }
            input.end();
        }
        self.advance_input(key, 0);
        Ok(())
    }

    /// Writes what the process takes and grants as much again, with `skipped` bytes that were not needed.
    pub fn advance_input(&mut self, key: u32, skipped: u64) {
        let Some(exec) = self.execs.get_mut(key) else {
            return;
        };
        let gone = match exec.input.as_mut().map(|input| input.advance()) {
            Some(Ok(gone)) => gone,
            _ => 0,
        };
        let stream = exec.stream;
        if let Some(stream) = stream {
            self.grant(stream, gone + skipped);
        }
    }

    fn known(&self, id: &str) -> Result<u32, Refusal> {
        self.execs
            .key_of(id)
            .ok_or_else(|| Refusal::new("exec_not_found", "no exec of this id is known"))
    }
}

/// What became of a stream that had something to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pumped {
    More,
    Idle,
    Over,
}
