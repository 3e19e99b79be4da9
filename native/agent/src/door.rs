//! Where connections come from: a listening socket (of a virtual machine a vsock), or the serial ports of a virtual machine.
//!
//! A serial port is one pipe for ever: it does not say where one connection ends and the next begins, and what was on its way when
//! the host went away is still to come. So whoever begins writes 20 bytes of its own choice to a second port, the bell; these are so
//! few that they are there whole or not at all. The agent lets go of the connection of before, answers with the same 20 bytes, and
//! discards what comes by the first port until it meets them again there.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use dsec_protocol::frames::PREAMBLE_BYTES;
use dsec_sys::epoll::{Poller, Source, EACH, READ, WRITE};
use dsec_sys::seqpacket::accept;

use crate::setup::{note, Entrance};
use crate::token::Token;

const RINGS_BYTES: usize = 64 * PREAMBLE_BYTES;

pub type Mark = [u8; PREAMBLE_BYTES];

pub enum Door {
    Socket {
        listener: OwnedFd,
        /// Keeps it in the poller.
        _waiting: Source,
    },
    Ports {
        data: OwnedFd,
        bell: Source,
        /// Of the connection that is open, or about to be.
        mark: Option<Mark>,
        /// What has come of the next one.
        half: Vec<u8>,
        /// Still to be said by the bell: it takes nothing before the kernel knows that somebody is there.
        owed: Option<Mark>,
    },
}

impl Door {
    pub fn new(poller: &Poller, entrance: Entrance) -> io::Result<Self> {
        match entrance {
            Entrance::Socket(listener) | Entrance::Vsock(listener) => {
                let copy = listener.try_clone()?;
                let mut waiting = Source::new(poller, copy, Token::Listener.pack());
                waiting.want(READ)?;
                Ok(Self::Socket {
                    listener,
                    _waiting: waiting,
                })
            }
            Entrance::Ports { data, bell } => {
                let mut bell = Source::new(poller, bell, Token::Bell.pack());
                bell.want(READ | WRITE | EACH)?;
                Ok(Self::Ports {
                    data,
                    bell,
                    mark: None,
                    half: Vec::new(),
                    owed: None,
                })
            }
        }
    }

    /// The next connection of a socket; nothing when there is none.
    pub fn accept(&self) -> Option<OwnedFd> {
        let Self::Socket { listener, .. } = self else {
            return None;
        };
        match accept(listener.as_fd()) {
            Ok(socket) => Some(socket),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
            Err(error) => {
                note("accepting", &error);
                None
            }
        }
    }

    /// The host has rung, or can be told: gives the mark of the connection that is to come, and the port that it comes by. The last one counts.
    pub fn rung(&mut self) -> Option<(OwnedFd, Mark)> {
        let Self::Ports {
            data,
            bell,
            mark,
            half,
            owed,
        } = self
        else {
            return None;
        };
        let mut scratch = [0; RINGS_BYTES];
        let mut last: Option<Mark> = None;
        while let Ok(Some(count)) = bell.read(&mut scratch) {
            if count == 0 {
                // Who has hung up has not rung halfway.
                half.clear();
                break;
            }
            half.extend_from_slice(&scratch[..count]);
            let whole = half.len() - half.len() % PREAMBLE_BYTES;
            if let Some(ring) = half[..whole].rchunks_exact(PREAMBLE_BYTES).next() {
                last = ring.try_into().ok();
            }
            half.drain(..whole);
        }
        if last.is_some() {
            *owed = last;
        }
        say(bell, owed);
        let last = last?;
        let port = data
            .try_clone()
            .inspect_err(|e| note("a serial port", e))
            .ok()?;
        *mark = Some(last);
        Some((port, last))
    }

    /// A connection by a port has ended from our side, which its other end cannot see: it is told by the bell.
    pub fn left(&mut self) {
        if let Self::Ports {
            bell, mark, owed, ..
        } = self
        {
            if let Some(mut mark) = mark.take() {
                mark[..4].copy_from_slice(b"LEFT");
                *owed = Some(mark);
                say(bell, owed);
            }
        }
    }
}

fn say(bell: &Source, owed: &mut Option<Mark>) {
    if let Some(mark) = owed {
        // So few bytes are taken whole or not at all.
        if let Ok(Some(_)) = bell.write(mark) {
            *owed = None;
        }
    }
}
