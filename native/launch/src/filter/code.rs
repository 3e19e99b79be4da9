//! Instructions of the kernel's classic filter machine, as far as programs here need them.

use dsec_sys::seccomp::Instruction;

pub const LOAD: u16 = 0x20;
pub const AND: u16 = 0x54;
pub const JUMP: u16 = 0x05;
pub const JUMP_EQUAL: u16 = 0x15;
pub const JUMP_AT_LEAST: u16 = 0x35;
pub const RETURN: u16 = 0x06;

pub fn load(offset: u32) -> Instruction {
    jump(LOAD, offset, 0, 0)
}

pub fn answer(value: u32) -> Instruction {
    jump(RETURN, value, 0, 0)
}

/// The answer that is all of `code`.
pub fn answer_of(code: &[Instruction]) -> Option<u32> {
    match code {
        [only] if only.code == RETURN => Some(only.value),
        _ => None,
    }
}

pub fn jump(code: u16, value: u32, jump_true: u8, jump_false: u8) -> Instruction {
    Instruction {
        code,
        jump_true,
        jump_false,
        value,
    }
}
