//! The chunks of one layer on the local disk: a sparse file, and one byte a chunk that says whether it is there.
//!
//!     CACHE/<digest>/data      sparse, as long as the blob
//!                    map       a byte a chunk: 1 when it is in `data`; written after the chunk, cleared before its hole;
//!                              2 when it is there and was not yet checked at an orderly end
//!                    about     what it belongs to: hash of the index, size of a chunk, of the blob
//!                    clean     there after an orderly end only: without it every chunk is checked before its first use
//!     CACHE/<digest>.gone       being removed: renamed first, so that a kill leaves no map without its data

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{PoisonError, RwLock};

use dsec_sys::fuse::punch_hole;

use crate::error::{Doing, Error, Result};
use crate::index::Index;

const DATA: &str = "data";
const MAP: &str = "map";
const ABOUT: &str = "about";
const CLEAN: &str = "clean";
pub const GONE: &str = "gone";
const ABSENT: u8 = 0;
const PRESENT: u8 = 1;
const UNCHECKED: u8 = 2;

/// What is known of a chunk when a cache is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    Absent,
    Present,
    /// There, and written before a crash: to be checked.
    Doubtful,
}

pub struct Cache {
    directory: PathBuf,
    data: File,
    map: File,
    /// Nothing is written any more: the files may belong to another `Cache` by now, or be thought of as clean.
    closed: RwLock<bool>,
}

impl Cache {
    /// Takes the place of a layer, with what is in it if that is of this index. The caller has no other of this digest.
    /// `open_data` opens its file for us.
    pub fn open(
        root: &Path,
        digest: &str,
        index: &Index,
        open_data: &dyn Fn(&Path) -> std::io::Result<File>,
    ) -> Result<(Cache, Vec<Found>)> {
        let directory = root.join(digest);
        let doing = || format!("opening the cache {}", directory.display());
        make_private(&directory).doing(doing())?;
        let about = about(index);
        let clean = std::fs::remove_file(directory.join(CLEAN)).is_ok();
        // On the disk before anything is written: else a power cut could leave new marks that count as clean.
        sync_directory(&directory).doing(doing())?;
        let facts = std::fs::metadata(directory.join(DATA));
        let known = std::fs::read(directory.join(ABOUT)).is_ok_and(|found| found == about)
            && facts.is_ok_and(|facts| facts.len() == index.size);
        if !known {
            for name in [ABOUT, MAP, DATA] {
                let _ = std::fs::remove_file(directory.join(name));
            }
            write_whole(&directory.join(ABOUT), &about).doing(doing())?;
        }
        if !known {
            let data = open(&directory.join(DATA)).doing(doing())?;
            data.set_len(index.size).doing(doing())?;
        }
        let data = open_data(&directory.join(DATA)).doing(doing())?;
        let map = open(&directory.join(MAP)).doing(doing())?;
        map.set_len(u64::from(index.len())).doing(doing())?;
        let mut bytes = vec![0; index.len() as usize];
        map.read_exact_at(&mut bytes, 0).doing(doing())?;
        let found = bytes
            .iter()
            .map(|byte| match (byte, clean) {
                (&PRESENT, true) => Found::Present,
                (&(PRESENT | UNCHECKED), _) => Found::Doubtful,
                _ => Found::Absent,
            })
            .collect();
        let cache = Cache {
            directory,
            data,
            map,
            closed: RwLock::new(false),
        };
        Ok((cache, found))
    }

    pub fn data(&self) -> &File {
        &self.data
    }

    pub fn read(&self, buffer: &mut [u8], offset: u64) -> std::io::Result<()> {
        self.data.read_exact_at(buffer, offset)
    }

    /// The chunk first, its mark after: a kill between the two loses the chunk, nothing else.
    pub fn put(&self, chunk: u32, start: u64, bytes: &[u8]) -> std::io::Result<()> {
        self.while_open(|| {
            self.data.write_all_at(bytes, start)?;
            self.map.write_all_at(&[PRESENT], u64::from(chunk))
        })
    }

    /// It counts as absent, whatever its bytes are.
    pub fn doubt(&self, chunk: u32) -> std::io::Result<()> {
        self.while_open(|| self.map.write_all_at(&[ABSENT], u64::from(chunk)))
    }

    /// The mark first, the chunk after.
    pub fn drop_chunk(&self, chunk: u32, start: u64, length: u64) -> std::io::Result<()> {
        self.while_open(|| {
            self.map.write_all_at(&[ABSENT], u64::from(chunk))?;
            punch_hole(self.data.as_fd(), start, length)
        })
    }

    fn while_open(&self, write: impl FnOnce() -> std::io::Result<()>) -> std::io::Result<()> {
        let closed = self.closed.read().unwrap_or_else(PoisonError::into_inner);
        if *closed {
            return Err(std::io::Error::other("the layer is served no longer"));
        }
        write()
    }

    /// Everything is on the disk, and nothing more is written; the next to open it need only check `unchecked`.
    pub fn close(&self, unchecked: &[u32]) -> Result<()> {
        let doing = || format!("closing the cache {}", self.directory.display());
        let mut closed = self.closed.write().unwrap_or_else(PoisonError::into_inner);
        if std::mem::replace(&mut *closed, true) {
            return Ok(());
        }
        for chunk in unchecked {
            self.map
                .write_all_at(&[UNCHECKED], u64::from(*chunk))
                .doing(doing())?;
        }
        self.data.sync_all().doing(doing())?;
        self.map.sync_all().doing(doing())?;
        write_whole(&self.directory.join(CLEAN), b"").doing(doing())
    }
}

/// Removes the cache `root`/`digest`, which nobody has open; a kill on the way leaves what the next start removes.
pub fn remove(root: &Path, digest: &str) -> std::io::Result<()> {
    let gone = root.join(digest).with_extension(GONE);
    let _ = std::fs::remove_dir_all(&gone);
    std::fs::rename(root.join(digest), &gone)?;
    std::fs::remove_dir_all(&gone)
}

pub fn data_path(root: &Path, digest: &str) -> PathBuf {
    root.join(digest).join(DATA)
}

/// Whether anybody has the data of a cache open that is not ours; true when that cannot be told.
pub fn is_read(root: &Path, digest: &str) -> bool {
    match File::open(data_path(root, digest)) {
        Ok(file) => !dsec_sys::fanotify::is_ours_alone(file.as_fd()).unwrap_or(false),
        Err(error) => {
            error.kind() != std::io::ErrorKind::NotFound
                && error.raw_os_error() != Some(libc::ENOTDIR)
        }
    }
}

/// A directory that others cannot look into, if it is not there yet.
pub fn make_private(directory: &Path) -> std::io::Result<()> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)
}

fn sync_directory(directory: &Path) -> std::io::Result<()> {
    File::open(directory)?.sync_all()
}

/// Bytes that a cache directory holds, by its map; 0 for one that cannot be read.
pub fn held_bytes(directory: &Path) -> u64 {
    let Ok(about) = std::fs::read(directory.join(ABOUT)) else {
        return 0;
    };
    let Some(chunk_size) = about.get(32..36) else {
        return 0;
    };
    let chunk_size =
        u32::from_le_bytes([chunk_size[0], chunk_size[1], chunk_size[2], chunk_size[3]]);
    let map = std::fs::read(directory.join(MAP)).unwrap_or_default();
    map.iter().filter(|byte| **byte != ABSENT).count() as u64 * u64::from(chunk_size)
}

fn about(index: &Index) -> Vec<u8> {
    let mut bytes = index.hash.to_vec();
    bytes.extend(index.chunk_size.to_le_bytes());
    bytes.extend(index.size.to_le_bytes());
    bytes
}

/// For reading and writing, made if need be, nobody else's.
pub fn open(path: &Path) -> std::io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)
}

fn write_whole(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let draft = path.with_extension("draft");
    let mut file = File::create(&draft)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    std::fs::rename(&draft, path)
}

/// A digest as a directory's name: nothing else may come from a request.
pub fn check_digest(digest: &str) -> Result<()> {
    let good = digest.len() == 64
        && digest
            .bytes()
            .all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte));
    if !good {
        return Err(Error::Invalid("a digest has 64 hexadecimal digits".into()));
    }
    Ok(())
}
