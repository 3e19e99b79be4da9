//! Numbers that nobody guesses, and, for tests, such as come again.

use std::fs::File;
use std::io::{self, Read};

/// What is read ahead: a number is wanted for each question.
const AHEAD: usize = 512;

pub struct Random {
    source: File,
    bytes: Vec<u8>,
}

impl Random {
    pub fn open() -> io::Result<Random> {
        Ok(Random {
            source: File::open("/dev/urandom")?,
            bytes: Vec::new(),
        })
    }

    pub fn number(&mut self) -> io::Result<u16> {
        if self.bytes.len() < 2 {
            self.bytes.resize(AHEAD, 0);
            if let Err(error) = self.source.read_exact(&mut self.bytes) {
                self.bytes.clear();
                return Err(error);
            }
        }
        let low = self.bytes.pop().unwrap_or_default();
        let high = self.bytes.pop().unwrap_or_default();
        Ok(u16::from_be_bytes([high, low]))
    }
}

/// xorshift64*: the seed is in the assertion's message, so a failure can be run again.
#[cfg(test)]
pub struct Xorshift(pub u64);

#[cfg(test)]
impl Xorshift {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    pub fn bytes(&mut self, bound: usize) -> Vec<u8> {
        let length = self.below(bound);
        (0..length).map(|_| self.next() as u8).collect()
    }
}
