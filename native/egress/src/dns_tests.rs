use super::*;
use crate::random::Xorshift;

fn question(name: &str, kind: u16) -> Vec<u8> {
    let mut message = write_query(7, name, kind, 1232);
    message.truncate(message.len() - EXTENSION);
    message[11] = 0;
    message
}

/// An answer to `write_query(7, name, kind)` with records of (owner, type, seconds, data).
fn answer(name: &str, kind: u16, records: &[(&str, u16, u32, Vec<u8>)]) -> Vec<u8> {
    let mut message = question(name, kind);
    message[2] |= IS_ANSWER;
    message[7] = records.len() as u8;
    for (owner, kind, seconds, data) in records {
        message.extend(written(owner));
        message.extend(kind.to_be_bytes());
        message.extend(INTERNET.to_be_bytes());
        message.extend(seconds.to_be_bytes());
        message.extend((data.len() as u16).to_be_bytes());
        message.extend(data);
    }
    message
}

fn written(name: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    for label in name.split('.') {
        bytes.push(label.len() as u8);
        bytes.extend(label.bytes());
    }
    bytes.push(0);
    bytes
}

fn ips(answer: &Answer) -> Vec<String> {
    answer
        .addresses
        .iter()
        .map(|(address, seconds)| format!("{address}/{seconds}"))
        .collect()
}

#[test]
fn a_question_is_read_and_answered_under_its_name() {
    let mut message = question("Index.example", A);
    message[0..2].copy_from_slice(&[1, 2]);

    let query = parse_query(&message).unwrap();
    let reply = write_answer(&query, NO_ERROR, &[("1.2.3.4".parse().unwrap(), 60)]);

    assert_eq!(
        (query.name.as_deref(), query.kind),
        (Some("index.example"), A)
    );
    assert_eq!(reply[..4], [1, 2, 0x81, 0x80]);
    assert_eq!(reply[4..12], [0, 1, 0, 1, 0, 0, 0, 0]);
    assert_eq!(reply[12..message.len()], message[12..]); // in the letters that were asked for
    assert_eq!(
        reply[message.len()..],
        [0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 1, 2, 3, 4]
    );
}

#[test]
fn an_answer_fits_every_client_and_has_an_extension_when_the_question_had() {
    let name = ["n".repeat(60).as_str(); 4].join(".");
    let query = parse_query(&write_query(7, &name, AAAA, 4096)).unwrap();
    let addresses = vec![("2a00::1".parse().unwrap(), 1); 100];

    let reply = write_answer(&query, NO_ERROR, &addresses);

    assert!(reply.len() <= 512 && reply.len() > 400);
    assert_eq!(reply[11], 1);
    assert_eq!(reply[reply.len() - EXTENSION..][..3], [0, 0, 41]);
}

#[test]
fn a_name_that_no_rule_has_is_none_and_who_can_read_it_is_told_why() {
    let plain = parse_query(&question("a.org", A)).unwrap();
    assert_eq!(
        write_blocked(&plain),
        write_answer(&plain, NO_SUCH_NAME, &[])
    );

    let query = parse_query(&write_query(7, "a.org", A, 4096)).unwrap();
    let reply = write_blocked(&query);

    let without = write_answer(&query, NO_SUCH_NAME, &[]);
    let said = &reply[without.len()..];
    assert_eq!(reply[..without.len() - 2], without[..without.len() - 2]);
    assert_eq!(reply[without.len() - 2..][..2], [0, said.len() as u8]);
    assert_eq!(said[..6], [0, 15, 0, said.len() as u8 - 4, 0, 15]);
    assert_eq!(&said[6..], BLOCKED_TEXT);
    let long = ["n".repeat(60).as_str(); 4].join(".");
    let query = parse_query(&write_query(7, &long, AAAA, 4096)).unwrap();
    assert!(write_blocked(&query).len() <= 512);
}

#[test]
fn what_is_no_question_is_told_so_or_nothing() {
    let good = question("a.org", A);
    let changed = |at: usize, value: u8| {
        let mut message = good.clone();
        message[at] = value;
        parse_query(&message).unwrap_err()
    };
    assert_eq!(parse_query(&good[..11]), Err(Wrong::Silence));
    assert_eq!(changed(2, 0x80), Wrong::Silence);
    assert_eq!(changed(2, 0x28), Wrong::Answer(7, NOT_IMPLEMENTED));
    for at in [5, 7, 9, 11] {
        assert_eq!(changed(at, 3), Wrong::Answer(7, FORMAT_ERROR));
    }
    assert_eq!(changed(12, 0xc0), Wrong::Answer(7, FORMAT_ERROR));
    assert_eq!(changed(12, 0x41), Wrong::Answer(7, FORMAT_ERROR));
    assert_eq!(changed(good.len() - 1, 3), Wrong::Answer(7, REFUSED)); // another class
    for length in 12..good.len() {
        assert_eq!(
            parse_query(&good[..length]),
            Err(Wrong::Answer(7, FORMAT_ERROR))
        );
    }
    let mut long = good.clone();
    long.push(0);
    assert_eq!(parse_query(&long), Err(Wrong::Answer(7, FORMAT_ERROR)));
}

#[test]
fn a_name_that_no_host_has_is_none() {
    for label in [&b"a b"[..], b"a.b", b"\0", b"\xff", b"1"] {
        let mut message = question("a.org", A)[..12].to_vec();
        message.push(label.len() as u8);
        message.extend(label);
        message.extend([0, 0, 1, 0, 1]);
        assert_eq!(parse_query(&message).unwrap().name, None, "{label:?}");
    }
    let mut root = question("a.org", A)[..12].to_vec();
    root.extend([0, 0, 1, 0, 1]);
    assert_eq!(parse_query(&root).unwrap().name, None);
}

#[test]
fn addresses_are_those_at_the_end_of_the_chain() {
    let message = answer(
        "a.org",
        A,
        &[
            ("c.net", A, 300, vec![1, 1, 1, 1]),
            ("evil.net", A, 300, vec![6, 6, 6, 6]),
            ("A.ORG", CNAME, 60, written("b.net")),
            ("c.net", A, 20, vec![1, 1, 1, 2]),
            ("b.net", CNAME, 100, written("c.net")),
            ("c.net", AAAA, 20, vec![9; 16]),
        ],
    );

    let answer = parse_answer(&message, 7, "a.org", A).unwrap();

    assert_eq!(ips(&answer), ["1.1.1.1/60", "1.1.1.2/20"]);
}

#[test]
fn a_chain_without_end_has_no_addresses() {
    let message = answer(
        "a.org",
        A,
        &[
            ("a.org", CNAME, 60, written("b.net")),
            ("b.net", CNAME, 60, written("a.org")),
        ],
    );

    assert!(parse_answer(&message, 7, "a.org", A)
        .unwrap()
        .addresses
        .is_empty());
}

#[test]
fn an_answer_is_of_its_question_or_none() {
    let message = answer("a.org", A, &[("a.org", A, u32::MAX, vec![1, 1, 1, 1])]);

    assert_eq!(
        ips(&parse_answer(&message, 7, "a.org", A).unwrap()),
        ["1.1.1.1/0"]
    );
    assert_eq!(parse_answer(&message, 8, "a.org", A), Err(NoAnswer));
    assert_eq!(parse_answer(&message, 7, "b.org", A), Err(NoAnswer));
    assert_eq!(parse_answer(&message, 7, "a.org", AAAA), Err(NoAnswer));
    assert_eq!(
        parse_answer(&question("a.org", A), 7, "a.org", A),
        Err(NoAnswer)
    );
    for length in 0..message.len() {
        assert_eq!(
            parse_answer(&message[..length], 7, "a.org", A),
            Err(NoAnswer),
            "{length}"
        );
    }
    let wrong = answer("a.org", A, &[("a.org", A, 1, vec![1, 1, 1])]);
    assert_eq!(parse_answer(&wrong, 7, "a.org", A), Err(NoAnswer));
}

#[test]
fn an_answer_that_was_cut_says_so() {
    let mut message = answer("a.org", A, &[("a.org", A, 5, vec![1, 1, 1, 1])]);
    message[2] |= TRUNCATED;
    message[7] = 9;

    assert!(parse_answer(&message, 7, "a.org", A).unwrap().is_truncated);
}

#[test]
fn pointers_go_backwards_only() {
    let mut message = answer("a.org", A, &[]);
    message[7] = 1;
    let at = message.len();
    for target in [at, at + 2, 0x3fff] {
        let mut message = message.clone();
        message.extend([
            0xc0 | (target >> 8) as u8,
            target as u8,
            0,
            1,
            0,
            1,
            0,
            0,
            0,
            1,
            0,
            4,
            1,
            1,
            1,
            1,
        ]);
        assert_eq!(parse_answer(&message, 7, "a.org", A), Err(NoAnswer));
    }
    message.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 1, 0, 4, 1, 1, 1, 1]);
    assert_eq!(
        ips(&parse_answer(&message, 7, "a.org", A).unwrap()),
        ["1.1.1.1/1"]
    );
}

#[test]
fn damaged_and_random_messages_end_in_a_verdict() {
    let good = answer(
        "a.org",
        A,
        &[
            ("a.org", CNAME, 60, written("b.net")),
            ("b.net", A, 1, vec![1, 1, 1, 1]),
        ],
    );
    for seed in 1..20_000 {
        let mut random = Xorshift(seed);
        let mut message = match seed % 3 {
            0 => random.bytes(600),
            1 => good.clone(),
            _ => question("www.example.org", AAAA),
        };
        for _ in 0..random.below(8) {
            if message.is_empty() {
                break;
            }
            let at = random.below(message.len());
            message[at] = random.next() as u8;
        }
        message.truncate(message.len() - random.below(message.len() / 4 + 1));
        if let Ok(query) = parse_query(&message) {
            let reply = write_answer(&query, NO_ERROR, &[("1.1.1.1".parse().unwrap(), 1)]);
            assert!(reply.len() <= 512, "seed {seed}");
            assert!(
                query
                    .name
                    .map_or(true, |name| host_name(&name) == Some(name)),
                "seed {seed}"
            );
        }
        if let Ok(answer) = parse_answer(&message, 7, "a.org", A) {
            assert!(answer.addresses.len() <= ADDRESSES_MAX, "seed {seed}");
            assert!(
                answer.addresses.iter().all(|(_, ttl)| *ttl <= TTL_MAX),
                "seed {seed}"
            );
        }
    }
}
