//! Layers as block devices, for who reads no files: disks of machines. Beside the front end, and from the same caches.
//!
//!     RUN/loader.blocks/<digest>   number and mark of its device: written before there is one, removed after it is gone
//!
//! A device outlives its worker: reads wait, and the next worker takes it over. The mark tells ours from others'.
//!
//! One that somebody has open is never taken away: the kernel would say that it has ended, and monitors take what lies
//! beyond an end for zeros. It gives errors, or waits, until nobody has it open, or its layer is served again.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _};
use std::os::fd::BorrowedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{channel, Receiver, TryRecvError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use dsec_sys::rights::{own_capabilities, set_own_capabilities, CapSets, CAP_SYS_ADMIN};
use dsec_sys::seqpacket::{wait_ready, Interest};
use dsec_sys::ublk::{Came, Control, Descriptor, Info, Queue, NEEDED, STATE_DEAD};

use crate::cache::{check_digest, make_private};
use crate::desk::{sectors_of, Desk, Reader, Side, Tray};
use crate::error::{Doing, Error, Result};

/// Each has a thread, and requests of up to 16 MiB in memory.
const BLOCKS_MAX: usize = 256;
/// Numbers: above those that the kernel gives, and so many that none comes again soon.
const NUMBERS: std::ops::Range<u32> = 1 << 16..1 << 20;
const TRIES: u32 = 16;
/// How long the kernel may need to see that a worker has died.
const SEEN: Duration = Duration::from_secs(20);
const POLL: Duration = Duration::from_millis(20);
const STACK_BYTES: usize = 256 << 10;

/// The kernel, or what takes its place in a test.
pub trait Driver {
    type Queue: Side + Send + 'static;
    fn add(&mut self, id: u32, mark: u64) -> io::Result<()>;
    fn info(&mut self, id: u32) -> io::Result<Info>;
    fn set_size(&mut self, id: u32, sectors: u64) -> io::Result<()>;
    fn queue(&mut self, id: u32) -> io::Result<Self::Queue>;
    fn start(&mut self, id: u32) -> io::Result<()>;
    fn stop(&mut self, id: u32) -> io::Result<()>;
    fn delete(&mut self, id: u32) -> io::Result<()>;
    fn begin_recovery(&mut self, id: u32) -> io::Result<()>;
    fn end_recovery(&mut self, id: u32) -> io::Result<()>;
    /// Somebody has it open.
    fn is_used(&mut self, id: u32) -> bool;
}

impl Driver for Control {
    type Queue = Queue;
    fn add(&mut self, id: u32, mark: u64) -> io::Result<()> {
        Control::add(self, id, mark)
    }
    fn info(&mut self, id: u32) -> io::Result<Info> {
        Control::info(self, id)
    }
    fn set_size(&mut self, id: u32, sectors: u64) -> io::Result<()> {
        Control::set_size(self, id, sectors)
    }
    fn queue(&mut self, id: u32) -> io::Result<Queue> {
        Queue::open(id)
    }
    fn start(&mut self, id: u32) -> io::Result<()> {
        Control::start(self, id)
    }
    fn stop(&mut self, id: u32) -> io::Result<()> {
        Control::stop(self, id)
    }
    fn delete(&mut self, id: u32) -> io::Result<()> {
        Control::delete(self, id)
    }
    fn begin_recovery(&mut self, id: u32) -> io::Result<()> {
        Control::begin_recovery(self, id)
    }
    fn end_recovery(&mut self, id: u32) -> io::Result<()> {
        Control::end_recovery(self, id)
    }
    fn is_used(&mut self, id: u32) -> bool {
        is_open(&path_of(id))
    }
}

impl Side for Queue {
    fn fetch(&mut self, tag: u16) -> io::Result<()> {
        Queue::fetch(self, tag)
    }
    fn commit(&mut self, tag: u16, result: i32) -> io::Result<()> {
        Queue::commit(self, tag, result)
    }
    fn wait(&mut self, wake: BorrowedFd) -> io::Result<Vec<Came>> {
        use std::os::fd::AsFd;
        self.submit()?;
        let both = [
            (self.as_fd(), Interest::Readable),
            (wake, Interest::Readable),
        ];
        match wait_ready(&both, None) {
            Err(error) if error.kind() != io::ErrorKind::Interrupted => Err(error),
            _ => self.take(),
        }
    }
    fn descriptor(&self, tag: u16) -> io::Result<Descriptor> {
        Queue::descriptor(self, tag)
    }
    fn fill(&self, tag: u16, bytes: &[u8]) -> io::Result<()> {
        Queue::fill(self, tag, bytes)
    }
}

/// The driver of this machine, if it can do what we need. The error says what would help.
pub fn open() -> Result<Control> {
    let mut control = Control::open().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => Error::Invalid(
            "there is no /dev/ublk-control: modprobe ublk_drv (CONFIG_BLK_DEV_UBLK)".into(),
        ),
        _ => Error::Host {
            doing: "opening /dev/ublk-control by io_uring (is kernel.io_uring_disabled set?)"
                .into(),
            source: error,
        },
    })?;
    match control.features() {
        Ok(features) if features & NEEDED == NEEDED => Ok(control),
        Ok(features) => Err(Error::Invalid(format!(
            "ublk_drv lacks features {:#x}: Linux 6.5 has them",
            NEEDED & !features
        ))),
        Err(error) => Err(Error::Host {
            doing: "asking ublk_drv for its features (Linux 6.5)".into(),
            source: error,
        }),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Kept {
    id: u32,
    mark: u64,
}

/// What a device shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Content {
    pub size: u64,
    /// Of the layer's index.
    pub hash: [u8; 32],
}

struct Block {
    id: u32,
    content: Content,
    /// Its layer is not served any more.
    ends: bool,
    tray: Arc<Tray>,
    /// Disconnected when its thread has ended.
    ended: Receiver<()>,
}

pub struct Blocks {
    directory: PathBuf,
    held: Mutex<BTreeMap<String, Block>>,
    /// What is done about a device in use that cannot be served any more: by others, in another process.
    lost: fn(),
}

impl Blocks {
    pub fn new(directory: PathBuf) -> Blocks {
        Blocks {
            directory,
            held: Mutex::default(),
            lost: || std::process::exit(1), // another worker takes the device over
        }
    }

    pub fn has(&self, digest: &str) -> bool {
        let held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        held.get(digest).is_some_and(|block| !block.ends)
    }

    /// The device of a layer of so many bytes: the one there is, also of a worker before us, or a new one.
    pub fn attach<D: Driver>(
        &self,
        driver: &mut D,
        digest: &str,
        content: Content,
        reader: &dyn Fn() -> Reader,
    ) -> Result<PathBuf> {
        check_digest(digest)?;
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        self.reap(driver, &mut held);
        if let Some(block) = held.get_mut(digest) {
            if block.content != content {
                return Err(Error::Busy(
                    "somebody has a device open of what the layer was".into(),
                ));
            }
            if std::mem::take(&mut block.ends) {
                block.tray.go_on(reader());
            }
            return Ok(path_of(block.id));
        }
        if held.len() >= BLOCKS_MAX {
            return Err(Error::Busy(format!(
                "{BLOCKS_MAX} layers are block devices already"
            )));
        }
        if content.size == 0 {
            return Err(Error::Invalid("a block device is not empty".into()));
        }
        let block = match self.take_over(driver, digest, content, reader)? {
            Some(block) => block,
            None => self.make(driver, digest, content, reader)?,
        };
        let path = path_of(block.id);
        held.insert(digest.into(), block);
        Ok(path)
    }

    /// Nothing: there is none that could be taken over, and none is left.
    fn take_over<D: Driver>(
        &self,
        driver: &mut D,
        digest: &str,
        content: Content,
        reader: &dyn Fn() -> Reader,
    ) -> Result<Option<Block>> {
        let Some(kept) = self.kept(digest) else {
            return Ok(None);
        };
        let state = match driver.info(kept.id) {
            Ok(info) if info.mark == kept.mark => info.state,
            _ => {
                self.forget(digest); // it is gone, or another's
                return Ok(None);
            }
        };
        if state != STATE_DEAD {
            match self.recover(driver, kept.id, content, reader()) {
                Ok(block) => return Ok(Some(block)),
                Err(error) if driver.is_used(kept.id) => return Err(error),
                Err(error) => eprintln!("dsec-loader: the device of {digest} is lost: {error}"),
            }
        }
        self.give_up(driver, digest, kept.id);
        Ok(None)
    }

    fn recover<D: Driver>(
        &self,
        driver: &mut D,
        id: u32,
        content: Content,
        reader: Reader,
    ) -> Result<Block> {
        let deadline = Instant::now() + SEEN;
        loop {
            match driver.begin_recovery(id) {
                Ok(()) => break,
                Err(error)
                    if error.raw_os_error() == Some(libc::EBUSY) && Instant::now() < deadline =>
                {
                    std::thread::sleep(POLL);
                }
                Err(error) => return Err(error).doing("taking a block device over"),
            }
        }
        self.serve(driver, id, content, reader, D::end_recovery)
    }

    fn make<D: Driver>(
        &self,
        driver: &mut D,
        digest: &str,
        content: Content,
        reader: &dyn Fn() -> Reader,
    ) -> Result<Block> {
        let doing = || format!("keeping the device of {digest}");
        make_private(&self.directory).doing(doing())?;
        let mut tries = 0;
        let id = loop {
            let kept = draw().doing("drawing a number")?;
            let text = format!("{} {}\n", kept.id, kept.mark);
            std::fs::write(self.directory.join(digest), text).doing(doing())?;
            tries += 1;
            match driver.add(kept.id, kept.mark) {
                Ok(()) => break kept.id,
                Err(error) if error.raw_os_error() == Some(libc::EEXIST) && tries < TRIES => {}
                Err(error) => {
                    self.forget(digest);
                    return Err(error).doing("making a block device");
                }
            }
        };
        driver
            .set_size(id, sectors_of(content.size))
            .doing("setting the size of a block device")
            .and_then(|()| self.serve(driver, id, content, reader(), D::start))
            .inspect_err(|_| self.give_up(driver, digest, id))
    }

    /// `begin` ends when the kernel has been asked for all requests that there may be at once.
    fn serve<D: Driver>(
        &self,
        driver: &mut D,
        id: u32,
        content: Content,
        reader: Reader,
        begin: fn(&mut D, u32) -> io::Result<()>,
    ) -> Result<Block> {
        let queue = driver
            .queue(id)
            .doing(format!("opening the queue of block device {id}"))?;
        let desk = Desk::new(queue, content.size, reader).doing("making a queue")?;
        let tray = desk.tray();
        let (alive, ended) = channel::<()>();
        let begun = Arc::new(AtomicBool::new(false));
        let (in_use, lost) = (Arc::clone(&begun), self.lost);
        let work = move || {
            let _alive = alive;
            if let Err(error) = distrusted().and_then(|()| desk.work()) {
                eprintln!("dsec-loader: block device {id}: {error}");
                if in_use.load(Ordering::Acquire) {
                    lost();
                }
            }
        };
        std::thread::Builder::new()
            .name("block".into())
            .stack_size(STACK_BYTES)
            .spawn(work)
            .doing("starting a thread")?;
        begin(driver, id)
            .doing(format!("starting block device {id}"))
            .inspect_err(|_| tray.end())?;
        begun.store(true, Ordering::Release);
        if ended.try_recv() == Err(TryRecvError::Disconnected) {
            return Err(Error::Busy(format!("block device {id} ended as it began")));
        }
        Ok(Block {
            id,
            content,
            ends: false,
            tray,
            ended,
        })
    }

    /// Its layer is served no longer: who reads it gets errors from now on, and once nobody has it open it goes. Again is
    /// success.
    pub fn detach<D: Driver>(&self, driver: &mut D, digest: &str) {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(block) = held.get_mut(digest) {
            block.ends = true;
            block.tray.end();
        }
        self.reap(driver, &mut held);
    }

    pub fn detach_all<D: Driver>(&self, driver: &mut D) {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        for block in held.values_mut() {
            block.ends = true;
            block.tray.end();
        }
        self.reap(driver, &mut held);
    }

    /// Some that have ended are still there. Does not wait for somebody who makes or takes one.
    pub fn has_ended(&self) -> bool {
        let held = self.held.try_lock();
        held.is_ok_and(|held| held.values().any(|block| block.ends))
    }

    pub fn reap_all<D: Driver>(&self, driver: &mut D) {
        self.reap(
            driver,
            &mut self.held.lock().unwrap_or_else(PoisonError::into_inner),
        );
    }

    /// What has ended and is not open any more goes.
    fn reap<D: Driver>(&self, driver: &mut D, held: &mut BTreeMap<String, Block>) {
        held.retain(|digest, block| {
            if !block.ends || driver.is_used(block.id) {
                return true;
            }
            self.give_up(driver, digest, block.id);
            // Not for ever: a device that the kernel keeps is in `loader.blocks`, or gone.
            let _ = block.ended.recv_timeout(SEEN);
            false
        });
    }

    /// Devices of workers before us that we do not serve go, if nobody has them open.
    pub fn sweep<D: Driver>(&self, driver: &mut D) {
        for digest in recorded(&self.directory) {
            let Some(kept) = self.kept(&digest) else {
                self.forget(&digest);
                continue;
            };
            let held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
            if held.contains_key(&digest) {
                continue;
            }
            drop(held);
            match driver.info(kept.id) {
                Ok(info) if info.mark == kept.mark => {
                    if driver.is_used(kept.id) {
                        eprintln!("dsec-loader: block device {} is open, and stays", kept.id);
                    } else {
                        self.give_up(driver, &digest, kept.id);
                    }
                }
                _ => self.forget(&digest),
            }
        }
    }

    fn give_up<D: Driver>(&self, driver: &mut D, digest: &str, id: u32) {
        let _ = driver.stop(id); // one that was never started is not to be stopped
        match driver.delete(id) {
            Ok(()) => self.forget(digest),
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => self.forget(digest),
            // It is kept in mind: the next one tries again.
            Err(error) => eprintln!("dsec-loader: block device {id} stays: {error}"),
        }
    }

    fn kept(&self, digest: &str) -> Option<Kept> {
        let text = std::fs::read_to_string(self.directory.join(digest)).ok()?;
        let mut words = text.split_whitespace();
        Some(Kept {
            id: words.next()?.parse().ok()?,
            mark: words.next()?.parse().ok()?,
        })
    }

    fn forget(&self, digest: &str) {
        let _ = std::fs::remove_file(self.directory.join(digest));
    }
}

/// Layers of which there are devices, or were.
pub fn recorded(directory: &Path) -> Vec<String> {
    let all = std::fs::read_dir(directory).into_iter().flatten().flatten();
    all.map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| check_digest(name).is_ok())
        .collect()
}

/// When nobody serves any more.
pub fn clear(directory: &Path) {
    if recorded(directory).is_empty() {
        return;
    }
    match open() {
        Ok(mut control) => Blocks::new(directory.into()).sweep(&mut control),
        Err(error) => eprintln!("dsec-loader: block devices stay: {error}"),
    }
}

/// By a process of this machine, or by its kernel.
fn is_open(path: &Path) -> bool {
    let Ok(device) = std::fs::metadata(path).map(|facts| facts.rdev()) else {
        return false; // it is not there yet, or no longer
    };
    let alone = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_EXCL | libc::O_CLOEXEC)
        .open(path);
    if alone.is_err_and(|error| error.raw_os_error() == Some(libc::EBUSY)) {
        return true; // mounted
    }
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    processes
        .filter_map(|process| std::fs::read_dir(process.path().join("fd")).ok())
        .flatten()
        .flatten()
        .any(|file| {
            std::fs::metadata(file.path())
                .is_ok_and(|facts| facts.file_type().is_block_device() && facts.rdev() == device)
        })
}

fn path_of(id: u32) -> PathBuf {
    PathBuf::from(format!("/dev/ublkb{id}"))
}

fn draw() -> io::Result<Kept> {
    let mut bytes = [0; 12];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    let (id, mark) = bytes.split_at(4);
    let id = u32::from_ne_bytes(id.try_into().unwrap_or_default());
    Ok(Kept {
        id: NUMBERS.start + id % (NUMBERS.end - NUMBERS.start),
        mark: u64::from_ne_bytes(mark.try_into().unwrap_or_default()),
    })
}

/// The kernel looks for partitions on what somebody serves who may do everything. A disk is its owner's: nobody but a
/// machine is to read what he has written there. This thread may therefore do less; others keep what they may do.
fn distrusted() -> io::Result<()> {
    let held = own_capabilities()?;
    set_own_capabilities(CapSets {
        effective: held.effective & !CAP_SYS_ADMIN,
        permitted: held.permitted & !CAP_SYS_ADMIN,
        inheritable: held.inheritable & !CAP_SYS_ADMIN,
    })
}

#[cfg(test)]
#[path = "blocks_tests.rs"]
mod tests;
