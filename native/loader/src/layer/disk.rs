//! The chunks of a layer between store and disk: fetched, checked, kept, doubted and thrown out.

use std::sync::PoisonError;

use super::{add, Fetched, Layer, Run, State};
use crate::error::{Cause, StoreError};
use crate::index::Chunk;

/// Chunks that are looked at while readers are kept out.
const EVICT_AT_ONCE: u32 = 256;

impl Layer {
    /// Fetches a run, and checks and keeps what has come of it, all of it or not.
    pub fn fetch(&self, run: &Run) -> Fetched {
        let chunks = &self.index.chunks[run.chunks.start as usize..run.chunks.end as usize];
        let solid = || chunks.iter().filter(|chunk| !chunk.is_hole());
        let (Some(first), Some(last)) = (solid().next(), solid().next_back()) else {
            return Fetched {
                good: vec![true; chunks.len()],
                error: None,
            };
        };
        let length = (last.end() - first.offset) as usize;
        let (bytes, mut error) = self.source().read(first.offset, length);
        add(&self.counts.fetches, u64::from(!bytes.is_empty()));
        add(&self.counts.fetched_bytes, bytes.len() as u64);
        let keep = |(number, chunk): (u32, &Chunk)| {
            if chunk.is_hole() {
                return true;
            }
            let from = (chunk.offset - first.offset) as usize;
            let Some(stored) = bytes.get(from..from + chunk.stored as usize) else {
                return false; // `error` says why it has not come
            };
            match self.keep(number, chunk, stored) {
                Ok(()) => true,
                Err(why) => {
                    error = Some(why);
                    false
                }
            }
        };
        let good = run.chunks.clone().zip(chunks).map(keep).collect();
        Fetched { good, error }
    }

    fn keep(&self, number: u32, chunk: &Chunk, stored: &[u8]) -> Result<(), StoreError> {
        let raw = unpack(stored, chunk.raw as usize)
            .filter(|raw| *blake3::hash(raw).as_bytes() == chunk.hash);
        let Some(raw) = raw else {
            add(&self.counts.corrupt, 1);
            let layer = self.digest.get(..12).unwrap_or_default();
            return Err(StoreError::new(
                Cause::Corrupt,
                format!("chunk {number} of layer {layer} is not what was published"),
            ));
        };
        let put = || self.cache.put(number, self.index.start(number), &raw);
        put()
            .or_else(|error| match error.raw_os_error() {
                // Others have filled the disk: the cache gives way, also within its bound.
                Some(libc::ENOSPC | libc::EDQUOT) if self.evict_twice(raw.len() as u64) > 0 => {
                    put()
                }
                _ => Err(error),
            })
            .map_err(|error| {
                StoreError::new(
                    Cause::Unavailable,
                    format!("the cache cannot be written: {error}"),
                )
            })
    }

    /// The first time round chunks may only lose the mark of their last use.
    fn evict_twice(&self, bytes: u64) -> u64 {
        match self.evict(bytes) {
            0 => self.evict(bytes),
            freed => freed,
        }
    }

    /// Makes holes where nobody has read since it last came by; gives the bytes back that it freed.
    pub fn evict(&self, at_most: u64) -> u64 {
        let mut freed = 0;
        let mut left = if self.punches { self.index.len() } else { 0 };
        while freed < at_most && left > 0 {
            let some = left.min(EVICT_AT_ONCE);
            freed += self.evict_some(some, at_most - freed);
            left -= some;
        }
        add(&self.counts.evicted, freed);
        freed
    }

    fn evict_some(&self, visits: u32, at_most: u64) -> u64 {
        let _alone = self.holes.write().unwrap_or_else(PoisonError::into_inner);
        let mut inner = self.inner();
        let mut freed = 0;
        for _ in 0..visits {
            if freed >= at_most {
                break;
            }
            let chunk = inner.sweep;
            inner.sweep = (chunk + 1) % self.index.len();
            let record = &self.index.chunks[chunk as usize];
            if !inner.states[chunk as usize].is_on_disk() || record.is_hole() {
                continue;
            }
            if std::mem::take(&mut inner.used[chunk as usize]) {
                continue;
            }
            let raw = u64::from(record.raw);
            if self
                .cache
                .drop_chunk(chunk, self.index.start(chunk), raw)
                .is_ok()
            {
                self.set(&mut inner, chunk, State::Absent);
                freed += raw;
            }
        }
        freed
    }

    /// Chunks from before a crash are compared with the index before anybody reads them.
    pub(super) fn check_doubtful(&self, chunks: std::ops::Range<u32>) {
        for chunk in chunks {
            if self.inner().states[chunk as usize] != State::Doubtful {
                continue;
            }
            let record = &self.index.chunks[chunk as usize];
            let mut bytes = vec![0; record.raw as usize];
            let read = self.cache.read(&mut bytes, self.index.start(chunk));
            let good = read.is_ok() && *blake3::hash(&bytes).as_bytes() == record.hash;
            let mut inner = self.inner();
            if inner.states[chunk as usize] != State::Doubtful {
                continue;
            }
            if good {
                self.set(&mut inner, chunk, State::Present);
                continue;
            }
            add(&self.counts.corrupt, 1);
            self.set(&mut inner, chunk, State::Absent);
            // Its mark goes too, or an orderly end would vouch for it.
            let start = self.index.start(chunk);
            let _ = if self.punches {
                self.cache.drop_chunk(chunk, start, u64::from(record.raw))
            } else {
                self.cache.doubt(chunk)
            };
        }
    }
}

/// A chunk as it was; nothing when it cannot be that. As many bytes as published stand for themselves.
fn unpack(stored: &[u8], raw: usize) -> Option<Vec<u8>> {
    if stored.len() == raw {
        return Some(stored.to_vec());
    }
    zstd::bulk::decompress(stored, raw)
        .ok()
        .filter(|bytes| bytes.len() == raw)
}
