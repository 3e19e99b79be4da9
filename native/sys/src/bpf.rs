//! bpf(2): programs that choose the socket of what arrives in a network namespace (Linux 5.9), and the sockets to choose from.

use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use crate::result::check_long;

/// One instruction: operation, registers (source in the upper half), jump, value.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instruction {
    pub operation: u8,
    pub registers: u8,
    pub jump: i16,
    pub value: i32,
}

const MAP_CREATE: libc::c_int = 0;
const MAP_UPDATE_ELEM: libc::c_int = 2;
const PROG_LOAD: libc::c_int = 5;
const LINK_CREATE: libc::c_int = 28;

const MAP_TYPE_SOCKMAP: u32 = 15;
const PROG_TYPE_SK_LOOKUP: u32 = 30;
const ATTACH_SK_LOOKUP: u32 = 36;
/// What the verifier has to say about a program of some 50 instructions is shorter.
const LOG_BYTES: usize = 64 * 1024;

#[repr(C)]
#[derive(Default)]
struct MapArguments {
    kind: u32,
    key_size: u32,
    value_size: u32,
    entries: u32,
    flags: u32,
}

#[repr(C)]
#[derive(Default)]
struct UpdateArguments {
    map: u32,
    padding: u32,
    key: u64,
    value: u64,
    flags: u64,
}

#[repr(C)]
#[derive(Default)]
struct LoadArguments {
    kind: u32,
    count: u32,
    instructions: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log: u64,
    kernel_version: u32,
    flags: u32,
    name: [u8; 16],
    interface: u32,
    expected_attach: u32,
}

#[repr(C)]
#[derive(Default)]
struct LinkArguments {
    program: u32,
    target: u32,
    attach: u32,
    flags: u32,
}

/// # Safety
/// Addresses in `arguments` must be valid for what the command does with them.
unsafe fn bpf<T>(command: libc::c_int, arguments: &T) -> io::Result<libc::c_long> {
    check_long(libc::syscall(
        libc::SYS_bpf,
        command,
        std::ptr::from_ref(arguments),
        size_of::<T>(),
    ))
}

fn owned(number: libc::c_long) -> OwnedFd {
    // SAFETY: the kernel has just returned this descriptor to us; descriptors fit 31 bits, and are closed by execve.
    unsafe { OwnedFd::from_raw_fd(number as i32) }
}

/// A map of so many sockets, each by its number from 0.
pub fn socket_map(entries: u32) -> io::Result<OwnedFd> {
    let arguments = MapArguments {
        kind: MAP_TYPE_SOCKMAP,
        key_size: 4,
        value_size: 4,
        entries,
        flags: 0,
    };
    // SAFETY: no addresses.
    unsafe { bpf(MAP_CREATE, &arguments) }.map(owned)
}

/// The map does not keep the socket: it goes from the map when its last descriptor is closed.
pub fn set_socket(map: BorrowedFd, number: u32, socket: BorrowedFd) -> io::Result<()> {
    let value = socket.as_raw_fd() as u32;
    let arguments = UpdateArguments {
        map: map.as_raw_fd() as u32,
        key: std::ptr::from_ref(&number) as u64,
        value: std::ptr::from_ref(&value) as u64,
        ..UpdateArguments::default()
    };
    // SAFETY: key and value are four bytes each, as the map was made for, and live through the call.
    unsafe { bpf(MAP_UPDATE_ELEM, &arguments) }.map(drop)
}

/// The error of a program that the verifier refuses ends with the last of what it said.
pub fn load_socket_chooser(instructions: &[Instruction]) -> io::Result<OwnedFd> {
    let load = |log: &mut [u8]| {
        let license = c"Apache-2.0";
        let mut arguments = LoadArguments {
            kind: PROG_TYPE_SK_LOOKUP,
            count: instructions.len() as u32,
            instructions: instructions.as_ptr() as u64,
            license: license.as_ptr() as u64,
            expected_attach: ATTACH_SK_LOOKUP,
            ..LoadArguments::default()
        };
        arguments.name[..10].copy_from_slice(b"dsec_steer");
        if !log.is_empty() {
            arguments.log_level = 1;
            arguments.log_size = log.len() as u32;
            arguments.log = log.as_mut_ptr() as u64;
        }
        // SAFETY: instructions and license live through the call, with the count given; the log is writable for its length.
        unsafe { bpf(PROG_LOAD, &arguments) }.map(owned)
    };
    let refused = match load(&mut []) {
        Ok(program) => return Ok(program),
        Err(error) => error,
    };
    // Only the verifier's own refusal is worth a second time with a log.
    if !matches!(refused.raw_os_error(), Some(libc::EACCES | libc::EINVAL)) {
        return Err(refused);
    }
    let mut log = vec![0; LOG_BYTES];
    let Err(error) = load(&mut log) else {
        return Err(refused);
    };
    let end = log.iter().position(|byte| *byte == 0).unwrap_or(0);
    let said = String::from_utf8_lossy(&log[end.saturating_sub(400)..end]);
    Err(io::Error::new(
        error.kind(),
        format!("{error}: {}", said.trim().replace('\n', "; ")),
    ))
}

/// Attached to a network namespace for as long as the returned descriptor is open somewhere.
pub fn attach_to_network(program: BorrowedFd, network: BorrowedFd) -> io::Result<OwnedFd> {
    let arguments = LinkArguments {
        program: program.as_raw_fd() as u32,
        target: network.as_raw_fd() as u32,
        attach: ATTACH_SK_LOOKUP,
        flags: 0,
    };
    // SAFETY: no addresses.
    unsafe { bpf(LINK_CREATE, &arguments) }.map(owned)
}
