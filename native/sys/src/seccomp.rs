//! Loading a system call filter.

use std::io;

/// One instruction of a classic packet filter.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instruction {
    pub code: u16,
    pub jump_true: u8,
    pub jump_false: u8,
    pub value: u32,
}

#[repr(C)]
struct Program {
    length: u16,
    instructions: *const Instruction,
}

/// The instructions as the bytes that the kernel takes.
pub fn filter_bytes(instructions: &[Instruction]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(instructions.len() * 8);
    for instruction in instructions {
        bytes.extend_from_slice(&instruction.code.to_ne_bytes());
        bytes.push(instruction.jump_true);
        bytes.push(instruction.jump_false);
        bytes.extend_from_slice(&instruction.value.to_ne_bytes());
    }
    bytes
}

/// Puts this process and its descendants under the filter. Needs no_new_privs, or CAP_SYS_ADMIN in the user namespace.
pub fn load_filter(instructions: &[Instruction]) -> io::Result<()> {
    let length = u16::try_from(instructions.len())
        .map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    let program = Program {
        length,
        instructions: instructions.as_ptr(),
    };
    const SET_MODE_FILTER: libc::c_uint = 1;
    // SAFETY: the program and its instructions live through the call, the kernel copies them, the length is theirs.
    if unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            SET_MODE_FILTER,
            0,
            std::ptr::addr_of!(program),
        )
    } != 0
    {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
