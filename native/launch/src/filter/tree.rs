//! A program that finds the range that a number is in: a balanced tree of comparisons. The kernel translates the program
//! anew for each command, so every instruction counts: answers are shared by all that give them and are near enough.

use std::collections::BTreeSet;

use dsec_sys::seccomp::Instruction;

use super::code::{answer, answer_of, jump, JUMP, JUMP_AT_LEAST};

/// From `first` on, up to the next entry, numbers get this code, which ends with an answer.
pub struct Range {
    pub first: u32,
    pub code: Vec<Instruction>,
}

pub fn search(ranges: &[Range]) -> Vec<Instruction> {
    if let Some(code) = block(ranges) {
        return code;
    }
    let [_, _, ..] = ranges else {
        return ranges.iter().flat_map(|only| only.code.clone()).collect();
    };
    let (low, high) = ranges.split_at(ranges.len() / 2);
    let pivot = high[0].first;
    let (low, high) = (search(low), search(high));
    let mut code = Vec::with_capacity(low.len() + high.len() + 2);
    match u8::try_from(low.len()) {
        Ok(distance) => code.push(jump(JUMP_AT_LEAST, pivot, distance, 0)),
        Err(_) => {
            code.push(jump(JUMP_AT_LEAST, pivot, 0, 1));
            code.push(jump(JUMP, low.len() as u32, 0, 0));
        }
    }
    code.extend(low);
    code.extend(high);
    code
}

/// All of it with the answers at its end, if a jump reaches so far.
fn block(ranges: &[Range]) -> Option<Vec<Instruction>> {
    let mut block = Block::default();
    block.add(ranges);
    block.finish()
}

#[derive(Default)]
struct Block {
    code: Vec<Instruction>,
    /// Comparisons that lead to an answer: where they are, of which outcome, and what is answered.
    open: Vec<(usize, bool, u32)>,
    too_far: bool,
}

impl Block {
    fn add(&mut self, ranges: &[Range]) {
        if let [only] = ranges {
            self.code.extend_from_slice(&only.code);
            return;
        }
        let (low, high) = ranges.split_at(ranges.len() / 2);
        let at = self.code.len();
        self.code.push(jump(JUMP_AT_LEAST, high[0].first, 0, 0));
        match simple(low) {
            Some(value) => self.open.push((at, false, value)),
            None => self.add(low), // what comes next
        }
        match simple(high) {
            Some(value) => self.open.push((at, true, value)),
            None => {
                self.lead(at, true, self.code.len());
                self.add(high);
            }
        }
    }

    fn lead(&mut self, at: usize, outcome: bool, place: usize) {
        let Ok(distance) = u8::try_from(place - at - 1) else {
            self.too_far = true;
            return;
        };
        match outcome {
            true => self.code[at].jump_true = distance,
            false => self.code[at].jump_false = distance,
        }
    }

    fn finish(mut self) -> Option<Vec<Instruction>> {
        let open = std::mem::take(&mut self.open);
        let values: BTreeSet<u32> = open.iter().map(|&(_, _, value)| value).collect();
        for value in values {
            let place = self.code.len();
            self.code.push(answer(value));
            for &(at, outcome, _) in open.iter().filter(|entry| entry.2 == value) {
                self.lead(at, outcome, place);
            }
        }
        (!self.too_far).then_some(self.code)
    }
}

/// What is answered at once, whatever the arguments are.
fn simple(ranges: &[Range]) -> Option<u32> {
    match ranges {
        [only] => answer_of(&only.code),
        _ => None,
    }
}
