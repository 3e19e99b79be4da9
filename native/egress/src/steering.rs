//! The program that the kernel asks which socket something is for (BPF_PROG_TYPE_SK_LOOKUP), put together here so that
//! nothing is needed to compile it. Whatever goes wrong in it means: for nobody.

use std::net::{Ipv4Addr, Ipv6Addr};

use dsec_sys::bpf::Instruction;

/// The sandbox's own addresses beside loopback. Of ranges that are never routed.
pub const OWN: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);
pub const OWN_6: Ipv6Addr = Ipv6Addr::new(0xfd64, 0x7365, 0x6300, 0, 0, 0, 0, 1);
/// Where our sockets are bound; nothing is sent to these.
pub const OURS: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 2);
pub const OURS_6: Ipv6Addr = Ipv6Addr::new(0xfd64, 0x7365, 0x6300, 0, 0, 0, 0, 2);

/// Sockets in the map.
pub const TCP: u32 = 0;
pub const TCP_6: u32 = 1;
pub const UDP: u32 = 2;
pub const UDP_6: u32 = 3;
pub const SOCKETS: u32 = 4;

pub const DNS_PORT: u16 = 53;

const FAMILY: i16 = 8;
const PROTOCOL: i16 = 12;
const LOCAL_V4: i16 = 40;
const LOCAL_V6: i16 = 44;
const LOCAL_PORT: i16 = 60;
/// The key for the map, below the frame's end.
const KEY: i16 = -4;

const HELPER_LOOKUP: i32 = 1;
const HELPER_RELEASE: i32 = 86;
const HELPER_ASSIGN: i32 = 124;
const DROP: i32 = 0;
const PASS: i32 = 1;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Label {
    V6,
    OwnV6,
    Choose,
    Give,
    Pass,
    Drop,
}

/// Instructions, and jumps to places that are known at the end.
#[derive(Default)]
struct Assembler {
    code: Vec<Instruction>,
    jumps: Vec<(usize, Label)>,
    labels: Vec<(Label, usize)>,
}

impl Assembler {
    fn emit(&mut self, operation: u8, to: u8, from: u8, jump: i16, value: i32) {
        self.code.push(Instruction {
            operation,
            registers: from << 4 | to,
            jump,
            value,
        });
    }

    fn copy(&mut self, to: u8, from: u8) {
        self.emit(0xbf, to, from, 0, 0);
    }

    fn set(&mut self, to: u8, value: i32) {
        self.emit(0xb7, to, 0, 0, value);
    }

    fn add(&mut self, to: u8, value: i32) {
        self.emit(0x07, to, 0, 0, value);
    }

    fn and(&mut self, to: u8, value: i32) {
        self.emit(0x57, to, 0, 0, value);
    }

    /// 32 bits of what `from` points to.
    fn load(&mut self, to: u8, from: u8, offset: i16) {
        self.emit(0x61, to, from, offset, 0);
    }

    fn store(&mut self, to: u8, offset: i16, from: u8) {
        self.emit(0x63, to, from, offset, 0);
    }

    fn load_map(&mut self, to: u8, map: i32) {
        self.emit(0x18, to, 1, 0, map);
        self.emit(0, 0, 0, 0, 0);
    }

    fn call(&mut self, helper: i32) {
        self.emit(0x85, 0, 0, 0, helper);
    }

    fn jump(&mut self, to: Label) {
        self.jumps.push((self.code.len(), to));
        self.emit(0x05, 0, 0, 0, 0);
    }

    /// By the lower 32 bits.
    fn jump_if(&mut self, register: u8, value: i32, to: Label) {
        self.jumps.push((self.code.len(), to));
        self.emit(0x16, register, 0, 0, value);
    }

    fn jump_unless(&mut self, register: u8, value: i32, to: Label) {
        self.jumps.push((self.code.len(), to));
        self.emit(0x56, register, 0, 0, value);
    }

    /// By all 64 bits: of pointers.
    fn jump_if_null(&mut self, register: u8, to: Label) {
        self.jumps.push((self.code.len(), to));
        self.emit(0x15, register, 0, 0, 0);
    }

    fn label(&mut self, label: Label) {
        self.labels.push((label, self.code.len()));
    }

    fn end(&mut self, verdict: i32) {
        self.set(0, verdict);
        self.emit(0x95, 0, 0, 0, 0);
    }

    fn finish(mut self) -> Vec<Instruction> {
        for (at, label) in self.jumps {
            let found = self.labels.iter().find(|(known, _)| *known == label);
            let target = found.map_or(0, |(_, target)| *target);
            self.code[at].jump = (target as i64 - at as i64 - 1) as i16;
        }
        self.code
    }
}

/// Loopback and the sandbox's own addresses: as if we were not there. Anything else: TCP for our listener, questions after
/// names for our socket, other datagrams for nobody.
pub fn program(map: i32) -> Vec<Instruction> {
    let mut code = Assembler::default();
    let word = |bytes: [u8; 4]| i32::from_ne_bytes(bytes); // as it lies in memory
    code.copy(6, 1);
    code.set(8, TCP as i32);
    code.load(2, 6, FAMILY);
    code.load(3, 6, PROTOCOL);
    code.jump_if(2, libc::AF_INET6, Label::V6);
    code.jump_unless(2, libc::AF_INET, Label::Drop);

    code.load(4, 6, LOCAL_V4);
    code.jump_if(4, word(OWN.octets()), Label::Pass);
    code.and(4, word([0xff, 0, 0, 0]));
    code.jump_if(4, word([127, 0, 0, 0]), Label::Pass);
    code.jump(Label::Choose);

    code.label(Label::V6);
    code.set(8, TCP_6 as i32);
    // ::1 and our own end alike and differ before; four words each.
    let own = words(OWN_6);
    let loopback = words(Ipv6Addr::LOCALHOST);
    code.load(4, 6, LOCAL_V6 + 12);
    code.jump_unless(4, word(loopback[3]), Label::Choose);
    code.load(4, 6, LOCAL_V6 + 8);
    code.jump_unless(4, 0, Label::Choose);
    code.load(4, 6, LOCAL_V6 + 4);
    code.load(5, 6, LOCAL_V6);
    code.jump_if(5, word(own[0]), Label::OwnV6);
    code.jump_unless(5, 0, Label::Choose);
    code.jump_if(4, 0, Label::Pass);
    code.jump(Label::Choose);
    code.label(Label::OwnV6);
    code.jump_if(4, word(own[1]), Label::Pass);

    code.label(Label::Choose);
    code.jump_if(3, libc::IPPROTO_TCP, Label::Give);
    code.jump_unless(3, libc::IPPROTO_UDP, Label::Drop);
    code.load(4, 6, LOCAL_PORT);
    code.jump_unless(4, i32::from(DNS_PORT), Label::Drop);
    code.add(8, (UDP - TCP) as i32);

    code.label(Label::Give);
    code.store(10, KEY, 8);
    code.copy(2, 10);
    code.add(2, i32::from(KEY));
    code.load_map(1, map);
    code.call(HELPER_LOOKUP);
    code.jump_if_null(0, Label::Drop);
    code.copy(7, 0);
    code.copy(1, 6);
    code.copy(2, 7);
    code.set(3, 0);
    code.call(HELPER_ASSIGN);
    code.copy(8, 0);
    code.copy(1, 7);
    code.call(HELPER_RELEASE);
    code.jump_unless(8, 0, Label::Drop);

    code.label(Label::Pass);
    code.end(PASS);
    code.label(Label::Drop);
    code.end(DROP);
    code.finish()
}

fn words(address: Ipv6Addr) -> [[u8; 4]; 4] {
    let octets = address.octets();
    [0, 4, 8, 12].map(|at| [octets[at], octets[at + 1], octets[at + 2], octets[at + 3]])
}

#[cfg(test)]
#[path = "steering_tests.rs"]
mod tests;
