//! Messages of DNS (RFC 1035): questions of sandboxes and answers of resolvers, both from strangers. Strict, and bounded in
//! time and memory by the length of a message.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::limits::{
    ADDRESSES_MAX, CHAIN_MAX, LABELS_MAX, QUESTION_BYTES_MAX, RECORDS_MAX, TTL_MAX,
};
use crate::policy::host_name;

pub const A: u16 = 1;
pub const AAAA: u16 = 28;
const CNAME: u16 = 5;
const OPT: u16 = 41;
const INTERNET: u16 = 1;

pub const NO_ERROR: u8 = 0;
pub const FORMAT_ERROR: u8 = 1;
pub const SERVER_FAILURE: u8 = 2;
pub const NO_SUCH_NAME: u8 = 3;
pub const NOT_IMPLEMENTED: u8 = 4;
pub const REFUSED: u8 = 5;

const HEADER: usize = 12;
const IS_ANSWER: u8 = 0x80;
const OPERATION: u8 = 0x78;
const TRUNCATED: u8 = 0x02;
const RECURSION_DESIRED: u8 = 0x01;
const RECURSION_AVAILABLE: u8 = 0x80;
const CODE: u8 = 0x0f;
const POINTER: u8 = 0xc0;
const NAME_BYTES_MAX: usize = 255;
/// What every client takes by UDP.
const ANSWER_BYTES: usize = 512;
const EXTENSION: usize = 11;
/// An option of it that says why (RFC 8914), for those who look.
const EXTENDED_ERROR: u16 = 15;
const BLOCKED: u16 = 15;
const BLOCKED_TEXT: &[u8] = b"no rule of this sandbox's egress allows it";

/// A question of a sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Query {
    pub id: u16,
    /// In the form that is compared; None for a name that no host has (and for the root).
    pub name: Option<String>,
    pub kind: u16,
    /// Name, type and class as they came.
    raw: Vec<u8>,
    wishes_recursion: bool,
    /// It knows of extensions (RFC 6891), and gets one back.
    is_extended: bool,
}

/// What is answered to what is not understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wrong {
    /// Nothing: it is an answer, or too short to have a number.
    Silence,
    Answer(u16, u8),
}

#[derive(Debug, PartialEq, Eq)]
pub struct Answer {
    pub code: u8,
    pub is_truncated: bool,
    /// With the seconds for which they hold.
    pub addresses: Vec<(IpAddr, u32)>,
}

#[derive(Debug, PartialEq, Eq)]
pub struct NoAnswer;

pub fn parse_query(message: &[u8]) -> Result<Query, Wrong> {
    let header: [u8; HEADER] = *message.first_chunk().ok_or(Wrong::Silence)?;
    let id = u16::from_be_bytes([header[0], header[1]]);
    if header[2] & IS_ANSWER != 0 {
        return Err(Wrong::Silence);
    }
    if header[2] & OPERATION != 0 {
        return Err(Wrong::Answer(id, NOT_IMPLEMENTED));
    }
    let wrong = Wrong::Answer(id, FORMAT_ERROR);
    if message.len() > QUESTION_BYTES_MAX {
        return Err(wrong);
    }
    let counts = [4, 6, 8, 10].map(|at| u16::from_be_bytes([header[at], header[at + 1]]));
    let is_extended = match counts {
        [1, 0, 0, 0] => false,
        [1, 0, 0, 1] => true,
        _ => return Err(wrong),
    };
    let mut reader = Reader {
        message,
        at: HEADER,
    };
    let name = reader.plain_name().ok_or(wrong)?;
    let kind = reader.u16().ok_or(wrong)?;
    let class = reader.u16().ok_or(wrong)?;
    let raw = message[HEADER..reader.at].to_vec();
    if is_extended {
        let is_root = reader.u8() == Some(0);
        let kind = reader.u16().ok_or(wrong)?;
        reader.take(6).ok_or(wrong)?; // how much it takes, codes, flags
        let length = reader.u16().ok_or(wrong)?;
        reader.take(usize::from(length)).ok_or(wrong)?;
        if !is_root || kind != OPT {
            return Err(wrong);
        }
    }
    if reader.at != message.len() {
        return Err(wrong);
    }
    if class != INTERNET {
        return Err(Wrong::Answer(id, REFUSED));
    }
    Ok(Query {
        id,
        name,
        kind,
        raw,
        wishes_recursion: header[2] & RECURSION_DESIRED != 0,
        is_extended,
    })
}

/// The question for a resolver: by our own number, never with anything that the sandbox has chosen but the name.
pub fn write_query(id: u16, name: &str, kind: u16, room: usize) -> Vec<u8> {
    let mut message = Vec::with_capacity(HEADER + NAME_BYTES_MAX + 4 + EXTENSION);
    message.extend(id.to_be_bytes());
    message.extend([RECURSION_DESIRED, 0, 0, 1, 0, 0, 0, 0, 0, 1]);
    for label in name.split('.') {
        message.push(label.len() as u8);
        message.extend(label.bytes());
    }
    message.push(0);
    message.extend(kind.to_be_bytes());
    message.extend(INTERNET.to_be_bytes());
    push_extension(&mut message, room as u16);
    message
}

/// A resolver's answer to `write_query` with these; anything else is none.
pub fn parse_answer(message: &[u8], id: u16, name: &str, kind: u16) -> Result<Answer, NoAnswer> {
    parse(message, id, name, kind).ok_or(NoAnswer)
}

fn parse(message: &[u8], id: u16, name: &str, kind: u16) -> Option<Answer> {
    let header: [u8; HEADER] = *message.first_chunk()?;
    if header[..2] != id.to_be_bytes() || header[2] & (IS_ANSWER | OPERATION) != IS_ANSWER {
        return None;
    }
    let count = |at: usize| u16::from_be_bytes([header[at], header[at + 1]]);
    let mut reader = Reader {
        message,
        at: HEADER,
    };
    let code = header[3] & CODE;
    let is_truncated = header[2] & TRUNCATED != 0;
    if count(4) != 1 || reader.plain_name()?.as_deref() != Some(name) {
        return None;
    }
    if reader.u16()? != kind || reader.u16()? != INTERNET {
        return None;
    }
    let mut records = Vec::new();
    for _ in 0..usize::from(count(6)).min(RECORDS_MAX) {
        match reader.record() {
            Some(record) => records.push(record),
            None if is_truncated => break,
            None => return None,
        }
    }
    Some(Answer {
        code,
        is_truncated,
        addresses: addresses_of(&records, name, kind),
    })
}

/// Those of the name at the end of the chain that begins with the one that was asked for.
fn addresses_of(records: &[Record], name: &str, kind: u16) -> Vec<(IpAddr, u32)> {
    let mut current = name;
    let mut most = TTL_MAX;
    for _ in 0..=CHAIN_MAX {
        let own = records
            .iter()
            .filter(|record| record.owner.as_deref() == Some(current));
        let found: Vec<_> = own
            .clone()
            .filter_map(|record| match record.data {
                Data::Address(address) if record.kind == kind => {
                    Some((address, record.seconds.min(most)))
                }
                _ => None,
            })
            .take(ADDRESSES_MAX)
            .collect();
        if !found.is_empty() {
            return found;
        }
        let next = own.clone().find_map(|record| match &record.data {
            Data::Alias(Some(target)) => Some((target.as_str(), record.seconds)),
            _ => None,
        });
        let Some((target, seconds)) = next else {
            return Vec::new();
        };
        current = target;
        most = most.min(seconds);
    }
    Vec::new()
}

/// Of a name that no rule has. There is none for this sandbox, which resolvers tell at once: REFUSED they take for a
/// failure of the server, and ask again, or wait. Who can read it is told why; nothing of it is to be kept.
pub fn write_blocked(query: &Query) -> Vec<u8> {
    let mut message = write_answer(query, NO_SUCH_NAME, &[]);
    let option = 2 + BLOCKED_TEXT.len();
    if query.is_extended && message.len() + 4 + option <= ANSWER_BYTES {
        let length = message.len() - 2; // of the extension's options, the last of what was written
        message[length..].copy_from_slice(&(4 + option as u16).to_be_bytes());
        message.extend(EXTENDED_ERROR.to_be_bytes());
        message.extend((option as u16).to_be_bytes());
        message.extend(BLOCKED.to_be_bytes());
        message.extend_from_slice(BLOCKED_TEXT);
    }
    message
}

/// As many of the addresses as every client takes.
pub fn write_answer(query: &Query, code: u8, addresses: &[(IpAddr, u32)]) -> Vec<u8> {
    let mut message = header_of(query.id, query.wishes_recursion, code);
    message[5] = 1;
    message.extend_from_slice(&query.raw);
    let room = ANSWER_BYTES - if query.is_extended { EXTENSION } else { 0 };
    let mut count: u16 = 0;
    for (address, seconds) in addresses {
        let (kind, data) = match address {
            IpAddr::V4(address) => (A, address.octets().to_vec()),
            IpAddr::V6(address) => (AAAA, address.octets().to_vec()),
        };
        if message.len() + 12 + data.len() > room {
            break;
        }
        message.extend([POINTER, HEADER as u8]); // the name of the question
        message.extend(kind.to_be_bytes());
        message.extend(INTERNET.to_be_bytes());
        message.extend(seconds.to_be_bytes());
        message.extend((data.len() as u16).to_be_bytes());
        message.extend(data);
        count += 1;
    }
    message[6..8].copy_from_slice(&count.to_be_bytes());
    if query.is_extended {
        message[11] = 1;
        push_extension(&mut message, ANSWER_BYTES as u16);
    }
    message
}

/// Of a question that is not understood.
pub fn write_wrong(id: u16, code: u8) -> Vec<u8> {
    header_of(id, false, code)
}

fn header_of(id: u16, wishes_recursion: bool, code: u8) -> Vec<u8> {
    let [high, low] = id.to_be_bytes();
    let flags = IS_ANSWER
        | if wishes_recursion {
            RECURSION_DESIRED
        } else {
            0
        };
    vec![
        high,
        low,
        flags,
        RECURSION_AVAILABLE | code,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
    ]
}

fn push_extension(message: &mut Vec<u8>, room: u16) {
    message.push(0);
    message.extend(OPT.to_be_bytes());
    message.extend(room.to_be_bytes());
    message.extend([0; 6]);
}

struct Record {
    owner: Option<String>,
    kind: u16,
    seconds: u32,
    data: Data,
}

enum Data {
    Address(IpAddr),
    Alias(Option<String>),
    Other,
}

struct Reader<'a> {
    message: &'a [u8],
    at: usize,
}

impl Reader<'_> {
    fn take(&mut self, count: usize) -> Option<&[u8]> {
        let end = self.at.checked_add(count)?;
        let taken = self.message.get(self.at..end)?;
        self.at = end;
        Some(taken)
    }

    fn u8(&mut self) -> Option<u8> {
        self.take(1).map(|bytes| bytes[0])
    }

    fn u16(&mut self) -> Option<u16> {
        self.take(2)
            .map(|bytes| u16::from_be_bytes([bytes[0], bytes[1]]))
    }

    fn u32(&mut self) -> Option<u32> {
        self.take(4)
            .map(|bytes| u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
    }

    /// One that is written out. The inner None is a name that no host has.
    fn plain_name(&mut self) -> Option<Option<String>> {
        let before = self.at;
        let name = self.name()?;
        let is_plain = self.at - before == name.written;
        is_plain.then_some(name.text)
    }

    fn name(&mut self) -> Option<Written> {
        let mut text = String::new();
        let mut good = true;
        let mut written = 1; // with the root
        let mut labels = 0;
        let mut at = self.at;
        let mut after = None;
        loop {
            let length = *self.message.get(at)?;
            match length & POINTER {
                0 => {}
                POINTER => {
                    let low = *self.message.get(at + 1)?;
                    after.get_or_insert(at + 2);
                    let target = usize::from(length & !POINTER) << 8 | usize::from(low);
                    // Backwards only: there is an end.
                    if target >= at {
                        return None;
                    }
                    at = target;
                    labels += 1;
                    if labels > 2 * LABELS_MAX {
                        return None;
                    }
                    continue;
                }
                _ => return None,
            }
            at += 1;
            if length == 0 {
                break;
            }
            let label = self.message.get(at..at + usize::from(length))?;
            at += usize::from(length);
            written += 1 + usize::from(length);
            labels += 1;
            if written > NAME_BYTES_MAX || labels > 4 * LABELS_MAX {
                return None;
            }
            // A dot in a label would make two of it.
            good = good
                && label
                    .iter()
                    .all(|byte| byte.is_ascii_graphic() && *byte != b'.');
            if good {
                if !text.is_empty() {
                    text.push('.');
                }
                text.extend(label.iter().map(|byte| char::from(*byte)));
            }
        }
        self.at = after.unwrap_or(at);
        let text = if good { host_name(&text) } else { None };
        Some(Written { text, written })
    }

    fn record(&mut self) -> Option<Record> {
        let owner = self.name()?.text;
        let kind = self.u16()?;
        let class = self.u16()?;
        let seconds = self.u32()?;
        let length = usize::from(self.u16()?);
        let end = self.at.checked_add(length)?;
        if end > self.message.len() {
            return None;
        }
        let data = match (kind, length) {
            _ if class != INTERNET => Data::Other,
            (A, 4) => {
                Data::Address(Ipv4Addr::from(*self.message[self.at..].first_chunk::<4>()?).into())
            }
            (AAAA, 16) => {
                Data::Address(Ipv6Addr::from(*self.message[self.at..].first_chunk::<16>()?).into())
            }
            (A | AAAA, _) => return None,
            (CNAME, _) => {
                let target = self.name()?.text;
                if self.at != end {
                    return None;
                }
                Data::Alias(target)
            }
            _ => Data::Other,
        };
        self.at = end;
        // The uppermost bit makes it zero (RFC 2181).
        let seconds = if seconds > i32::MAX as u32 {
            0
        } else {
            seconds
        };
        Some(Record {
            owner,
            kind,
            seconds,
            data,
        })
    }
}

struct Written {
    text: Option<String>,
    /// Bytes that it has when written out.
    written: usize,
}

#[cfg(test)]
#[path = "dns_tests.rs"]
mod tests;
