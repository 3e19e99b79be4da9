//! A filter specification as one program: a binary search for the number, then the rules of that call in order.

use std::collections::BTreeMap;

use dsec_sys::seccomp::Instruction;

use super::code::{answer, jump, load, AND, JUMP_AT_LEAST, JUMP_EQUAL};
use super::table;
use super::tree::{search, Range};
use crate::error::{Error, Result};
use crate::wire::{ArgRule, FilterSpec, SyscallRule};

const AT_NUMBER: u32 = 0;
const AT_ARCHITECTURE: u32 = 4;
const AT_ARGUMENTS: u32 = 16;

const KILL_PROCESS: u32 = 0x8000_0000;
const ALLOW: u32 = 0x7fff_0000;
const ERRNO: u32 = 0x0005_0000;
const X86_64: u32 = 0xc000_003e;
/// Numbers from here on are those of the x32 architecture, which shares the identifier of x86-64.
const X32_BIT: u32 = 0x4000_0000;

const INSTRUCTIONS_MAX: usize = 4096;
const RULES_MAX: usize = 4096;
/// A jump to the end of its rule, whose length is known only later.
const TO_NEXT_RULE: u8 = u8::MAX;
/// A jump over so many comparisons can be told.
const ALIKE_MAX: usize = 200;

/// One rule of one call: what to answer when all conditions hold.
struct Case<'a> {
    when: &'a [ArgRule],
    answer: u32,
}

/// The program for `spec`. A name that the table does not have, or conditions that cannot be, are errors.
pub fn compile(spec: &FilterSpec) -> Result<Vec<Instruction>> {
    let ranges = ranges(&cases(spec)?)?;
    let mut program = vec![
        load(AT_ARCHITECTURE),
        jump(JUMP_EQUAL, X86_64, 1, 0),
        answer(KILL_PROCESS),
        load(AT_NUMBER),
        jump(JUMP_AT_LEAST, X32_BIT, 0, 1),
        answer(KILL_PROCESS),
    ];
    program.extend(search(&ranges));
    if program.len() > INSTRUCTIONS_MAX {
        return Err(Error::Invalid(format!(
            "filter of {} instructions, {INSTRUCTIONS_MAX} at most",
            program.len()
        )));
    }
    Ok(program)
}

/// All rules by call number, in the order in which they apply.
fn cases(spec: &FilterSpec) -> Result<BTreeMap<u32, Vec<Case<'_>>>> {
    let lists = [
        (&spec.deny, ERRNO | libc::EPERM as u32),
        (&spec.ignore, ERRNO),
        (&spec.nosys, ERRNO | libc::ENOSYS as u32),
        (&spec.allow, ALLOW),
    ];
    if lists.iter().map(|(rules, _)| rules.len()).sum::<usize>() > RULES_MAX {
        return Err(Error::Invalid(format!(
            "more than {RULES_MAX} rules in a filter"
        )));
    }
    let mut calls: BTreeMap<u32, Vec<Case>> = BTreeMap::new();
    for (rules, answer) in lists {
        for SyscallRule { syscall, when } in rules {
            let number = table::number(syscall)
                .ok_or_else(|| Error::Invalid(format!("no system call {syscall:?}")))?;
            calls.entry(number).or_default().push(Case { when, answer });
        }
    }
    Ok(calls)
}

/// Runs of numbers with the same code, from 0 up; what no rule names is ENOSYS.
fn ranges(calls: &BTreeMap<u32, Vec<Case>>) -> Result<Vec<Range>> {
    let unknown = || vec![answer(ERRNO | libc::ENOSYS as u32)];
    let mut ranges: Vec<Range> = Vec::new();
    let mut add = |first: u32, code: Vec<Instruction>| {
        if !ranges.last().is_some_and(|range| range.code == code) {
            ranges.push(Range { first, code });
        }
    };
    let mut next = 0;
    for (&number, cases) in calls {
        if number > next {
            add(next, unknown());
        }
        add(number, call_code(cases)?);
        next = number + 1;
    }
    add(next, unknown());
    Ok(ranges)
}

/// The rules of one call, the first that holds wins.
fn call_code(cases: &[Case]) -> Result<Vec<Instruction>> {
    let mut code = Vec::new();
    let mut rest = cases;
    while let Some(case) = rest.first() {
        let (alike, others) = rest.split_at(alike(rest));
        match alike {
            [only] => code.extend(case_code(only)?),
            several => code.extend(one_of_code(several)?),
        }
        if case.when.is_empty() {
            return Ok(code); // nothing after it can be reached
        }
        rest = others;
    }
    code.push(answer(ERRNO | libc::ENOSYS as u32));
    Ok(code)
}

/// How many cases, from the first on, give the same answer for one value each of the same argument.
fn alike(cases: &[Case]) -> usize {
    let value_of = |case: &Case| match case.when {
        [only] if !only.wide && !only.negate => Some((case.answer, only.index, only.mask)),
        _ => None,
    };
    let first = value_of(&cases[0]);
    let same = |case: &&Case| first.is_some() && value_of(case) == first;
    cases.iter().take(ALIKE_MAX).take_while(same).count().max(1)
}

/// Of alike cases: the argument is looked at once, and the answer is there once.
fn one_of_code(cases: &[Case]) -> Result<Vec<Instruction>> {
    let mut code = Vec::new();
    condition_code(&cases[0].when[0], &mut code)?;
    code.pop(); // its comparison, of which there are several
    for (index, case) in cases.iter().enumerate() {
        let condition = &case.when[0];
        check_condition(condition)?;
        let left = cases.len() - 1 - index;
        let to_next_rule = u8::from(left == 0);
        code.push(jump(
            JUMP_EQUAL,
            condition.equals as u32,
            left as u8,
            to_next_rule,
        ));
    }
    code.push(answer(cases[0].answer));
    Ok(code)
}

fn case_code(case: &Case) -> Result<Vec<Instruction>> {
    let mut code = Vec::new();
    for condition in case.when {
        condition_code(condition, &mut code)?;
    }
    code.push(answer(case.answer));
    let length = code.len();
    for (index, instruction) in code.iter_mut().enumerate() {
        let distance = u8::try_from(length - index - 1)
            .ok()
            .filter(|&distance| distance != TO_NEXT_RULE);
        let distance =
            distance.ok_or_else(|| Error::Invalid("too many conditions in one rule".into()))?;
        for target in [&mut instruction.jump_true, &mut instruction.jump_false] {
            if *target == TO_NEXT_RULE {
                *target = distance;
            }
        }
    }
    Ok(code)
}

fn check_condition(condition: &ArgRule) -> Result<()> {
    let ArgRule {
        index,
        equals,
        mask,
        wide,
        ..
    } = *condition;
    if index > 5 {
        return Err(Error::Invalid(format!(
            "argument {index} of a system call, 5 at most"
        )));
    }
    if equals & !mask != 0 || (!wide && equals > u64::from(u32::MAX)) {
        return Err(Error::Invalid(format!(
            "condition that never holds: {equals:#x} under mask {mask:#x}"
        )));
    }
    Ok(())
}

fn condition_code(condition: &ArgRule, code: &mut Vec<Instruction>) -> Result<()> {
    check_condition(condition)?;
    let ArgRule {
        index,
        equals,
        mask,
        negate,
        wide,
    } = *condition;
    let at = AT_ARGUMENTS + 8 * u32::from(index);
    let mut part = |offset: u32, mask: u32, equals: u32, if_equal: u8, if_not: u8| {
        code.push(load(at + offset));
        if mask != u32::MAX {
            code.push(jump(AND, mask, 0, 0));
        }
        code.push(jump(JUMP_EQUAL, equals, if_equal, if_not));
    };
    let (low, low_mask) = (equals as u32, mask as u32);
    let (high, high_mask) = ((equals >> 32) as u32, (mask >> 32) as u32);
    if wide && negate {
        // Other upper bits are enough: over the comparison of the lower ones.
        let lower_length = if low_mask == u32::MAX { 2 } else { 3 };
        part(4, high_mask, high, 0, lower_length);
    } else if wide {
        part(4, high_mask, high, 0, TO_NEXT_RULE);
    }
    match negate {
        true => part(0, low_mask, low, TO_NEXT_RULE, 0),
        false => part(0, low_mask, low, 0, TO_NEXT_RULE),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::filter::code::{JUMP, LOAD, RETURN};

    const EPERM: u32 = ERRNO | 1;
    const ENOSYS: u32 = ERRNO | 38;

    fn rule(syscall: &str, when: Vec<ArgRule>) -> SyscallRule {
        SyscallRule {
            syscall: syscall.into(),
            when,
        }
    }

    fn arg(index: u8, mask: u64, equals: u64) -> ArgRule {
        ArgRule {
            index,
            equals,
            mask,
            negate: false,
            wide: false,
        }
    }

    /// What the kernel would do with the program.
    fn run(program: &[Instruction], arch: u32, number: u32, args: [u64; 6]) -> u32 {
        let (mut at, mut value) = (0, 0_u32);
        loop {
            let Instruction {
                code,
                jump_true,
                jump_false,
                value: k,
            } = program[at];
            at += 1;
            match code {
                LOAD => {
                    value = match k {
                        AT_NUMBER => number,
                        AT_ARCHITECTURE => arch,
                        k => (args[((k - 16) / 8) as usize] >> (8 * (k % 8))) as u32,
                    }
                }
                AND => value &= k,
                JUMP => at += k as usize,
                JUMP_EQUAL => at += usize::from(if value == k { jump_true } else { jump_false }),
                JUMP_AT_LEAST => at += usize::from(if value >= k { jump_true } else { jump_false }),
                RETURN => return k,
                other => panic!("unknown instruction {other}"),
            }
        }
    }

    fn call(program: &[Instruction], name: &str, args: [u64; 6]) -> u32 {
        run(program, X86_64, table::number(name).unwrap(), args)
    }

    #[test]
    fn the_lists_apply_in_their_order() {
        let spec = FilterSpec {
            deny: vec![rule("bpf", vec![])],
            ignore: vec![rule("bpf", vec![]), rule("setrlimit", vec![])],
            nosys: vec![rule("setrlimit", vec![]), rule("clone3", vec![])],
            allow: vec![
                rule("clone3", vec![]),
                rule("read", vec![]),
                rule("bpf", vec![]),
            ],
        };

        let program = compile(&spec).unwrap();

        assert_eq!(call(&program, "bpf", [0; 6]), EPERM);
        assert_eq!(call(&program, "setrlimit", [0; 6]), ERRNO);
        assert_eq!(call(&program, "clone3", [0; 6]), ENOSYS);
        assert_eq!(call(&program, "read", [0; 6]), ALLOW);
        assert_eq!(call(&program, "write", [0; 6]), ENOSYS);
        assert_eq!(run(&program, X86_64, 9999, [0; 6]), ENOSYS);
    }

    #[test]
    fn every_number_gets_its_own_answer() {
        for step in 1..6 {
            let names: Vec<&str> = table_names();
            let allowed: Vec<&str> = names.iter().copied().step_by(step).collect();
            let spec = FilterSpec {
                allow: allowed.iter().map(|n| rule(n, vec![])).collect(),
                ..Default::default()
            };

            let program = compile(&spec).unwrap();

            for number in 0..600 {
                let expected = allowed
                    .iter()
                    .any(|name| table::number(name) == Some(number));
                let answer = run(&program, X86_64, number, [0; 6]);
                assert_eq!(
                    answer,
                    if expected { ALLOW } else { ENOSYS },
                    "number {number}, step {step}"
                );
            }
        }
    }

    fn table_names() -> Vec<&'static str> {
        [
            "read", "write", "open", "close", "stat", "mmap", "clone", "clone3", "execve",
            "ptrace", "openat2", "bpf", "socket", "ioctl", "prctl", "seccomp", "mseal", "getpid",
            "kill", "uname", "fork", "vfork", "setuid", "mount",
        ]
        .to_vec()
    }

    #[test]
    fn other_architectures_are_killed() {
        let program = compile(&FilterSpec {
            allow: vec![rule("read", vec![])],
            ..Default::default()
        })
        .unwrap();

        assert_eq!(run(&program, 0x4000_0003, 0, [0; 6]), KILL_PROCESS);
        assert_eq!(run(&program, X86_64, X32_BIT, [0; 6]), KILL_PROCESS);
        assert_eq!(run(&program, X86_64, u32::MAX, [0; 6]), KILL_PROCESS);
    }

    #[test]
    fn conditions_look_at_the_masked_argument() {
        let spec = FilterSpec {
            deny: vec![rule(
                "clone",
                vec![ArgRule {
                    negate: true,
                    ..arg(0, 0x7e02_0000, 0)
                }],
            )],
            allow: vec![
                rule("clone", vec![]),
                rule("socket", vec![arg(0, u64::MAX, 1)]),
                rule("socket", vec![arg(0, u64::MAX, 2)]),
            ],
            ..Default::default()
        };

        let program = compile(&spec).unwrap();

        assert_eq!(call(&program, "clone", [0x1000_0000, 0, 0, 0, 0, 0]), EPERM);
        assert_eq!(call(&program, "clone", [0x11, 0, 0, 0, 0, 0]), ALLOW);
        assert_eq!(call(&program, "socket", [2, 0, 0, 0, 0, 0]), ALLOW);
        assert_eq!(call(&program, "socket", [40, 0, 0, 0, 0, 0]), ENOSYS);
        assert_eq!(
            call(&program, "socket", [0xdead_0000_0000_0001, 0, 0, 0, 0, 0]),
            ALLOW
        );
    }

    #[test]
    fn wide_conditions_look_at_all_bits() {
        let wide = ArgRule {
            wide: true,
            ..arg(1, u64::MAX, 0x5_0000_0007)
        };
        let other = ArgRule {
            negate: true,
            ..wide.clone()
        };
        let masked = ArgRule {
            wide: true,
            negate: true,
            ..arg(2, 0xf_0000_000f, 0x1_0000_0002)
        };
        let spec = FilterSpec {
            allow: vec![
                rule("ioctl", vec![wide]),
                rule("prctl", vec![other]),
                rule("kill", vec![masked]),
            ],
            ..Default::default()
        };

        let program = compile(&spec).unwrap();

        for (value, same) in [
            (0x5_0000_0007, true),
            (7, false),
            (0x5_0000_0000, false),
            (0x6_0000_0007, false),
        ] {
            let args = [0, value, 0, 0, 0, 0];
            assert_eq!(
                call(&program, "ioctl", args),
                if same { ALLOW } else { ENOSYS }
            );
            assert_eq!(
                call(&program, "prctl", args),
                if same { ENOSYS } else { ALLOW }
            );
        }
        for (value, same) in [
            (0x1_0000_0002, true),
            (0xf1_0000_00f2, true),
            (2, false),
            (0x1_0000_0000, false),
        ] {
            assert_eq!(
                call(&program, "kill", [0, 0, value, 0, 0, 0]),
                if same { ENOSYS } else { ALLOW }
            );
        }
    }

    /// What the words say, without any program.
    fn meaning(spec: &FilterSpec, number: u32, args: [u64; 6]) -> u32 {
        let lists = [
            (&spec.deny, EPERM),
            (&spec.ignore, ERRNO),
            (&spec.nosys, ENOSYS),
            (&spec.allow, ALLOW),
        ];
        for (rules, answer) in lists {
            for rule in rules {
                let holds = |arg: &ArgRule| {
                    let bits = if arg.wide { u64::MAX } else { 0xffff_ffff };
                    let same = args[usize::from(arg.index)] & arg.mask & bits == arg.equals;
                    same != arg.negate
                };
                if table::number(&rule.syscall) == Some(number) && rule.when.iter().all(holds) {
                    return answer;
                }
            }
        }
        ENOSYS
    }

    #[test]
    fn a_program_says_what_its_words_say() {
        let names = table_names();
        let mut state = 7_u64;
        let mut below = move |bound: u64| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % bound
        };
        let values = [
            0,
            1,
            2,
            3,
            8,
            0x5401,
            0x5402,
            0x8000_0000,
            0xffff_ffff,
            1 << 32,
            1 << 33 | 1,
        ];
        for round in 0..300 {
            let mut spec = FilterSpec::default();
            for list in [
                &mut spec.deny,
                &mut spec.ignore,
                &mut spec.nosys,
                &mut spec.allow,
            ] {
                for _ in 0..below(if round % 3 == 0 { 120 } else { 20 }) {
                    let mut when = Vec::new();
                    for _ in 0..below(3) {
                        let wide = below(4) == 0;
                        let mask = [u64::MAX, 0xff, 0xffff_ffff, 3][below(4) as usize];
                        let equals = values[below(if wide { 11 } else { 9 }) as usize] & mask;
                        let equals = if wide { equals } else { equals & 0xffff_ffff };
                        when.push(ArgRule {
                            index: below(3) as u8,
                            equals,
                            mask,
                            negate: below(4) == 0,
                            wide,
                        });
                    }
                    let name = names[below(names.len() as u64) as usize];
                    list.push(rule(name, when));
                }
            }
            let program = compile(&spec).unwrap();
            for number in names
                .iter()
                .map(|name| table::number(name).unwrap())
                .chain([600, 470])
            {
                for _ in 0..30 {
                    let args = [0; 6].map(|_: u64| values[below(11) as usize]);
                    assert_eq!(
                        run(&program, X86_64, number, args),
                        meaning(&spec, number, args),
                        "round {round}, number {number}, {args:x?}, {spec:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn one_of_many_values_costs_one_instruction_each() {
        let values = 0..150_u64;
        let spec = FilterSpec {
            allow: values
                .map(|value| rule("ioctl", vec![arg(1, u64::MAX, 2 * value)]))
                .collect(),
            ..Default::default()
        };

        let program = compile(&spec).unwrap();

        assert!(program.len() < 170, "{}", program.len());
        for value in 0..310_u64 {
            let expected = if value < 300 && value % 2 == 0 {
                ALLOW
            } else {
                ENOSYS
            };
            assert_eq!(call(&program, "ioctl", [0, value, 0, 0, 0, 0]), expected);
        }
    }

    #[test]
    fn nonsense_is_refused() {
        let bad = [
            rule("no_such_call", vec![]),
            rule("read", vec![arg(6, u64::MAX, 0)]),
            rule("read", vec![arg(0, 0xf0, 0x0f)]),
            rule("read", vec![arg(0, u64::MAX, 1 << 32)]),
            rule("read", vec![arg(0, u64::MAX, 1); 200]),
        ];
        for rule in bad {
            assert!(compile(&FilterSpec {
                allow: vec![rule],
                ..Default::default()
            })
            .is_err());
        }
    }
}
