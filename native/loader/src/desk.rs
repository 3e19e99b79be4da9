//! Requests of one block device: taken from the kernel, read from its layer, answered. Everything that is said to the
//! kernel is said by one thread; what is read may come from any, in any order.

use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};

use dsec_sys::ublk::{
    Came, Descriptor, ABORTED, DEPTH, OP_FLUSH, OP_READ, REQUEST_BYTES_MAX, SECTOR,
};

use crate::shelf::Read;

/// Reads so many bytes at an offset, which lie within the layer.
pub type Reader = Arc<dyn Fn(u64, usize, Read) + Send + Sync>;

/// The kernel's side of a queue.
pub trait Side {
    fn fetch(&mut self, tag: u16) -> io::Result<()>;
    fn commit(&mut self, tag: u16, result: i32) -> io::Result<()>;
    /// Gives the kernel what was fetched and committed, and waits until something has come, or `wake` is readable.
    fn wait(&mut self, wake: BorrowedFd) -> io::Result<Vec<Came>>;
    fn descriptor(&self, tag: u16) -> io::Result<Descriptor>;
    fn fill(&self, tag: u16, bytes: &[u8]) -> io::Result<()>;
}

struct Answer {
    tag: u16,
    number: u64,
    bytes: Option<Vec<u8>>,
}

/// What others have for the thread of a desk.
pub struct Tray {
    answers: Mutex<Vec<Answer>>,
    /// None: each request fails.
    reader: Mutex<Option<Reader>>,
    bell: UnixStream,
}

impl Tray {
    /// From now on each request fails at once, also those that are being read.
    pub fn end(&self) {
        *self.reader.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.ring();
    }

    /// After an end: of the same bytes.
    pub fn go_on(&self, reader: Reader) {
        *self.reader.lock().unwrap_or_else(PoisonError::into_inner) = Some(reader);
    }

    fn reader(&self) -> Option<Reader> {
        self.reader
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    fn put(&self, answer: Answer) {
        self.answers
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(answer);
        self.ring();
    }

    fn take(&self) -> Vec<Answer> {
        std::mem::take(&mut *self.answers.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn ring(&self) {
        let _ = (&self.bell).write(&[0]); // full: it has been rung
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Kernel,
    /// The request with this number is being read.
    Desk(u64, usize),
    /// There will be no more.
    Gone,
}

pub struct Desk<S> {
    side: S,
    size: u64,
    tray: Arc<Tray>,
    heard: UnixStream,
    places: Vec<Place>,
    next: u64,
}

/// How many sectors a device has for so many bytes: the last one may go beyond them, with zeros.
pub fn sectors_of(size: u64) -> u64 {
    size.div_ceil(SECTOR)
}

impl<S: Side> Desk<S> {
    pub fn new(side: S, size: u64, reader: Reader) -> io::Result<Desk<S>> {
        let (bell, heard) = UnixStream::pair()?;
        bell.set_nonblocking(true)?;
        heard.set_nonblocking(true)?;
        let tray = Tray {
            answers: Mutex::default(),
            reader: Mutex::new(Some(reader)),
            bell,
        };
        Ok(Desk {
            side,
            size,
            tray: Arc::new(tray),
            heard,
            places: vec![Place::Kernel; usize::from(DEPTH)],
            next: 0,
        })
    }

    pub fn tray(&self) -> Arc<Tray> {
        Arc::clone(&self.tray)
    }

    /// Until the device is stopped. After an error the kernel has requests that nobody answers.
    pub fn work(mut self) -> io::Result<()> {
        for tag in 0..DEPTH {
            self.side.fetch(tag)?;
        }
        while self.places.iter().any(|place| *place != Place::Gone) {
            for came in self.side.wait(self.heard.as_fd())? {
                self.came(came)?;
            }
            let mut rings = [0; 64];
            while matches!((&self.heard).read(&mut rings), Ok(1..)) {}
            for answer in self.tray.take() {
                self.answered(answer)?;
            }
            if self.tray.reader().is_none() {
                self.fail_all()?;
            }
        }
        Ok(())
    }

    fn came(&mut self, came: Came) -> io::Result<()> {
        let tag = u16::try_from(came.token).map_err(|_| io::ErrorKind::InvalidData)?;
        let known = self.places.get(usize::from(tag));
        if known != Some(&Place::Kernel) {
            return Err(io::ErrorKind::InvalidData.into()); // nobody has asked
        }
        match came.result {
            0 => self.take(tag),
            ABORTED => {
                self.places[usize::from(tag)] = Place::Gone;
                Ok(())
            }
            other => Err(io::Error::from_raw_os_error(other.saturating_neg())),
        }
    }

    fn take(&mut self, tag: u16) -> io::Result<()> {
        let request = self.side.descriptor(tag)?;
        let (offset, length) = match request.op {
            OP_READ => match range_of(&request, self.size) {
                Some(range) => range,
                None => return self.side.commit(tag, -libc::EIO),
            },
            OP_FLUSH => return self.side.commit(tag, 0), // there is nothing to be written
            _ => return self.side.commit(tag, -libc::EIO),
        };
        let Some(reader) = self.tray.reader() else {
            return self.side.commit(tag, -libc::EIO);
        };
        let number = self.next;
        self.next += 1;
        self.places[usize::from(tag)] = Place::Desk(number, length);
        let there = (self.size - offset).min(length as u64) as usize;
        let tray = self.tray();
        let done = move |bytes| tray.put(Answer { tag, number, bytes });
        reader(offset, there, Box::new(done));
        Ok(())
    }

    fn answered(&mut self, answer: Answer) -> io::Result<()> {
        let tag = answer.tag;
        let length = match self.places[usize::from(tag)] {
            Place::Desk(number, length) if number == answer.number => length,
            _ => return Ok(()), // it has failed meanwhile
        };
        let filled = answer.bytes.is_some_and(|mut bytes| {
            bytes.resize(length, 0);
            self.side.fill(tag, &bytes).is_ok()
        });
        self.finish(tag, if filled { length as i32 } else { -libc::EIO })
    }

    fn fail_all(&mut self) -> io::Result<()> {
        for tag in 0..DEPTH {
            if matches!(self.places[usize::from(tag)], Place::Desk(..)) {
                self.finish(tag, -libc::EIO)?;
            }
        }
        Ok(())
    }

    fn finish(&mut self, tag: u16, result: i32) -> io::Result<()> {
        self.places[usize::from(tag)] = Place::Kernel;
        self.side.commit(tag, result)
    }
}

/// What a request wants, if that is a part of a device for so many bytes, and no more than one may want.
fn range_of(request: &Descriptor, size: u64) -> Option<(u64, usize)> {
    let end = request.start.checked_add(u64::from(request.sectors))?;
    let most = u64::from(REQUEST_BYTES_MAX) / SECTOR;
    if request.sectors == 0 || u64::from(request.sectors) > most || end > sectors_of(size) {
        return None;
    }
    Some((
        request.start * SECTOR,
        (u64::from(request.sectors) * SECTOR) as usize,
    ))
}

#[cfg(test)]
#[path = "desk_tests.rs"]
pub(crate) mod tests;
