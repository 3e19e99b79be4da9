//! System call filters: loading one, and a short list of what a program of ours still needs.

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

pub const LOAD: u16 = 0x20;
pub const AND: u16 = 0x54;
pub const JUMP: u16 = 0x05;
pub const JUMP_EQUAL: u16 = 0x15;
pub const JUMP_AT_LEAST: u16 = 0x35;
pub const RETURN: u16 = 0x06;

const AT_NUMBER: u32 = 0;
const AT_ARCHITECTURE: u32 = 4;
const AT_ARGUMENTS: u32 = 16;
const X86_64: u32 = 0xc000_003e;
/// Numbers from here on are those of the x32 architecture, which shares the identifier of x86-64.
const X32_BIT: u32 = 0x4000_0000;

const ALLOW: u32 = 0x7fff_0000;
const KILL_PROCESS: u32 = 0x8000_0000;
const FORBID: u32 = 0x0005_0000 | libc::EPERM as u32;
const MISSING: u32 = 0x0005_0000 | libc::ENOSYS as u32;

/// When a call is allowed.
pub enum When<'a> {
    Always,
    /// The lower half of this argument, under the mask, is one of these.
    Argument(u32, u32, &'a [u32]),
    /// Never: it is answered as on a kernel that does not have it, and the caller takes an older one.
    Missing,
}

/// All that is not in the list is EPERM; calls of another architecture end the process.
pub fn allow_only(calls: &[(libc::c_long, When)]) -> Vec<Instruction> {
    let step = |code, value, jump_true, jump_false| Instruction {
        code,
        jump_true,
        jump_false,
        value,
    };
    let mut program = vec![
        step(LOAD, AT_ARCHITECTURE, 0, 0),
        step(JUMP_EQUAL, X86_64, 1, 0),
        step(RETURN, KILL_PROCESS, 0, 0),
        step(LOAD, AT_NUMBER, 0, 0),
        step(JUMP_AT_LEAST, X32_BIT, 0, 1),
        step(RETURN, KILL_PROCESS, 0, 0),
    ];
    for (number, when) in calls {
        let mut body = Vec::new();
        if let When::Argument(index, mask, values) = when {
            body.push(step(LOAD, AT_ARGUMENTS + 8 * index, 0, 0));
            body.push(step(AND, *mask, 0, 0));
            for (place, value) in values.iter().enumerate() {
                let to_allow = (values.len() - place) as u8;
                body.push(step(JUMP_EQUAL, *value, to_allow, 0));
            }
            body.push(step(RETURN, FORBID, 0, 0));
        }
        let answer = match when {
            When::Missing => MISSING,
            _ => ALLOW,
        };
        body.push(step(RETURN, answer, 0, 0));
        program.push(step(JUMP_EQUAL, *number as u32, 0, body.len() as u8));
        program.extend(body);
    }
    program.push(step(RETURN, FORBID, 0, 0));
    program
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the kernel would answer.
    fn run(program: &[Instruction], number: u32, arguments: [u64; 6]) -> u32 {
        let (mut value, mut at) = (0, 0);
        loop {
            let Instruction {
                code,
                jump_true,
                jump_false,
                value: k,
            } = program[at];
            at += 1;
            let jump = |holds| usize::from(if holds { jump_true } else { jump_false });
            match code {
                LOAD => {
                    value = match k {
                        AT_NUMBER => number,
                        AT_ARCHITECTURE => X86_64,
                        _ => arguments[(k - AT_ARGUMENTS) as usize / 8] as u32,
                    }
                }
                AND => value &= k,
                JUMP_EQUAL => at += jump(value == k),
                JUMP_AT_LEAST => at += jump(value >= k),
                _ => return k,
            }
        }
    }

    #[test]
    fn what_is_listed_is_allowed_and_by_its_argument_only() {
        let program = allow_only(&[
            (libc::SYS_read, When::Always),
            (libc::SYS_socket, When::Argument(0, u32::MAX, &[2, 10])),
            (libc::SYS_mmap, When::Argument(2, 4, &[0])),
        ]);
        let call = |number: libc::c_long, first: u64, third: u64| {
            run(&program, number as u32, [first, 0, third, 0, 0, 0])
        };
        assert_eq!(call(libc::SYS_read, 9, 9), ALLOW);
        assert_eq!(call(libc::SYS_socket, 2, 0), ALLOW);
        assert_eq!(call(libc::SYS_socket, 10, 0), ALLOW);
        assert_eq!(call(libc::SYS_socket, 1, 0), FORBID);
        assert_eq!(call(libc::SYS_mmap, 0, 3), ALLOW);
        assert_eq!(call(libc::SYS_mmap, 0, 7), FORBID);
        assert_eq!(call(libc::SYS_execve, 0, 0), FORBID);
        assert_eq!(run(&program, X32_BIT, [0; 6]), KILL_PROCESS);
    }
}
