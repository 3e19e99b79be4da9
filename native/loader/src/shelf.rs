//! What is being served, whatever the front end.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};

use crate::error::{Error, Result};
use crate::layer::{add, Layer};
use crate::pool::Pool;

/// How often chunks are fetched again that were evicted before they could be read.
const TRIES: u32 = 3;

/// Called once: with what was read, or nothing when it cannot be had.
pub type Read = Box<dyn FnOnce(Option<Vec<u8>>) + Send>;

/// A layer that is served, and who fetches for it.
#[derive(Clone)]
pub struct Served {
    pub layer: Arc<Layer>,
    pub pool: Arc<Pool>,
}

impl Served {
    /// Reads a part that lies within the layer, once it is here; never waits itself. What is read comes after `room` bytes,
    /// which are left for who asked.
    pub fn read(&self, offset: u64, size: usize, room: usize, done: Read) {
        self.read_when_here(offset, size, room, TRIES, done);
    }

    fn read_when_here(&self, offset: u64, size: usize, room: usize, tries: u32, done: Read) {
        let chunks = self.layer.index.covering(offset, size as u64);
        let again = self.clone();
        let wanted = self.layer.want(
            chunks,
            Box::new(move |good| {
                if !good {
                    return done(None);
                }
                match again.read_now(offset, size, room) {
                    Some(read) => done(read),
                    // Evicted again before it was read: a cache that is far too small.
                    None => match tries.checked_sub(1) {
                        Some(left) => again.read_when_here(offset, size, room, left, done),
                        None => done(None),
                    },
                }
            }),
        );
        self.pool.fetch(&self.layer, wanted.runs);
        if wanted.ahead {
            self.pool.ahead(&self.layer);
        }
    }

    /// Nothing when the chunks are not here any more.
    fn read_now(&self, offset: u64, size: usize, room: usize) -> Option<Option<Vec<u8>>> {
        let layer = &self.layer;
        let _holes = layer.holes.read().unwrap_or_else(PoisonError::into_inner);
        if !layer.is_present(layer.index.covering(offset, size as u64)) {
            return None;
        }
        let mut bytes = vec![0; room + size];
        if layer.cache.read(&mut bytes[room..], offset).is_err() {
            return Some(None);
        }
        add(&layer.counts.read_bytes, size as u64);
        Some(Some(bytes))
    }
}

#[derive(Default)]
pub struct Shelf {
    served: RwLock<BTreeMap<u64, Served>>,
}

impl Shelf {
    pub fn put(&self, served: Served) -> Result<()> {
        let mut all = self.served.write().unwrap_or_else(PoisonError::into_inner);
        let node = node_of(&served.layer.digest);
        if all
            .get(&node)
            .is_some_and(|other| other.layer.digest != served.layer.digest)
        {
            return Err(Error::Busy("another layer has the same number".into()));
        }
        all.insert(node, served);
        Ok(())
    }

    pub fn take(&self, digest: &str) -> Option<Served> {
        let mut all = self.served.write().unwrap_or_else(PoisonError::into_inner);
        all.remove(&node_of(digest))
    }

    pub fn find(&self, digest: &str) -> Option<Served> {
        self.at(node_of(digest))
            .filter(|served| served.layer.digest == digest)
    }

    pub fn at(&self, node: u64) -> Option<Served> {
        let all = self.served.read().unwrap_or_else(PoisonError::into_inner);
        all.get(&node).cloned()
    }

    pub fn all(&self) -> Vec<Served> {
        let all = self.served.read().unwrap_or_else(PoisonError::into_inner);
        all.values().cloned().collect()
    }

    /// Bytes on the disk of all that is served, and how many chunks are known in memory.
    pub fn held(&self) -> (u64, usize) {
        let all = self.served.read().unwrap_or_else(PoisonError::into_inner);
        let each = || all.values().map(|served| &served.layer);
        (
            each().map(|layer| layer.held_bytes()).sum(),
            each().map(|layer| layer.index.chunks.len()).sum(),
        )
    }
}

/// The same for the same layer, also after a restart: the kernel knows files by it.
pub fn node_of(digest: &str) -> u64 {
    let number = digest
        .get(..15)
        .and_then(|text| u64::from_str_radix(text, 16).ok());
    number.unwrap_or(0) + 2
}
