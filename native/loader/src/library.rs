//! All layers that are served, their caches, and the bound on what these hold.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use crate::cache::{check_digest, held_bytes, Cache};
use crate::error::{Doing, Error, Result};
use crate::fuse::{Fuse, Served};
use crate::index::Index;
use crate::layer::{Counts, Layer};
use crate::pool::Pool;
use crate::source::Source;
use crate::wire::{AddArgs, LayerStats, SourceArgs, StatsAnswer, StoreFailure};

const STORES_MAX: usize = 16;
const LAYERS_MAX: usize = 4096;
const INDEX_BYTES_MAX: u64 = 256 << 20;
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
    pub authorities: String,
    pub supervisor: u32,
}

pub struct Library {
    pub settings: Settings,
    pub fuse: Arc<Fuse>,
    pools: Mutex<BTreeMap<String, Arc<Pool>>>,
    evicting: AtomicBool,
}

impl Library {
    pub fn new(settings: Settings, device: File) -> Result<Arc<Library>> {
        for directory in [&settings.cache, &settings.active] {
            std::fs::create_dir_all(directory).doing(format!("making {}", directory.display()))?;
        }
        Ok(Arc::new(Library {
            settings,
            fuse: Arc::new(Fuse::new(device)),
            pools: Mutex::default(),
            evicting: AtomicBool::new(false),
        }))
    }

    /// What a worker before us served.
    pub fn restore(self: &Arc<Library>) -> Result<()> {
        let doing = || format!("reading {}", self.settings.active.display());
        for entry in std::fs::read_dir(&self.settings.active).doing(doing())? {
            let path = entry.doing(doing())?.path();
            let served = std::fs::read(&path)
                .doing(format!("reading {}", path.display()))
                .and_then(|bytes| {
                    rmp_serde::from_slice::<AddArgs>(&bytes)
                        .map_err(|error| Error::Invalid(error.to_string()))
                })
                .and_then(|args| self.serve(&args));
            if let Err(error) = served {
                // Its readers get EIO; the others are served.
                eprintln!(
                    "dsec-loader: {} is not served again: {error}",
                    path.display()
                );
            }
        }
        Ok(())
    }

    /// Serves a layer; served already is success, with the source as it is given now.
    pub fn add(self: &Arc<Library>, args: &AddArgs) -> Result<PathBuf> {
        check_digest(&args.digest)?;
        if let Some(served) = self.fuse.find(&args.digest) {
            served.layer.set_source(self.source(&args.source)?);
        } else {
            let served = self.serve(args)?;
            served.layer.prefetch(&args.trace);
            served.pool.ahead(&served.layer);
        }
        let bytes = rmp_serde::to_vec_named(&AddArgs {
            trace: Vec::new(),
            ..args.clone()
        })
        .map_err(|error| Error::Invalid(error.to_string()))?;
        let draft = self.settings.active.join(format!("{}.draft", args.digest));
        std::fs::write(&draft, bytes).doing("keeping what is served")?;
        std::fs::rename(&draft, self.settings.active.join(&args.digest))
            .doing("keeping what is served")?;
        // Through our supervisor's root: who mounts may live in a namespace that does not see our mount.
        let file = self.settings.mount.join(&args.digest);
        Ok(PathBuf::from(format!(
            "/proc/{}/root{}",
            self.settings.supervisor,
            file.display()
        )))
    }

    fn serve(self: &Arc<Library>, args: &AddArgs) -> Result<Served> {
        check_digest(&args.digest)?;
        if self.fuse.all().len() >= LAYERS_MAX {
            return Err(Error::Busy(format!(
                "{LAYERS_MAX} layers are served already"
            )));
        }
        let doing = format!("reading {}", args.index);
        let length = std::fs::metadata(&args.index).doing(&doing)?.len();
        if length > INDEX_BYTES_MAX {
            return Err(Error::Invalid(format!(
                "an index of {length} bytes is not taken"
            )));
        }
        let bytes = std::fs::read(&args.index).doing(&doing)?;
        let index = Index::parse(&bytes, args.chunk_size, args.size)?;
        let source = self.source(&args.source)?;
        let pool = self.pool(&args.source)?;
        let (cache, found) = Cache::open(&self.settings.cache, &args.digest, &index)?;
        let layer = Layer::new(args.digest.clone(), index, cache, &found, source);
        let served = Served {
            layer: Arc::new(layer),
            pool,
        };
        self.fuse.serve(served.clone())?;
        Ok(served)
    }

    pub fn set_source(&self, digest: &str, source: &SourceArgs) -> Result<()> {
        let served = self.find(digest)?;
        served.layer.set_source(self.source(source)?);
        Ok(())
    }

    fn source(&self, args: &SourceArgs) -> Result<Source> {
        match (&args.path, &args.url) {
            (Some(path), None) if path.starts_with('/') => Ok(Source::file(PathBuf::from(path))),
            (None, Some(url)) => {
                Source::http(url.clone(), &args.addresses, &self.settings.authorities)
            }
            _ => Err(Error::Invalid(
                "a source has an absolute path, or a URL".into(),
            )),
        }
    }

    /// The threads for a store: of a host, or of a directory's file system.
    fn pool(self: &Arc<Library>, source: &SourceArgs) -> Result<Arc<Pool>> {
        let key = match (&source.path, &source.url) {
            (Some(path), _) => path.split('/').take(4).collect::<Vec<_>>().join("/"),
            (None, Some(url)) => url.split('/').take(3).collect::<Vec<_>>().join("/"),
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
        let grown = move || {
            if let Some(library) = library.upgrade() {
                library.keep_within_bound();
            }
        };
        let pool = Pool::start(Box::new(grown)).doing("starting threads")?;
        pools.insert(key, Arc::clone(&pool));
        Ok(pool)
    }

    pub fn find(&self, digest: &str) -> Result<Served> {
        self.fuse
            .find(digest)
            .ok_or_else(|| Error::NotFound(format!("layer {digest} is not served")))
    }

    /// Serves it no longer. What is in its cache stays until the room is needed.
    pub fn remove(&self, digest: &str) -> Result<()> {
        check_digest(digest)?;
        let _ = std::fs::remove_file(self.settings.active.join(digest));
        let Some(served) = self.fuse.forget(digest) else {
            return Ok(());
        };
        served.pool.forget(&served.layer);
        served.layer.cache.close()
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
            None => self.fuse.all(),
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

    /// Caches of layers that nobody is served go first, whole, the one unused for longest before the others; then chunks
    /// of those that are served.
    pub fn evict(&self, bytes: u64) -> u64 {
        let mut freed = 0;
        for directory in self.idle_caches() {
            if freed >= bytes {
                return freed;
            }
            let held = held_bytes(&directory);
            if std::fs::remove_dir_all(&directory).is_ok() {
                freed += held;
            }
        }
        // Twice round: at first each chunk only loses the mark of its last use.
        for _ in 0..2 {
            for served in self.fuse.all() {
                if freed >= bytes {
                    return freed;
                }
                freed += served.layer.evict(bytes - freed);
            }
        }
        freed
    }

    fn keep_within_bound(&self) {
        if self.evicting.swap(true, Ordering::AcqRel) {
            return; // another thread is at it
        }
        let held = self.held();
        if held > self.settings.cache_bytes {
            let target = self.settings.cache_bytes - self.settings.cache_bytes / ROOM_PARTS;
            self.evict(held - target);
        }
        self.evicting.store(false, Ordering::Release);
    }

    fn held(&self) -> u64 {
        let active: u64 = self
            .fuse
            .all()
            .iter()
            .map(|served| served.layer.held_bytes())
            .sum();
        let idle: u64 = self
            .idle_caches()
            .iter()
            .map(|directory| held_bytes(directory))
            .sum();
        active + idle
    }

    /// Directories of layers that are not served, the one that was left longest ago first.
    fn idle_caches(&self) -> Vec<PathBuf> {
        let Ok(entries) = std::fs::read_dir(&self.settings.cache) else {
            return Vec::new();
        };
        let mut found: Vec<(SystemTime, PathBuf)> = entries
            .flatten()
            .filter(|entry| {
                let name = entry.file_name();
                name.to_str().is_some_and(|name| {
                    check_digest(name).is_ok() && self.fuse.find(name).is_none()
                })
            })
            .map(|entry| {
                let left = entry.metadata().and_then(|facts| facts.modified());
                (left.unwrap_or(SystemTime::UNIX_EPOCH), entry.path())
            })
            .collect();
        found.sort();
        found.into_iter().map(|(_, path)| path).collect()
    }

    /// An orderly end: nothing has to be checked by the next worker.
    pub fn close(&self) {
        for pool in self
            .pools
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .values()
        {
            pool.end();
        }
        for served in self.fuse.all() {
            if let Err(error) = served.layer.cache.close() {
                eprintln!("dsec-loader: {error}");
            }
        }
    }
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
    let text = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let path = path.to_string_lossy();
    text.lines()
        .any(|line| line.split(' ').nth(1) == Some(&path))
}
