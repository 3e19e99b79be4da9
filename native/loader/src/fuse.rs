//! The blobs as files of a FUSE mount: /dev/fuse is read and written directly (include/uapi/linux/fuse.h).
//! Threads that read requests never wait for a store: who must wait is answered from a thread that fetches.

use std::fs::File;
use std::io::{Read, Write};
use std::sync::Arc;

use crate::error::{Doing, Error, Result};
use crate::shelf::{node_of, Shelf};

pub const READ_BYTES_MAX: u32 = 1 << 20;
/// A request has a header and at most a few hundred bytes: we are never written to. The kernel wants no smaller buffer.
const REQUEST_BYTES: usize = 64 << 10;
const IN_HEADER: usize = 40;
const OUT_HEADER: usize = 16;
const ROOT: u64 = 1;
/// Names and sizes never change while a layer is served.
const VALID_S: u64 = 3600;
const KEEP_CACHE: u32 = 1 << 1;
const NOTIFY_INVAL_INODE: i32 = 2;
const NOTIFY_RESEND: i32 = 7;
/// Requests that may wait at once: those to a store that hangs must leave room for all others on the mount.
const BACKGROUND_MAX: u16 = 1024;
const MAJOR: u32 = 7;
const MINOR: u32 = 40;

mod op {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FLUSH: u32 = 25;
    pub const INIT: u32 = 26;
    pub const OPENDIR: u32 = 27;
    pub const READDIR: u32 = 28;
    pub const RELEASEDIR: u32 = 29;
    pub const INTERRUPT: u32 = 36;
    pub const DESTROY: u32 = 38;
    pub const BATCH_FORGET: u32 = 42;
}

mod flag {
    pub const ASYNC_READ: u32 = 1 << 0;
    pub const ASYNC_DIO: u32 = 1 << 15;
    pub const PARALLEL_DIROPS: u32 = 1 << 18;
    pub const MAX_PAGES: u32 = 1 << 22;
    pub const INIT_EXT: u32 = 1 << 30;
    /// In the second word of flags.
    pub const HAS_RESEND: u32 = 1 << (39 - 32);
}

pub struct Fuse {
    device: File,
    shelf: Arc<Shelf>,
}

struct Request<'a> {
    opcode: u32,
    unique: u64,
    node: u64,
    body: &'a [u8],
}

impl<'a> Request<'a> {
    fn parse(bytes: &'a [u8]) -> Option<Request<'a>> {
        if bytes.len() < IN_HEADER || u32_at(bytes, 0)? as usize != bytes.len() {
            return None;
        }
        Some(Request {
            opcode: u32_at(bytes, 4)?,
            unique: u64_at(bytes, 8)?,
            node: u64_at(bytes, 16)?,
            body: &bytes[IN_HEADER..],
        })
    }
}

/// The first request of a mount, which comes once in its life: what both sides can do. Done before there is a worker.
pub fn shake_hands(mut device: &File) -> Result<bool> {
    let mut buffer = vec![0; REQUEST_BYTES];
    let length = device
        .read(&mut buffer)
        .doing("reading the first FUSE request")?;
    let request = Request::parse(&buffer[..length])
        .filter(|request| request.opcode == op::INIT && request.body.len() >= 16)
        .ok_or_else(|| Error::Invalid("the first FUSE request is not INIT".into()))?;
    let offered = u32_at(request.body, 12).unwrap_or(0);
    let offered_2 = if offered & flag::INIT_EXT != 0 {
        u32_at(request.body, 16).unwrap_or(0)
    } else {
        0
    };
    let wanted = flag::ASYNC_READ
        | flag::ASYNC_DIO
        | flag::PARALLEL_DIROPS
        | flag::MAX_PAGES
        | flag::INIT_EXT;
    let resend = offered_2 & flag::HAS_RESEND != 0;
    let mut answer = Vec::with_capacity(64);
    put_u32(&mut answer, MAJOR);
    put_u32(&mut answer, MINOR);
    put_u32(&mut answer, 128 << 10); // read-ahead
    put_u32(&mut answer, offered & wanted);
    answer.extend(BACKGROUND_MAX.to_le_bytes());
    answer.extend((BACKGROUND_MAX / 4 * 3).to_le_bytes()); // of which the device is congested
    put_u32(&mut answer, 4096); // writes: there are none
    put_u32(&mut answer, 1); // granularity of times
    answer.extend(((READ_BYTES_MAX / 4096) as u16).to_le_bytes());
    answer.extend(0_u16.to_le_bytes());
    put_u32(&mut answer, offered_2 & flag::HAS_RESEND);
    answer.resize(64, 0);
    let message = message(request.unique, 0, &answer);
    device
        .write_all(&message)
        .doing("answering the first FUSE request")?;
    Ok(resend)
}

impl Fuse {
    pub fn new(device: File, shelf: Arc<Shelf>) -> Fuse {
        Fuse { device, shelf }
    }

    /// Requests that a worker before us has read and not answered come again (Linux 6.9).
    pub fn resend(&self) {
        let mut message = Vec::with_capacity(OUT_HEADER);
        put_u32(&mut message, OUT_HEADER as u32);
        message.extend(NOTIFY_RESEND.to_le_bytes());
        message.extend(0_u64.to_le_bytes());
        // An older kernel says EINVAL: then those who wait are killed by whoever waits for them.
        let _ = (&self.device).write(&message);
    }

    /// The kernel gives up what it has cached of a file that is served anew: it may be another one now.
    pub fn invalidate(&self, digest: &str) {
        let mut message = Vec::with_capacity(OUT_HEADER + 24);
        put_u32(&mut message, (OUT_HEADER + 24) as u32);
        message.extend(NOTIFY_INVAL_INODE.to_le_bytes());
        message.extend(0_u64.to_le_bytes());
        message.extend(node_of(digest).to_le_bytes());
        message.extend([0; 16]); // from its beginning, to its end
        let _ = (&self.device).write(&message); // ENOENT: the kernel does not know the file
    }

    /// Answers requests until the mount is gone. Several threads may do it.
    pub fn work(self: &Arc<Fuse>) -> Result<()> {
        let mut buffer = vec![0; REQUEST_BYTES];
        loop {
            match (&self.device).read(&mut buffer) {
                Ok(length) => {
                    if let Some(request) = Request::parse(&buffer[..length]) {
                        self.answer(&request);
                    }
                }
                Err(error) => match error.raw_os_error() {
                    // A request that was taken back while it was read; a signal.
                    Some(libc::ENOENT | libc::EINTR | libc::EAGAIN) => {}
                    Some(libc::ENODEV | libc::ECONNABORTED) => return Ok(()),
                    _ => return Err(error).doing("reading FUSE requests"),
                },
            }
        }
    }

    fn answer(self: &Arc<Fuse>, request: &Request) {
        match request.opcode {
            op::LOOKUP => self.lookup(request),
            op::GETATTR => match self.attributes(request.node) {
                Some(attributes) => {
                    let mut body = VALID_S.to_le_bytes().to_vec();
                    body.extend([0; 8]);
                    body.extend(attributes);
                    self.reply(request.unique, 0, &body);
                }
                None => self.reply(request.unique, libc::ENOENT, &[]),
            },
            op::OPEN | op::OPENDIR => {
                let mut body = 0_u64.to_le_bytes().to_vec();
                put_u32(&mut body, KEEP_CACHE);
                put_u32(&mut body, 0);
                self.reply(request.unique, 0, &body);
            }
            op::READ => self.read(request),
            op::READDIR | op::FLUSH | op::RELEASE | op::RELEASEDIR | op::DESTROY => {
                self.reply(request.unique, 0, &[]);
            }
            op::STATFS => self.reply(request.unique, 0, &[0; 80]),
            op::FORGET | op::BATCH_FORGET | op::INTERRUPT => {}
            _ => self.reply(request.unique, libc::ENOSYS, &[]),
        }
    }

    fn lookup(&self, request: &Request) {
        let name = request
            .body
            .split(|byte| *byte == 0)
            .next()
            .unwrap_or_default();
        let served = std::str::from_utf8(name)
            .ok()
            .filter(|_| request.node == ROOT)
            .and_then(|digest| self.shelf.find(digest));
        let node = served.map(|served| node_of(&served.layer.digest));
        let Some((node, attributes)) = node.and_then(|node| Some((node, self.attributes(node)?)))
        else {
            self.reply(request.unique, libc::ENOENT, &[]);
            return;
        };
        let mut body = Vec::with_capacity(128);
        body.extend(node.to_le_bytes());
        body.extend(0_u64.to_le_bytes()); // generation
        body.extend(VALID_S.to_le_bytes());
        body.extend(VALID_S.to_le_bytes());
        body.extend([0; 8]);
        body.extend(attributes);
        self.reply(request.unique, 0, &body);
    }

    /// struct fuse_attr: 88 bytes.
    fn attributes(&self, node: u64) -> Option<Vec<u8>> {
        let (mode, size, links) = match node {
            ROOT => (libc::S_IFDIR | 0o500, 0, 2),
            _ => (
                libc::S_IFREG | 0o444, // machines' monitors read it, which are nobody's users
                self.shelf.at(node)?.layer.index.size,
                1,
            ),
        };
        let mut body = Vec::with_capacity(88);
        for number in [node, size, size.div_ceil(512), 0, 0, 0] {
            body.extend(number.to_le_bytes());
        }
        for number in [0, 0, 0, mode, links, 0, 0, 0, 4096, 0] {
            put_u32(&mut body, number);
        }
        Some(body)
    }

    fn read(self: &Arc<Fuse>, request: &Request) {
        let (Some(offset), Some(size)) = (u64_at(request.body, 8), u32_at(request.body, 16)) else {
            self.reply(request.unique, libc::EINVAL, &[]);
            return;
        };
        let Some(served) = self.shelf.at(request.node) else {
            self.reply(request.unique, libc::EIO, &[]);
            return;
        };
        let left = served.layer.index.size.saturating_sub(offset);
        let size = u64::from(size.min(READ_BYTES_MAX)).min(left);
        if size == 0 {
            self.reply(request.unique, 0, &[]);
            return;
        }
        let (fuse, unique) = (Arc::clone(self), request.unique);
        let done = move |message: Option<Vec<u8>>| match message {
            Some(mut message) => {
                fill_header(&mut message, unique, 0);
                fuse.send(&message);
            }
            None => fuse.reply(unique, libc::EIO, &[]),
        };
        served.read(offset, size as usize, OUT_HEADER, Box::new(done));
    }

    fn reply(&self, unique: u64, errno: i32, body: &[u8]) {
        self.send(&message(unique, errno, body));
    }

    fn send(&self, message: &[u8]) {
        // Whoever asked may have gone (ENOENT), and so may the mount (ENODEV): nobody is left to be told.
        let _ = (&self.device).write(message);
    }
}

fn message(unique: u64, errno: i32, body: &[u8]) -> Vec<u8> {
    let body = if errno == 0 { body } else { &[] };
    let mut message = vec![0; OUT_HEADER];
    message.extend(body);
    fill_header(&mut message, unique, errno);
    message
}

fn fill_header(message: &mut [u8], unique: u64, errno: i32) {
    let length = message.len() as u32;
    message[..4].copy_from_slice(&length.to_le_bytes());
    message[4..8].copy_from_slice(&(-errno).to_le_bytes());
    message[8..16].copy_from_slice(&unique.to_le_bytes());
}

fn put_u32(body: &mut Vec<u8>, number: u32) {
    body.extend(number.to_le_bytes());
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    let field = bytes.get(at..at + 4)?;
    Some(u32::from_le_bytes([field[0], field[1], field[2], field[3]]))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from(u32_at(bytes, at)?) | u64::from(u32_at(bytes, at + 4)?) << 32)
}
