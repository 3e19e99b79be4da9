//! One layer that is being served: which chunks are here, who waits for which, what was touched.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use crate::cache::{Cache, Found};
use crate::error::{Cause, StoreError};
use crate::index::Index;
use crate::source::Source;

/// Chunks that are fetched by one request to the store.
const RUN_CHUNKS_MAX: u32 = 16;
/// And of a prefetch, where many requests at once do more than long ones.
const AHEAD_RUN_CHUNKS_MAX: u32 = 4;
/// A reader that goes on and on has as many chunks fetched before it.
const AHEAD_CHUNKS_MAX: u32 = 16;
/// Bytes of a data object between two chunks of one request that nobody wants.
const GAP_BYTES_MAX: u64 = 64 << 10;

/// How long somebody waits for a chunk, with all retries, before the read fails.
const PATIENCE: Duration = Duration::from_secs(30);
/// And while the store has not given anything since somebody waited that long in vain.
const PATIENCE_WITH_BROKEN: Duration = Duration::from_secs(2);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Absent,
    Fetching,
    Present,
    Doubtful,
}

/// Called once: with true when the chunks are here.
pub type Done = Box<dyn FnOnce(bool) + Send>;

struct Waiter {
    left: usize,
    failed: bool,
    done: Done,
}

struct Inner {
    states: Vec<State>,
    /// Used since the evictor came by.
    used: Vec<bool>,
    touched: Vec<bool>,
    order: Vec<u32>,
    waiting: HashMap<u32, Vec<u64>>,
    waiters: HashMap<u64, Waiter>,
    next_waiter: u64,
    ahead: VecDeque<u32>,
    expected: u32,
    window: u32,
    sweep: u32,
    last_error: Option<StoreError>,
    broken: bool,
}

#[derive(Default)]
pub struct Counts {
    pub read_bytes: AtomicU64,
    pub fetched_bytes: AtomicU64, // as stored
    pub fetches: AtomicU64,
    pub hits: AtomicU64,
    pub misses: AtomicU64,
    pub errors: AtomicU64,
    pub corrupt: AtomicU64,
    pub evicted: AtomicU64,
}

pub fn add(counter: &AtomicU64, amount: u64) {
    counter.fetch_add(amount, Ordering::Relaxed);
}

pub struct Layer {
    pub digest: String,
    pub index: Index,
    pub cache: Cache,
    pub counts: Counts,
    source: RwLock<Arc<Source>>,
    inner: Mutex<Inner>,
    /// Held for reading by whoever reads from the cache what it has found present, for writing while holes are made.
    pub holes: RwLock<()>,
}

/// Adjacent chunks, marked as being fetched: whoever has it must give it to `fetched` or `not_fetched`.
#[derive(Clone, Debug)]
pub struct Run {
    pub chunks: std::ops::Range<u32>,
    pub attempt: u32,
    pub since: Instant,
}

/// What has to be done for a wish: runs to fetch now, and whether there is something to fetch ahead.
#[derive(Debug, Default)]
pub struct Wanted {
    pub runs: Vec<Run>,
    pub ahead: bool,
}

pub struct Stats {
    pub chunks: u64,
    pub present: u64,
    pub touched: u64,
    pub waiting: u64,
}

impl Layer {
    pub fn new(
        digest: String,
        index: Index,
        cache: Cache,
        found: &[Found],
        source: Source,
    ) -> Layer {
        let states: Vec<State> = index
            .chunks
            .iter()
            .zip(found)
            .map(|(chunk, found)| match found {
                _ if chunk.is_hole() => State::Present,
                Found::Absent => State::Absent,
                Found::Present => State::Present,
                Found::Doubtful => State::Doubtful,
            })
            .collect();
        let count = states.len();
        Layer {
            digest,
            index,
            cache,
            counts: Counts::default(),
            source: RwLock::new(Arc::new(source)),
            inner: Mutex::new(Inner {
                states,
                used: vec![false; count],
                touched: vec![false; count],
                order: Vec::new(),
                waiting: HashMap::new(),
                waiters: HashMap::new(),
                next_waiter: 0,
                ahead: VecDeque::new(),
                expected: 0,
                window: 0,
                sweep: 0,
                last_error: None,
                broken: false,
            }),
            holes: RwLock::new(()),
        }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn source(&self) -> Arc<Source> {
        self.source
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    pub fn set_source(&self, source: Source) {
        *self.source.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(source);
    }

    /// True when all these chunks are here; call it holding `holes`, and they stay.
    pub fn is_present(&self, chunks: std::ops::Range<u32>) -> bool {
        let mut inner = self.inner();
        for chunk in chunks {
            if inner.states[chunk as usize] != State::Present {
                return false;
            }
            inner.used[chunk as usize] = true;
        }
        true
    }

    /// Sees to it that chunks are here and then calls `done`, at once or from a thread that fetches. What comes back has
    /// to be given to the pool.
    pub fn want(&self, chunks: std::ops::Range<u32>, done: Done) -> Wanted {
        self.check_doubtful(chunks.clone());
        let mut guard = self.inner();
        let inner = &mut *guard;
        let mut missing = Vec::new();
        for chunk in chunks.clone() {
            inner.touch(chunk);
            match inner.states[chunk as usize] {
                State::Present => {}
                State::Fetching => missing.push((chunk, false)),
                State::Absent | State::Doubtful => missing.push((chunk, true)),
            }
        }
        inner.look_ahead(&chunks, self.index.len());
        let ahead = !inner.ahead.is_empty();
        if missing.is_empty() {
            drop(guard);
            add(&self.counts.hits, 1);
            done(true);
            return Wanted {
                runs: Vec::new(),
                ahead,
            };
        }
        add(&self.counts.misses, 1);
        let waiter = inner.next_waiter;
        inner.next_waiter += 1;
        inner.waiters.insert(
            waiter,
            Waiter {
                left: missing.len(),
                failed: false,
                done,
            },
        );
        for (chunk, absent) in &missing {
            inner.waiting.entry(*chunk).or_default().push(waiter);
            if *absent {
                inner.states[*chunk as usize] = State::Fetching;
            }
        }
        let wanted: Vec<u32> = missing
            .iter()
            .filter(|(_, absent)| *absent)
            .map(|(chunk, _)| *chunk)
            .collect();
        Wanted {
            runs: self.runs_of(&wanted, RUN_CHUNKS_MAX),
            ahead,
        }
    }

    /// Chunks that are to be fetched when there is nothing more urgent, in this order.
    pub fn prefetch(&self, chunks: &[u32]) {
        let mut inner = self.inner();
        let count = self.index.len();
        let wanted = chunks.iter().copied().filter(|chunk| *chunk < count);
        inner.ahead.extend(wanted);
        inner.ahead.truncate(count as usize);
    }

    /// The next run of what is to be fetched ahead.
    pub fn take_ahead(&self) -> Option<Run> {
        let mut inner = self.inner();
        let first = loop {
            let chunk = inner.ahead.pop_front()?;
            if inner.states[chunk as usize] == State::Absent {
                break chunk;
            }
        };
        let mut end = first + 1;
        inner.states[first as usize] = State::Fetching;
        while end - first < AHEAD_RUN_CHUNKS_MAX
            && inner.ahead.front() == Some(&end)
            && inner.states[end as usize] == State::Absent
            && self.fits(first, end)
        {
            inner.ahead.pop_front();
            inner.states[end as usize] = State::Fetching;
            end += 1;
        }
        Some(Run {
            chunks: first..end,
            attempt: 0,
            since: Instant::now(),
        })
    }

    /// A run has been fetched: `good` are those of its chunks that are here and checked.
    pub fn fetched(&self, run: &Run, good: &[bool]) {
        let mut ready = Vec::new();
        {
            let mut inner = self.inner();
            inner.broken &= !good.contains(&true);
            for (chunk, good) in run.chunks.clone().zip(good) {
                inner.states[chunk as usize] = if *good { State::Present } else { State::Absent };
                inner.settle(chunk, *good, &mut ready);
            }
        }
        for (done, good) in ready {
            done(good);
        }
    }

    /// A run cannot be fetched now. Those who wait for it are told; the next who wants it tries again.
    pub fn not_fetched(&self, run: &Run, error: StoreError) {
        add(&self.counts.errors, 1);
        {
            let mut inner = self.inner();
            inner.broken = true;
            inner.last_error = Some(error);
        }
        self.fetched(run, &vec![false; run.chunks.len()]);
    }

    /// How long a run is tried for.
    pub fn patience(&self) -> Duration {
        if self.inner().broken {
            PATIENCE_WITH_BROKEN
        } else {
            PATIENCE
        }
    }

    /// Whether anybody waits for one of these chunks; nobody does for what was fetched ahead.
    pub fn is_awaited(&self, run: &Run) -> bool {
        let inner = self.inner();
        run.chunks
            .clone()
            .any(|chunk| inner.waiting.contains_key(&chunk))
    }

    pub fn take_error(&self) -> Option<StoreError> {
        self.inner().last_error.take()
    }

    pub fn stats(&self) -> Stats {
        let inner = self.inner();
        Stats {
            chunks: inner.states.len() as u64,
            present: inner
                .states
                .iter()
                .filter(|state| **state == State::Present)
                .count() as u64,
            touched: inner.order.len() as u64,
            waiting: inner.waiters.len() as u64,
        }
    }

    /// Chunks in the order in which they were first wanted.
    pub fn trace(&self) -> Vec<u32> {
        self.inner().order.clone()
    }

    /// Makes holes where nobody has read since it last came by; gives the bytes back that it freed.
    pub fn evict(&self, at_most: u64) -> u64 {
        let _alone = self.holes.write().unwrap_or_else(PoisonError::into_inner);
        let mut inner = self.inner();
        let count = inner.states.len();
        let mut freed = 0;
        for _ in 0..count {
            if freed >= at_most {
                break;
            }
            let chunk = inner.sweep as usize;
            inner.sweep = (inner.sweep + 1) % count.max(1) as u32;
            let here = matches!(inner.states[chunk], State::Present | State::Doubtful);
            if !here || self.index.chunks[chunk].is_hole() {
                continue;
            }
            if std::mem::take(&mut inner.used[chunk]) {
                continue;
            }
            let raw = u64::from(self.index.chunks[chunk].raw);
            if self
                .cache
                .drop_chunk(chunk as u32, self.index.start(chunk as u32), raw)
                .is_ok()
            {
                inner.states[chunk] = State::Absent;
                freed += raw;
            }
        }
        add(&self.counts.evicted, freed);
        freed
    }

    /// Bytes of chunks that are on the disk.
    pub fn held_bytes(&self) -> u64 {
        let inner = self.inner();
        let held = inner.states.iter().zip(&self.index.chunks);
        held.filter(|(state, chunk)| {
            matches!(state, State::Present | State::Doubtful) && !chunk.is_hole()
        })
        .map(|(_, chunk)| u64::from(chunk.raw))
        .sum()
    }

    /// Chunks from before a crash are compared with the index before anybody reads them.
    fn check_doubtful(&self, chunks: std::ops::Range<u32>) {
        for chunk in chunks {
            if self.inner().states[chunk as usize] != State::Doubtful {
                continue;
            }
            let record = &self.index.chunks[chunk as usize];
            let mut bytes = vec![0; record.raw as usize];
            let read = self.cache.read(&mut bytes, self.index.start(chunk));
            let good = read.is_ok() && *blake3::hash(&bytes).as_bytes() == record.hash;
            let mut inner = self.inner();
            if inner.states[chunk as usize] == State::Doubtful {
                inner.states[chunk as usize] = if good { State::Present } else { State::Absent };
            }
        }
    }

    fn runs_of(&self, chunks: &[u32], at_most: u32) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        for &chunk in chunks {
            match runs.last_mut() {
                Some(run)
                    if run.chunks.end == chunk
                        && chunk - run.chunks.start < at_most
                        && self.fits(run.chunks.start, chunk) =>
                {
                    run.chunks.end += 1;
                }
                _ => runs.push(Run {
                    chunks: chunk..chunk + 1,
                    attempt: 0,
                    since: Instant::now(),
                }),
            }
        }
        runs
    }

    /// Whether `chunk` lies close behind the one before it, so that one request gets both.
    fn fits(&self, first: u32, chunk: u32) -> bool {
        let chunks = &self.index.chunks;
        let this = &chunks[chunk as usize];
        let before = chunks[first as usize..chunk as usize]
            .iter()
            .rev()
            .find(|chunk| !chunk.is_hole());
        match before {
            Some(before) if !this.is_hole() => this.offset - before.end() <= GAP_BYTES_MAX,
            _ => true,
        }
    }

    /// Fetches, checks and keeps a run. The store's error, or which chunks are good.
    pub fn fetch(&self, run: &Run) -> Result<Vec<bool>, StoreError> {
        let chunks = &self.index.chunks[run.chunks.start as usize..run.chunks.end as usize];
        let solid = || chunks.iter().filter(|chunk| !chunk.is_hole());
        let (Some(first), Some(last)) = (solid().next(), solid().next_back()) else {
            return Ok(vec![true; chunks.len()]);
        };
        let length = (last.end() - first.offset) as usize;
        let bytes = self.source().read(first.offset, length)?;
        add(&self.counts.fetches, 1);
        add(&self.counts.fetched_bytes, length as u64);
        let mut good = Vec::with_capacity(chunks.len());
        for (number, chunk) in run.chunks.clone().zip(chunks) {
            if chunk.is_hole() {
                good.push(true);
                continue;
            }
            let from = (chunk.offset - first.offset) as usize;
            let raw = unpack(
                &bytes[from..from + chunk.stored as usize],
                chunk.raw as usize,
            );
            let Some(raw) = raw.filter(|raw| *blake3::hash(raw).as_bytes() == chunk.hash) else {
                add(&self.counts.corrupt, 1);
                return Err(StoreError::new(
                    Cause::Corrupt,
                    format!(
                        "chunk {number} of layer {} is not what was published",
                        &self.digest[..12]
                    ),
                ));
            };
            self.cache
                .put(number, self.index.start(number), &raw)
                .map_err(|error| {
                    StoreError::new(
                        Cause::Unavailable,
                        format!("the cache cannot be written: {error}"),
                    )
                })?;
            good.push(true);
        }
        Ok(good)
    }
}

impl Inner {
    fn touch(&mut self, chunk: u32) {
        self.used[chunk as usize] = true;
        if !std::mem::replace(&mut self.touched[chunk as usize], true) {
            self.order.push(chunk);
        }
    }

    /// Reads that follow each other have more fetched before them, twice as much each time.
    fn look_ahead(&mut self, chunks: &std::ops::Range<u32>, count: u32) {
        let follows = chunks.start == self.expected || chunks.start + 1 == self.expected;
        if chunks.end == self.expected && follows {
            return; // within the same chunk
        }
        self.window = if follows {
            (self.window * 2).clamp(1, AHEAD_CHUNKS_MAX)
        } else {
            0
        };
        self.expected = chunks.end;
        let end = chunks.end.saturating_add(self.window).min(count);
        for chunk in (chunks.end..end).rev() {
            if self.ahead.len() <= self.states.len() && self.states[chunk as usize] == State::Absent
            {
                self.ahead.push_front(chunk);
            }
        }
    }

    /// Whoever waits for this chunk has one less to wait for.
    fn settle(&mut self, chunk: u32, good: bool, ready: &mut Vec<(Done, bool)>) {
        for id in self.waiting.remove(&chunk).unwrap_or_default() {
            let Some(waiter) = self.waiters.get_mut(&id) else {
                continue;
            };
            waiter.left -= 1;
            waiter.failed |= !good;
            if waiter.left == 0 {
                if let Some(waiter) = self.waiters.remove(&id) {
                    ready.push((waiter.done, !waiter.failed));
                }
            }
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
