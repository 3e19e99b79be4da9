//! epoll, and descriptors that remember what they wait for.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use crate::result::check;

pub const READ: u32 = libc::EPOLLIN as u32;
pub const WRITE: u32 = libc::EPOLLOUT as u32;
/// Told once for each thing that happens, and not for as long as it lasts: for what may have been hung up for long.
pub const EACH: u32 = libc::EPOLLET as u32;
pub const HANGUP: u32 = (libc::EPOLLHUP | libc::EPOLLERR) as u32;

pub struct Poller {
    fd: OwnedFd,
}

#[derive(Clone, Copy, Debug)]
pub struct Ready {
    pub token: u64,
    pub events: u32,
}

impl Poller {
    pub fn new() -> io::Result<Self> {
        // SAFETY: no pointers; the returned descriptor is new and ours.
        let fd = unsafe {
            let raw = check(libc::epoll_create1(libc::EPOLL_CLOEXEC))?;
            OwnedFd::from_raw_fd(raw)
        };
        Ok(Self { fd })
    }

    /// It is readable when something in this poller is ready: to be waited for in another one.
    pub fn as_descriptor(&self) -> io::Result<OwnedFd> {
        self.fd.try_clone()
    }

    /// Waits at most `timeout_ms` (-1: for ever) and appends what is ready.
    pub fn wait(&self, ready: &mut Vec<Ready>, timeout_ms: i32) -> io::Result<()> {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 64];
        // SAFETY: `events` is valid for 64 entries during the call.
        let count = unsafe {
            libc::epoll_wait(
                self.fd.as_raw_fd(),
                events.as_mut_ptr(),
                events.len() as i32,
                timeout_ms,
            )
        };
        if count < 0 {
            let error = io::Error::last_os_error();
            return match error.kind() {
                io::ErrorKind::Interrupted => Ok(()),
                _ => Err(error),
            };
        }
        for event in &events[..count as usize] {
            ready.push(Ready {
                token: event.u64,
                events: event.events,
            });
        }
        Ok(())
    }
}

/// A descriptor in (or out of) a poller. Dropping it takes it out and closes it.
#[derive(Debug)]
pub struct Source {
    fd: OwnedFd,
    epoll: RawFd,
    token: u64,
    interest: u32,
}

impl Source {
    /// Not waited for until `want` says so. The poller must outlive the source.
    pub fn new(poller: &Poller, fd: OwnedFd, token: u64) -> Self {
        Self {
            fd,
            epoll: poller.fd.as_raw_fd(),
            token,
            interest: 0,
        }
    }

    /// Waits for `interest` from now on. With 0 it leaves the poller, as hang-ups are otherwise always reported.
    pub fn want(&mut self, interest: u32) -> io::Result<()> {
        if interest == self.interest {
            return Ok(());
        }
        let operation = match (self.interest, interest) {
            (0, _) => libc::EPOLL_CTL_ADD,
            (_, 0) => libc::EPOLL_CTL_DEL,
            _ => libc::EPOLL_CTL_MOD,
        };
        let mut event = libc::epoll_event {
            events: interest,
            u64: self.token,
        };
        // SAFETY: `event` is valid during the call; a stale descriptor gives an error, nothing worse.
        check(unsafe {
            libc::epoll_ctl(self.epoll, operation, self.fd.as_raw_fd(), &raw mut event)
        })?;
        self.interest = interest;
        Ok(())
    }

    pub fn interest(&self) -> u32 {
        self.interest
    }

    /// The same descriptor under another token. On an error it is not waited for, or still under the token of before.
    pub fn retarget(&mut self, token: u64) -> io::Result<()> {
        let interest = self.interest;
        self.want(0)?;
        self.token = token;
        self.want(interest)
    }

    /// There is nobody at its other end just now.
    pub fn is_hung_up(&self) -> bool {
        let mut look = libc::pollfd {
            fd: self.fd.as_raw_fd(),
            events: 0,
            revents: 0,
        };
        // SAFETY: the record is valid during the call, which does not wait.
        let found = unsafe { libc::poll(&raw mut look, 1, 0) };
        found > 0 && look.revents & (libc::POLLHUP | libc::POLLERR) != 0
    }

    /// `None` when it would block; 0 at the end.
    pub fn read(&self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        // SAFETY: `buffer` is valid and writable for its length.
        let count = unsafe {
            libc::read(
                self.fd.as_raw_fd(),
                buffer.as_mut_ptr().cast(),
                buffer.len(),
            )
        };
        progress(count)
    }

    /// `None` when it would block.
    pub fn write(&self, bytes: &[u8]) -> io::Result<Option<usize>> {
        // SAFETY: `bytes` is valid for its length.
        let count = unsafe { libc::write(self.fd.as_raw_fd(), bytes.as_ptr().cast(), bytes.len()) };
        progress(count)
    }
}

impl AsRawFd for Source {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

impl AsFd for Source {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        // A forked child may still hold the descriptor, and epoll watches open files, not descriptors. An error here
        // means that it was not in the poller any more.
        let _ = self.want(0);
    }
}

fn progress(count: isize) -> io::Result<Option<usize>> {
    if count >= 0 {
        return Ok(Some(count as usize));
    }
    let error = io::Error::last_os_error();
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(None),
        _ => Err(error),
    }
}
