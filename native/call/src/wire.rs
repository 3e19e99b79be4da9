//! What the node says to the runner, and what it answers: a length (u32, little endian) and one msgpack map, each way.
//!
//! Orders come one after another and are answered one by one, so the node may send all of a call in one piece.

use std::io::{self, Read, Write};

use dsec_protocol::codec::{decode, encode};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Above the sum of what one order or answer may hold: files or output of 16 MiB each, twice, and what is around them.
const MESSAGE_BYTES_MAX: usize = 64 << 20;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Order {
    #[serde(default)]
    pub warm: Option<Warm>,
    #[serde(default)]
    pub place: Option<NewPlace>,
    #[serde(default)]
    pub run: Option<Run>,
    #[serde(default)]
    pub finish: Option<Finish>,
    /// Between calls: is all well?
    #[serde(default)]
    pub check: bool,
}

/// Have an interpreter up, of which calls are forked.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Warm {
    pub argv: Vec<Text>,
    pub env: Vec<Text>,
    pub wait_ms: u64,
}

/// A directory and a user for one program's work, with files in it. Numbered by the node from 0 in each call.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NewPlace {
    pub place: usize,
    pub files: Vec<NewFile>,
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct NewFile {
    #[serde(with = "serde_bytes")]
    pub path: Vec<u8>,
    #[serde(with = "serde_bytes")]
    pub data: Vec<u8>,
    pub mode: u32,
}

/// One program, to its end and that of all its processes.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Run {
    pub place: usize,
    pub argv: Vec<Text>,
    /// `NAME=value`; `HOME`, `TMPDIR` and `PWD` are the place's directory.
    pub env: Vec<Text>,
    /// `argv` is a script and its arguments, for the interpreter that is up.
    pub warm: bool,
    #[serde(with = "serde_bytes")]
    pub stdin: Vec<u8>,
    pub wall_ms: u64,
    /// Of all its processes; 0: no bound of its own.
    pub cpu_ms: u64,
    pub output_bytes: usize,
    pub pids: u64,
    pub file_bytes: u64,
}

/// The call is over: some files are given back, and nothing of it stays.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Finish {
    pub collect: Vec<Text>,
    pub bytes_max: usize,
}

pub type Text = serde_bytes::ByteBuf;

#[derive(Debug, Default, Serialize)]
pub struct Answer {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ready: Option<Ready>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub placed: Option<Placed>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ran: Option<Ran>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub finished: Option<Finished>,
    /// The order could not be carried out. The runner is as good as before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
}

/// The first answer, and that to `warm` and to `check`.
#[derive(Debug, Serialize)]
pub struct Ready {
    pub version: u32,
}

#[derive(Debug, Serialize)]
pub struct Placed {
    #[serde(with = "serde_bytes")]
    pub directory: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Why {
    /// By itself, or by a signal that is not ours.
    Ended,
    Wall,
    Cpu,
    Output,
    /// It could not be started; `detail` says why.
    Start,
    /// It was not begun with: the interpreter that was up is lost.
    Lost,
}

#[derive(Debug, Serialize)]
pub struct Ran {
    pub why: Why,
    pub code: Option<i32>,
    pub signal: Option<i32>,
    #[serde(with = "serde_bytes")]
    pub out: Vec<u8>,
    #[serde(with = "serde_bytes")]
    pub err: Vec<u8>,
    pub wall_us: u64,
    pub cpu_us: u64,
    /// Of its largest process.
    pub rss_bytes: u64,
    pub detail: String,
}

#[derive(Debug, Serialize)]
pub struct Finished {
    pub files: Vec<NewFile>,
    pub missing: Vec<Text>,
    /// Something of the call may have stayed, and what: the container is to be given up.
    pub dirty: Option<String>,
}

/// `None` at the end of the stream, between two messages.
pub fn receive<T: DeserializeOwned>(from: &mut impl Read) -> io::Result<Option<T>> {
    let mut head = [0; 4];
    let mut got = 0;
    while got < head.len() {
        match from.read(&mut head[got..])? {
            0 if got == 0 => return Ok(None),
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            count => got += count,
        }
    }
    let length = u32::from_le_bytes(head) as usize;
    if length > MESSAGE_BYTES_MAX {
        return Err(io::Error::other("a message is too long"));
    }
    let mut body = Vec::new();
    if from.take(length as u64).read_to_end(&mut body)? < length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    decode(&body).map(Some).map_err(io::Error::other)
}

/// Who writes it flushes it.
pub fn send(to: &mut impl Write, message: &impl Serialize) -> io::Result<()> {
    let body = encode(message).map_err(io::Error::other)?;
    if body.len() > MESSAGE_BYTES_MAX {
        return Err(io::Error::other("an answer is too long"));
    }
    to.write_all(&(body.len() as u32).to_le_bytes())?;
    to.write_all(&body)
}
