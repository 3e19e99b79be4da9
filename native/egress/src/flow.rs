//! One connection: its two sockets, and what is on its way between them. What waits lies in pipes and in the sockets.

use std::io;
use std::net::SocketAddr;
use std::time::Instant;

use dsec_sys::epoll::{Source, READ, WRITE};
use dsec_sys::inet::{is_urgent, reset_on_close, splice};
use dsec_sys::pipes::{new_pipe, Pipe};
use dsec_sys::sockets::shutdown_write;

use crate::limits::{PIPE_BYTES, SPARE_PIPES};
use crate::policy::{Destination, Name};
use crate::talk::Talk;

pub enum Stage {
    /// Its first bytes are waited for, of which so many have been seen, the last time of so many.
    Naming {
        seen: usize,
        looks: u32,
    },
    Dialing,
    Moving,
    /// It asks us after names.
    Asking(Talk),
}

pub struct Flow {
    pub client: Source,
    pub server: Option<Source>,
    pub to: Destination,
    pub stage: Stage,
    /// Names that it was let through for.
    pub names: Vec<Name>,
    /// It named all of these itself.
    pub has_named: bool,
    /// When it ends unless something moves.
    pub until: Instant,
    up: Way,
    down: Way,
}

#[derive(Default)]
struct Way {
    pipe: Option<Pipe>,
    held: usize,
    /// Its source has said that there is no more.
    has_ended: bool,
    /// Its target has been told so.
    is_shut: bool,
}

/// Bytes that were moved, and whether that was all.
pub struct Moved {
    pub up: usize,
    pub down: usize,
    pub is_over: bool,
}

impl Flow {
    pub fn new(client: Source, to: Destination, stage: Stage, until: Instant) -> Flow {
        Flow {
            client,
            server: None,
            to,
            stage,
            names: Vec::new(),
            has_named: false,
            until,
            up: Way::default(),
            down: Way::default(),
        }
    }

    pub fn address(&self) -> SocketAddr {
        SocketAddr::new(self.to.address, self.to.port)
    }

    /// Moves up to so many bytes each way, and waits for what can go on then. An error is the end of it.
    pub fn pump(&mut self, pipes: &mut Pipes, most: usize) -> io::Result<Moved> {
        let Some(server) = &mut self.server else {
            return Err(io::ErrorKind::NotConnected.into());
        };
        let up = self.up.pump(&self.client, server, pipes, most)?;
        let down = self.down.pump(server, &self.client, pipes, most)?;
        let interest = |out: &Way, back: &Way| {
            let reads = !out.has_ended && out.held == 0;
            (if reads { READ } else { 0 }) | if back.held > 0 { WRITE } else { 0 }
        };
        self.client.want(interest(&self.up, &self.down))?;
        server.want(interest(&self.down, &self.up))?;
        Ok(Moved {
            up,
            down,
            is_over: self.up.is_shut && self.down.is_shut,
        })
    }

    /// Until it is over in order, its ends are told that it broke off, also when this process is killed: nobody takes a part
    /// for the whole.
    pub fn resets(&self, resets: bool) -> io::Result<()> {
        reset_on_close(&self.client, resets)?;
        match &self.server {
            Some(server) => reset_on_close(server, resets),
            None => Ok(()),
        }
    }
}

impl Way {
    fn pump(
        &mut self,
        from: &Source,
        to: &Source,
        pipes: &mut Pipes,
        most: usize,
    ) -> io::Result<usize> {
        let mut moved = 0;
        while moved < most && !self.is_shut {
            if self.held == 0 {
                if self.has_ended {
                    shutdown_write(to)?;
                    self.is_shut = true;
                    break;
                }
                let pipe = match self.pipe.take() {
                    Some(pipe) => pipe,
                    None => pipes.take()?,
                };
                let came = splice(from, &pipe.write, PIPE_BYTES);
                self.pipe = Some(pipe);
                match came? {
                    // What is urgent is not moved, and would be ready for ever.
                    None if is_urgent(from)? => return Err(io::ErrorKind::Unsupported.into()),
                    None => break,
                    Some(0) => self.has_ended = true,
                    Some(count) => self.held = count,
                }
                continue;
            }
            let Some(pipe) = &self.pipe else {
                return Err(io::ErrorKind::BrokenPipe.into());
            };
            match splice(&pipe.read, to, self.held)? {
                None => break,
                Some(0) => return Err(io::ErrorKind::WriteZero.into()),
                Some(count) => {
                    self.held -= count;
                    moved += count;
                }
            }
        }
        if self.held == 0 {
            if let Some(pipe) = self.pipe.take() {
                pipes.give(pipe);
            }
        }
        Ok(moved)
    }
}

/// Empty pipes: one is used only while something waits in it.
#[derive(Default)]
pub struct Pipes {
    spare: Vec<Pipe>,
}

impl Pipes {
    fn take(&mut self) -> io::Result<Pipe> {
        match self.spare.pop() {
            Some(pipe) => Ok(pipe),
            None => new_pipe(),
        }
    }

    fn give(&mut self, pipe: Pipe) {
        if self.spare.len() < SPARE_PIPES {
            self.spare.push(pipe);
        }
    }
}
