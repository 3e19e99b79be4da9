//! How readers come to chunks: files of a FUSE mount, or files of the cache whose reads wait (fanotify).

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::fuse::Fuse;
use crate::guard::Guard;
use crate::layer::Layer;
use crate::shelf::Served;

/// What was asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Wish {
    /// FUSE; where there is none, fanotify.
    #[default]
    Auto,
    Fuse,
    Fanotify,
}

impl Wish {
    pub fn parse(word: &str) -> Option<Wish> {
        match word {
            "auto" => Some(Wish::Auto),
            "fuse" => Some(Wish::Fuse),
            "fanotify" => Some(Wish::Fanotify),
            _ => None,
        }
    }

    pub fn word(self) -> &'static str {
        match self {
            Wish::Auto => "auto",
            Wish::Fuse => "fuse",
            Wish::Fanotify => "fanotify",
        }
    }
}

/// The front end of a wish on this machine. `guarded`: readers wait by fanotify already, and go on to.
pub fn choose(wish: Wish, cache: &Path, guarded: bool) -> Result<Wish> {
    let fuse = || Path::new("/dev/fuse").exists();
    match wish {
        _ if guarded => Ok(Wish::Fanotify),
        Wish::Fuse => Ok(Wish::Fuse),
        Wish::Auto if fuse() => Ok(Wish::Fuse),
        Wish::Auto | Wish::Fanotify => match crate::guard::probe(cache) {
            Ok(()) => Ok(Wish::Fanotify),
            Err(error) => Err(Error::Host {
                doing: format!(
                    "asking for pre-content events of {} (Linux 6.14, ext4, xfs or btrfs)",
                    cache.display()
                ),
                source: error,
            }),
        },
    }
}

#[derive(Clone)]
pub enum Front {
    Fuse(Arc<Fuse>),
    Guard(Arc<Guard>),
}

impl Front {
    pub fn name(&self) -> &'static str {
        match self {
            Front::Fuse(_) => Wish::Fuse.word(),
            Front::Guard(_) => Wish::Fanotify.word(),
        }
    }

    /// The data of a cache, for us: nothing that we do with it raises an event.
    pub fn open_data(&self, path: &Path) -> std::io::Result<File> {
        match self {
            Front::Fuse(_) => crate::cache::open(path),
            Front::Guard(guard) => guard.open_silently(path),
        }
    }

    /// Whether holes can be made in what is served. A reader whose event has been answered reads some time after, so
    /// there is no time at which one of its files could be punched.
    pub fn punches(&self) -> bool {
        matches!(self, Front::Fuse(_))
    }

    /// The file that is given to EROFS.
    pub fn path(&self, mount: &Path, cache: &Path, digest: &str) -> PathBuf {
        match self {
            Front::Fuse(_) => mount.join(digest),
            Front::Guard(_) => crate::cache::data_path(cache, digest),
        }
    }

    /// A file that is served anew may be another one now.
    pub fn invalidate(&self, digest: &str) {
        if let Front::Fuse(fuse) = self {
            fuse.invalidate(digest);
        }
    }

    pub fn began(&self, served: &Served) -> Result<()> {
        match self {
            Front::Fuse(_) => Ok(()),
            Front::Guard(guard) => guard.watch(&served.layer),
        }
    }

    /// Chunks of it have come.
    pub fn grown(&self, layer: &Layer) {
        if let Front::Guard(guard) = self {
            guard.let_go_when_whole(layer);
        }
    }

    /// Answers readers until there can be none any more.
    pub fn work(&self) -> Result<()> {
        match self {
            Front::Fuse(fuse) => fuse.work(),
            Front::Guard(guard) => guard.work(),
        }
    }
}
