//! The memory of one machine: what of it comes from the file, and what the guest has given up since.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use dsec_sys::userfault::{Event, Faults, Filled, PAGE_BYTES};

use crate::regions::Region;
use dsec_sys::failure::{Doing, Error, Result};

/// Given at once: who touches one page is about to touch its neighbours. More would be memory that nobody has asked for.
const CHUNK_PAGES: usize = 4;
const CHUNK_BYTES: usize = CHUNK_PAGES * PAGE_BYTES;

pub struct Memory {
    file: File,
    regions: Vec<Region>,
    /// Of each page of the file: whether the guest has given it up, so that it is empty from then on.
    removed: Vec<bool>,
    faults: Faults,
    /// Whose turn has to wait for events that are still to be read.
    waiting: Vec<u64>,
}

impl Memory {
    pub fn new(file: File, regions: Vec<Region>, faults: Faults) -> Result<Self> {
        let length = file.metadata().doing("look at", "the memory")?.len();
        if regions.iter().any(|r| r.offset + r.length > length) {
            return Err(Error::new("the memory's file is too short".into()));
        }
        Ok(Self {
            file,
            removed: vec![false; usize::try_from(length).unwrap_or(0).div_ceil(PAGE_BYTES)],
            regions,
            faults,
            waiting: Vec::new(),
        })
    }

    pub fn faults(&self) -> &Faults {
        &self.faults
    }

    /// All that has happened by now. What was removed counts before what is missing: the kernel tells of it first, and takes no page
    /// before it was heard.
    pub fn serve(&mut self) -> Result<()> {
        loop {
            while let Some(event) = self.faults.next().doing("read", "faults")? {
                match event {
                    Event::Missing(address) => self.waiting.push(address),
                    Event::Removed { start, end } => self.remove(start, end),
                    Event::Other => {}
                }
            }
            let mut again = Vec::new();
            for address in std::mem::take(&mut self.waiting) {
                if self.give(address)? == Filled::Later {
                    again.push(address);
                }
            }
            if again.is_empty() {
                return Ok(());
            }
            self.waiting = again;
        }
    }

    fn remove(&mut self, start: u64, end: u64) {
        for region in &self.regions {
            let from = start.max(region.address);
            let to = end.min(region.address + region.length);
            if from < to {
                let first = ((from - region.address + region.offset) / PAGE_BYTES as u64) as usize;
                let last =
                    (to - region.address + region.offset).div_ceil(PAGE_BYTES as u64) as usize;
                self.removed[first..last].fill(true);
            }
        }
    }

    fn give(&self, address: u64) -> Result<Filled> {
        let address = address / PAGE_BYTES as u64 * PAGE_BYTES as u64;
        let region = self
            .regions
            .iter()
            .find(|r| (r.address..r.address + r.length).contains(&address))
            .ok_or_else(|| Error::new("a fault lies outside of the memory".into()))?;
        let first = ((address - region.address + region.offset) / PAGE_BYTES as u64) as usize;
        if self.removed[first] {
            return gone_is_done(self.faults.zero(address, PAGE_BYTES));
        }
        let left = ((region.address + region.length - address) / PAGE_BYTES as u64) as usize;
        let mut pages = [0; CHUNK_BYTES];
        let count = self.removed[first..]
            .iter()
            .take(CHUNK_PAGES.min(left))
            .take_while(|removed| !**removed)
            .count();
        let pages = &mut pages[..count * PAGE_BYTES];
        self.file
            .read_exact_at(pages, (first * PAGE_BYTES) as u64)
            .doing("read", "the memory")?;
        // The one that is waited for first; a neighbour that is there already is none of ours.
        let mut first_result = Filled::Done;
        for (number, page) in pages.chunks(PAGE_BYTES).enumerate() {
            let target = address + (number * PAGE_BYTES) as u64;
            let empty = page.iter().all(|byte| *byte == 0);
            let done = gone_is_done(match empty {
                true => self.faults.zero(target, PAGE_BYTES),
                false => self.faults.copy(target, page),
            })?;
            if number == 0 {
                first_result = done;
            }
            if done != Filled::Done {
                break;
            }
        }
        Ok(first_result)
    }
}

/// A monitor that is about to end, or a range that is unmapped, waits for nothing.
fn gone_is_done(filled: io::Result<Filled>) -> Result<Filled> {
    match filled {
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound) => Ok(Filled::Done),
        Err(error) if error.raw_os_error() == Some(NO_SUCH_PROCESS) => Ok(Filled::Done),
        filled => filled.doing("fill", "a page"),
    }
}

const NO_SUCH_PROCESS: i32 = 3;
