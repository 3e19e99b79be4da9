//! Instructions of the kernel's classic filter machine, as far as programs here need them.

use dsec_sys::seccomp::Instruction;
pub use dsec_sys::seccomp::{AND, JUMP, JUMP_AT_LEAST, JUMP_EQUAL, LOAD, RETURN};

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
