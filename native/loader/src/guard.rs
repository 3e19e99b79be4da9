//! The blobs as sparse files of the cache: who reads what is not there yet waits until it is (fanotify pre-content events,
//! Linux 6.14). A blob that is whole is a file like any other, for mounts that there are too.
//!
//! The kernel lets reads through, and holes read as zeros, when nobody has the group open: see `keeper`.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{channel, Sender};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use dsec_sys::fanotify::{answer, mark, new_group, next_event, unmark, Event};

use crate::error::{Doing, Result};
use crate::layer::{add, Layer};
use crate::shelf::{Served, Shelf};

/// A wait as it is kept for the next worker, at its descriptor's number: file, range, and 1.
const WAIT_BYTES: usize = 40;
/// Numbers that descriptors of events may have had; as many reads may wait at once.
const NUMBERS: RawFd = 1 << 16;
/// What a worker before us was asked is answered within that time, by EIO if need be; others wait until then.
const SETTLE: Duration = Duration::from_secs(10);
const SILENT: Duration = Duration::from_secs(10);

type Inode = (u64, u64);

/// A read that a worker before us had taken and not answered.
pub struct Stale {
    number: RawFd,
    inode: Inode,
    offset: u64,
    length: u64,
}

pub struct Guard {
    group: File,
    shelf: Arc<Shelf>,
    digests: RwLock<BTreeMap<Inode, String>>,
    /// Files of which the next event of ours is wanted, for its descriptor.
    traps: Mutex<BTreeMap<Inode, Sender<OwnedFd>>>,
    /// Events that wait until everything is served again; None when it is.
    parked: Mutex<Option<Vec<Event>>>,
    waits: File,
    own: i32,
}

/// Whether files in this directory can be guarded.
pub fn probe(directory: &Path) -> std::io::Result<()> {
    let path = directory.join(format!(".probe-{}", std::process::id()));
    crate::cache::make_private(directory)?;
    let file = crate::cache::open(&path)?;
    let _ = std::fs::remove_file(&path);
    mark(new_group()?.as_fd(), file.as_fd())
}

impl Guard {
    pub fn new(group: File, shelf: Arc<Shelf>, waits: &Path, again: bool) -> Result<Guard> {
        let waits = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(!again)
            .mode(0o600)
            .open(waits)
            .doing(format!("opening {}", waits.display()))?;
        Ok(Guard {
            group,
            shelf,
            digests: RwLock::default(),
            traps: Mutex::default(),
            parked: Mutex::new(Some(Vec::new())),
            waits,
            own: std::process::id() as i32,
        })
    }

    /// What a worker before us left unanswered, and descriptors to be kept until that is answered: an answer is for the
    /// read whose event had a number, and a new event must not have one of the old numbers. To be called before `work`.
    pub fn take_over(&self) -> Result<(Vec<Stale>, Vec<File>)> {
        let mut stale = Vec::new();
        let mut record = [0; WAIT_BYTES];
        for number in 0..NUMBERS {
            let kept = self.waits.read_exact_at(&mut record, place(number));
            match kept.ok().and_then(|()| parse(number, &record)) {
                Some(wait) => stale.push(wait),
                // Taken and not kept, in the moment between: its reader is told, and mostly asks again.
                None => drop(answer(self.group.as_fd(), number, false)),
            }
        }
        let last = stale.iter().map(|wait| wait.number).max();
        let mut fill = Vec::new();
        while last.is_some_and(|last| {
            fill.last()
                .map_or(true, |file: &File| file.as_raw_fd() <= last)
        }) {
            fill.push(File::open("/dev/null").doing("taking numbers of descriptors")?);
        }
        Ok((stale, fill))
    }

    /// Answers what `take_over` found, when everything is served that was.
    pub fn settle(self: &Arc<Guard>, stale: Vec<Stale>) {
        let (done, all_done) = channel::<()>();
        let mut told = Vec::new();
        for wait in stale {
            let answered = Arc::new(AtomicBool::new(false));
            told.push((wait.number, Arc::clone(&answered)));
            let (guard, done) = (Arc::clone(self), done.clone());
            let finish = move |good| {
                if !answered.swap(true, Ordering::AcqRel) {
                    guard.finish(wait.number, good);
                }
                drop(done);
            };
            match self.served(wait.inode) {
                Some(served) => self.want(&served, wait.offset, wait.length, Box::new(finish)),
                None => finish(false),
            }
        }
        drop(done);
        let _ = all_done.recv_timeout(SETTLE); // ends when the last has been answered
        for (number, answered) in told {
            if !answered.swap(true, Ordering::AcqRel) {
                self.finish(number, false);
            }
        }
    }

    /// Everything is served that was: who has asked meanwhile is answered.
    pub fn open(self: &Arc<Guard>) {
        let parked = self.parked().take();
        for event in parked.into_iter().flatten() {
            self.take(event);
        }
    }

    /// A descriptor of a file whose reads wait from now on, but not those by this descriptor: it comes of an event that
    /// we raise ourselves. `work` must be running.
    pub fn open_silently(&self, path: &Path) -> std::io::Result<File> {
        let plain = crate::cache::open(path)?;
        mark(self.group.as_fd(), plain.as_fd())?;
        let noisy = crate::cache::open(path)?;
        let inode = inode_of(&noisy)?;
        let (sender, receiver) = channel();
        self.traps().insert(inode, sender);
        std::thread::Builder::new()
            .name("open".into())
            .spawn(move || noisy.read_at(&mut [0; 1], 0))?;
        let silent = receiver.recv_timeout(SILENT);
        self.traps().remove(&inode);
        let silent = silent.map_err(|_| std::io::Error::other("reading raises no event"))?;
        Ok(File::from(silent))
    }

    /// Reads of this layer's file are for it.
    pub fn watch(&self, layer: &Layer) -> Result<()> {
        let inode = inode_of(layer.cache.data()).doing("looking at a cache")?;
        self.digests
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(inode, layer.digest.clone());
        self.let_go_when_whole(layer);
        Ok(())
    }

    /// Nothing of it will ever be missing again while it is served: holes are not made in it.
    pub fn let_go_when_whole(&self, layer: &Layer) {
        if layer.is_whole() {
            if let Err(error) = unmark(self.group.as_fd(), layer.cache.data().as_fd()) {
                eprintln!("dsec-loader: reads of a whole layer still wait: {error}");
            }
        }
    }

    pub fn work(self: &Arc<Guard>) -> Result<()> {
        loop {
            match next_event(self.group.as_fd()) {
                Ok(Some(event)) => self.take(event),
                Ok(None) => {}
                Err(error) => match error.raw_os_error() {
                    Some(libc::EINTR | libc::EAGAIN) => {}
                    // The kernel has told the reader that we have no descriptor for it: too many are open, or its mount is one
                    // by which nobody may write.
                    Some(
                        libc::EMFILE | libc::ENFILE | libc::EROFS | libc::EACCES | libc::EPERM,
                    ) => {}
                    _ => return Err(error).doing("reading events"),
                },
            }
        }
    }

    fn take(self: &Arc<Guard>, event: Event) {
        let number = event.file.as_raw_fd();
        let file = File::from(event.file);
        let Ok(inode) = inode_of(&file) else {
            let _ = answer(self.group.as_fd(), number, false);
            return;
        };
        if event.process == self.own {
            let trap = self.traps().remove(&inode);
            let _ = answer(self.group.as_fd(), number, trap.is_none());
            if let Some(trap) = trap {
                let _ = trap.send(OwnedFd::from(file));
            }
            return;
        }
        if let Some(parked) = self.parked().as_mut() {
            parked.push(Event {
                file: OwnedFd::from(file),
                ..event
            });
            return;
        }
        // Of a layer that is served no longer, or another one's: nobody may read holes.
        let Some(served) = self.served(inode) else {
            let _ = answer(self.group.as_fd(), number, false);
            return;
        };
        let chunks = served.layer.index.covering(event.offset, event.length);
        let here = served.layer.is_present(chunks);
        if !here
            && self
                .keep(number, inode, event.offset, event.length)
                .is_err()
        {
            let _ = answer(self.group.as_fd(), number, false);
            return;
        }
        let guard = Arc::clone(self);
        let finish = move |good| {
            if here {
                let _ = answer(guard.group.as_fd(), number, good);
            } else {
                guard.finish(number, good);
            }
            drop(file); // its number is given on
        };
        self.want(&served, event.offset, event.length, Box::new(finish));
        self.let_go_when_whole(&served.layer);
    }

    fn want(&self, served: &Served, offset: u64, length: u64, done: Box<dyn FnOnce(bool) + Send>) {
        let layer = &served.layer;
        let length = length.min(layer.index.size.saturating_sub(offset));
        add(&layer.counts.read_bytes, length);
        let wanted = layer.want(layer.index.covering(offset, length), done);
        served.pool.fetch(layer, wanted.runs);
        if wanted.ahead {
            served.pool.ahead(layer);
        }
    }

    fn served(&self, inode: Inode) -> Option<Served> {
        let digests = self.digests.read().unwrap_or_else(PoisonError::into_inner);
        let served = digests
            .get(&inode)
            .and_then(|digest| self.shelf.find(digest))?;
        // A digest may be served from another file by now.
        let same = inode_of(served.layer.cache.data()).is_ok_and(|known| known == inode);
        same.then_some(served)
    }

    fn keep(&self, number: RawFd, inode: Inode, offset: u64, length: u64) -> std::io::Result<()> {
        let mut record = Vec::with_capacity(WAIT_BYTES);
        for field in [inode.0, inode.1, offset, length, 1] {
            record.extend(field.to_ne_bytes());
        }
        self.waits.write_all_at(&record, place(number))
    }

    /// The answer first: killed between the two, we leave a wait that nobody has any more.
    fn finish(&self, number: RawFd, good: bool) {
        let _ = answer(self.group.as_fd(), number, good); // whoever asked may have been killed
        let _ = self.waits.write_all_at(&[0; WAIT_BYTES], place(number));
    }

    fn traps(&self) -> std::sync::MutexGuard<'_, BTreeMap<Inode, Sender<OwnedFd>>> {
        self.traps.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn parked(&self) -> std::sync::MutexGuard<'_, Option<Vec<Event>>> {
        self.parked.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn inode_of(file: &File) -> std::io::Result<Inode> {
    let facts = file.metadata()?;
    Ok((facts.dev(), facts.ino()))
}

fn place(number: RawFd) -> u64 {
    number as u64 * WAIT_BYTES as u64
}

fn parse(number: RawFd, record: &[u8; WAIT_BYTES]) -> Option<Stale> {
    let field = |at: usize| {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&record[at * 8..at * 8 + 8]);
        u64::from_ne_bytes(bytes)
    };
    (field(4) == 1).then(|| Stale {
        number,
        inode: (field(0), field(1)),
        offset: field(2),
        length: field(3),
    })
}
