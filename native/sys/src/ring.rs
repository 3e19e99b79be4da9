//! io_uring(7), as far as drivers want it: commands to devices, and their answers. Of one thread.

use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::result::{check, check_long};

/// What a command may say, with entries of 128 bytes.
pub const ARGUMENT_BYTES: usize = 80;
const ENTRY_BYTES: usize = 128;
const ANSWER_BYTES: usize = 16;
const URING_CMD: u8 = 46;
const SETUP_SQE128: u32 = 1 << 10;
const ENTER_GETEVENTS: libc::c_uint = 1;
const FEATURE_SINGLE_MMAP: u32 = 1;
const OFFSET_RINGS: libc::off_t = 0;
const OFFSET_ENTRIES: libc::off_t = 0x1000_0000;
// Where an entry has what (struct io_uring_sqe).
const AT_FD: usize = 4;
const AT_COMMAND: usize = 8;
const AT_TOKEN: usize = 32;
const AT_ARGUMENT: usize = 48;

/// struct io_sqring_offsets and struct io_cqring_offsets differ in what the last three numbers are.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Offsets {
    head: u32,
    tail: u32,
    ring_mask: u32,
    ring_entries: u32,
    /// flags of submissions, overflow of completions
    fifth: u32,
    /// dropped, or cqes
    sixth: u32,
    /// array, or flags
    seventh: u32,
    reserved: u32,
    user: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Parameters {
    sq_entries: u32,
    cq_entries: u32,
    flags: u32,
    sq_thread_cpu: u32,
    sq_thread_idle: u32,
    features: u32,
    wq_fd: u32,
    reserved: [u32; 3],
    sq: Offsets,
    cq: Offsets,
}

/// What has come of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Came {
    pub token: u64,
    /// Of the device; negative: an errno.
    pub result: i32,
}

/// Memory of a descriptor, until it is dropped.
pub(crate) struct Map {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: nobody else has the mapping, and it is not bound to a thread.
unsafe impl Send for Map {}

impl Map {
    pub(crate) fn new(
        fd: BorrowedFd,
        offset: libc::off_t,
        length: usize,
        writable: bool,
    ) -> io::Result<Map> {
        let access = libc::PROT_READ | if writable { libc::PROT_WRITE } else { 0 };
        let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                length,
                access,
                flags,
                fd.as_raw_fd(),
                offset,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Map { start, length })
    }

    /// A number in it that the kernel writes, or reads, at any time.
    fn shared(&self, at: u32) -> io::Result<&AtomicU32> {
        let at = self.place(at as usize, size_of::<u32>())?;
        // SAFETY: within the mapping, which lives as long as we do, and aligned; all access to it is atomic.
        Ok(unsafe { &*self.start.as_ptr().add(at).cast::<AtomicU32>() })
    }

    /// Bytes that the kernel has written and does not write now.
    pub(crate) fn read<const N: usize>(&self, at: usize) -> io::Result<[u8; N]> {
        let at = self.place(at, N)?;
        // SAFETY: within the mapping; volatile, for it is not ours alone.
        Ok(unsafe {
            self.start
                .as_ptr()
                .add(at)
                .cast::<[u8; N]>()
                .read_volatile()
        })
    }

    fn write(&mut self, at: usize, bytes: &[u8]) -> io::Result<()> {
        let at = self.place(at, bytes.len())?;
        // SAFETY: within the mapping, which is writable and does not overlap a slice of ours.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.start.as_ptr().add(at), bytes.len());
        }
        Ok(())
    }

    fn place(&self, at: usize, length: usize) -> io::Result<usize> {
        let end = at.checked_add(length);
        if at % size_of::<u32>() != 0 || end.map_or(true, |end| end > self.length) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(at)
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: it is ours, and nothing that borrows it is left.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.length) };
    }
}

pub(crate) struct Ring {
    fd: OwnedFd,
    rings: Map,
    entries: Map,
    parameters: Parameters,
    /// Written, and not yet given to the kernel.
    new: u32,
}

impl AsFd for Ring {
    /// Readable when something has come.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Ring {
    /// For `entries` commands at once.
    pub(crate) fn new(entries: u32) -> io::Result<Ring> {
        let mut parameters = Parameters {
            flags: SETUP_SQE128,
            ..Parameters::default()
        };
        // SAFETY: the record has the layout of struct io_uring_params; the descriptor returned is new and ours.
        let fd = unsafe {
            let fd = libc::syscall(libc::SYS_io_uring_setup, entries, &raw mut parameters);
            OwnedFd::from_raw_fd(check_long(fd)? as libc::c_int)
        };
        if parameters.features & FEATURE_SINGLE_MMAP == 0 {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let words = parameters.sq.seventh as usize + parameters.sq_entries as usize * 4;
        let answers = parameters.cq.sixth as usize + parameters.cq_entries as usize * ANSWER_BYTES;
        let rings = Map::new(fd.as_fd(), OFFSET_RINGS, words.max(answers), true)?;
        let length = parameters.sq_entries as usize * ENTRY_BYTES;
        let entries = Map::new(fd.as_fd(), OFFSET_ENTRIES, length, true)?;
        Ok(Ring {
            fd,
            rings,
            entries,
            parameters,
            new: 0,
        })
    }

    /// Writes a command down, for `submit`. Fails with EAGAIN when there is no room.
    ///
    /// # Safety
    /// What `argument` points at must be good for what the device does with it, until the answer has come.
    pub(crate) unsafe fn command(
        &mut self,
        device: BorrowedFd,
        command: u32,
        argument: &[u8],
        token: u64,
    ) -> io::Result<()> {
        let sq = self.parameters.sq;
        let tail = self.rings.shared(sq.tail)?.load(Ordering::Relaxed);
        let head = self.rings.shared(sq.head)?.load(Ordering::Acquire);
        if tail.wrapping_sub(head) >= self.parameters.sq_entries {
            return Err(io::Error::from_raw_os_error(libc::EAGAIN));
        }
        let slot = tail & (self.parameters.sq_entries - 1); // a power of two
        let entry = entry(device.as_raw_fd(), command, argument, token)?;
        self.entries.write(slot as usize * ENTRY_BYTES, &entry)?;
        self.rings
            .shared(sq.seventh + slot * 4)?
            .store(slot, Ordering::Relaxed);
        self.rings
            .shared(sq.tail)?
            .store(tail.wrapping_add(1), Ordering::Release);
        self.new += 1;
        Ok(())
    }

    /// Gives the kernel what has been written down.
    pub(crate) fn submit(&mut self) -> io::Result<()> {
        while self.new > 0 {
            let none = std::ptr::null::<libc::sigset_t>();
            // SAFETY: plain numbers, and no mask.
            let taken = unsafe {
                libc::syscall(
                    libc::SYS_io_uring_enter,
                    self.fd.as_raw_fd(),
                    self.new,
                    0,
                    ENTER_GETEVENTS,
                    none,
                    0,
                )
            };
            match check(taken as libc::c_int) {
                Ok(taken) => self.new -= (taken as u32).min(self.new),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// What has come; does not wait.
    pub(crate) fn take(&mut self) -> io::Result<Vec<Came>> {
        let cq = self.parameters.cq;
        let mut head = self.rings.shared(cq.head)?.load(Ordering::Relaxed);
        let tail = self.rings.shared(cq.tail)?.load(Ordering::Acquire);
        let mut all = Vec::new();
        while head != tail {
            let slot = (head & (self.parameters.cq_entries - 1)) as usize;
            let bytes: [u8; ANSWER_BYTES] =
                self.rings.read(cq.sixth as usize + slot * ANSWER_BYTES)?;
            let (token, rest) = bytes.split_at(8);
            all.push(Came {
                token: u64::from_ne_bytes(token.try_into().unwrap_or_default()),
                result: i32::from_ne_bytes(rest[..4].try_into().unwrap_or_default()),
            });
            head = head.wrapping_add(1);
        }
        self.rings.shared(cq.head)?.store(head, Ordering::Release);
        Ok(all)
    }
}

fn entry(fd: i32, command: u32, argument: &[u8], token: u64) -> io::Result<[u8; ENTRY_BYTES]> {
    if argument.len() > ARGUMENT_BYTES {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut entry = [0; ENTRY_BYTES];
    entry[0] = URING_CMD;
    entry[AT_FD..AT_FD + 4].copy_from_slice(&fd.to_ne_bytes());
    entry[AT_COMMAND..AT_COMMAND + 4].copy_from_slice(&command.to_ne_bytes());
    entry[AT_TOKEN..AT_TOKEN + 8].copy_from_slice(&token.to_ne_bytes());
    entry[AT_ARGUMENT..AT_ARGUMENT + argument.len()].copy_from_slice(argument);
    Ok(entry)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::mem::{align_of, offset_of};

    use super::*;

    #[test]
    fn records_are_as_the_kernel_has_them() {
        assert_eq!((size_of::<Offsets>(), align_of::<Offsets>()), (40, 8));
        assert_eq!(size_of::<Parameters>(), 120);
        assert_eq!(offset_of!(Parameters, features), 20);
        assert_eq!(offset_of!(Parameters, sq), 40);
        assert_eq!(offset_of!(Parameters, cq), 80);
        assert_eq!(offset_of!(Offsets, seventh), 24);
    }

    #[test]
    fn an_entry_has_its_parts_where_the_kernel_looks_for_them() {
        let entry = entry(7, 0x1234_5678, &[1, 2, 3], u64::MAX - 1).unwrap();

        assert_eq!(entry[..4], [46, 0, 0, 0]);
        assert_eq!(entry[4..8], 7_i32.to_ne_bytes());
        assert_eq!(entry[8..12], 0x1234_5678_u32.to_ne_bytes());
        assert_eq!(entry[32..40], (u64::MAX - 1).to_ne_bytes());
        assert_eq!(entry[48..52], [1, 2, 3, 0]);
        assert!(entry[52..].iter().all(|byte| *byte == 0));
        assert!(super::entry(7, 0, &[0; ARGUMENT_BYTES + 1], 0).is_err());
    }

    /// The kernel of here answers commands to a file that takes none, so the rings are read and written rightly.
    #[test]
    fn commands_are_answered_in_a_ring_that_goes_round() {
        let mut ring = match Ring::new(4) {
            Ok(ring) => ring,
            Err(error) => {
                eprintln!("no io_uring here: {error}");
                return;
            }
        };
        let null = File::open("/proc/self/status").unwrap(); // has no commands
        let mut came = Vec::new();
        for token in 0..10_u64 {
            // SAFETY: nothing is pointed at.
            unsafe { ring.command(null.as_fd(), 1, &[], token) }.unwrap();
            ring.submit().unwrap();
            came.extend(ring.take().unwrap());
        }
        assert_eq!(came.len(), 10);
        assert_eq!(came[9].token, 9);
        assert!(came.iter().all(|came| came.result < 0));
    }

    #[test]
    fn more_commands_than_there_is_room_for_are_refused() {
        let Ok(mut ring) = Ring::new(2) else { return };
        let null = File::open("/proc/self/status").unwrap();
        let mut put = |token| {
            // SAFETY: nothing is pointed at.
            unsafe { ring.command(null.as_fd(), 1, &[], token) }
        };

        assert!(put(0).is_ok() && put(1).is_ok());
        assert_eq!(put(2).unwrap_err().raw_os_error(), Some(libc::EAGAIN));
    }
}
