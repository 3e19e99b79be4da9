//! Memory of another process that is filled when it is first touched (userfaultfd(2)).

use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use crate::result::{check, check_long};

/// Of the only kind of page that is served.
pub const PAGE_BYTES: usize = 4096;

const EVENT_BYTES: usize = 32; // struct uffd_msg
const EVENT_PAGEFAULT: u8 = 0x12;
const EVENT_REMOVE: u8 = 0x15;
const EVENT_UNMAP: u8 = 0x16;
// _IOWR(0xAA, 0x03, struct uffdio_copy), _IOWR(0xAA, 0x04, struct uffdio_zeropage), _IOR(0xAA, 0x02, struct uffdio_range)
const COPY: libc::c_ulong = 0xC028_AA03;
const ZERO: libc::c_ulong = 0xC020_AA04;
const WAKE: libc::c_ulong = 0x8010_AA02;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Somebody waits for the page with this address.
    Missing(u64),
    /// What lies in this range is given up: from now on it is empty.
    Removed {
        start: u64,
        end: u64,
    },
    Other,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filled {
    Done,
    /// It is there already; who waits for it goes on.
    Already,
    /// An event must be read first.
    Later,
}

/// The descriptor of a process that has asked us to fill its memory.
pub struct Faults {
    fd: OwnedFd,
}

impl AsFd for Faults {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Faults {
    pub fn new(fd: OwnedFd) -> Self {
        Self { fd }
    }

    /// The next event; none when there is none now.
    pub fn next(&self) -> io::Result<Option<Event>> {
        let mut bytes = [0_u8; EVENT_BYTES];
        // SAFETY: the buffer lives through the call and has the length given.
        let count =
            unsafe { libc::read(self.fd.as_raw_fd(), bytes.as_mut_ptr().cast(), EVENT_BYTES) };
        if count < 0 {
            let error = io::Error::last_os_error();
            return match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(None),
                _ => Err(error),
            };
        }
        Ok(Some(parse(&bytes)))
    }

    /// Puts `pages`, whole ones, at an address of that process.
    pub fn copy(&self, address: u64, pages: &[u8]) -> io::Result<Filled> {
        let mut order = [address, pages.as_ptr() as u64, pages.len() as u64, 0, 0];
        // SAFETY: the record is a struct uffdio_copy; its source is a slice of the length given. What is written lies in the
        // other process: the kernel takes only addresses that this descriptor was registered for.
        let done = unsafe { libc::ioctl(self.fd.as_raw_fd(), COPY as _, order.as_mut_ptr()) };
        self.filled(done, address, pages.len())
    }

    /// Puts empty pages there, which take no memory.
    pub fn zero(&self, address: u64, length: usize) -> io::Result<Filled> {
        let mut order = [address, length as u64, 0, 0];
        // SAFETY: the record is a struct uffdio_zeropage; as in `copy`.
        let done = unsafe { libc::ioctl(self.fd.as_raw_fd(), ZERO as _, order.as_mut_ptr()) };
        self.filled(done, address, length)
    }

    fn filled(&self, done: libc::c_int, address: u64, length: usize) -> io::Result<Filled> {
        match check(done) {
            Ok(_) => Ok(Filled::Done),
            Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => Ok(Filled::Later),
            Err(error) if error.raw_os_error() == Some(libc::EEXIST) => {
                let mut range = [address, length as u64];
                // SAFETY: the record is a struct uffdio_range.
                check(unsafe { libc::ioctl(self.fd.as_raw_fd(), WAKE as _, range.as_mut_ptr()) })?;
                Ok(Filled::Already)
            }
            Err(error) => Err(error),
        }
    }
}

fn parse(bytes: &[u8; EVENT_BYTES]) -> Event {
    let number = |at: usize| {
        let mut field = [0; 8];
        field.copy_from_slice(&bytes[at..at + 8]);
        u64::from_ne_bytes(field)
    };
    match bytes[0] {
        EVENT_PAGEFAULT => Event::Missing(number(16)),
        EVENT_REMOVE | EVENT_UNMAP => Event::Removed {
            start: number(8),
            end: number(16),
        },
        _ => Event::Other,
    }
}

/// A descriptor that is readable once the process at the other end of a connection has ended.
pub fn peer_process(socket: BorrowedFd) -> io::Result<OwnedFd> {
    let mut peer = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: SO_PEERCRED writes one struct ucred, whose size is given.
    check(unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut length,
        )
    })?;
    // SAFETY: plain numbers; the descriptor is new and ours.
    unsafe {
        let fd = check_long(libc::syscall(libc::SYS_pidfd_open, peer.pid, 0))?;
        Ok(OwnedFd::from_raw_fd(fd as RawFd))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_read_as_the_kernel_writes_them() {
        let event = |kind: u8, numbers: [u64; 3]| {
            let mut bytes = [0; EVENT_BYTES];
            bytes[0] = kind;
            for (at, number) in numbers.iter().enumerate() {
                bytes[8 + at * 8..16 + at * 8].copy_from_slice(&number.to_ne_bytes());
            }
            parse(&bytes)
        };

        assert_eq!(event(0x12, [1, 0x7000, 0]), Event::Missing(0x7000));
        let removed = Event::Removed {
            start: 0x1000,
            end: 0x3000,
        };
        assert_eq!(event(0x15, [0x1000, 0x3000, 0]), removed);
        assert_eq!(event(0x16, [0x1000, 0x3000, 0]), removed);
        assert_eq!(event(0x13, [5, 0, 0]), Event::Other);
    }
}
