//! Whom a connection names in its first bytes: a TLS client hello (RFC 8446, 6066) or an HTTP request (RFC 9112). The bytes
//! are a sandbox's; servers behind shared addresses are often more lenient than the standards, so what could be read in two
//! ways is refused.

use std::net::IpAddr;

use crate::policy::host_name;

#[derive(Debug, PartialEq, Eq)]
pub enum Seen {
    /// More bytes are needed.
    More,
    /// All of these are named.
    Names(Vec<String>),
    /// A hello without a name, or a protocol in which hosts are not named.
    Nobody,
    Unreadable,
}

/// Records of TLS: what is no part of a handshake is passed over by some servers before one.
const RECORDS: std::ops::RangeInclusive<u8> = 20..=24;
const HANDSHAKE: u8 = 22;
const CLIENT_HELLO: u8 = 1;
const SERVER_NAME: u16 = 0;
const RECORD_BYTES_MAX: usize = 16 << 10;
/// A first line of HTTP is shorter.
const LINE_BYTES_MAX: usize = 8 << 10;

/// How a balancer tells a server behind it who calls (the PROXY protocol): what follows is read as if nothing were before it.
const CALLER: &[u8] = b"PROXY ";
const CALLER_2: &[u8] = b"\r\n\r\n\0\r\nQUIT\n";

/// `address` is the one that the connection goes to: as a host in HTTP it names nobody.
pub fn look(bytes: &[u8], address: IpAddr) -> Seen {
    if bytes.starts_with(CALLER_2) {
        return Seen::Unreadable;
    }
    match bytes.first() {
        _ if CALLER_2.starts_with(bytes) => Seen::More, // also when there is nothing
        None => Seen::More,
        Some(&HANDSHAKE) => hello(bytes),
        Some(kind) if RECORDS.contains(kind) => Seen::Unreadable,
        Some(_) => request(bytes, address),
    }
}

// ---- TLS -----------------------------------------------------------------------------------------

fn hello(bytes: &[u8]) -> Seen {
    // The message may be spread over records.
    let mut message = Vec::new();
    let mut rest = bytes;
    let wanted = loop {
        if message.len() >= 4 {
            let length = usize::from(message[1]) << 16
                | usize::from(message[2]) << 8
                | usize::from(message[3]);
            if message[0] != CLIENT_HELLO || length > RECORD_BYTES_MAX {
                return Seen::Unreadable;
            }
            if message.len() >= 4 + length {
                break length;
            }
        }
        let Some(header) = rest.first_chunk::<5>() else {
            // What is there of a header can be wrong already.
            let good = rest.first().map_or(true, |kind| *kind == HANDSHAKE);
            return if good { Seen::More } else { Seen::Unreadable };
        };
        let length = usize::from(u16::from_be_bytes([header[3], header[4]]));
        if header[0] != HANDSHAKE || header[1] != 3 || length == 0 || length > RECORD_BYTES_MAX {
            return Seen::Unreadable;
        }
        let there = rest[5..].len().min(length);
        message.extend_from_slice(&rest[5..5 + there]);
        if there < length && !is_whole(&message) {
            return Seen::More;
        }
        rest = &rest[5 + there..];
    };
    match server_names(&message[4..4 + wanted]) {
        None => Seen::Unreadable,
        Some(names) if names.is_empty() => Seen::Nobody,
        Some(names) => Seen::Names(names),
    }
}

fn is_whole(message: &[u8]) -> bool {
    message.first_chunk::<4>().is_some_and(|[_, a, b, c]| {
        let length = usize::from(*a) << 16 | usize::from(*b) << 8 | usize::from(*c);
        message.len() >= 4 + length
    })
}

/// None for what is no client hello, or one with a name that no host has.
fn server_names(mut hello: &[u8]) -> Option<Vec<String>> {
    take(&mut hello, 2 + 32)?; // version, random
    vector8(&mut hello)?; // session
    vector16(&mut hello)?; // ciphers
    vector8(&mut hello)?; // compressions
    if hello.is_empty() {
        return Some(Vec::new());
    }
    let mut extensions = vector16(&mut hello)?;
    if !hello.is_empty() {
        return None;
    }
    let mut names = Vec::new();
    let mut found = false;
    while !extensions.is_empty() {
        let kind = u16_of(&mut extensions)?;
        let mut body = vector16(&mut extensions)?;
        if kind != SERVER_NAME {
            continue;
        }
        if found {
            return None; // who knows which one counts
        }
        found = true;
        let mut list = vector16(&mut body)?;
        if !body.is_empty() || list.is_empty() {
            return None;
        }
        while !list.is_empty() {
            let kind = take(&mut list, 1)?[0];
            let name = vector16(&mut list)?;
            if kind != 0 {
                return None;
            }
            names.push(host_name(std::str::from_utf8(name).ok()?)?);
        }
    }
    Some(names)
}

fn take<'a>(from: &mut &'a [u8], count: usize) -> Option<&'a [u8]> {
    let taken = from.get(..count)?;
    *from = &from[count..];
    Some(taken)
}

fn u16_of(from: &mut &[u8]) -> Option<u16> {
    take(from, 2).map(|bytes| u16::from_be_bytes([bytes[0], bytes[1]]))
}

fn vector8<'a>(from: &mut &'a [u8]) -> Option<&'a [u8]> {
    let length = take(from, 1)?[0];
    take(from, usize::from(length))
}

fn vector16<'a>(from: &mut &'a [u8]) -> Option<&'a [u8]> {
    let length = u16_of(from)?;
    take(from, usize::from(length))
}

// ---- HTTP ----------------------------------------------------------------------------------------

fn request(bytes: &[u8], address: IpAddr) -> Seen {
    // Servers pass over empty lines before a request.
    let start = bytes
        .iter()
        .position(|byte| !matches!(byte, b'\r' | b'\n'))
        .unwrap_or(bytes.len());
    let bytes = &bytes[start..];
    if bytes.is_empty() {
        return Seen::More;
    }
    // By its first byte or by all of its first line, and never by a part of it: however it is cut, it is the same.
    if !begins_request(bytes[0]) {
        return Seen::Nobody;
    }
    let end = bytes.iter().position(|byte| *byte == b'\n');
    let Some(end) = end.filter(|end| *end <= LINE_BYTES_MAX) else {
        return match bytes.len() > LINE_BYTES_MAX {
            true => Seen::Unreadable,
            false => Seen::More,
        };
    };
    let line = trimmed(&bytes[..end]);
    if line.starts_with(CALLER) {
        return Seen::Unreadable;
    }
    if !is_for_servers(line) {
        return Seen::Nobody;
    }
    let Some(target) = target_of(line) else {
        return Seen::Unreadable;
    };
    let host = match host_header(&bytes[end + 1..]) {
        Header::More => return Seen::More,
        Header::Unreadable => return Seen::Unreadable,
        Header::Host(host) => host,
    };
    let mut names = Vec::new();
    for part in [host, authority_of(target)].into_iter().flatten() {
        match named(part, address) {
            Some(Some(name)) => names.push(name),
            Some(None) => {}
            None => return Seen::Unreadable,
        }
    }
    if names.is_empty() {
        return Seen::Nobody;
    }
    Seen::Names(names)
}

/// Servers that know no method beginning so know none, whatever follows: some look at the first bytes of a method only. Blank
/// before it, as one byte or as Unicode has it (of which this is the first one), is nothing to some.
fn begins_request(first: u8) -> bool {
    first.is_ascii_graphic() || is_blank(first) || matches!(first, 0xc2 | 0xe1..=0xe3 | 0xef)
}

/// Whether some server takes it for a request, whatever else is wrong with it.
fn is_for_servers(line: &[u8]) -> bool {
    let has = |word: &[u8]| {
        let mut parts = line.windows(word.len());
        parts.any(|part| part.eq_ignore_ascii_case(word))
    };
    if [&b"HTTP/"[..], b"RTSP/", b"ICE/"].into_iter().any(has) {
        return true;
    }
    // Also the oldest version, which has no word for itself, and to which some answer with their first host.
    let mut words = line
        .split(|byte| is_blank(*byte))
        .filter(|word| !word.is_empty());
    match (words.next(), words.next()) {
        (None, _) => true,
        (Some(method), None) => is_one_of(method, &[b"GET"]),
        (Some(method), Some(target)) => {
            is_one_of(method, &[b"GET", b"CONNECT"])
                || matches!(target[0], b'/' | b'*')
                || has(b"://")
        }
    }
}

fn is_one_of(word: &[u8], words: &[&[u8]]) -> bool {
    words.iter().any(|one| one.eq_ignore_ascii_case(word))
}

/// Also what is blank in Unicode, or separates records.
fn is_blank(byte: u8) -> bool {
    matches!(byte, b'\t'..=b'\r' | 0x1c..=b' ' | 0x85 | 0xa0)
}

/// Of `METHOD TARGET HTTP/1.x` with single blanks.
fn target_of(line: &[u8]) -> Option<&str> {
    let line = std::str::from_utf8(line).ok()?;
    let mut words = line.split(' ');
    let (method, target, version) = (words.next()?, words.next()?, words.next()?);
    let good = words.next().is_none()
        && method.bytes().all(|byte| byte.is_ascii_graphic())
        && matches!(version, "HTTP/1.1" | "HTTP/1.0")
        && !target.is_empty()
        && target.bytes().all(|byte| byte.is_ascii_graphic());
    good.then_some(target)
}

/// A target may be a whole URL, or (CONNECT) a host.
fn authority_of(target: &str) -> Option<&str> {
    if target.starts_with('/') || target == "*" {
        return None;
    }
    let rest = target.split_once("://").map_or(target, |(_, rest)| rest);
    let end = rest.find(['/', '?', '#', '\\']).unwrap_or(rest.len());
    Some(&rest[..end])
}

enum Header<'a> {
    More,
    Host(Option<&'a str>),
    Unreadable,
}

/// The whole head has to be there: a second host may come last.
fn host_header(mut bytes: &[u8]) -> Header<'_> {
    let mut host = None;
    loop {
        let Some(end) = bytes.iter().position(|byte| *byte == b'\n') else {
            return Header::More;
        };
        let line = trimmed(&bytes[..end]);
        bytes = &bytes[end + 1..];
        if line.is_empty() {
            return Header::Host(host);
        }
        let Some(colon) = line.iter().position(|byte| *byte == b':') else {
            return Header::Unreadable;
        };
        let (name, value) = (&line[..colon], &line[colon + 1..]);
        // No blank before the colon, none at the front (a folded line), nothing that is no character of a name.
        if name.is_empty() || !name.iter().all(|byte| byte.is_ascii_graphic()) {
            return Header::Unreadable;
        }
        if !is_one_line(value) {
            return Header::Unreadable;
        }
        if !name.eq_ignore_ascii_case(b"host") {
            continue;
        }
        match std::str::from_utf8(value) {
            Ok(value) if host.is_none() => host = Some(value.trim_matches([' ', '\t'])),
            _ => return Header::Unreadable,
        }
    }
}

/// What no value may have is the end of a line to some servers, as is NEL, which letters beyond ASCII may have inside: that is
/// one where a host follows.
fn is_one_line(value: &[u8]) -> bool {
    let good = |byte: &u8| matches!(byte, b'\t' | b' '..=b'~' | 0x80..);
    let mut parts = value.split(|byte| *byte == 0x85).skip(1);
    value.iter().all(good) && !parts.any(|part| part.to_ascii_lowercase().starts_with(b"host"))
}

/// A host with or without its port: Some(None) for the connection's own address; None for what is neither.
fn named(host: &str, address: IpAddr) -> Option<Option<String>> {
    let (name, port) = match host.strip_prefix('[') {
        Some(rest) => {
            let (inner, after) = rest.split_once(']')?;
            (
                inner,
                after.strip_prefix(':').or(after.is_empty().then_some(""))?,
            )
        }
        None => host.split_once(':').unwrap_or((host, "")),
    };
    if !port.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    match name.parse::<IpAddr>() {
        Ok(found) => (found == address).then_some(None),
        Err(_) => host_name(name).map(Some),
    }
}

fn trimmed(line: &[u8]) -> &[u8] {
    line.strip_suffix(b"\r").unwrap_or(line)
}

#[cfg(test)]
#[path = "peek_tests.rs"]
mod tests;
