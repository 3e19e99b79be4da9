use super::*;
use crate::random::Xorshift;

fn see(bytes: &[u8]) -> Seen {
    look(bytes, "9.9.9.9".parse().unwrap())
}

fn names(names: &[&str]) -> Seen {
    Seen::Names(names.iter().map(|name| (*name).to_owned()).collect())
}

fn extension(kind: u16, body: &[u8]) -> Vec<u8> {
    let mut bytes = kind.to_be_bytes().to_vec();
    bytes.extend((body.len() as u16).to_be_bytes());
    bytes.extend(body);
    bytes
}

fn server_name(names: &[(u8, &[u8])]) -> Vec<u8> {
    let mut list = Vec::new();
    for (kind, name) in names {
        list.push(*kind);
        list.extend((name.len() as u16).to_be_bytes());
        list.extend(*name);
    }
    let mut body = (list.len() as u16).to_be_bytes().to_vec();
    body.extend(list);
    extension(0, &body)
}

fn message(extensions: &[Vec<u8>]) -> Vec<u8> {
    let mut hello = vec![3, 3];
    hello.extend([7; 32]);
    hello.extend([0, 0, 2, 0x13, 1, 1, 0]);
    let all: Vec<u8> = extensions.concat();
    hello.extend((all.len() as u16).to_be_bytes());
    hello.extend(all);
    let length = hello.len() as u32;
    let mut message = vec![1];
    message.extend(&length.to_be_bytes()[1..]);
    message.extend(hello);
    message
}

fn records(message: &[u8], size: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    for part in message.chunks(size) {
        bytes.extend([22, 3, 1]);
        bytes.extend((part.len() as u16).to_be_bytes());
        bytes.extend(part);
    }
    bytes
}

#[test]
fn a_hello_names_its_host_however_it_is_cut() {
    let message = message(&[
        extension(43, &[2, 3, 4]),
        server_name(&[(0, b"Index.example")]),
        extension(51, &[9; 1200]),
    ]);
    for size in [1, 3, 100, 16 << 10] {
        let bytes = records(&message, size);
        assert_eq!(see(&bytes), names(&["index.example"]), "{size}");
        for length in 0..bytes.len() {
            assert_eq!(see(&bytes[..length]), Seen::More, "{size} {length}");
        }
        let mut more = bytes.clone();
        more.extend([23, 3, 3, 0, 1, 0]); // early data
        assert_eq!(see(&more), names(&["index.example"]));
    }
}

#[test]
fn a_hello_without_a_name_names_nobody() {
    assert_eq!(
        see(&records(&message(&[extension(43, &[2, 3, 4])]), 4096)),
        Seen::Nobody
    );
    let mut bare = vec![1, 0, 0, 41, 3, 3];
    bare.extend([7; 32]);
    bare.extend([0, 0, 2, 0x13, 1, 1, 0]);
    assert_eq!(see(&records(&bare, 4096)), Seen::Nobody);
}

#[test]
fn a_hello_that_could_be_read_in_two_ways_is_unreadable() {
    let twice = message(&[server_name(&[(0, b"a.org")]), server_name(&[(0, b"b.org")])]);
    let cases = [
        twice,
        message(&[server_name(&[(1, b"a.org")])]),
        message(&[server_name(&[(0, b"a.org\0.evil.org")])]),
        message(&[server_name(&[(0, b"1.2.3.4")])]),
        message(&[server_name(&[])]),
        message(&[extension(0, &[])]),
        message(&[extension(0, &[0, 9, 0])]),
        vec![2, 0, 0, 1, 0],       // not a client's
        vec![1, 0xff, 0, 0],       // too long
        vec![1, 0, 0, 3, 3, 3, 1], // too short
    ];
    for (number, message) in cases.iter().enumerate() {
        assert_eq!(see(&records(message, 4096)), Seen::Unreadable, "{number}");
    }
    assert_eq!(see(&[22, 9, 1, 0, 1, 1]), Seen::Unreadable);
    assert_eq!(see(&[22, 3, 1, 0, 0, 1]), Seen::Unreadable);
    assert_eq!(see(&[22, 3, 1, 0, 1, 1, 23]), Seen::Unreadable);
    // Both names of one list count.
    let both = message(&[server_name(&[(0, b"a.org"), (0, b"b.org")])]);
    assert_eq!(see(&records(&both, 4096)), names(&["a.org", "b.org"]));
}

#[test]
fn what_comes_before_a_hello_is_not_passed_over() {
    let hello = records(&message(&[server_name(&[(0, b"b.org")])]), 4096);
    for before in [
        &[21, 3, 1, 0, 2, 1, 112][..],
        &[20, 3, 3, 0, 1, 1],
        &[23, 3, 3, 0, 0],
        &[24, 3, 3, 0, 0],
        &[22, 3, 1, 0, 0],
    ] {
        assert_eq!(see(&[before, &hello].concat()), Seen::Unreadable);
        assert_eq!(see(before), Seen::Unreadable);
    }
}

#[test]
fn a_request_names_its_host() {
    let cases: &[(&[u8], Seen)] = &[
        (
            b"GET / HTTP/1.1\r\nHost: Index.example\r\n\r\n",
            names(&["index.example"]),
        ),
        (
            b"GET / HTTP/1.1\nhost:index.example:80 \n\n",
            names(&["index.example"]),
        ),
        (
            b"\r\n\nGET / HTTP/1.1\r\nAccept: */*\r\nHost: a.org.\r\n\r\nmore",
            names(&["a.org"]),
        ),
        (
            b"GET http://b.org:80/x HTTP/1.1\r\nHost: a.org\r\n\r\n",
            names(&["a.org", "b.org"]),
        ),
        (
            b"CONNECT b.org:443 HTTP/1.1\r\nHost: a.org\r\n\r\n",
            names(&["a.org", "b.org"]),
        ),
        (
            b"M-SEARCH / HTTP/1.1\r\nHost: b.org\r\n\r\n",
            names(&["b.org"]),
        ),
        (
            b"G3T_x / HTTP/1.1\r\nHost: b.org\r\n\r\n",
            names(&["b.org"]),
        ),
        (
            b"GET / HTTP/1.1\r\nX: \xc3\x85ngstr\xc3\xb6m\t~\r\nHost: b.org\r\n\r\n",
            names(&["b.org"]),
        ),
        (b"GET / HTTP/1.0\r\n\r\n", Seen::Nobody),
        (b"GET / HTTP/1.1\r\nHost: 9.9.9.9\r\n\r\n", Seen::Nobody),
        (b"GET / HTTP/1.1\r\nHost: 9.9.9.9:80\r\n\r\n", Seen::Nobody),
        (
            b"OPTIONS * HTTP/1.1\r\nHost: a.org\r\n\r\n",
            names(&["a.org"]),
        ),
    ];
    for (bytes, seen) in cases {
        assert_eq!(see(bytes), *seen, "{}", String::from_utf8_lossy(bytes));
    }
}

#[test]
fn a_request_is_waited_for_to_the_end_of_its_head() {
    let bytes = b"GET / HTTP/1.1\r\nHost: a.org\r\nX: y\r\n\r\n";
    for length in 0..bytes.len() {
        assert_eq!(see(&bytes[..length]), Seen::More, "{length}");
    }
}

#[test]
fn a_request_that_could_be_read_in_two_ways_is_unreadable() {
    let cases: &[&[u8]] = &[
        b"GET / HTTP/1.1\r\nHost: a.org\r\nHost: b.org\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost : a.org\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: y\r\n Host: a.org\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a.org, b.org\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: b.org@a.org\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a.org/b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 9.9.9.8\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: [::1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: \r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\0b\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        // Somebody else is said to call.
        b"PROXY TCP4 1.2.3.4 9.9.9.9 1 80\r\nGET / HTTP/1.1\r\nHost: b.org\r\n\r\n",
        b"PROXY UNKNOWN\r\n\x16\x03\x01",
        b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0cGET / HTTP/1.1\r\nHost: b.org\r\n\r\n",
        // Ends of lines to some.
        b"GET / HTTP/1.1\r\nX: y\rHost: b.org\r\nHost: a.org\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: y\x0bHost: b.org\r\nHost: a.org\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: y\x0cHost: b.org\r\nHost: a.org\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: y\x1ehost: b.org\r\nHost: a.org\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: y\x85Host: b.org\r\nHost: a.org\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: \xc2\x85hOST: b.org\r\nHost: a.org\r\n\r\n",
        b"GET  / HTTP/1.1\r\nHost: a.org\r\n\r\n",
        b"GET / HTTP/1.1 \r\nHost: a.org\r\n\r\n",
        b"GET / HTTP/2.0\r\nHost: a.org\r\n\r\n",
        b"GET / http/1.1\r\nHost: a.org\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET http://user@b.org/ HTTP/1.1\r\nHost: a.org\r\n\r\n",
        b"GET /\r\n",
        b"GET / \r\nHost: b.org\r\n\r\n",
        // What blanks and methods are is seen in many ways.
        b"GET\t/ HTTP/1.1\r\nHost: b.org\r\n\r\n",
        b"GET\x0b/\x0cHTTP/1.1\r\nHost: b.org\r\n\r\n",
        b" GET / HTTP/1.1\r\nHost: b.org\r\n\r\n",
        b"\tGET / HTTP/1.1\r\nHost: b.org\r\n\r\n",
        b" \r\nGET / HTTP/1.1\r\nHost: b.org\r\n\r\n",
        b"GET / http/1.1\nHost: b.org\n\n",
        b"POST /\r\nHost: b.org\r\n\r\n",
        b"\xa0GET / HTTP/1.1\r\nHost: b.org\r\n\r\n",
        b"\x1f\x85GET\xa0/ HTTP/1.1\r\nHost: b.org\r\n\r\n",
        b"GET\0 / HTTP/1.1\r\nHost: b.org\r\n\r\n",
        b"connect b.org:80\r\nHost: a.org\r\n\r\n",
        b"get\thttp://b.org/\r\n",
        b"SOURCE / ICE/1.0\r\nHost: b.org\r\n\r\n",
        b"OPTIONS x RTSP/1.0\r\nHost: b.org\r\n\r\n",
    ];
    for bytes in cases {
        assert_eq!(
            see(bytes),
            Seen::Unreadable,
            "{}",
            String::from_utf8_lossy(bytes)
        );
        // However little of it comes at first, it is not let through for that.
        for length in 0..bytes.len() {
            let seen = see(&bytes[..length]);
            assert!(
                matches!(seen, Seen::More | Seen::Unreadable),
                "{length} {seen:?}"
            );
        }
    }
    let long = [
        vec![b'A'; 40],
        b" / HTTP/1.1\r\nHost: a.org\r\n\r\n".to_vec(),
    ]
    .concat();
    assert_eq!(see(&long), names(&["a.org"]));
    let endless = [b"GET /".to_vec(), vec![b'a'; LINE_BYTES_MAX]].concat();
    assert_eq!(see(&endless), Seen::Unreadable);
}

#[test]
fn a_request_with_bytes_that_no_method_has_is_unreadable_however_it_is_cut() {
    for bytes in [
        &b"G\x7fT / http/1.1\r\nHost: b.org\r\n\r\n"[..],
        b"GE\x01T / HTTP/1.1\r\nHost: b.org\r\n\r\n",
        b"GET\x01 / HTTP/1.1\r\nHost: b.org\r\n\r\n",
        b"GETS\0 / HTTP/1.1\r\nHost: b.org\r\n\r\n",
        b"POST\x01 /\r\nHost: b.org\r\n\r\n",
        b"POST\xff /\r\nHost: b.org\r\n\r\n",
        b"\xc2\xa0GET / HTTP/1.1\r\nHost: b.org\r\n\r\n",
        b"\xef\xbb\xbfGET / HTTP/1.1\r\nHost: b.org\r\n\r\n",
    ] {
        assert_eq!(see(bytes), Seen::Unreadable, "{bytes:?}");
        for length in 0..bytes.len() {
            let seen = see(&bytes[..length]);
            assert!(
                matches!(seen, Seen::More | Seen::Unreadable),
                "{bytes:?} {length} {seen:?}"
            );
        }
    }
}

#[test]
fn a_verdict_on_a_part_is_that_on_the_whole() {
    let hello = records(&message(&[server_name(&[(0, b"a.org")])]), 20);
    let request = b"GET http://a.org/ HTTP/1.1\r\nHost: a.org\r\nX: y\r\n\r\n".to_vec();
    for seed in 1..6000 {
        let mut random = Xorshift(seed);
        let mut bytes = match seed % 4 {
            0 => random.bytes(80),
            1 => hello.clone(),
            _ => request.clone(),
        };
        for _ in 0..random.below(4) {
            if !bytes.is_empty() {
                let at = random.below(bytes.len());
                let odd = b"\0\x01\t\r\n \x16\x7f\x85\xa0\xc2\xff:/*";
                bytes[at] = match random.below(2) {
                    0 => random.next() as u8,
                    _ => odd[random.below(odd.len())],
                };
            }
        }
        if seed % 7 == 0 {
            bytes.splice(..0, *b"\r\n\r\n\0\r\nQUIT\n");
            bytes.truncate(20);
            let at = random.below(bytes.len());
            bytes[at] = random.next() as u8;
        }
        let whole = see(&bytes);
        for length in 0..bytes.len() {
            let part = see(&bytes[..length]);
            assert!(
                part == Seen::More || part == whole,
                "seed {seed}, {length} bytes: {part:?}, then {whole:?}"
            );
        }
    }
    let long = [vec![b'A'; LINE_BYTES_MAX + 1], b" / HTTP/1.1\r\n".to_vec()].concat();
    assert_eq!(see(&long), Seen::Unreadable);
    assert_eq!(see(&long[..=LINE_BYTES_MAX]), Seen::Unreadable);
}

#[test]
fn other_protocols_name_nobody() {
    for bytes in [
        &b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n"[..],
        b"\0\0\0\x08",
        b"EHLO me\r\n",
        b"*1\r\n$4\r\nPING\r\n",
        b"AMQP\0\0\x09\x01",
        b"\0GET / HTTP/1.1\r\nHost: b.org\r\n\r\n", // no server's request
        b"\x80\x2e\x01\x03\x01",
        b"\x16",
    ] {
        let seen = see(bytes);
        assert!(
            matches!(seen, Seen::Nobody | Seen::More),
            "{bytes:?} {seen:?}"
        );
    }
}

#[test]
fn damaged_and_random_bytes_end_in_a_verdict() {
    let hello = records(&message(&[server_name(&[(0, b"a.org")])]), 20);
    let request = b"GET http://a.org/ HTTP/1.1\r\nHost: a.org\r\n\r\n".to_vec();
    for seed in 1..20_000 {
        let mut random = Xorshift(seed);
        let mut bytes = match seed % 3 {
            0 => random.bytes(300),
            1 => hello.clone(),
            _ => request.clone(),
        };
        for _ in 0..random.below(6) {
            if !bytes.is_empty() {
                let at = random.below(bytes.len());
                bytes[at] = random.next() as u8;
            }
        }
        if let Seen::Names(names) = see(&bytes) {
            assert!(
                names
                    .iter()
                    .all(|name| host_name(name).as_deref() == Some(name)),
                "seed {seed}"
            );
        }
    }
}
