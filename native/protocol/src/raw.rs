//! msgpack without meaning: where a value ends. Lets a request's `args` stay bytes until its operation is known.

use crate::error::ProtocolError;

const DEPTH_MAX: usize = 32;

/// A request before its arguments are decoded.
pub struct RawRequest<'a> {
    pub op: &'a str,
    pub args: &'a [u8],
}

/// An empty map, for a request without `args`.
const EMPTY_MAP: &[u8] = &[0x80];

/// Splits `{op, args}`. Anything but these two keys, or bytes after the map, is refused.
pub fn split_request(body: &[u8]) -> Result<RawRequest<'_>, ProtocolError> {
    let mut reader = Reader { bytes: body, at: 0 };
    let count = reader.map_header()?;
    let (mut op, mut args) = (None, None);
    for _ in 0..count {
        let key = reader.text()?;
        match key {
            "op" if op.is_none() => op = Some(reader.text()?),
            "args" if args.is_none() => args = Some(reader.value()?),
            _ => return Err(ProtocolError::NotOneMap),
        }
    }
    if reader.at != body.len() {
        return Err(ProtocolError::NotOneMap);
    }
    Ok(RawRequest {
        op: op.ok_or(ProtocolError::NotOneMap)?,
        args: args.unwrap_or(EMPTY_MAP),
    })
}

/// Whether the bytes are exactly one map, nested at most 32 deep.
pub fn is_one_map(body: &[u8]) -> bool {
    let is_map = matches!(body.first(), Some(0x80..=0x8f | 0xde | 0xdf));
    let mut reader = Reader { bytes: body, at: 0 };
    is_map && reader.value().is_ok() && reader.at == body.len()
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], ProtocolError> {
        let end = self.at.checked_add(count).ok_or(ProtocolError::NotOneMap)?;
        let slice = self
            .bytes
            .get(self.at..end)
            .ok_or(ProtocolError::NotOneMap)?;
        self.at = end;
        Ok(slice)
    }

    fn number(&mut self, width: usize) -> Result<usize, ProtocolError> {
        let bytes = self.take(width)?;
        Ok(bytes.iter().fold(0, |sum, b| (sum << 8) | usize::from(*b)))
    }

    fn map_header(&mut self) -> Result<usize, ProtocolError> {
        match self.number(1)? {
            marker @ 0x80..=0x8f => Ok(marker & 0x0f),
            0xde => self.number(2),
            0xdf => self.number(4),
            _ => Err(ProtocolError::NotOneMap),
        }
    }

    fn text(&mut self) -> Result<&'a str, ProtocolError> {
        let length = match self.number(1)? {
            marker @ 0xa0..=0xbf => marker & 0x1f,
            0xd9 => self.number(1)?,
            0xda => self.number(2)?,
            _ => return Err(ProtocolError::NotOneMap),
        };
        std::str::from_utf8(self.take(length)?).map_err(|_| ProtocolError::NotOneMap)
    }

    /// Skips one value and gives its bytes. Iterative, so that hostile nesting costs no stack.
    fn value(&mut self) -> Result<&'a [u8], ProtocolError> {
        let start = self.at;
        let mut open: Vec<usize> = vec![1];
        while let Some(left) = open.last_mut() {
            if *left == 0 {
                open.pop();
                continue;
            }
            *left -= 1;
            let inner = self.head()?;
            if inner > 0 {
                if open.len() >= DEPTH_MAX {
                    return Err(ProtocolError::NotOneMap);
                }
                open.push(inner);
            }
        }
        Ok(&self.bytes[start..self.at])
    }

    /// Passes a scalar, or a container's head: then gives how many values are inside.
    fn head(&mut self) -> Result<usize, ProtocolError> {
        let marker = self.number(1)?;
        let (skip, inner) = match marker {
            0x00..=0x7f | 0xe0..=0xff | 0xc0 | 0xc2 | 0xc3 => (0, 0),
            0x80..=0x8f => (0, (marker & 0x0f) * 2),
            0x90..=0x9f => (0, marker & 0x0f),
            0xa0..=0xbf => (marker & 0x1f, 0),
            0xc4 | 0xd9 => (self.number(1)?, 0),
            0xc5 | 0xda => (self.number(2)?, 0),
            0xc6 | 0xdb => (self.number(4)?, 0),
            0xca | 0xce | 0xd2 => (4, 0),
            0xcb | 0xcf | 0xd3 => (8, 0),
            0xcc | 0xd0 => (1, 0),
            0xcd | 0xd1 => (2, 0),
            0xdc => (0, self.number(2)?),
            0xdd => (0, self.number(4)?),
            0xde => (0, self.number(2)? * 2),
            0xdf => (0, self.number(4)? * 2),
            // Extension types are no part of the protocol.
            _ => return Err(ProtocolError::NotOneMap),
        };
        self.take(skip)?;
        Ok(inner)
    }
}
