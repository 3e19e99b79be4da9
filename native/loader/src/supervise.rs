//! The supervisor: opens and mounts /dev/fuse, or makes a fanotify group, and holds it, so that a worker that dies can be
//! followed by another. It does nothing else, so there is little that it could die of.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use dsec_sys::fuse::mount_fuse;
use dsec_sys::mounts::unmount;
use dsec_sys::process::kill;
use dsec_sys::seqpacket::{next_signal, signal_descriptor, wait_ready, Interest};

use crate::blocks;
use crate::error::{Doing, Error, Result};
use crate::front::{choose, Wish};
use crate::fuse::{shake_hands, READ_BYTES_MAX};
use crate::keeper::{self, Keeper};
use crate::library::is_mounted;

const PAUSE_FIRST: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// A worker that lived this long had started well.
const LIVED: Duration = Duration::from_secs(30);
/// How long a keeper is waited for that is about to let the lock go.
const GIVE_WAY: Duration = Duration::from_secs(10);
const END_TIMEOUT: Duration = Duration::from_secs(20);

pub struct Place {
    pub run: PathBuf,
}

impl Place {
    pub fn mount(&self) -> PathBuf {
        self.run.join("loader")
    }

    pub fn socket(&self) -> PathBuf {
        self.run.join("loader.sock")
    }

    pub fn active(&self) -> PathBuf {
        self.run.join("loader.active")
    }

    pub fn lock(&self) -> PathBuf {
        self.run.join("loader.lock")
    }

    /// Whose lock the keeper has.
    pub fn keep(&self) -> PathBuf {
        self.run.join("loader.keep")
    }

    pub fn waits(&self) -> PathBuf {
        self.run.join("loader.waits")
    }

    /// Devices that there are.
    pub fn blocks(&self) -> PathBuf {
        self.run.join("loader.blocks")
    }

    pub fn pid(&self) -> PathBuf {
        self.run.join("loader.pid")
    }
}

/// What the worker reads, kept for the next one.
struct Held {
    device: File,
    front: Wish,
    resends: bool,
    keeper: Option<Keeper>,
}

/// Keeps a worker running until it ends in order or we are told to end. `words` are the worker's arguments.
pub fn supervise(place: &Place, words: &[String], wish: Wish, cache: &Path) -> Result<()> {
    let signals = signal_descriptor(&[libc::SIGTERM, libc::SIGINT, libc::SIGCHLD, libc::SIGHUP])
        .doing("blocking signals")?;
    clear(&place.mount())?;
    let keeper = Keeper::find(place)?;
    let front = choose(wish, cache, keeper.is_some())?;
    let ended = match front {
        Wish::Fanotify => guard(keeper, place, words),
        Wish::Fuse | Wish::Auto => mount(place),
    }
    .and_then(|(mut held, again)| {
        std::fs::write(place.pid(), format!("{}\n", std::process::id()))
            .doing("writing our process id")?;
        keep_running(&mut held, &signals, words, again)
    });
    tidy(place).and(ended)
}

fn mount(place: &Place) -> Result<(Held, bool)> {
    let mount = place.mount();
    std::fs::create_dir_all(&mount).doing(format!("making {}", mount.display()))?;
    forget(place);
    let device = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_CLOEXEC)
        .open("/dev/fuse")
        .doing("opening /dev/fuse")?;
    let path = std::ffi::CString::new(mount.as_os_str().as_bytes())
        .map_err(|_| Error::Invalid("a path with NUL".into()))?;
    mount_fuse(device.as_fd(), &path, READ_BYTES_MAX)
        .doing(format!("mounting {}", mount.display()))?;
    let resends = shake_hands(&device)?;
    let held = Held {
        device,
        front: Wish::Fuse,
        resends,
        keeper: None,
    };
    Ok((held, false))
}

/// With a keeper, its group goes on, with all that an earlier one served.
fn guard(keeper: Option<Keeper>, place: &Place, words: &[String]) -> Result<(Held, bool)> {
    let again = keeper.is_some();
    let (device, keeper) = if let Some(keeper) = keeper {
        keeper.stay();
        (keeper.group()?, keeper)
    } else {
        forget(place);
        let group = dsec_sys::fanotify::new_group().doing("making a fanotify group")?;
        let group = File::from(group);
        let keeper = keeper::start(&group, words)?;
        (group, keeper)
    };
    let held = Held {
        device,
        front: Wish::Fanotify,
        resends: true, // by us: what a worker has not answered is kept
        keeper: Some(keeper),
    };
    Ok((held, again))
}

/// What an earlier one served went with its mount, or its group, but for what its readers have a device of.
fn forget(place: &Place) {
    let devices = blocks::recorded(&place.blocks());
    for entry in std::fs::read_dir(place.active())
        .into_iter()
        .flatten()
        .flatten()
    {
        let name = entry.file_name().to_string_lossy().into_owned();
        if !devices.contains(&name) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// What is to be gone when nobody serves.
pub fn tidy(place: &Place) -> Result<()> {
    let _ = std::fs::remove_file(place.socket());
    let _ = std::fs::remove_file(place.pid());
    blocks::clear(&place.blocks());
    if let Ok(Some(keeper)) = Keeper::find(place) {
        keeper.let_go();
    }
    clear(&place.mount())
}

fn keep_running(
    held: &mut Held,
    signals: &OwnedFd,
    words: &[String],
    mut again: bool,
) -> Result<()> {
    let mut pause = PAUSE_FIRST;
    loop {
        let started = Instant::now();
        match start(held, words, again) {
            Ok(mut worker) => {
                let (status, told) = wait(&mut worker, signals, held, words)?;
                if told || status.success() {
                    return Ok(());
                }
                let how = status
                    .signal()
                    .map_or(format!("exit code {:?}", status.code()), |signal| {
                        format!("signal {signal}")
                    });
                eprintln!("dsec-loader: the worker ended by {how}; another one is started");
            }
            // A machine that is out of processes or memory is so for a while: readers wait on the mount.
            Err(error) if again => eprintln!("dsec-loader: {error}"),
            Err(error) => return Err(error),
        }
        pause = if started.elapsed() > LIVED {
            PAUSE_FIRST
        } else {
            (pause * 2).min(PAUSE_MAX)
        };
        if wait_for_end(signals, pause)? {
            return Ok(());
        }
        again = true;
    }
}

fn start(held: &Held, words: &[String], again: bool) -> Result<Child> {
    let own = own_program()?;
    let device = held.device.try_clone().doing("giving the device on")?;
    let mut command = Command::new(own);
    command
        .arg("--worker")
        .args(words)
        .args(["--front", held.front.word()])
        .stdin(Stdio::from(device))
        .stdout(Stdio::null());
    if again {
        command.arg("--again");
    }
    if held.resends {
        command.arg("--resends");
    }
    command
        .process_group(0)
        .spawn()
        .doing("starting the worker")
}

/// Our program, also when its file has been replaced by an upgrade.
pub fn own_program() -> Result<PathBuf> {
    let path = std::env::current_exe().doing("finding our program")?;
    Ok(if path.exists() {
        path
    } else {
        PathBuf::from("/proc/self/exe")
    })
}

/// How the worker ended, and whether we were told to end.
fn wait(
    worker: &mut Child,
    signals: &OwnedFd,
    held: &mut Held,
    words: &[String],
) -> Result<(std::process::ExitStatus, bool)> {
    let mut deadline: Option<Instant> = None;
    let mut killed = false;
    loop {
        if let Some(status) = worker.try_wait().doing("waiting for the worker")? {
            return Ok((status, deadline.is_some()));
        }
        let mut left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        if killed || left == Some(Duration::ZERO) {
            if !std::mem::replace(&mut killed, true) {
                let _ = worker.kill();
            }
            left = None; // it may hang in the kernel, in a file system that is gone: SIGCHLD comes when it does not
        }
        let mut interests = vec![(signals.as_fd(), Interest::Readable)];
        if let Some(keeper) = &held.keeper {
            interests.push((keeper.process.as_fd(), Interest::Readable));
        } else if held.front == Wish::Fanotify {
            left = Some(left.unwrap_or(PAUSE_MAX).min(PAUSE_MAX)); // to try again
        }
        let lost = match wait_ready(&interests, left) {
            Err(error) if error.kind() != std::io::ErrorKind::Interrupted => {
                return Err(error).doing("waiting for signals");
            }
            ready => ready.is_ok_and(|ready| ready.get(1) == Some(&true)),
        };
        if held.front == Wish::Fanotify && (lost || held.keeper.is_none()) {
            // Readers must never have only us.
            held.keeper = keeper::start(&held.device, words)
                .inspect_err(|error| eprintln!("dsec-loader: {error}"))
                .ok();
        }
        while let Some(signal) = next_signal(signals.as_fd()) {
            if signal.number != libc::SIGCHLD && deadline.is_none() {
                deadline = Some(Instant::now() + END_TIMEOUT);
                let _ = kill(worker.id() as i32, libc::SIGTERM);
            }
        }
    }
}

fn wait_for_end(signals: &OwnedFd, pause: Duration) -> Result<bool> {
    let _ = wait_ready(&[(signals.as_fd(), Interest::Readable)], Some(pause))
        .doing("waiting for signals")?;
    let mut told = false;
    while let Some(signal) = next_signal(signals.as_fd()) {
        told |= signal.number != libc::SIGCHLD;
    }
    Ok(told)
}

/// Takes away what is mounted there, of ours or of one that died; readers of it get ENOTCONN from now on.
fn clear(mount: &Path) -> Result<()> {
    let path = std::ffi::CString::new(mount.as_os_str().as_bytes())
        .map_err(|_| Error::Invalid("a path with NUL".into()))?;
    while is_mounted(mount) {
        unmount(&path, true).doing(format!("unmounting {}", mount.display()))?;
    }
    Ok(())
}

/// One supervisor a run directory: the lock is held as long as it lives, and its worker after it. `given`: who started us
/// has it, as our standard input.
pub fn lock(place: &Place, given: bool) -> Result<Option<File>> {
    if given {
        let lock = dsec_sys::fuse::standard_input().doing("taking the lock")?;
        return Ok(Some(File::from(lock)));
    }
    let deadline = Instant::now() + GIVE_WAY;
    loop {
        if let Some(lock) = try_lock_file(&place.lock())? {
            return Ok(Some(lock));
        }
        // One that refuses what is left of an earlier loader has the lock now and then.
        match Keeper::find(place)? {
            Some(keeper) if keeper.ends && Instant::now() < deadline => keeper.stay(),
            _ => return Ok(None),
        }
        std::thread::sleep(PAUSE_FIRST);
    }
}

pub fn try_lock_file(path: &Path) -> Result<Option<File>> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)
        .doing(format!("opening {}", path.display()))?;
    match dsec_sys::fuse::try_lock(file.as_fd()) {
        Ok(true) => Ok(Some(file)),
        Ok(false) => Ok(None),
        Err(error) => Err(error).doing(format!("locking {}", path.display())),
    }
}

/// Lets a child have a descriptor too.
pub fn inherit(file: &File) -> Result<()> {
    dsec_sys::fuse::keep_on_exec(file.as_raw_fd()).doing("keeping the lock")
}
