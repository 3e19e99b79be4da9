//! The supervisor: opens and mounts /dev/fuse, and holds it, so that a worker that dies can be followed by another on the
//! same mount. It does nothing else, so there is little that it could die of.

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

use crate::error::{Doing, Error, Result};
use crate::fuse::{shake_hands, READ_BYTES_MAX};
use crate::library::is_mounted;

const PAUSE_FIRST: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// A worker that lived this long had started well.
const LIVED: Duration = Duration::from_secs(30);
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

    pub fn pid(&self) -> PathBuf {
        self.run.join("loader.pid")
    }
}

/// Mounts, and keeps a worker running until it ends in order or we are told to end. `words` are the worker's arguments.
pub fn supervise(place: &Place, words: &[String]) -> Result<()> {
    let signals = signal_descriptor(&[libc::SIGTERM, libc::SIGINT, libc::SIGCHLD, libc::SIGHUP])
        .doing("blocking signals")?;
    let mount = place.mount();
    clear(&mount)?;
    std::fs::create_dir_all(&mount).doing(format!("making {}", mount.display()))?;
    // What an earlier one served went with its mount.
    let _ = std::fs::remove_dir_all(place.active());
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
    let ended = shake_hands(&device).and_then(|resends| {
        std::fs::write(place.pid(), format!("{}\n", std::process::id()))
            .doing("writing our process id")?;
        keep_running(&device, &signals, words, resends)
    });
    tidy(place).and(ended)
}

/// What is to be gone when nobody serves.
pub fn tidy(place: &Place) -> Result<()> {
    let _ = std::fs::remove_file(place.socket());
    let _ = std::fs::remove_file(place.pid());
    clear(&place.mount())
}

fn keep_running(device: &File, signals: &OwnedFd, words: &[String], resends: bool) -> Result<()> {
    let mut pause = PAUSE_FIRST;
    let mut again = false;
    loop {
        let started = Instant::now();
        match start(device, words, again, resends) {
            Ok(mut worker) => {
                let (status, told) = wait(&mut worker, signals)?;
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

fn start(device: &File, words: &[String], again: bool, resends: bool) -> Result<Child> {
    let own = own_program()?;
    let device = device.try_clone().doing("giving the device on")?;
    let mut command = Command::new(own);
    command
        .arg("--worker")
        .args(words)
        .stdin(Stdio::from(device))
        .stdout(Stdio::null());
    if again {
        command.arg("--again");
    }
    if resends {
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
fn wait(worker: &mut Child, signals: &OwnedFd) -> Result<(std::process::ExitStatus, bool)> {
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
        match wait_ready(&[(signals.as_fd(), Interest::Readable)], left) {
            Err(error) if error.kind() != std::io::ErrorKind::Interrupted => {
                return Err(error).doing("waiting for signals");
            }
            _ => {}
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

/// One supervisor a run directory: the lock is held as long as it lives, and its worker after it.
pub fn lock(place: &Place) -> Result<Option<File>> {
    let path = place.lock();
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&path)
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
