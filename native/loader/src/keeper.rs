//! The keeper: has the fanotify group open besides the supervisor and the worker, and does nothing else. When both have
//! died, readers wait on, and it starts another supervisor. After an orderly end it stays, and answers reads by EIO, until
//! nobody has a file open that has holes.

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use dsec_sys::fanotify::{answer, next_event, take_descriptor};
use dsec_sys::namespaces::{open_process, signal_process};
use dsec_sys::seqpacket::{next_signal, signal_descriptor, wait_ready, Interest};

use crate::error::{Doing, Error, Result};
use crate::supervise::{own_program, try_lock_file, Place};

const POLL: Duration = Duration::from_secs(1);
/// How long it lets a supervisor start that somebody else has begun.
const GIVE_WAY: Duration = Duration::from_secs(2);
const PAUSE_FIRST: Duration = Duration::from_millis(50);
const ENDS: &str = "ends";
const STAYS: &str = "stays";
const GROUP: i32 = 0; // as what every keeper has it open

/// Another process: the one that keeps the group of a run directory.
pub struct Keeper {
    pub process: OwnedFd,
    /// It has been told to end, and holds the lock now and then while it refuses what is still read.
    pub ends: bool,
}

impl Keeper {
    /// None when there is none: the lock says, not the number in the file.
    pub fn find(place: &Place) -> Result<Option<Keeper>> {
        let path = place.keep();
        let Ok(mut file) = File::open(&path) else {
            return Ok(None);
        };
        if dsec_sys::fuse::try_lock(file.as_fd()).doing("looking for a keeper")? {
            return Ok(None);
        }
        let mut text = String::new();
        file.read_to_string(&mut text)
            .doing(format!("reading {}", path.display()))?;
        let mut words = text.split_whitespace();
        let Some(pid) = words.next().and_then(|word| word.parse::<i32>().ok()) else {
            return Ok(None); // it has only just begun, and has not had the group for longer than who began it
        };
        let process = open_process(pid).doing("opening the keeper")?;
        let ends = words.next() == Some(ENDS);
        Ok(Some(Keeper { process, ends }))
    }

    pub fn group(&self) -> Result<File> {
        let group = take_descriptor(self.process.as_fd(), GROUP).doing("taking the group")?;
        Ok(File::from(group))
    }

    /// It is to end once nobody reads.
    pub fn let_go(&self) {
        let _ = signal_process(self.process.as_fd(), libc::SIGTERM);
    }

    /// A supervisor begins.
    pub fn stay(&self) {
        let _ = signal_process(self.process.as_fd(), libc::SIGHUP);
    }
}

/// Starts one, for a supervisor; its end is seen by the process.
pub fn start(group: &File, words: &[String]) -> Result<Keeper> {
    let group = group.try_clone().doing("giving the group on")?;
    let child = Command::new(own_program()?)
        .arg("--keep")
        .args(words)
        .stdin(Stdio::from(group))
        .stdout(Stdio::null())
        .process_group(0)
        .spawn()
        .doing("starting the keeper")?;
    let process = open_process(child.id() as i32).doing("opening the keeper")?;
    let ends = false;
    Ok(Keeper { process, ends })
}

/// In a worker: whose supervisor has died sees to the keeper itself, for readers must never have only us.
pub fn watch_over(
    group: File,
    place: Place,
    words: Vec<String>,
    orphan: impl Fn() -> bool + Send + 'static,
) -> Result<()> {
    let watch = move || loop {
        std::thread::sleep(POLL);
        if !orphan() {
            continue;
        }
        let kept = Keeper::find(&place).and_then(|keeper| match keeper {
            Some(keeper) => Ok(keeper),
            None => start(&group, &words),
        });
        match kept {
            Ok(keeper) => {
                let ended = [(keeper.process.as_fd(), Interest::Readable)];
                let _ = wait_ready(&ended, None);
            }
            Err(error) => eprintln!("dsec-loader: {error}"),
        }
    };
    std::thread::Builder::new()
        .name("keeper".into())
        .spawn(watch)
        .doing("starting a thread")
        .map(drop)
}

/// What a keeper does.
pub fn run(place: &Place, cache: &Path, words: &[String]) -> Result<()> {
    // Above all the lock, which is our supervisor's and its worker's.
    dsec_sys::process::close_all_but(&[]).doing("closing what others have open")?;
    let signals = signal_descriptor(&[libc::SIGTERM, libc::SIGHUP, libc::SIGCHLD, libc::SIGINT])
        .doing("blocking signals")?;
    let Some(mine) = try_lock_file(&place.keep())? else {
        return Ok(()); // one is enough
    };
    write_about(&mine, false)?;
    let group = dsec_sys::fuse::standard_input().doing("taking the group")?;
    let mut ends = false;
    let mut quiet_until = Instant::now();
    let mut pause = PAUSE_FIRST;
    let mut supervisor: Option<Child> = None;
    loop {
        let _ = wait_ready(
            &[(signals.as_fd(), Interest::Readable)],
            Some(POLL.min(pause)),
        );
        let (mut stays, mut told) = (false, false);
        while let Some(signal) = next_signal(signals.as_fd()) {
            stays |= signal.number == libc::SIGHUP;
            told |= matches!(signal.number, libc::SIGTERM | libc::SIGINT);
        }
        if stays {
            // Which of both came last cannot be told; to stay is never wrong for readers.
            ends = false;
            quiet_until = Instant::now() + GIVE_WAY;
        } else if told {
            ends = true;
        }
        if stays || told {
            write_about(&mine, ends)?;
        }
        pause = (pause * 2).min(POLL);
        if let Some(child) = supervisor.as_mut() {
            if child
                .try_wait()
                .doing("waiting for the supervisor")?
                .is_some()
            {
                supervisor = None;
            }
        }
        if !ends && Instant::now() < quiet_until {
            continue;
        }
        let Some(lock) = try_lock_file(&place.lock())? else {
            continue; // somebody serves
        };
        if !ends {
            eprintln!("dsec-loader: supervisor and worker have died; others are started");
            match start_supervisor(lock, words) {
                Ok(child) => supervisor = Some(child),
                Err(error) => eprintln!("dsec-loader: {error}"),
            }
            quiet_until = Instant::now() + GIVE_WAY;
            continue;
        }
        // The lock is ours: nobody else reads events.
        refuse(&group)?;
        if nobody_reads(cache) {
            let _ = std::fs::remove_file(place.keep());
            return Ok(());
        }
    }
}

/// For `find`: who we are, and whether we have the lock now and then.
fn write_about(file: &File, ends: bool) -> Result<()> {
    let text = format!(
        "{} {}\n",
        std::process::id(),
        if ends { ENDS } else { STAYS }
    );
    file.set_len(0)
        .and_then(|()| file.write_all_at(text.as_bytes(), 0))
        .doing("writing our process id")
}

fn start_supervisor(lock: File, words: &[String]) -> Result<Child> {
    Command::new(own_program()?)
        .args(["--supervise", "--locked"])
        .args(words)
        .stdin(Stdio::from(lock))
        .stdout(Stdio::null())
        .process_group(0)
        .spawn()
        .doing("starting a supervisor")
}

fn refuse(group: &OwnedFd) -> Result<()> {
    use std::os::fd::AsRawFd;
    loop {
        let ready = wait_ready(&[(group.as_fd(), Interest::Readable)], Some(Duration::ZERO));
        if !ready.is_ok_and(|ready| ready.contains(&true)) {
            return Ok(());
        }
        match next_event(group.as_fd()) {
            Ok(Some(event)) => {
                let _ = answer(group.as_fd(), event.file.as_raw_fd(), false);
            }
            Ok(None) => {}
            Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
            Err(error) => {
                return Err(Error::Host {
                    doing: "reading events".into(),
                    source: error,
                })
            }
        }
    }
}

fn nobody_reads(cache: &Path) -> bool {
    let all = std::fs::read_dir(cache).into_iter().flatten().flatten();
    all.into_iter()
        .all(|entry| !crate::cache::is_read(cache, &entry.file_name().to_string_lossy()))
}
