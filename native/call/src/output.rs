//! What a program writes, up to a limit.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use dsec_sys::paths::read_once;

pub struct Output {
    pipe: Option<OwnedFd>,
    pub bytes: Vec<u8>,
    limit: usize,
    pub over: bool,
}

impl Output {
    pub fn new(pipe: OwnedFd, limit: usize) -> Self {
        Self {
            pipe: Some(pipe),
            bytes: Vec::new(),
            limit,
            over: false,
        }
    }

    /// While somebody may still write.
    pub fn source(&self) -> Option<BorrowedFd<'_>> {
        self.pipe.as_ref().map(AsFd::as_fd)
    }

    /// Takes what is there now, without waiting. What is above the limit is dropped.
    pub fn take(&mut self, scratch: &mut [u8]) {
        while let Some(pipe) = &self.pipe {
            match read_once(pipe.as_fd(), scratch) {
                Ok(0) => self.pipe = None,
                Ok(count) => {
                    let room = self.limit - self.bytes.len();
                    self.over |= count > room;
                    self.bytes.extend_from_slice(&scratch[..count.min(room)]);
                    if self.over {
                        return;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => self.pipe = None,
            }
        }
    }
}
