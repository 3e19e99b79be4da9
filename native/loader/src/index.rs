//! The chunks of a blob: where each lies in the data object of its store, and what it must hash to.

use crate::error::{Error, Result};

pub const RECORD_BYTES: usize = 48;
pub const CHUNK_BYTES_MIN: u32 = 4 << 10;
pub const CHUNK_BYTES_MAX: u32 = 4 << 20;
/// A blob of 1 TiB in chunks of 256 KiB.
const CHUNKS_MAX: usize = 4 << 20;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    pub offset: u64,
    /// Bytes in the store; 0: a hole; as many as `raw`: not compressed.
    pub stored: u32,
    pub raw: u32,
    pub hash: [u8; 32],
}

impl Chunk {
    pub fn is_hole(&self) -> bool {
        self.stored == 0
    }

    pub fn end(&self) -> u64 {
        self.offset + u64::from(self.stored)
    }
}

#[derive(Debug)]
pub struct Index {
    pub chunks: Vec<Chunk>,
    pub chunk_size: u32,
    pub size: u64,
    /// Of the index itself: a cache made by another one is of no use.
    pub hash: [u8; 32],
}

impl Index {
    pub fn parse(bytes: &[u8], chunk_size: u32, size: u64) -> Result<Index> {
        if !(CHUNK_BYTES_MIN..=CHUNK_BYTES_MAX).contains(&chunk_size)
            || !chunk_size.is_power_of_two()
        {
            return Err(Error::Invalid(format!(
                "chunks of {chunk_size} bytes are not taken"
            )));
        }
        let count = usize::try_from(size.div_ceil(u64::from(chunk_size))).unwrap_or(usize::MAX);
        if count > CHUNKS_MAX || bytes.len() != count * RECORD_BYTES {
            return Err(Error::Invalid(format!(
                "an index of {} bytes does not fit a blob of {size} bytes",
                bytes.len()
            )));
        }
        let mut chunks = Vec::with_capacity(count);
        let mut end = 0_u64;
        for (number, record) in bytes.chunks_exact(RECORD_BYTES).enumerate() {
            let chunk = chunk_of(record);
            let left = size - number as u64 * u64::from(chunk_size);
            let raw = u64::from(chunk_size).min(left);
            let sane = u64::from(chunk.raw) == raw
                && chunk.stored <= chunk.raw
                && chunk.offset.checked_add(u64::from(chunk.stored)).is_some()
                && (chunk.is_hole() || chunk.offset >= end);
            if !sane {
                return Err(Error::Invalid(format!(
                    "chunk {number} of the index makes no sense"
                )));
            }
            if !chunk.is_hole() {
                end = chunk.end();
            }
            chunks.push(chunk);
        }
        Ok(Index {
            chunks,
            chunk_size,
            size,
            hash: *blake3::hash(bytes).as_bytes(),
        })
    }

    pub fn len(&self) -> u32 {
        self.chunks.len() as u32
    }

    /// Where a chunk begins in the blob.
    pub fn start(&self, chunk: u32) -> u64 {
        u64::from(chunk) * u64::from(self.chunk_size)
    }

    /// The chunks that `length` bytes from `offset` lie in; empty past the end.
    pub fn covering(&self, offset: u64, length: u64) -> std::ops::Range<u32> {
        if length == 0 || offset >= self.size {
            return 0..0;
        }
        let end = offset.saturating_add(length).min(self.size);
        let size = u64::from(self.chunk_size);
        (offset / size) as u32..end.div_ceil(size) as u32
    }
}

fn chunk_of(record: &[u8]) -> Chunk {
    let mut offset = [0; 8];
    let mut stored = [0; 4];
    let mut raw = [0; 4];
    let mut hash = [0; 32];
    offset.copy_from_slice(&record[..8]);
    stored.copy_from_slice(&record[8..12]);
    raw.copy_from_slice(&record[12..16]);
    hash.copy_from_slice(&record[16..48]);
    Chunk {
        offset: u64::from_le_bytes(offset),
        stored: u32::from_le_bytes(stored),
        raw: u32::from_le_bytes(raw),
        hash,
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    pub fn record(offset: u64, stored: u32, raw: u32, hash: [u8; 32]) -> Vec<u8> {
        let mut bytes = offset.to_le_bytes().to_vec();
        bytes.extend(stored.to_le_bytes());
        bytes.extend(raw.to_le_bytes());
        bytes.extend(hash);
        bytes
    }

    #[test]
    fn the_last_chunk_is_as_long_as_what_is_left() {
        let bytes = [record(0, 100, 4096, [1; 32]), record(100, 5, 5, [2; 32])].concat();

        let index = Index::parse(&bytes, 4096, 4101).unwrap();

        assert_eq!(index.covering(0, 4096), 0..1);
        assert_eq!(index.covering(4095, 2), 0..2);
        assert_eq!(index.covering(4096, 1 << 40), 1..2);
        assert_eq!(index.covering(4101, 1), 0..0);
    }

    #[test]
    fn an_index_that_lies_is_refused() {
        let good = [record(0, 100, 4096, [1; 32]), record(100, 5, 5, [2; 32])];
        let lies = [
            [record(0, 100, 4096, [1; 32]), record(99, 5, 5, [2; 32])].concat(),
            [record(0, 5000, 4096, [1; 32]), good[1].clone()].concat(),
            [record(0, 100, 4095, [1; 32]), good[1].clone()].concat(),
            [record(u64::MAX, 100, 4096, [1; 32]), good[1].clone()].concat(),
            good[0].clone(),
            Vec::new(),
        ];
        for bytes in lies {
            assert!(matches!(
                Index::parse(&bytes, 4096, 4101),
                Err(Error::Invalid(_))
            ));
        }
        assert!(Index::parse(&good.concat(), 4095, 4101).is_err());
        assert!(Index::parse(&[], 4096, u64::MAX).is_err());
    }
}
