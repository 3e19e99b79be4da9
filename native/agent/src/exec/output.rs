//! One channel of an exec's output: what was read and is not acknowledged, and how far it has been sent.

use std::collections::VecDeque;
use std::io;

use dsec_protocol::error::ProtocolError;
use dsec_protocol::frames::Data;
use dsec_sys::epoll::Source;

use crate::link::Link;

/// What one mark costs.
const MARK_BYTES: usize = 16;
/// A chunk grows no further: chunks keep the order of the two channels visible.
const CHUNK_BYTES_MAX: u64 = 64 << 10;

/// Where a chunk begins.
#[derive(Clone, Copy, Debug)]
struct Mark {
    offset: u64,
    sequence: u64,
}

#[derive(Default)]
pub struct Output {
    pub source: Option<Source>,
    /// Offset of the first byte held.
    acked: u64,
    bytes: VecDeque<u8>,
    marks: VecDeque<Mark>,
    /// Offset of the next byte for the attached stream.
    pub sent: u64,
}

pub enum Taken {
    Bytes(usize),
    Nothing,
    End,
}

impl Output {
    pub fn reading(source: Option<Source>) -> Self {
        Self {
            source,
            ..Self::default()
        }
    }

    pub fn produced(&self) -> u64 {
        self.acked + self.bytes.len() as u64
    }

    /// Memory that it takes.
    pub fn held_bytes(&self) -> usize {
        self.bytes.len() + self.marks.len() * MARK_BYTES
    }

    pub fn kept_bytes(&self) -> usize {
        self.bytes.len()
    }

    pub fn marks(&self) -> usize {
        self.marks.len()
    }

    pub fn has_unsent(&self) -> bool {
        self.sent < self.produced()
    }

    /// Reads once, at most the scratch buffer.
    pub fn take(&mut self, scratch: &mut [u8]) -> Taken {
        let Some(source) = &self.source else {
            return Taken::End;
        };
        match source.read(scratch) {
            Ok(Some(0)) => Taken::End,
            Ok(Some(count)) => Taken::Bytes(count),
            Ok(None) => Taken::Nothing,
            // EIO: the last process on the terminal has closed it.
            Err(_) => Taken::End,
        }
    }

    /// Keeps bytes that were read. `follows`: nothing of the other channel came since the last of this one. Gives whether
    /// they began a chunk, which then has the number `sequence`.
    pub fn keep(&mut self, bytes: &[u8], sequence: u64, follows: bool) -> bool {
        let produced = self.produced();
        let grows = follows
            && self.marks.back().is_some_and(|mark| {
                mark.offset >= self.sent
                    && produced - mark.offset + bytes.len() as u64 <= CHUNK_BYTES_MAX
            });
        self.bytes.extend(bytes);
        if !grows {
            self.marks.push_back(Mark {
                offset: produced,
                sequence,
            });
        }
        !grows
    }

    /// Sequence of the next chunk to send.
    pub fn next_sequence(&self) -> Option<u64> {
        match self.has_unsent() {
            true => self.mark_at(self.sent).map(|at| self.marks[at].sequence),
            false => None,
        }
    }

    /// Sends (part of) one chunk; gives the bytes that this took of the credit.
    pub fn send(
        &mut self,
        link: &mut Link,
        stream: u32,
        channel: u8,
        credit: u64,
    ) -> Result<u64, ProtocolError> {
        let Some(at) = self.mark_at(self.sent) else {
            return Ok(0);
        };
        let end = self
            .marks
            .get(at + 1)
            .map_or(self.produced(), |mark| mark.offset);
        let count = (end - self.sent).min(credit).min(CHUNK_BYTES_MAX) as usize;
        let from = (self.sent - self.acked) as usize;
        let (head, tail) = pieces(&self.bytes, from, count);
        let data = Data {
            channel,
            offset: self.sent,
            sequence: self.marks[at].sequence,
            payload: head,
        };
        link.send_data(stream, data, tail)?;
        self.sent += count as u64;
        Ok(count as u64)
    }

    /// Forgets everything below `offset`. What was never sent but is recorded needs no sending either.
    pub fn acknowledge(&mut self, offset: u64) {
        let offset = offset.min(self.produced());
        if offset <= self.acked {
            return;
        }
        self.bytes.drain(..(offset - self.acked) as usize);
        self.acked = offset;
        self.sent = self.sent.max(offset);
        while self.marks.get(1).is_some_and(|mark| mark.offset <= offset) {
            self.marks.pop_front();
        }
        if self.bytes.is_empty() {
            // Nothing is kept of an idle exec.
            self.bytes = VecDeque::new();
            self.marks = VecDeque::new();
        }
    }

    /// Where a new stream begins that asks for `offset`.
    pub fn rewind(&mut self, offset: u64) {
        self.sent = offset.clamp(self.acked, self.produced());
    }

    pub fn want(&mut self, interest: u32) -> io::Result<()> {
        match &mut self.source {
            Some(source) => source.want(interest),
            None => Ok(()),
        }
    }

    fn mark_at(&self, offset: u64) -> Option<usize> {
        self.marks
            .partition_point(|mark| mark.offset <= offset)
            .checked_sub(1)
    }
}

/// A range of a ring buffer as its at most two pieces.
pub fn pieces(ring: &VecDeque<u8>, from: usize, count: usize) -> (&[u8], &[u8]) {
    let (head, tail) = ring.as_slices();
    let end = from + count;
    if end <= head.len() {
        (&head[from..end], &[])
    } else if from >= head.len() {
        (&tail[from - head.len()..end - head.len()], &[])
    } else {
        (&head[from..], &tail[..end - head.len()])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_keep_the_sequence_of_their_first_byte() {
        let mut output = Output::default();
        assert!(output.keep(b"aaaa", 0, false));
        assert!(!output.keep(b"bb", 1, true));
        assert!(output.keep(b"cc", 2, false));

        output.rewind(5);
        assert_eq!(output.next_sequence(), Some(0));
        output.rewind(6);
        assert_eq!(output.next_sequence(), Some(2));
        output.acknowledge(7);
        assert_eq!(output.next_sequence(), Some(2));
        output.acknowledge(100);
        assert_eq!(output.next_sequence(), None);
        assert_eq!((output.produced(), output.held_bytes()), (8, 0));
    }

    #[test]
    fn one_byte_writes_cost_what_their_marks_take() {
        let mut output = Output::default();
        for sequence in 0..1000 {
            output.keep(b"x", sequence, false);
        }
        assert!(output.held_bytes() > 16_000);
    }

    #[test]
    fn a_new_stream_begins_between_acknowledged_and_produced() {
        let mut output = Output::default();
        output.keep(b"0123456789", 0, false);
        output.acknowledge(4);

        for (asked, given) in [(0, 4), (6, 6), (99, 10)] {
            output.rewind(asked);
            assert_eq!(output.sent, given);
        }
    }
}
