//! One layer that is being served: which chunks are here, who waits for which, what was touched.

mod disk;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use dsec_sys::clock::monotonic;

use crate::cache::{Cache, Found};
use crate::error::{Cause, FailedRead, Result, StoreError};
use crate::index::{Chunk, Index};
use crate::source::Source;

/// Chunks that are fetched by one request to the store.
const RUN_CHUNKS_MAX: u32 = 16;
/// And bytes of the store, which each thread that fetches may have in memory.
const RUN_BYTES_MAX: u64 = 4 << 20;
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
/// Nobody waits longer, whatever the threads that fetch hang in: a process that waits for a page cannot always be killed.
const WAIT_MAX: Duration = Duration::from_secs(60);
/// After that the kernel asks again, page by page.
const WAIT_MAX_WITH_BROKEN: Duration = Duration::from_secs(4);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Absent,
    Fetching,
    Present,
    Doubtful,
}

impl State {
    fn is_on_disk(self) -> bool {
        matches!(self, State::Present | State::Doubtful)
    }
}

/// Called once: with true when the chunks are here.
pub type Done = Box<dyn FnOnce(bool) + Send>;

struct Waiter {
    left: usize,
    failed: bool,
    since: Instant,
    done: Done,
}

struct Inner {
    states: Vec<State>,
    /// How many of them are not present.
    lacking: usize,
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
    failed_read: Option<FailedRead>,
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
    /// Holes may be made in it while it is served.
    punches: bool,
    pub counts: Counts,
    source: RwLock<Arc<Source>>,
    /// Bytes of chunks that are on the disk.
    held: AtomicU64,
    inner: Mutex<Inner>,
    /// Held for reading by whoever reads from the cache what it has found present, for writing while holes are made.
    pub holes: RwLock<()>,
}

/// Adjacent chunks, marked as being fetched: whoever has it must give it to `fetched` or `give_up`.
#[derive(Clone, Debug)]
pub struct Run {
    pub chunks: std::ops::Range<u32>,
    pub attempt: u32,
    pub since: Instant,
    /// Nobody waited for it when it was taken.
    pub ahead: bool,
}

/// What a request to the store led to: which chunks are here and checked, and why the others are not.
pub struct Fetched {
    pub good: Vec<bool>,
    pub error: Option<StoreError>,
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
        punches: bool,
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
        let lacking = states
            .iter()
            .filter(|state| **state != State::Present)
            .count();
        let held = states
            .iter()
            .zip(&index.chunks)
            .filter(|(state, chunk)| state.is_on_disk() && !chunk.is_hole())
            .map(|(_, chunk)| u64::from(chunk.raw))
            .sum();
        Layer {
            digest,
            index,
            cache,
            punches,
            counts: Counts::default(),
            source: RwLock::new(Arc::new(source)),
            held: AtomicU64::new(held),
            inner: Mutex::new(Inner {
                states,
                lacking,
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
                failed_read: None,
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

    /// True when nothing is missing, nor to be checked.
    pub fn is_whole(&self) -> bool {
        self.inner().lacking == 0
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
                since: Instant::now(),
                done,
            },
        );
        for (chunk, absent) in &missing {
            inner.waiting.entry(*chunk).or_default().push(waiter);
            if *absent {
                self.set(inner, *chunk, State::Fetching);
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
            ahead: true,
        })
    }

    /// Of a run, `good` chunks are here and checked: who waits for them is told. What is to be fetched again comes back.
    pub fn fetched(&self, run: &Run, good: &[bool]) -> Vec<Run> {
        let mut ready = Vec::new();
        let mut rest: Vec<Run> = Vec::new();
        {
            let mut inner = self.inner();
            inner.broken &= !good.contains(&true);
            for (chunk, good) in run.chunks.clone().zip(good) {
                if *good {
                    self.set(&mut inner, chunk, State::Present);
                    inner.settle(chunk, true, &mut ready);
                } else if let Some(last) = rest.last_mut().filter(|run| run.chunks.end == chunk) {
                    last.chunks.end += 1;
                } else {
                    rest.push(Run {
                        chunks: chunk..chunk + 1,
                        ..run.clone()
                    });
                }
            }
        }
        if rest.iter().map(|run| run.chunks.len()).sum::<usize>() < good.len() {
            for run in &mut rest {
                run.since = Instant::now(); // the store gives something
            }
        }
        for (done, good) in ready {
            done(good);
        }
        rest
    }

    /// A run is not fetched now, and those who wait for it are told; the next who wants it tries again. Unless `finally`,
    /// only if nobody waits; false if somebody does.
    pub fn give_up(&self, run: &Run, error: Option<&StoreError>, finally: bool) -> bool {
        let mut ready = Vec::new();
        {
            let mut inner = self.inner();
            if !finally && inner.is_awaited(run) {
                return false;
            }
            if let Some(error) = error {
                add(&self.counts.errors, 1);
                inner.broken |= error.cause != Cause::Corrupt;
                inner.last_error = Some(error.clone());
                if inner.is_awaited(run) {
                    inner.note_failed_read(error.cause);
                }
            }
            for chunk in run.chunks.clone() {
                self.set(&mut inner, chunk, State::Absent);
                inner.settle(chunk, false, &mut ready);
            }
        }
        for (done, good) in ready {
            done(good);
        }
        true
    }

    /// Those who have waited too long are told so, while what they wait for may still come.
    pub fn expire(&self, now: Instant) {
        let limit = if self.inner().broken {
            WAIT_MAX_WITH_BROKEN
        } else {
            WAIT_MAX
        };
        self.fail_waiters(|waiter| now.saturating_duration_since(waiter.since) >= limit);
    }

    fn fail_waiters(&self, which: impl Fn(&Waiter) -> bool) {
        let mut failed = Vec::new();
        {
            let mut guard = self.inner();
            let inner = &mut *guard;
            let over: Vec<u64> = inner
                .waiters
                .iter()
                .filter(|(_, waiter)| which(waiter))
                .map(|(id, _)| *id)
                .collect();
            if over.is_empty() {
                return;
            }
            failed.extend(over.iter().filter_map(|id| inner.waiters.remove(id)));
            inner.waiting.retain(|_, ids| {
                ids.retain(|id| !over.contains(id));
                !ids.is_empty()
            });
            add(&self.counts.errors, 1);
            inner.broken = true;
            inner.note_failed_read(Cause::Unreachable);
            inner.last_error.get_or_insert_with(|| {
                StoreError::new(Cause::Unreachable, "the store gives nothing in time")
            });
        }
        for waiter in failed {
            (waiter.done)(false);
        }
    }

    /// Nothing more is kept, and nobody waits any longer.
    pub fn close(&self) -> Result<()> {
        let unchecked: Vec<u32> = (0..)
            .zip(&self.inner().states)
            .filter(|(_, state)| **state == State::Doubtful)
            .map(|(chunk, _)| chunk)
            .collect();
        let closed = self.cache.close(&unchecked);
        self.fail_waiters(|_| true);
        closed
    }

    fn set(&self, inner: &mut Inner, chunk: u32, state: State) {
        let before = std::mem::replace(&mut inner.states[chunk as usize], state);
        inner.lacking += usize::from(state != State::Present);
        inner.lacking -= usize::from(before != State::Present);
        let record = &self.index.chunks[chunk as usize];
        let raw = u64::from(record.raw);
        match (before.is_on_disk(), state.is_on_disk()) {
            _ if record.is_hole() => {}
            (false, true) => add(&self.held, raw),
            (true, false) => {
                self.held.fetch_sub(raw, Ordering::Relaxed);
            }
            _ => {}
        }
    }

    /// How long a run is tried for.
    pub fn patience(&self) -> Duration {
        if self.inner().broken {
            PATIENCE_WITH_BROKEN
        } else {
            PATIENCE
        }
    }

    pub fn take_error(&self) -> Option<StoreError> {
        self.inner().last_error.take()
    }

    pub fn failed_read(&self) -> Option<FailedRead> {
        self.inner().failed_read
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

    /// Bytes of chunks that are on the disk.
    pub fn held_bytes(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
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
                    ahead: false,
                }),
            }
        }
        runs
    }

    /// Whether `chunk` lies close behind the one before it, so that one request gets both.
    fn fits(&self, first: u32, chunk: u32) -> bool {
        let chunks = &self.index.chunks;
        let this = &chunks[chunk as usize];
        let solid = |chunk: &&Chunk| !chunk.is_hole();
        let mut before = chunks[first as usize..chunk as usize].iter().filter(solid);
        let start = before.clone().next().map(|chunk| chunk.offset);
        match (start, before.next_back()) {
            (Some(start), Some(before)) if !this.is_hole() => {
                this.offset - before.end() <= GAP_BYTES_MAX && this.end() - start <= RUN_BYTES_MAX
            }
            _ => true,
        }
    }
}

impl Inner {
    /// Whether anybody waits for one of these chunks; nobody does for what was fetched ahead.
    fn is_awaited(&self, run: &Run) -> bool {
        run.chunks
            .clone()
            .any(|chunk| self.waiting.contains_key(&chunk))
    }

    fn note_failed_read(&mut self, cause: Cause) {
        let at = monotonic();
        self.failed_read = Some(FailedRead { cause, at });
    }

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
