//! The one connection to the host: bytes in to frames, frames to bytes out.

use std::io;
use std::os::fd::OwnedFd;

use dsec_protocol::codec::encode;
use dsec_protocol::error::ProtocolError;
use dsec_protocol::frames::{
    encode_data, encode_data_read, encode_frame, Data, Decoder, FrameType, PREAMBLE_BYTES,
    PREAMBLE_MAGIC,
};
use dsec_protocol::opening::Empty;
use dsec_sys::epoll::{Poller, Source, EACH, READ, WRITE};
use serde::Serialize;

use crate::door::Mark;
use crate::refusal::Refusal;
use crate::token::Token;

/// Above this no more DATA is produced: what waits here cannot be interleaved any more.
const OUT_HIGH_BYTES: usize = 384 << 10;
/// Above this no requests are read: only answers come here, and the host does not take them.
const OUT_STALLED_BYTES: usize = 4 << 20;

/// Read before a preamble is found: of a host that says hello at once.
const SEEN_BYTES_MAX: usize = 1 << 20;

pub struct Link {
    source: Source,
    decoder: Decoder,
    out: Vec<u8>,
    sent: usize,
    pub greeted: bool,
    /// Nothing more is said after what is in `out`.
    pub closing: bool,
    by_port: bool,
    /// The port says that nobody is there. That may be of a connection of before, so it is no end: only the bell is.
    alone: bool,
}

impl Link {
    fn new(source: Source, echo: &[u8], rest: &[u8], by_port: bool) -> Self {
        let mut decoder = Decoder::default();
        decoder.feed(rest);
        Self {
            source,
            decoder,
            out: echo.to_vec(),
            sent: 0,
            greeted: false,
            closing: false,
            by_port,
            alone: by_port,
        }
    }

    /// Reads once. `None`: nothing there; `Some(false)`: the host has closed.
    pub fn read(&mut self, scratch: &mut [u8]) -> io::Result<Option<bool>> {
        let read = self.read_once(scratch)?;
        if !self.by_port {
            return Ok(read);
        }
        self.alone = self.source.is_hung_up();
        if self.alone && read == Some(true) {
            // There may be more, and each thing is told once now: `flush` asks anew.
            self.source.want(0)?;
        }
        Ok(read.filter(|more| *more))
    }

    fn read_once(&mut self, scratch: &mut [u8]) -> io::Result<Option<bool>> {
        if let Some(room) = self.decoder.room() {
            let count = self.source.read(room)?;
            self.decoder.filled(count.unwrap_or(0));
            return Ok(count.map(|count| count > 0));
        }
        match self.source.read(scratch)? {
            None => Ok(None),
            Some(0) => Ok(Some(false)),
            Some(count) => {
                self.decoder.feed(&scratch[..count]);
                Ok(Some(true))
            }
        }
    }

    pub fn decoder(&mut self) -> &mut Decoder {
        &mut self.decoder
    }

    pub fn send<T: Serialize>(&mut self, kind: FrameType, stream: u32, record: &T) {
        let sent = encode(record).and_then(|body| self.send_body(kind, stream, &body));
        if let Err(error) = sent {
            self.refuse(stream, Refusal::new("internal", error.to_string()));
        }
    }

    pub fn send_body(
        &mut self,
        kind: FrameType,
        stream: u32,
        body: &[u8],
    ) -> Result<(), ProtocolError> {
        encode_frame(&mut self.out, kind, stream, body)
    }

    pub fn send_data(
        &mut self,
        stream: u32,
        data: Data<'_>,
        rest: &[u8],
    ) -> Result<(), ProtocolError> {
        encode_data(&mut self.out, stream, data, rest)
    }

    /// As `send_data`, with a payload of at most `most` bytes that `read` writes in place.
    pub fn send_read(
        &mut self,
        stream: u32,
        data: Data<'_>,
        most: usize,
        read: impl FnOnce(&mut [u8]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        encode_data_read(&mut self.out, stream, data, most, read)
    }

    pub fn refuse(&mut self, stream: u32, refusal: Refusal) {
        // A failure is three short strings: it always fits a frame.
        if let Ok(body) = encode(&refusal.into_failure()) {
            let _ = self.send_body(FrameType::Err, stream, &body);
        }
    }

    pub fn end(&mut self, stream: u32) {
        self.send(FrameType::End, stream, &Empty {});
    }

    pub fn waiting_bytes(&self) -> usize {
        self.out.len() - self.sent
    }

    pub fn has_room(&self) -> bool {
        self.waiting_bytes() < OUT_HIGH_BYTES
    }

    pub fn is_stalled(&self) -> bool {
        self.waiting_bytes() > OUT_STALLED_BYTES
    }

    /// Writes what the socket takes, and waits for what is to come next. `more`: a file is being sent, whose next piece wants
    /// the memory of this one.
    pub fn flush(&mut self, more: bool) -> io::Result<()> {
        while self.sent < self.out.len() {
            match self.source.write(&self.out[self.sent..])? {
                Some(count) => self.sent += count,
                None => break,
            }
        }
        if self.sent == self.out.len() {
            self.sent = 0;
            self.out.clear();
            if self.out.capacity() > 8192 && !more {
                self.out = Vec::new();
            }
        } else if self.sent > OUT_HIGH_BYTES {
            self.out.drain(..self.sent);
            self.sent = 0;
        }
        let mut interest = 0;
        if !self.is_stalled() && !self.closing {
            interest |= READ;
        }
        if self.waiting_bytes() > 0 {
            interest |= WRITE;
        }
        if self.alone {
            interest |= EACH;
        }
        self.source.want(interest)
    }
}

/// A connection that has not shown a preamble yet.
pub struct Pending {
    pub number: u32,
    source: Source,
    seen: Vec<u8>,
    /// By a serial port: what comes before this is of a connection of before.
    mark: Option<Mark>,
    by_port: bool,
}

pub enum Opening {
    Waiting(Pending),
    Ready(Box<Link>),
    Gone,
}

impl Pending {
    pub fn new(poller: &Poller, number: u32, fd: OwnedFd) -> io::Result<Self> {
        let mut source = Source::new(poller, fd, Token::Pending(number).pack());
        source.want(READ)?;
        Ok(Self {
            number,
            source,
            seen: Vec::new(),
            mark: None,
            by_port: false,
        })
    }

    /// One that begins after `mark` on a port. There may be nobody at its other end yet, which is no end of it.
    pub fn by_port(poller: &Poller, number: u32, port: OwnedFd, mark: Mark) -> io::Result<Self> {
        let mut source = Source::new(poller, port, Token::Pending(number).pack());
        source.want(READ | EACH)?;
        Ok(Self {
            number,
            source,
            seen: Vec::new(),
            mark: Some(mark),
            by_port: true,
        })
    }

    /// Reads once and discards what cannot be part of a preamble.
    pub fn advance(mut self, scratch: &mut [u8]) -> Opening {
        match self.read(scratch) {
            Ok(true) => {}
            Ok(false) => return Opening::Waiting(self),
            Err(_) => return Opening::Gone,
        }
        let magic = self
            .seen
            .windows(PREAMBLE_MAGIC.len())
            .position(|window| window == PREAMBLE_MAGIC);
        let Some(start) = magic else {
            let keep = self.seen.len().min(PREAMBLE_MAGIC.len() - 1);
            self.seen.drain(..self.seen.len() - keep);
            return Opening::Waiting(self);
        };
        self.seen.drain(..start);
        if self.seen.len() < PREAMBLE_BYTES {
            return Opening::Waiting(self);
        }
        let (echo, rest) = self.seen.split_at(PREAMBLE_BYTES);
        let (echo, rest) = (echo.to_vec(), rest.to_vec());
        match self.source.retarget(Token::Link.pack()) {
            Ok(()) => Opening::Ready(Box::new(Link::new(self.source, &echo, &rest, self.by_port))),
            Err(_) => Opening::Gone,
        }
    }

    /// False while there is nothing to look at. An end is an error, but at a port, where it may be that of a connection of before.
    fn read(&mut self, scratch: &mut [u8]) -> io::Result<bool> {
        if !self.by_port {
            return match self.source.read(scratch)? {
                None => Ok(false),
                Some(0) => Err(io::ErrorKind::UnexpectedEof.into()),
                Some(count) => {
                    self.seen.extend_from_slice(&scratch[..count]);
                    Ok(true)
                }
            };
        }
        // All that is there: each thing is told once. More than a beginning is nobody's of ours.
        while self.seen.len() < SEEN_BYTES_MAX {
            match self.source.read(scratch)? {
                None | Some(0) => break,
                Some(count) => self.seen.extend_from_slice(&scratch[..count]),
            }
            self.skip_to_mark();
        }
        Ok(self.mark.is_none())
    }

    fn skip_to_mark(&mut self) {
        let Some(mark) = &self.mark else {
            return;
        };
        let start = self
            .seen
            .windows(mark.len())
            .position(|window| window == mark);
        let done = match start {
            Some(start) => start + mark.len(),
            None => self.seen.len().saturating_sub(mark.len() - 1),
        };
        self.seen.drain(..done);
        if start.is_some() {
            self.mark = None;
        }
    }
}
