//! The threads that fetch, of one store: what somebody waits for first, then what is fetched ahead.
//! A store that does not answer holds up its own threads only.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::error::{Cause, StoreError};
use crate::layer::{Layer, Run};

pub const THREADS: usize = 16;
const STACK_BYTES: usize = 256 << 10;
const BACKOFF_FIRST: Duration = Duration::from_millis(50);
const CORRUPT_TRIES: u32 = 2;
const BACKOFF_MAX: Duration = Duration::from_secs(4);

type Job = (Arc<Layer>, Run);
pub type Grown = Box<dyn Fn(&Layer) + Send + Sync>;

#[derive(Default)]
struct Queue {
    wanted: VecDeque<Job>,
    ahead: VecDeque<Arc<Layer>>,
    later: BTreeMap<(Instant, u64), Job>,
    number: u64,
    ended: bool,
}

pub struct Pool {
    queue: Mutex<Queue>,
    changed: Condvar,
    /// Called with each layer of which chunks were kept: the cache may have become too large.
    grown: Grown,
}

impl Pool {
    pub fn start(grown: Grown) -> std::io::Result<Arc<Pool>> {
        let pool = Arc::new(Pool {
            queue: Mutex::default(),
            changed: Condvar::new(),
            grown,
        });
        for _ in 0..THREADS {
            let worker = Arc::clone(&pool);
            std::thread::Builder::new()
                .name("fetch".into())
                .stack_size(STACK_BYTES)
                .spawn(move || worker.work())
                .inspect_err(|_| pool.end())?;
        }
        Ok(pool)
    }

    pub fn fetch(&self, layer: &Arc<Layer>, runs: Vec<Run>) {
        if runs.is_empty() {
            return;
        }
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        for run in runs {
            queue.wanted.push_back((Arc::clone(layer), run));
            self.changed.notify_one();
        }
    }

    /// The layer has something to be fetched ahead.
    pub fn ahead(&self, layer: &Arc<Layer>) {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        if !queue.ahead.iter().any(|known| Arc::ptr_eq(known, layer)) {
            queue.ahead.push_back(Arc::clone(layer));
            self.changed.notify_all();
        }
    }

    /// Lets go of a layer; what is being fetched of it is still finished.
    pub fn forget(&self, layer: &Arc<Layer>) {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.ahead.retain(|known| !Arc::ptr_eq(known, layer));
    }

    pub fn end(&self) {
        self.queue
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .ended = true;
        self.changed.notify_all();
    }

    fn work(&self) {
        while let Some((layer, run)) = self.next() {
            if !run.ahead && layer.give_up(&run, None, false) {
                continue; // whoever waited for it has been told that it takes too long
            }
            let fetched = layer.fetch(&run);
            let rest = layer.fetched(&run, &fetched.good);
            if fetched.good.contains(&true) {
                (self.grown)(&layer);
            }
            let lost = || StoreError::new(Cause::Unavailable, "the store gave less than asked");
            let error = fetched.error.unwrap_or_else(lost);
            for run in rest {
                self.again(&layer, run, &error);
            }
        }
    }

    fn again(&self, layer: &Arc<Layer>, mut run: Run, error: &StoreError) {
        let finally = match error.cause {
            Cause::Corrupt => run.attempt >= CORRUPT_TRIES, // it was read whole: time does not mend it
            _ => run.since.elapsed() >= layer.patience(),
        };
        // Nobody waits for what was fetched ahead: it is not tried again.
        if layer.give_up(&run, Some(error), finally) {
            return;
        }
        let pause = (BACKOFF_FIRST * 2_u32.saturating_pow(run.attempt)).min(BACKOFF_MAX);
        run.attempt += 1;
        run.ahead = false;
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.number += 1;
        let key = (Instant::now() + pause, queue.number);
        queue.later.insert(key, (Arc::clone(layer), run));
        self.changed.notify_one();
    }

    fn next(&self) -> Option<Job> {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if queue.ended {
                return None;
            }
            let now = Instant::now();
            let due = queue.later.first_key_value().map(|(key, _)| key.0);
            if due.is_some_and(|due| due <= now) {
                return queue.later.pop_first().map(|(_, job)| job);
            }
            if let Some(job) = queue.wanted.pop_front() {
                return Some(job);
            }
            if let Some(layer) = queue.ahead.pop_front() {
                if let Some(run) = layer.take_ahead() {
                    queue.ahead.push_back(Arc::clone(&layer));
                    return Some((layer, run));
                }
                continue;
            }
            queue = match due {
                Some(due) => {
                    let wait = due.saturating_duration_since(now);
                    let waited = self.changed.wait_timeout(queue, wait);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                None => self
                    .changed
                    .wait(queue)
                    .unwrap_or_else(PoisonError::into_inner),
            };
        }
    }
}
