//! What is being served, whatever the front end.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};

use crate::error::{Error, Result};
use crate::layer::Layer;
use crate::pool::Pool;

/// A layer that is served, and who fetches for it.
#[derive(Clone)]
pub struct Served {
    pub layer: Arc<Layer>,
    pub pool: Arc<Pool>,
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
