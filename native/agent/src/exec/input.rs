//! Standard input of an exec: taken from the host, not yet taken by the process.

use std::collections::VecDeque;
use std::io;

use dsec_sys::epoll::{Source, WRITE};

/// Reached only by a host that attaches and sends again and again without waiting for credit.
pub const INPUT_BYTES_MAX: usize = 1 << 20;
const END_OF_TRANSMISSION: u8 = 4;

pub struct Input {
    /// `None` once nothing more goes to the process; what still comes is dropped.
    source: Option<Source>,
    bytes: VecDeque<u8>,
    /// Bytes taken from the host in all.
    pub taken: u64,
    ended: bool,
    terminal: bool,
    line_is_open: bool,
}

impl Input {
    pub fn new(source: Source, terminal: bool) -> Self {
        Self {
            source: Some(source),
            bytes: VecDeque::new(),
            taken: 0,
            ended: false,
            terminal,
            line_is_open: false,
        }
    }

    /// The descriptor, for the size of a terminal.
    pub fn source(&self) -> Option<&Source> {
        self.source.as_ref()
    }

    pub fn is_ended(&self) -> bool {
        self.ended
    }

    pub fn waiting_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// The caller has checked that the bytes begin at `taken`.
    pub fn feed(&mut self, bytes: &[u8]) {
        self.bytes.extend(bytes);
        self.taken += bytes.len() as u64;
    }

    /// End-of-file after what is waiting. On a terminal a ^D, or two when the first would only end a line.
    pub fn end(&mut self) {
        if self.ended {
            return;
        }
        self.ended = true;
        if self.terminal {
            let last = self.bytes.back().copied();
            let open = last.map_or(self.line_is_open, |byte| byte != b'\n');
            self.bytes.push_back(END_OF_TRANSMISSION);
            if open {
                self.bytes.push_back(END_OF_TRANSMISSION);
            }
        }
    }

    /// Writes what the process takes; gives the bytes that are off our hands.
    pub fn advance(&mut self) -> io::Result<u64> {
        let mut gone = 0;
        while let (Some(source), false) = (&self.source, self.bytes.is_empty()) {
            let (head, _) = self.bytes.as_slices();
            match source.write(head) {
                Ok(Some(count)) => {
                    self.line_is_open = count > 0 && head[count - 1] != b'\n';
                    self.bytes.drain(..count);
                    gone += count as u64;
                }
                Ok(None) => break,
                // The process does not read any more.
                Err(_) => self.source = None,
            }
        }
        if self.source.is_none() {
            gone += self.bytes.len() as u64;
            self.bytes.clear();
        }
        if !self.bytes.is_empty() {
            self.want(WRITE)?;
            return Ok(gone);
        }
        self.bytes = VecDeque::new();
        self.want(0)?;
        // Closing a terminal's master would end its output as well.
        if self.ended && !self.terminal {
            self.source = None;
        }
        Ok(gone)
    }

    fn want(&mut self, interest: u32) -> io::Result<()> {
        match &mut self.source {
            Some(source) => source.want(interest),
            None => Ok(()),
        }
    }
}
