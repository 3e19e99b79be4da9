//! All layers that are served, their caches, and the bound on what these hold.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use crate::blocks::{self, Blocks, Content};
use crate::cache::{self, check_digest, held_bytes, make_private, Cache};
use crate::desk::Reader;
use crate::error::{Doing, Error, Result};
use crate::front::Front;
use crate::index::Index;
use crate::layer::{Counts, Layer};
use crate::pool::Pool;
use crate::shelf::{Served, Shelf};
use crate::source::{self, Source};
use crate::wire::{AddArgs, LayerStats, ReadFailure, SourceArgs, StatsAnswer, StoreFailure};

const STORES_MAX: usize = 16;
const LAYERS_MAX: usize = 4096;
const INDEX_BYTES_MAX: u64 = 256 << 20;
/// Chunks of all layers together: 4 TiB in chunks of 256 KiB, in about 1 GiB of memory.
const CHUNKS_MAX: usize = 16 << 20;
/// Hosts, with their addresses, to which connections are kept.
const AGENTS_MAX: usize = 64;
const WATCH_PERIOD: Duration = Duration::from_secs(1);
/// Chunks of one trace: as many as fit a message.
pub const TRACE_MAX: usize = 20_000;
/// Evicting stops this far below the bound, so that it is not done for every chunk.
const ROOM_PARTS: u64 = 16;

pub struct Settings {
    pub cache: PathBuf,
    pub cache_bytes: u64,
    /// Where what is served is kept, for the next worker.
    pub active: PathBuf,
    pub mount: PathBuf,
    /// Where reads that wait are kept, for the next worker.
    pub waits: PathBuf,
    /// What devices there are.
    pub blocks: PathBuf,
    pub authorities: String,
    pub supervisor: u32,
}

pub struct Library {
    pub settings: Settings,
    pub shelf: Arc<Shelf>,
    pub front: Front,
    blocks: Blocks,
    pools: Mutex<BTreeMap<String, Arc<Pool>>>,
    agents: Mutex<BTreeMap<(String, Vec<String>), ureq::Agent>>,
    /// Caches of layers that are not served, with their bytes; the one that was left longest ago first. Who opens, closes
    /// or removes a cache holds it, so that no two do so to the same.
    idle: Mutex<Vec<(String, u64)>>,
    idle_bytes: AtomicU64,
    evicting: AtomicBool,
}

impl Library {
    pub fn new(settings: Settings, shelf: Arc<Shelf>, front: Front) -> Result<Arc<Library>> {
        for directory in [&settings.cache, &settings.active] {
            make_private(directory).doing(format!("making {}", directory.display()))?;
        }
        let idle = found_caches(&settings.cache);
        Ok(Arc::new(Library {
            blocks: Blocks::new(settings.blocks.clone()),
            settings,
            shelf,
            front,
            pools: Mutex::default(),
            agents: Mutex::default(),
            idle_bytes: AtomicU64::new(idle.iter().map(|(_, bytes)| bytes).sum()),
            idle: Mutex::new(idle),
            evicting: AtomicBool::new(false),
        }))
    }

    /// What a worker before us served.
    pub fn restore(self: &Arc<Library>) -> Result<()> {
        let doing = || format!("reading {}", self.settings.active.display());
        for entry in std::fs::read_dir(&self.settings.active).doing(doing())? {
            let path = entry.doing(doing())?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if check_digest(&name).is_err() {
                let _ = std::fs::remove_file(&path); // a draft of one that was killed
                continue;
            }
            let served = self.kept(&name).and_then(|args| {
                let served = self.serve(&args)?;
                match args.block {
                    true => self.block(&served).map(drop),
                    false => Ok(()),
                }
            });
            if let Err(error) = served {
                // Its readers get EIO; the others are served.
                eprintln!(
                    "dsec-loader: {} is not served again: {error}",
                    path.display()
                );
            }
        }
        if !blocks::recorded(&self.settings.blocks).is_empty() {
            match blocks::open() {
                Ok(mut driver) => self.blocks.sweep(&mut driver),
                Err(error) => eprintln!("dsec-loader: block devices stay: {error}"),
            }
        }
        Ok(())
    }

    /// The device of a layer that is served.
    fn block(&self, served: &Served) -> Result<PathBuf> {
        let content = Content {
            size: served.layer.index.size,
            hash: served.layer.index.hash,
        };
        let reader = || -> Reader {
            let served = served.clone();
            Arc::new(move |offset, size, done| served.read(offset, size, 0, done))
        };
        let mut driver = blocks::open()?;
        self.blocks
            .attach(&mut driver, &served.layer.digest, content, &reader)
    }

    /// Fails those who have waited too long, until the library is gone.
    pub fn watch(self: &Arc<Library>) -> std::io::Result<()> {
        let library = Arc::downgrade(self);
        let watch = move || {
            while let Some(library) = library.upgrade() {
                for served in library.shelf.all() {
                    served.layer.expire(Instant::now());
                }
                if library.blocks.has_ended() {
                    if let Ok(mut driver) = blocks::open() {
                        library.blocks.reap_all(&mut driver);
                    }
                }
                drop(library);
                std::thread::sleep(WATCH_PERIOD);
            }
        };
        let thread = std::thread::Builder::new().name("watch".into());
        thread.spawn(watch).map(drop)
    }

    /// Serves a layer; served already is success, with the source as it is given now. One of the same digest and another
    /// index is another image of the same files, and takes its place: its node has removed the first.
    pub fn add(self: &Arc<Library>, args: &AddArgs) -> Result<PathBuf> {
        check_digest(&args.digest)?;
        let mut known = self.shelf.find(&args.digest);
        if let Some(served) = &known {
            let index = &served.layer.index;
            let same = (index.size, index.chunk_size) == (args.size, args.chunk_size)
                && index.hash == *blake3::hash(&index_bytes(&args.index)?).as_bytes();
            if !same {
                self.remove(&args.digest)?;
                known = None;
            }
        }
        let served = if let Some(served) = known {
            served.layer.set_source(self.source(&args.source)?);
            served
        } else {
            self.front.invalidate(&args.digest);
            self.serve(args)?
        };
        let device = match args.block {
            true => Some(self.block(&served)?),
            false => None,
        };
        self.keep(&AddArgs {
            block: args.block || self.blocks.has(&args.digest), // who reads it reads on
            ..args.clone()
        })?;
        // Through our supervisor's root: who mounts may live in a namespace that does not see our mount, and nobody mounts
        // a file that is not guarded any more.
        let Settings { mount, cache, .. } = &self.settings;
        let file = device.unwrap_or_else(|| self.front.path(mount, cache, &args.digest));
        Ok(PathBuf::from(format!(
            "/proc/{}/root{}",
            self.namespace(),
            file.display()
        )))
    }

    fn serve(self: &Arc<Library>, args: &AddArgs) -> Result<Served> {
        check_digest(&args.digest)?;
        if self.shelf.all().len() >= LAYERS_MAX {
            return Err(Error::Busy(format!(
                "{LAYERS_MAX} layers are served already"
            )));
        }
        let bytes = index_bytes(&args.index)?;
        let index = Index::parse(&bytes, args.chunk_size, args.size)?;
        if self.shelf.held().1 + index.chunks.len() > CHUNKS_MAX {
            return Err(Error::Busy(format!(
                "{CHUNKS_MAX} chunks are served already"
            )));
        }
        let source = self.source(&args.source)?;
        let pool = self.pool(&args.source)?;
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let open_data = |path: &Path| self.front.open_data(path);
        let (cache, found) = Cache::open(&self.settings.cache, &args.digest, &index, &open_data)?;
        let punches = self.front.punches();
        let layer = Layer::new(args.digest.clone(), index, cache, &found, source, punches);
        let served = Served {
            layer: Arc::new(layer),
            pool,
        };
        self.shelf.put(served.clone())?;
        self.front.began(&served)?;
        if let Some(at) = idle.iter().position(|(digest, _)| *digest == args.digest) {
            self.idle_bytes
                .fetch_sub(idle.remove(at).1, Ordering::Relaxed);
        }
        Ok(served)
    }

    pub fn set_source(&self, digest: &str, source: &SourceArgs) -> Result<()> {
        let served = self.find(digest)?;
        served.layer.set_source(self.source(source)?);
        // For the next worker too: the old one may be good no longer.
        let args = self.kept(digest)?;
        self.keep(&AddArgs {
            source: source.clone(),
            ..args
        })
    }

    /// What is served, for the next worker.
    fn keep(&self, args: &AddArgs) -> Result<()> {
        let bytes =
            rmp_serde::to_vec_named(args).map_err(|error| Error::Invalid(error.to_string()))?;
        let draft = self.settings.active.join(format!("{}.draft", args.digest));
        std::fs::write(&draft, bytes).doing("keeping what is served")?;
        std::fs::rename(&draft, self.settings.active.join(&args.digest))
            .doing("keeping what is served")
    }

    fn kept(&self, digest: &str) -> Result<AddArgs> {
        let bytes = std::fs::read(self.settings.active.join(digest))
            .doing(format!("reading what is kept of {digest}"))?;
        rmp_serde::from_slice(&bytes).map_err(|error| Error::Invalid(error.to_string()))
    }

    /// A process that sees our mount: our supervisor, which stays the same, unless it has died.
    fn namespace(&self) -> u32 {
        let supervisor = self.settings.supervisor;
        if std::os::unix::process::parent_id() == supervisor {
            supervisor
        } else {
            std::process::id()
        }
    }

    fn source(&self, args: &SourceArgs) -> Result<Source> {
        match (&args.path, &args.url) {
            (Some(path), None) if path.starts_with('/') => Ok(Source::File(PathBuf::from(path))),
            (None, Some(url)) => Ok(Source::Http {
                agent: self.agent(url, &args.addresses)?,
                url: url.clone(),
            }),
            _ => Err(Error::Invalid(
                "a source has an absolute path, or a URL".into(),
            )),
        }
    }

    /// Connections are shared by the layers of a host.
    fn agent(&self, url: &str, addresses: &[String]) -> Result<ureq::Agent> {
        let mut agents = self.agents.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (origin(url), addresses.to_vec());
        if let Some(agent) = agents.get(&key) {
            return Ok(agent.clone());
        }
        if agents.len() >= AGENTS_MAX {
            agents.clear(); // who uses one keeps it
        }
        let agent = source::agent(url, addresses, &self.settings.authorities)?;
        agents.insert(key, agent.clone());
        Ok(agent)
    }

    /// The threads for a store: of a host, or of a directory's file system.
    fn pool(self: &Arc<Library>, source: &SourceArgs) -> Result<Arc<Pool>> {
        let key = match (&source.path, &source.url) {
            (Some(path), _) => path.split('/').take(4).collect::<Vec<_>>().join("/"),
            (None, Some(url)) => origin(url),
            (None, None) => String::new(),
        };
        let mut pools = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pool) = pools.get(&key) {
            return Ok(Arc::clone(pool));
        }
        if pools.len() >= STORES_MAX {
            // Better shared threads than none.
            return pools
                .values()
                .next()
                .cloned()
                .ok_or_else(|| Error::Busy("no threads".into()));
        }
        let library = Arc::downgrade(self);
        let grown = move |layer: &Layer| {
            if let Some(library) = library.upgrade() {
                library.front.grown(layer);
                library.keep_within_bound();
            }
        };
        let pool = Pool::start(Box::new(grown)).doing("starting threads")?;
        pools.insert(key, Arc::clone(&pool));
        Ok(pool)
    }

    pub fn find(&self, digest: &str) -> Result<Served> {
        self.shelf
            .find(digest)
            .ok_or_else(|| Error::NotFound(format!("layer {digest} is not served")))
    }

    /// Serves it no longer. What is in its cache stays until the room is needed.
    pub fn remove(&self, digest: &str) -> Result<()> {
        check_digest(digest)?;
        let _ = std::fs::remove_file(self.settings.active.join(digest));
        if self.blocks.has(digest) {
            self.blocks.detach(&mut blocks::open()?, digest);
        }
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(served) = self.shelf.take(digest) else {
            return Ok(());
        };
        served.pool.forget(&served.layer);
        let closed = served.layer.close();
        let bytes = served.layer.held_bytes();
        idle.push((digest.into(), bytes));
        self.idle_bytes.fetch_add(bytes, Ordering::Relaxed);
        closed
    }

    pub fn prefetch(&self, digest: &str, chunks: &[u32], whole: bool) -> Result<()> {
        let served = self.find(digest)?;
        if whole {
            let all: Vec<u32> = (0..served.layer.index.len()).collect();
            served.layer.prefetch(&all);
        } else {
            served.layer.prefetch(chunks);
        }
        served.pool.ahead(&served.layer);
        Ok(())
    }

    pub fn trace(&self, digest: &str) -> Result<Vec<u32>> {
        let mut chunks = self.find(digest)?.layer.trace();
        chunks.truncate(TRACE_MAX);
        Ok(chunks)
    }

    pub fn stats(&self, digest: Option<&str>) -> Result<StatsAnswer> {
        let served = match digest {
            Some(digest) => vec![self.find(digest)?],
            None => self.shelf.all(),
        };
        Ok(StatsAnswer {
            layers: served
                .iter()
                .map(|served| stats_of(&served.layer))
                .collect(),
            cache_bytes: self.held(),
            cache_bytes_max: self.settings.cache_bytes,
        })
    }

    /// The last read of one of these layers that failed because of its store. Layers that are not served have none.
    pub fn failure(&self, digests: &[String]) -> Option<ReadFailure> {
        let failed = digests.iter().filter_map(|digest| {
            let read = self.shelf.find(digest)?.layer.failed_read()?;
            Some((digest, read))
        });
        failed
            .max_by_key(|(_, read)| read.at)
            .map(|(digest, read)| ReadFailure {
                digest: digest.clone(),
                cause: read.cause.word(),
                at_s: read.at.as_secs_f64(),
            })
    }

    /// Caches of layers that nobody is served go first, whole, the one unused for longest before the others; then chunks
    /// of those that are served.
    pub fn evict(&self, bytes: u64) -> u64 {
        let mut freed = 0;
        {
            let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
            let mut read = Vec::new();
            while freed < bytes && !idle.is_empty() {
                let (digest, held) = idle.remove(0);
                if !self.front.punches() && cache::is_read(&self.settings.cache, &digest) {
                    read.push((digest, held)); // mounts of it linger
                    continue;
                }
                self.idle_bytes.fetch_sub(held, Ordering::Relaxed);
                match cache::remove(&self.settings.cache, &digest) {
                    Ok(()) => freed += held,
                    Err(error) => eprintln!("dsec-loader: cache {digest} stays: {error}"),
                }
            }
            idle.splice(0..0, read);
        }
        // Twice round: at first each chunk only loses the mark of its last use.
        for _ in 0..2 {
            for served in self.shelf.all() {
                if freed >= bytes {
                    return freed;
                }
                freed += served.layer.evict(bytes - freed);
            }
        }
        freed
    }

    fn keep_within_bound(&self) {
        let target = self.settings.cache_bytes - self.settings.cache_bytes / ROOM_PARTS;
        // One thread at a time. It looks again once it is done: what others have added meanwhile they leave to it.
        while self.held() > self.settings.cache_bytes && !self.evicting.swap(true, Ordering::AcqRel)
        {
            let freed = self.evict(self.held().saturating_sub(target));
            self.evicting.swap(false, Ordering::AcqRel);
            if freed == 0 {
                return;
            }
        }
    }

    /// Asked after each fetch: nothing is counted for it.
    fn held(&self) -> u64 {
        self.shelf.held().0 + self.idle_bytes.load(Ordering::Relaxed)
    }

    /// An orderly end: nothing has to be checked by the next worker.
    pub fn close(&self) {
        if !blocks::recorded(&self.settings.blocks).is_empty() {
            match blocks::open() {
                Ok(mut driver) => self.blocks.detach_all(&mut driver),
                Err(error) => eprintln!("dsec-loader: block devices stay: {error}"),
            }
        }
        for pool in self
            .pools
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .values()
        {
            pool.end();
        }
        for served in self.shelf.all() {
            if let Err(error) = served.layer.close() {
                eprintln!("dsec-loader: {error}");
            }
        }
    }
}

fn index_bytes(path: &str) -> Result<Vec<u8>> {
    let doing = || format!("reading {path}");
    let length = std::fs::metadata(path).doing(doing())?.len();
    if length > INDEX_BYTES_MAX {
        return Err(Error::Invalid(format!(
            "an index of {length} bytes is not taken"
        )));
    }
    std::fs::read(path).doing(doing())
}

fn origin(url: &str) -> String {
    url.split('/').take(3).collect::<Vec<_>>().join("/")
}

/// The caches that are there, the one that was left longest ago first; what is being removed is gone after.
fn found_caches(root: &Path) -> Vec<(String, u64)> {
    let mut found: Vec<(SystemTime, String)> = Vec::new();
    for entry in std::fs::read_dir(root).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.extension().is_some_and(|end| end == cache::GONE) {
            let _ = std::fs::remove_dir_all(&path);
        }
        let name = entry.file_name().to_string_lossy().into_owned();
        if check_digest(&name).is_ok() {
            let left = entry.metadata().and_then(|facts| facts.modified());
            found.push((left.unwrap_or(SystemTime::UNIX_EPOCH), name));
        }
    }
    found.sort();
    found
        .into_iter()
        .map(|(_, name)| {
            let bytes = held_bytes(&root.join(&name));
            (name, bytes)
        })
        .collect()
}

fn stats_of(layer: &Layer) -> LayerStats {
    let stats = layer.stats();
    let Counts {
        read_bytes,
        fetched_bytes,
        fetches,
        hits,
        misses,
        errors,
        corrupt,
        evicted,
    } = &layer.counts;
    let now = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
    LayerStats {
        digest: layer.digest.clone(),
        size: layer.index.size,
        chunk_size: layer.index.chunk_size,
        chunks: stats.chunks,
        present: stats.present,
        touched: stats.touched,
        waiting: stats.waiting,
        read_bytes: now(read_bytes),
        fetched_bytes: now(fetched_bytes),
        fetches: now(fetches),
        hits: now(hits),
        misses: now(misses),
        errors: now(errors),
        corrupt: now(corrupt),
        evicted_bytes: now(evicted),
        held_bytes: layer.held_bytes(),
        error: layer.take_error().map(|error| StoreFailure {
            cause: error.cause.word(),
            detail: error.detail,
        }),
    }
}

/// True when a directory has something mounted on it by us; used at start to clear what a dead one has left.
pub fn is_mounted(path: &Path) -> bool {
    let text = std::fs::read("/proc/self/mounts").unwrap_or_default();
    // As the kernel writes it.
    let path = path.to_string_lossy().replace('\\', "\\134");
    let path = path.replace(' ', "\\040").replace('\t', "\\011");
    String::from_utf8_lossy(&text)
        .lines()
        .any(|line| line.split(' ').nth(1) == Some(&path))
}
