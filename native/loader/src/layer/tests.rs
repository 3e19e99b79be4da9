use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::AtomicUsize;
use std::sync::mpsc;

use super::*;
use crate::cache;
use crate::pool::Pool;

const CHUNK: u32 = 4096;
const COUNT: u32 = 8;
const DIGEST: &str = "abababababababababababababababababababababababababababababababab";
const SOON: Duration = Duration::from_secs(60);

/// A store of a layer of noise in chunks, and a place for its cache. It goes with the record.
struct Site {
    root: PathBuf,
    index: Vec<u8>,
}

impl Drop for Site {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.root);
    }
}

fn content(chunk: u32) -> Vec<u8> {
    let mut bytes = vec![0; CHUNK as usize];
    let mut hasher = blake3::Hasher::new();
    hasher.update(&chunk.to_le_bytes());
    hasher.finalize_xof().fill(&mut bytes);
    bytes
}

impl Site {
    fn new() -> Site {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let root =
            std::env::temp_dir().join(format!("dsec-loader-{}-{number}", std::process::id()));
        std::fs::create_dir_all(root.join("cache")).unwrap();
        let mut index = Vec::new();
        let mut data = Vec::new();
        for chunk in 0..COUNT {
            let bytes = content(chunk);
            let hash = *blake3::hash(&bytes).as_bytes();
            let offset = data.len() as u64;
            index.extend(crate::index::tests::record(offset, CHUNK, CHUNK, hash));
            data.extend(bytes);
        }
        std::fs::write(root.join("data"), data).unwrap();
        Site { root, index }
    }

    fn data(&self) -> PathBuf {
        self.root.join("data")
    }

    fn cached(&self, name: &str) -> PathBuf {
        self.root.join("cache").join(DIGEST).join(name)
    }

    fn open(&self) -> Arc<Layer> {
        let index = Index::parse(&self.index, CHUNK, u64::from(CHUNK * COUNT)).unwrap();
        let (cache, found) =
            Cache::open(&self.root.join("cache"), DIGEST, &index, &cache::open).unwrap();
        let source = Source::File(self.data());
        Arc::new(Layer::new(
            DIGEST.into(),
            index,
            cache,
            &found,
            source,
            true,
        ))
    }

    fn overwrite(&self, file: PathBuf, chunk: u32, bytes: &[u8]) {
        let file = OpenOptions::new().write(true).open(file).unwrap();
        file.write_all_at(bytes, u64::from(chunk * CHUNK)).unwrap();
    }
}

fn pool() -> Arc<Pool> {
    Pool::start(Box::new(|_| {})).unwrap()
}

/// Asks for chunks; how it ended comes once.
fn ask(layer: &Arc<Layer>, chunks: std::ops::Range<u32>) -> (Wanted, mpsc::Receiver<bool>) {
    let (tell, told) = mpsc::channel();
    let wanted = layer.want(chunks, Box::new(move |good| tell.send(good).unwrap()));
    (wanted, told)
}

fn read(layer: &Arc<Layer>, pool: &Pool, chunk: u32) -> Option<Vec<u8>> {
    let (wanted, told) = ask(layer, chunk..chunk + 1);
    pool.fetch(layer, wanted.runs);
    if !told.recv_timeout(SOON).unwrap() {
        return None;
    }
    let _holes = layer.holes.read().unwrap();
    assert!(layer.is_present(chunk..chunk + 1));
    let mut bytes = vec![0; CHUNK as usize];
    layer
        .cache
        .read(&mut bytes, layer.index.start(chunk))
        .unwrap();
    Some(bytes)
}

#[test]
fn a_chunk_is_fetched_once_for_all_who_wait() {
    let site = Site::new();
    let layer = site.open();

    let (first, told) = ask(&layer, 0..2);
    let (second, told_too) = ask(&layer, 1..2);
    assert_eq!(first.runs.len(), 1);
    assert!(second.runs.is_empty());
    let pool = pool();
    pool.fetch(&layer, first.runs);

    assert!(told.recv_timeout(SOON).unwrap());
    assert!(told_too.recv_timeout(SOON).unwrap());
    assert_eq!(layer.counts.fetches.load(Ordering::Relaxed), 1);
    assert_eq!(layer.held_bytes(), u64::from(2 * CHUNK));
    pool.end();
}

#[test]
fn a_failure_is_told_once_to_each_who_waits_and_the_next_tries_again() {
    let site = Site::new();
    let layer = site.open();
    let (wanted, told) = ask(&layer, 0..2);
    let (_, told_too) = ask(&layer, 1..3);
    let error = StoreError::new(Cause::Gone, "gone");

    assert!(!layer.give_up(&wanted.runs[0], Some(&error), false));
    assert!(layer.give_up(&wanted.runs[0], Some(&error), true));

    assert_eq!(told.try_iter().collect::<Vec<_>>(), [false]);
    assert!(told_too.try_recv().is_err(), "chunk 2 is still on its way");
    assert_eq!(layer.take_error(), Some(error));
    assert_eq!(layer.failed_read().unwrap().cause, Cause::Gone);
    assert_eq!(ask(&layer, 0..2).0.runs.len(), 1);
}

#[test]
fn what_is_fetched_ahead_in_vain_is_no_read_that_failed() {
    let site = Site::new();
    let layer = site.open();
    let error = StoreError::new(Cause::Corrupt, "corrupt");
    layer.prefetch(&[0, 1]);
    let run = layer.take_ahead().unwrap();

    assert!(layer.give_up(&run, Some(&error), false));
    assert_eq!(layer.failed_read(), None);

    let began = monotonic();
    let (wanted, _told) = ask(&layer, 0..1);
    assert!(layer.give_up(&wanted.runs[0], Some(&error), true));
    let failed = layer.failed_read().unwrap();
    assert_eq!(failed.cause, Cause::Corrupt);
    assert!((began..=monotonic()).contains(&failed.at));
}

#[test]
fn a_chunk_of_a_run_that_is_corrupt_fails_alone() {
    let site = Site::new();
    site.overwrite(site.data(), 2, b"something else");
    let layer = site.open();
    let pool = pool();
    let asked: Vec<_> = (0..4).map(|chunk| ask(&layer, chunk..chunk + 1)).collect();
    let run = Run {
        chunks: 0..4,
        ..asked[0].0.runs[0].clone()
    };

    pool.fetch(&layer, vec![run]);

    let good: Vec<bool> = asked
        .iter()
        .map(|(_, told)| told.recv_timeout(SOON).unwrap())
        .collect();
    assert_eq!(good, [true, true, false, true]);
    assert_eq!(layer.take_error().unwrap().cause, Cause::Corrupt);
    assert_eq!(layer.held_bytes(), u64::from(3 * CHUNK));
    site.overwrite(site.data(), 2, &content(2));
    assert_eq!(read(&layer, &pool, 2), Some(content(2)));
    pool.end();
}

#[test]
fn what_has_come_of_a_run_that_broke_off_is_kept() {
    let site = Site::new();
    let file = OpenOptions::new().write(true).open(site.data()).unwrap();
    file.set_len(u64::from(2 * CHUNK + 1)).unwrap();
    let layer = site.open();
    let (wanted, _told) = ask(&layer, 0..4);

    let fetched = layer.fetch(&wanted.runs[0]);
    let rest = layer.fetched(&wanted.runs[0], &fetched.good);

    assert_eq!(fetched.good, [true, true, false, false]);
    assert!(fetched.error.is_some());
    assert_eq!(rest.len(), 1);
    assert_eq!(rest[0].chunks, 2..4);
}

#[test]
fn readers_never_see_the_holes_that_eviction_makes() {
    let site = Site::new();
    let layer = site.open();
    let pool = pool();
    let (over, stop) = mpsc::channel::<()>();
    let evictor = {
        let layer = Arc::clone(&layer);
        std::thread::spawn(move || {
            while stop.try_recv().is_err() {
                layer.evict(u64::MAX);
                // Now and then a reader comes first.
                std::thread::sleep(Duration::from_micros(100));
            }
        })
    };
    let (mut seen, mut turn) = (0, 0);
    let until = std::time::Instant::now() + SOON;
    while turn < 400 || (seen < 10 && std::time::Instant::now() < until) {
        let chunk = turn % COUNT;
        turn += 1;
        let (wanted, told) = ask(&layer, chunk..chunk + 1);
        pool.fetch(&layer, wanted.runs);
        assert!(told.recv_timeout(SOON).unwrap());
        let _holes = layer.holes.read().unwrap();
        if layer.is_present(chunk..chunk + 1) {
            let mut bytes = vec![0; CHUNK as usize];
            layer
                .cache
                .read(&mut bytes, layer.index.start(chunk))
                .unwrap();
            assert!(bytes == content(chunk));
            seen += 1;
        }
    }
    over.send(()).unwrap();
    evictor.join().unwrap();
    pool.end();
    assert!(seen >= 10);
    while layer.held_bytes() > 0 {
        layer.evict(u64::MAX);
    }
}

#[test]
fn after_a_crash_chunks_are_checked_before_they_are_read() {
    let site = Site::new();
    let pool = pool();
    let layer = site.open();
    for chunk in 0..COUNT {
        read(&layer, &pool, chunk);
    }
    drop(layer); // as killed: it was not closed
    site.overwrite(site.cached("data"), 3, b"damaged");

    let layer = site.open();

    for chunk in 0..COUNT {
        assert_eq!(read(&layer, &pool, chunk), Some(content(chunk)));
    }
    assert_eq!(layer.counts.fetches.load(Ordering::Relaxed), 1);
    assert_eq!(layer.held_bytes(), u64::from(COUNT * CHUNK));
    pool.end();
}

#[test]
fn an_orderly_end_vouches_only_for_what_was_checked() {
    let site = Site::new();
    let pool = pool();
    let layer = site.open();
    for chunk in 0..COUNT {
        read(&layer, &pool, chunk);
    }
    drop(layer);
    site.overwrite(site.cached("data"), 3, b"damaged");
    site.overwrite(site.cached("data"), 5, b"damaged too");
    std::fs::rename(site.data(), site.root.join("away")).unwrap();

    let layer = site.open();
    // Chunk 3 is found out, and nothing comes in its place; chunk 5 is not looked at.
    let (_, told) = ask(&layer, 3..4);
    layer.close().unwrap();
    assert!(!told.recv_timeout(SOON).unwrap());

    std::fs::rename(site.root.join("away"), site.data()).unwrap();
    let layer = site.open();
    for chunk in 0..COUNT {
        assert_eq!(read(&layer, &pool, chunk), Some(content(chunk)));
    }
    pool.end();
}

#[test]
fn a_cache_that_lost_its_data_is_empty() {
    let site = Site::new();
    let pool = pool();
    let layer = site.open();
    read(&layer, &pool, 1);
    layer.close().unwrap();
    // What a kill could leave of a cache that was being removed.
    std::fs::remove_file(site.cached("data")).unwrap();

    let layer = site.open();

    assert_eq!(layer.held_bytes(), 0);
    assert_eq!(read(&layer, &pool, 1), Some(content(1)));
    pool.end();
}

#[test]
fn a_cache_that_was_closed_is_written_no_more() {
    let site = Site::new();
    let pool = pool();
    let old = site.open();
    read(&old, &pool, 0);
    let (wanted, told) = ask(&old, 1..2);
    old.close().unwrap();
    assert!(!told.recv_timeout(SOON).unwrap());

    let new = site.open();
    assert_eq!(old.evict(u64::MAX) + old.evict(u64::MAX), 0);
    assert_eq!(old.fetch(&wanted.runs[0]).good, [false]);

    assert_eq!(new.held_bytes(), u64::from(CHUNK));
    assert_eq!(read(&new, &pool, 0), Some(content(0)));
    pool.end();
    new.close().unwrap();
    cache::remove(&site.root.join("cache"), DIGEST).unwrap();
    assert_eq!(
        std::fs::read_dir(site.root.join("cache")).unwrap().count(),
        0
    );
}

#[test]
fn nobody_waits_for_ever_for_a_thread_that_hangs() {
    let site = Site::new();
    let layer = site.open();
    let (wanted, told) = ask(&layer, 0..1);

    layer.expire(Instant::now());
    assert!(told.try_recv().is_err());
    layer.expire(Instant::now() + WAIT_MAX);
    assert_eq!(told.try_iter().collect::<Vec<_>>(), [false]);
    assert_eq!(layer.take_error().unwrap().cause, Cause::Unreachable);
    assert_eq!(layer.failed_read().unwrap().cause, Cause::Unreachable);

    // The thread comes back: what it has is of use.
    let fetched = layer.fetch(&wanted.runs[0]);
    assert!(layer.fetched(&wanted.runs[0], &fetched.good).is_empty());
    let (wanted, told) = ask(&layer, 0..1);
    assert!(wanted.runs.is_empty());
    assert!(told.recv_timeout(SOON).unwrap());
}

#[test]
fn a_run_is_not_longer_than_a_thread_may_hold() {
    let chunk_size = 4 << 20;
    let index: Vec<u8> = (0..4_u64)
        .flat_map(|chunk| {
            let size = u64::from(chunk_size);
            crate::index::tests::record(chunk * size, chunk_size, chunk_size, [7; 32])
        })
        .collect();
    let site = Site::new();
    let index = Index::parse(&index, chunk_size, 16 << 20).unwrap();
    let (cache, found) =
        Cache::open(&site.root.join("cache"), DIGEST, &index, &cache::open).unwrap();
    let source = Source::File(site.data());
    let layer = Arc::new(Layer::new(
        DIGEST.into(),
        index,
        cache,
        &found,
        source,
        true,
    ));

    assert_eq!(ask(&layer, 0..4).0.runs.len(), 4);
}
