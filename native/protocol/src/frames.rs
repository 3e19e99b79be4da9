//! Frames: `u32be length | u8 type | u32be stream | body`, decoded as bytes come.

use crate::error::ProtocolError;
use crate::limits::{DATA_BYTES_MAX, FRAME_BYTES_MAX};

pub const PREAMBLE_MAGIC: &[u8; 4] = b"DSEC";
pub const PREAMBLE_BYTES: usize = 20;
pub const HEADER_BYTES: usize = 9;
const DATA_HEAD_BYTES: usize = 17;
const LENGTH_OVERHEAD: usize = 5;
/// Bodies from here on are put together in place.
const LARGE_BYTES: usize = 64 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum FrameType {
    Hello = 1,
    Req = 2,
    Res = 3,
    Err = 4,
    Data = 5,
    Credit = 6,
    End = 7,
    Event = 8,
}

impl FrameType {
    fn of(byte: u8) -> Option<Self> {
        Some(match byte {
            1 => Self::Hello,
            2 => Self::Req,
            3 => Self::Res,
            4 => Self::Err,
            5 => Self::Data,
            6 => Self::Credit,
            7 => Self::End,
            8 => Self::Event,
            _ => return None,
        })
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    pub kind: FrameType,
    pub stream: u32,
    pub body: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Data<'a> {
    pub channel: u8,
    pub offset: u64,
    pub sequence: u64,
    pub payload: &'a [u8],
}

pub const CHANNEL_IN: u8 = 0;
pub const CHANNEL_OUT: u8 = 1;
pub const CHANNEL_ERR: u8 = 2;

/// Appends a frame. The caller keeps `body` within `FRAME_BYTES_MAX - 5`; a longer one is an error and nothing is written.
pub fn encode_frame(
    out: &mut Vec<u8>,
    kind: FrameType,
    stream: u32,
    body: &[u8],
) -> Result<(), ProtocolError> {
    let length = LENGTH_OVERHEAD + body.len();
    if length > FRAME_BYTES_MAX {
        return Err(ProtocolError::FrameLength(
            u32::try_from(length).unwrap_or(u32::MAX),
        ));
    }
    put_header(out, length as u32, kind, stream);
    out.extend_from_slice(body);
    Ok(())
}

/// Appends a DATA frame whose payload comes in two pieces, as a ring buffer gives it.
pub fn encode_data(
    out: &mut Vec<u8>,
    stream: u32,
    data: Data<'_>,
    rest: &[u8],
) -> Result<(), ProtocolError> {
    let payload = data.payload.len() + rest.len();
    if payload > DATA_BYTES_MAX {
        return Err(ProtocolError::DataBody("with too long a payload"));
    }
    let length = LENGTH_OVERHEAD + DATA_HEAD_BYTES + payload;
    put_header(out, length as u32, FrameType::Data, stream);
    out.push(data.channel);
    out.extend_from_slice(&data.offset.to_be_bytes());
    out.extend_from_slice(&data.sequence.to_be_bytes());
    out.extend_from_slice(data.payload);
    out.extend_from_slice(rest);
    Ok(())
}

/// Appends a DATA frame with a payload of at most `most` bytes that `read` writes in place; gives how many. Without any,
/// or when it fails, nothing is appended.
pub fn encode_data_read(
    out: &mut Vec<u8>,
    stream: u32,
    data: Data<'_>,
    most: usize,
    read: impl FnOnce(&mut [u8]) -> std::io::Result<usize>,
) -> std::io::Result<usize> {
    let at = out.len();
    let payload = at + HEADER_BYTES + DATA_HEAD_BYTES;
    out.resize(payload + most.min(DATA_BYTES_MAX), 0);
    let count = match read(&mut out[payload..]) {
        Ok(count) if count > 0 => count,
        nothing => {
            out.truncate(at);
            return nothing;
        }
    };
    out.truncate(payload + count);
    let mut head = Vec::with_capacity(HEADER_BYTES + DATA_HEAD_BYTES);
    let length = LENGTH_OVERHEAD + DATA_HEAD_BYTES + count;
    put_header(&mut head, length as u32, FrameType::Data, stream);
    head.push(data.channel);
    head.extend_from_slice(&data.offset.to_be_bytes());
    head.extend_from_slice(&data.sequence.to_be_bytes());
    out[at..payload].copy_from_slice(&head);
    Ok(count)
}

pub fn decode_data(body: &[u8]) -> Result<Data<'_>, ProtocolError> {
    if body.len() < DATA_HEAD_BYTES {
        return Err(ProtocolError::DataBody("that is too short"));
    }
    if body.len() > DATA_HEAD_BYTES + DATA_BYTES_MAX {
        return Err(ProtocolError::DataBody("with too long a payload"));
    }
    if body[0] > CHANNEL_ERR {
        return Err(ProtocolError::DataBody("for an unknown channel"));
    }
    Ok(Data {
        channel: body[0],
        offset: u64_at(body, 1),
        sequence: u64_at(body, 9),
        payload: &body[DATA_HEAD_BYTES..],
    })
}

/// Incremental decoder. Holds at most one frame and what was fed after it.
#[derive(Default)]
pub struct Decoder {
    buffer: Vec<u8>,
    start: usize,
    large: Option<Large>,
    /// The body of a large frame that has been dealt with, for the next one.
    spare: Vec<u8>,
}

/// A large DATA frame that has begun: its body is put together in place.
struct Large {
    stream: u32,
    body: Vec<u8>,
    have: usize,
}

impl Decoder {
    pub fn feed(&mut self, mut bytes: &[u8]) {
        if let Some(room) = self.room() {
            let count = room.len().min(bytes.len());
            room[..count].copy_from_slice(&bytes[..count]);
            bytes = &bytes[count..];
            self.filled(count);
        }
        if self.start > 0 {
            self.buffer.drain(..self.start);
            self.start = 0;
        }
        self.buffer.extend_from_slice(bytes);
    }

    /// Where the next bytes belong when a large frame has begun; `filled` says how many came.
    pub fn room(&mut self) -> Option<&mut [u8]> {
        let large = self.large.as_mut()?;
        let have = large.have;
        (have < large.body.len()).then(|| &mut large.body[have..])
    }

    pub fn filled(&mut self, count: usize) {
        if let Some(large) = &mut self.large {
            large.have = (large.have + count).min(large.body.len());
        }
    }

    /// The next whole frame, `None` when more bytes are needed. After an error the channel is unusable.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, ProtocolError> {
        match self.large.take() {
            Some(large) if large.have < large.body.len() => {
                self.large = Some(large);
                return Ok(None);
            }
            Some(large) => {
                return Ok(Some(Frame {
                    kind: FrameType::Data,
                    stream: large.stream,
                    body: large.body,
                }))
            }
            None => {}
        }
        let bytes = &self.buffer[self.start..];
        if bytes.len() < HEADER_BYTES {
            self.release();
            return Ok(None);
        }
        let length = u32_at(bytes, 0);
        if !(LENGTH_OVERHEAD..=FRAME_BYTES_MAX).contains(&(length as usize)) {
            return Err(ProtocolError::FrameLength(length));
        }
        let kind = FrameType::of(bytes[4]).ok_or(ProtocolError::FrameType(bytes[4]))?;
        let end = 4 + length as usize;
        if bytes.len() < end {
            let size = length as usize - LENGTH_OVERHEAD;
            let fits = (LARGE_BYTES..=DATA_HEAD_BYTES + DATA_BYTES_MAX).contains(&size);
            if kind == FrameType::Data && fits {
                self.begin_large(size);
            }
            return Ok(None);
        }
        let frame = Frame {
            kind,
            stream: u32_at(bytes, 5),
            body: bytes[HEADER_BYTES..end].to_vec(),
        };
        self.start += end;
        self.release();
        Ok(Some(frame))
    }

    /// Takes back a frame that has been dealt with. Large bodies mostly come one after the other, and memory for each anew
    /// costs more than to copy what is in it; any other frame ends that.
    pub fn recycle(&mut self, frame: Frame) {
        let large = frame.kind == FrameType::Data && frame.body.len() >= LARGE_BYTES;
        self.spare = if large { frame.body } else { Vec::new() };
        self.release();
    }

    pub fn pending_bytes(&self) -> usize {
        self.buffer.len() - self.start + self.large.as_ref().map_or(0, |large| large.have)
    }

    fn begin_large(&mut self, size: usize) {
        let bytes = &self.buffer[self.start..];
        let (stream, begun) = (u32_at(bytes, 5), &bytes[HEADER_BYTES..]);
        let have = begun.len();
        let mut body = std::mem::take(&mut self.spare);
        body.resize(size, 0);
        body[..have].copy_from_slice(begun);
        self.large = Some(Large { stream, body, have });
        self.start = self.buffer.len();
        self.release();
    }

    /// An idle channel keeps no buffer: there are thousands of agents on a node.
    fn release(&mut self) {
        if self.start == self.buffer.len() {
            self.start = 0;
            self.buffer.clear();
            let more = self.large.is_some() || self.spare.capacity() > 0;
            if self.buffer.capacity() > 4096 && !more {
                self.buffer = Vec::new();
            }
        }
    }
}

fn put_header(out: &mut Vec<u8>, length: u32, kind: FrameType, stream: u32) {
    out.extend_from_slice(&length.to_be_bytes());
    out.push(kind as u8);
    out.extend_from_slice(&stream.to_be_bytes());
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    (u64::from(u32_at(bytes, at)) << 32) | u64::from(u32_at(bytes, at + 4))
}
