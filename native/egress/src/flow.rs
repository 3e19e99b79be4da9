//! One connection: its two sockets, and what is on its way between them. What waits lies in pipes and in the sockets.

use std::io;
use std::net::SocketAddr;
use std::time::Instant;

use dsec_sys::epoll::{Source, EACH, HANGUP, READ, WRITE};
use dsec_sys::inet::{
    held_bytes, hold_at_most, is_closed, is_urgent, reset_on_close, splice, unsent_bytes,
};
use dsec_sys::pipes::{new_pipe, Pipe};
use dsec_sys::sockets::shutdown_write;

use crate::limits::{NARROW_BYTES, PIPE_BYTES, SPARE_PIPES};
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
    /// Both sides have said that there is no more, and have not had all of it yet: as long as it takes memory it counts.
    Ending,
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
    is_narrow: bool,
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
            is_narrow: false,
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

    /// Waits until both sides have had all that is for them. Whether they have.
    pub fn settle(&mut self) -> io::Result<bool> {
        let mut settled = true;
        for end in [Some(&mut self.client), self.server.as_mut()] {
            let Some(end) = end else { continue };
            // Its end is one byte. It is hung up for as long as it lasts, and so told of only when something changes.
            let has_all = unsent_bytes(end)? <= 1 || is_closed(end)?;
            end.want(if has_all { 0 } else { HANGUP | EACH })?;
            settled &= has_all;
        }
        Ok(settled)
    }

    /// What the kernel holds for it.
    pub fn held(&self) -> u64 {
        let ends = [Some(&self.client), self.server.as_ref()];
        let sockets = ends.into_iter().flatten();
        let held: u64 = sockets.map(|end| held_bytes(end).unwrap_or(0)).sum();
        held + (self.up.held + self.down.held) as u64
    }

    /// The kernel holds no more for it than it must from now on.
    pub fn narrow(&mut self) {
        if self.is_narrow {
            return;
        }
        self.is_narrow = self.server.is_some();
        for end in [Some(&self.client), self.server.as_ref()] {
            // One that is about to end refuses: then there is nothing to bound.
            let _ = end.map(|end| hold_at_most(end, NARROW_BYTES));
        }
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
