//! Block devices that a program serves (include/uapi/linux/ublk_cmd.h), with user copy: Linux 6.5.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

pub use crate::ring::Came;
use crate::ring::{Map, Ring};
use crate::seqpacket::{wait_ready, Interest};

pub const USER_RECOVERY: u64 = 1 << 3;
/// What a server that died had not answered is asked of the next.
pub const USER_RECOVERY_REISSUE: u64 = 1 << 4;
pub const CMD_IOCTL_ENCODE: u64 = 1 << 6;
pub const USER_COPY: u64 = 1 << 7;
/// What we ask of a kernel.
pub const NEEDED: u64 = USER_RECOVERY | USER_RECOVERY_REISSUE | CMD_IOCTL_ENCODE | USER_COPY;

pub const STATE_DEAD: u16 = 0;
pub const STATE_LIVE: u16 = 1;
/// Its server has died, and requests wait for another.
pub const STATE_QUIESCED: u16 = 2;

/// Requests of a queue that may be in our hands at once.
pub const DEPTH: u16 = 64;
/// Of one request.
pub const REQUEST_BYTES_MAX: u32 = 256 << 10;
pub const SECTOR: u64 = 512;
pub const OP_READ: u8 = 0;
pub const OP_FLUSH: u8 = 2;
/// The result of a command of a device that is stopped: there will be no more requests.
pub const ABORTED: i32 = -libc::ENODEV;

const CONTROL: &str = "/dev/ublk-control";
const CONTROL_BYTES: usize = 32; // struct ublksrv_ctrl_cmd
const INFO_BYTES: usize = 64; // struct ublksrv_ctrl_dev_info
const PARAMS_BYTES: usize = 40; // the head of struct ublk_params, and struct ublk_param_basic
const COMMAND_BYTES: usize = 16; // struct ublksrv_io_cmd
const DESCRIPTOR_BYTES: usize = 24; // struct ublksrv_io_desc
const NO_QUEUE: u16 = u16::MAX;
const PARAM_BASIC: u32 = 1;
const ATTRIBUTE_READ_ONLY: u32 = 1;
const SECTOR_SHIFT: u8 = 9;
const PAGE_SHIFT: u8 = 12;
const BUFFERS: u64 = 0x8000_0000; // UBLKSRV_IO_BUF_OFFSET
const TAG_SHIFT: u32 = 25; // UBLK_TAG_OFF
/// A command that the kernel has not answered by then is given up.
const PATIENCE: Duration = Duration::from_secs(10);

const GET_DEV_INFO: u32 = ioctl(READ, 0x02, CONTROL_BYTES);
const ADD_DEV: u32 = ioctl(READ | WRITE, 0x04, CONTROL_BYTES);
const DEL_DEV: u32 = ioctl(READ | WRITE, 0x05, CONTROL_BYTES);
const START_DEV: u32 = ioctl(READ | WRITE, 0x06, CONTROL_BYTES);
const STOP_DEV: u32 = ioctl(READ | WRITE, 0x07, CONTROL_BYTES);
const SET_PARAMS: u32 = ioctl(READ | WRITE, 0x08, CONTROL_BYTES);
const START_USER_RECOVERY: u32 = ioctl(READ | WRITE, 0x10, CONTROL_BYTES);
const END_USER_RECOVERY: u32 = ioctl(READ | WRITE, 0x11, CONTROL_BYTES);
const GET_FEATURES: u32 = ioctl(READ, 0x13, CONTROL_BYTES);
const DEL_DEV_ASYNC: u32 = ioctl(READ, 0x14, CONTROL_BYTES);
const FETCH_REQ: u32 = ioctl(READ | WRITE, 0x20, COMMAND_BYTES);
const COMMIT_AND_FETCH_REQ: u32 = ioctl(READ | WRITE, 0x21, COMMAND_BYTES);

const WRITE: u32 = 1;
const READ: u32 = 2;

/// _IOC(direction, 'u', number, size)
const fn ioctl(direction: u32, number: u32, size: usize) -> u32 {
    direction << 30 | (size as u32) << 16 | (b'u' as u32) << 8 | number
}

/// What the kernel knows of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Info {
    pub id: u32,
    pub state: u16,
    pub flags: u64,
    /// The kernel keeps it, and does not look at it.
    pub mark: u64,
}

impl Info {
    fn encode(&self) -> [u8; INFO_BYTES] {
        let mut bytes = [0; INFO_BYTES];
        put(&mut bytes, 0, &1_u16.to_ne_bytes()); // nr_hw_queues
        put(&mut bytes, 2, &DEPTH.to_ne_bytes());
        put(&mut bytes, 8, &REQUEST_BYTES_MAX.to_ne_bytes());
        put(&mut bytes, 12, &self.id.to_ne_bytes());
        put(&mut bytes, 24, &self.flags.to_ne_bytes());
        put(&mut bytes, 32, &self.mark.to_ne_bytes());
        bytes
    }

    fn decode(bytes: &[u8; INFO_BYTES]) -> Info {
        Info {
            id: u32::from_ne_bytes(cut(bytes, 12)),
            state: u16::from_ne_bytes(cut(bytes, 4)),
            flags: u64::from_ne_bytes(cut(bytes, 24)),
            mark: u64::from_ne_bytes(cut(bytes, 32)),
        }
    }
}

/// A request as the driver has written it down; what it says is not checked here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Descriptor {
    pub op: u8,
    pub sectors: u32,
    pub start: u64,
}

impl Descriptor {
    fn decode(bytes: &[u8; DESCRIPTOR_BYTES]) -> Descriptor {
        Descriptor {
            op: (u32::from_ne_bytes(cut(bytes, 0)) & 0xff) as u8,
            sectors: u32::from_ne_bytes(cut(bytes, 4)),
            start: u64::from_ne_bytes(cut(bytes, 8)),
        }
    }
}

/// The control device, which makes, starts and takes away.
pub struct Control {
    device: File,
    ring: Ring,
    next: u64,
}

impl Control {
    pub fn open() -> io::Result<Control> {
        let device = OpenOptions::new().read(true).write(true).open(CONTROL)?;
        let ring = Ring::new(4)?;
        Ok(Control {
            device,
            ring,
            next: 0,
        })
    }

    /// What the driver can do. EOPNOTSUPP or EINVAL: it is older than Linux 6.5.
    pub fn features(&mut self) -> io::Result<u64> {
        let bytes: [u8; 8] = self.ask(GET_FEATURES, u32::MAX, 0, [0; 8])?;
        Ok(u64::from_ne_bytes(bytes))
    }

    /// EEXIST: there is one of this number.
    pub fn add(&mut self, id: u32, mark: u64) -> io::Result<()> {
        let wanted = Info {
            id,
            flags: NEEDED,
            mark,
            ..Info::default()
        };
        let made = Info::decode(&self.ask(ADD_DEV, id, 0, wanted.encode())?);
        if made.id != id || made.flags & NEEDED != NEEDED {
            let _ = self.delete(id);
            return Err(io::ErrorKind::Unsupported.into());
        }
        Ok(())
    }

    /// ENODEV: there is none.
    pub fn info(&mut self, id: u32) -> io::Result<Info> {
        let bytes = self.ask(GET_DEV_INFO, id, 0, [0; INFO_BYTES])?;
        Ok(Info::decode(&bytes))
    }

    /// For reading only, of so many sectors.
    pub fn set_size(&mut self, id: u32, sectors: u64) -> io::Result<()> {
        self.ask(SET_PARAMS, id, 0, params(sectors)).map(drop)
    }

    /// Once all requests of its queue are fetched by this process; the device is there then.
    pub fn start(&mut self, id: u32) -> io::Result<()> {
        self.tell(START_DEV, id, u64::from(std::process::id()))
    }

    /// Readers get errors from now on.
    pub fn stop(&mut self, id: u32) -> io::Result<()> {
        self.tell(STOP_DEV, id, 0)
    }

    /// It goes once nobody has it open, which is not waited for.
    pub fn delete(&mut self, id: u32) -> io::Result<()> {
        match self.tell(DEL_DEV_ASYNC, id, 0) {
            // Before Linux 6.9. Its wait can be interrupted: who has it open closes it some day.
            Err(error) if is_unknown(&error) => match self.tell(DEL_DEV, id, 0) {
                Err(error) if error.kind() == io::ErrorKind::TimedOut => Ok(()),
                other => other,
            },
            other => other,
        }
    }

    /// EBUSY: the kernel has not yet seen that its server is dead.
    pub fn begin_recovery(&mut self, id: u32) -> io::Result<()> {
        self.tell(START_USER_RECOVERY, id, 0)
    }

    /// As `start`.
    pub fn end_recovery(&mut self, id: u32) -> io::Result<()> {
        self.tell(END_USER_RECOVERY, id, u64::from(std::process::id()))
    }

    fn tell(&mut self, command: u32, id: u32, word: u64) -> io::Result<()> {
        self.ask(command, id, word, []).map(drop)
    }

    /// The buffer goes to the kernel, and comes back as that leaves it.
    fn ask<const N: usize>(
        &mut self,
        command: u32,
        id: u32,
        word: u64,
        buffer: [u8; N],
    ) -> io::Result<[u8; N]> {
        let buffer = Box::into_raw(Box::new(buffer));
        let address = if N == 0 { 0 } else { buffer as u64 };
        let argument = control(id, N as u16, address, word);
        let token = self.next;
        self.next += 1;
        // SAFETY: the buffer is of the length given, and lives until the answer has come, or for ever.
        let asked = unsafe {
            self.ring
                .command(self.device.as_fd(), command, &argument, token)
        };
        let result = asked
            .and_then(|()| self.ring.submit())
            .and_then(|()| self.answer(token));
        match result {
            // The kernel may yet write to it: it is nobody's any more.
            Err(error) => Err(error),
            Ok(result) => {
                // SAFETY: made by `into_raw` above, and the kernel is done with it.
                let buffer = unsafe { Box::from_raw(buffer) };
                check_result(result).map(|()| *buffer)
            }
        }
    }

    fn answer(&mut self, token: u64) -> io::Result<i32> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(came) = self.ring.take()?.iter().find(|came| came.token == token) {
                return Ok(came.result);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            match wait_ready(&[(self.ring.as_fd(), Interest::Readable)], Some(left)) {
                Err(error) if error.kind() != io::ErrorKind::Interrupted => return Err(error),
                _ => {}
            }
        }
    }
}

/// The one queue of a device. The thread that fetches first serves it as long as it lives.
pub struct Queue {
    device: File,
    ring: Ring,
    descriptors: Map,
}

impl AsFd for Queue {
    /// Readable when something has come.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ring.as_fd()
    }
}

impl Queue {
    /// Of a device that is added, and that nobody serves.
    pub fn open(id: u32) -> io::Result<Queue> {
        let device = OpenOptions::new()
            .read(true)
            .write(true)
            .open(format!("/dev/ublkc{id}"))?;
        let length = (usize::from(DEPTH) * DESCRIPTOR_BYTES).next_multiple_of(4096);
        let descriptors = Map::new(device.as_fd(), 0, length, false)?;
        let ring = Ring::new(u32::from(DEPTH))?;
        Ok(Queue {
            device,
            ring,
            descriptors,
        })
    }

    /// A request with this tag is wanted.
    pub fn fetch(&mut self, tag: u16) -> io::Result<()> {
        self.command(FETCH_REQ, tag, 0)
    }

    /// The request with this tag is done, with so many bytes, or with a negative errno; another one is wanted.
    pub fn commit(&mut self, tag: u16, result: i32) -> io::Result<()> {
        self.command(COMMIT_AND_FETCH_REQ, tag, result)
    }

    fn command(&mut self, command: u32, tag: u16, result: i32) -> io::Result<()> {
        let argument = request_command(tag, result);
        // SAFETY: with user copy the argument points at nothing.
        unsafe {
            self.ring
                .command(self.device.as_fd(), command, &argument, u64::from(tag))
        }
    }

    pub fn submit(&mut self) -> io::Result<()> {
        self.ring.submit()
    }

    pub fn take(&mut self) -> io::Result<Vec<Came>> {
        self.ring.take()
    }

    /// Of a request that has come.
    pub fn descriptor(&self, tag: u16) -> io::Result<Descriptor> {
        let bytes = self.descriptors.read(usize::from(tag) * DESCRIPTOR_BYTES)?;
        Ok(Descriptor::decode(&bytes))
    }

    /// What a request that has come, and is not done, is to read.
    pub fn fill(&self, tag: u16, bytes: &[u8]) -> io::Result<()> {
        self.device.write_all_at(bytes, buffer_of(tag))
    }
}

fn is_unknown(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EOPNOTSUPP | libc::EINVAL | libc::ENOTTY)
    )
}

fn check_result(result: i32) -> io::Result<()> {
    match result {
        0.. => Ok(()),
        _ => Err(io::Error::from_raw_os_error(-result)),
    }
}

fn control(id: u32, length: u16, address: u64, word: u64) -> [u8; CONTROL_BYTES] {
    let mut bytes = [0; CONTROL_BYTES];
    put(&mut bytes, 0, &id.to_ne_bytes());
    put(&mut bytes, 4, &NO_QUEUE.to_ne_bytes());
    put(&mut bytes, 6, &length.to_ne_bytes());
    put(&mut bytes, 8, &address.to_ne_bytes());
    put(&mut bytes, 16, &word.to_ne_bytes());
    bytes
}

fn params(sectors: u64) -> [u8; PARAMS_BYTES] {
    let mut bytes = [0; PARAMS_BYTES];
    put(&mut bytes, 0, &(PARAMS_BYTES as u32).to_ne_bytes());
    put(&mut bytes, 4, &PARAM_BASIC.to_ne_bytes());
    put(&mut bytes, 8, &ATTRIBUTE_READ_ONLY.to_ne_bytes());
    // logical and physical block, the best and the least transfer
    put(
        &mut bytes,
        12,
        &[SECTOR_SHIFT, PAGE_SHIFT, PAGE_SHIFT, PAGE_SHIFT],
    );
    let most = REQUEST_BYTES_MAX >> SECTOR_SHIFT;
    put(&mut bytes, 16, &most.to_ne_bytes());
    put(&mut bytes, 24, &sectors.to_ne_bytes());
    bytes
}

fn request_command(tag: u16, result: i32) -> [u8; COMMAND_BYTES] {
    let mut bytes = [0; COMMAND_BYTES];
    put(&mut bytes, 2, &tag.to_ne_bytes());
    put(&mut bytes, 4, &result.to_ne_bytes());
    bytes
}

/// Where the bytes of a request are in the device of its queue.
fn buffer_of(tag: u16) -> u64 {
    BUFFERS + (u64::from(tag) << TAG_SHIFT)
}

fn put(bytes: &mut [u8], at: usize, part: &[u8]) {
    bytes[at..at + part.len()].copy_from_slice(part);
}

fn cut<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut part = [0; N];
    part.copy_from_slice(&bytes[at..at + N]);
    part
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_have_the_numbers_of_the_kernel() {
        assert_eq!(GET_DEV_INFO, 0x8020_7502);
        assert_eq!(ADD_DEV, 0xC020_7504);
        assert_eq!(DEL_DEV, 0xC020_7505);
        assert_eq!(START_DEV, 0xC020_7506);
        assert_eq!(STOP_DEV, 0xC020_7507);
        assert_eq!(SET_PARAMS, 0xC020_7508);
        assert_eq!(START_USER_RECOVERY, 0xC020_7510);
        assert_eq!(END_USER_RECOVERY, 0xC020_7511);
        assert_eq!(GET_FEATURES, 0x8020_7513);
        assert_eq!(DEL_DEV_ASYNC, 0x8020_7514);
        assert_eq!(FETCH_REQ, 0xC010_7520);
        assert_eq!(COMMIT_AND_FETCH_REQ, 0xC010_7521);
    }

    #[test]
    fn a_control_command_is_as_the_kernel_reads_it() {
        let bytes = control(3, 64, 0x1122_3344_5566_7788, 99);

        assert_eq!(bytes[..4], 3_u32.to_ne_bytes());
        assert_eq!(bytes[4..6], [0xff, 0xff]);
        assert_eq!(bytes[6..8], 64_u16.to_ne_bytes());
        assert_eq!(bytes[8..16], 0x1122_3344_5566_7788_u64.to_ne_bytes());
        assert_eq!(bytes[16..24], 99_u64.to_ne_bytes());
        assert_eq!(bytes[24..], [0; 8]); // no path of an unprivileged device
    }

    #[test]
    fn what_is_known_of_a_device_goes_both_ways() {
        let info = Info {
            id: 0x0102_0304,
            state: 0,
            flags: NEEDED,
            mark: u64::MAX - 5,
        };
        let mut bytes = info.encode();

        assert_eq!(Info::decode(&bytes), info);
        assert_eq!(bytes[..2], 1_u16.to_ne_bytes());
        assert_eq!(bytes[2..4], DEPTH.to_ne_bytes());
        assert_eq!(bytes[8..12], REQUEST_BYTES_MAX.to_ne_bytes());
        bytes[4] = 2;
        assert_eq!(Info::decode(&bytes).state, STATE_QUIESCED);
        assert_eq!(NEEDED, 0b1101_1000);
    }

    #[test]
    fn a_device_is_read_only_and_of_whole_sectors() {
        let bytes = params(0x0A0B_0C0D_0E0F);

        assert_eq!(bytes[..8], [40, 0, 0, 0, 1, 0, 0, 0]);
        assert_eq!(bytes[8..16], [1, 0, 0, 0, 9, 12, 12, 12]);
        assert_eq!(bytes[16..20], 512_u32.to_ne_bytes());
        assert_eq!(bytes[24..32], 0x0A0B_0C0D_0E0F_u64.to_ne_bytes());
        assert_eq!(bytes[32..], [0; 8]);
    }

    #[test]
    fn a_descriptor_is_read_as_the_driver_writes_it() {
        let mut bytes = [0xEE; DESCRIPTOR_BYTES];
        bytes[..4].copy_from_slice(&0x0001_2305_u32.to_ne_bytes()); // flags above the operation
        bytes[4..8].copy_from_slice(&8_u32.to_ne_bytes());
        bytes[8..16].copy_from_slice(&u64::MAX.to_ne_bytes());

        let descriptor = Descriptor::decode(&bytes);

        let expected = Descriptor {
            op: 5,
            sectors: 8,
            start: u64::MAX,
        };
        assert_eq!(descriptor, expected);
    }

    #[test]
    fn an_answer_has_its_tag_and_result_and_no_address() {
        let bytes = request_command(0x0102, -5);

        assert_eq!(bytes[..2], [0, 0]);
        assert_eq!(bytes[2..4], 0x0102_u16.to_ne_bytes());
        assert_eq!(bytes[4..8], (-5_i32).to_ne_bytes());
        assert_eq!(bytes[8..], [0; 8]); // user copy
    }

    #[test]
    fn each_tag_has_a_buffer_that_no_other_reaches() {
        assert_eq!(buffer_of(0), 0x8000_0000);
        let next = buffer_of(1) - buffer_of(0);
        assert_eq!(next, 1 << 25);
        assert!(u64::from(REQUEST_BYTES_MAX) < next);
    }
}
