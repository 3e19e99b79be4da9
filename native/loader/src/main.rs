//! dsec-loader: serves the blobs of layers from a store, chunk by chunk as they are read. `docs/internals/loader.md`.

mod blocks;
mod cache;
mod desk;
mod error;
mod front;
mod fuse;
mod guard;
mod index;
mod keeper;
mod layer;
mod library;
mod pool;
mod shelf;
mod source;
mod supervise;
mod wire;
mod worker;

use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use dsec_sys::{identity, rights};

use crate::error::{Doing, Error, Result};
use crate::front::Wish;
use crate::library::Settings;
use crate::supervise::Place;
use crate::worker::Worker;

const USAGE: &str = "usage: dsec-loader --run DIR --cache DIR --cache-bytes N [--authorities FILE] [--front auto|fuse|fanotify]";
const AUTHORITIES: &str = "/etc/ssl/certs/ca-certificates.crt";
const START_TIMEOUT: Duration = Duration::from_secs(15);
const POLL: Duration = Duration::from_millis(10);
/// Words that say which of our processes one is.
const ROLES: [&str; 6] = [
    "--supervise",
    "--locked",
    "--keep",
    "--worker",
    "--again",
    "--resends",
];
const EXIT_USAGE: u8 = 2;
const EXIT_RUNS: u8 = 3;

#[derive(Default)]
struct Options {
    run: Option<PathBuf>,
    cache: Option<PathBuf>,
    cache_bytes: Option<u64>,
    authorities: Option<String>,
    front: Wish,
    supervise: bool,
    keep: bool,
    probe: bool,
    probe_blocks: bool,
    locked: bool,
    worker: bool,
    again: bool,
    resends: bool,
}

/// Files whoever's they are; groups of fanotify, mounts and block devices, and who has one open; limits, and not to be killed
/// first.
const RIGHTS: u64 = rights::CAP_CHOWN
    | rights::CAP_DAC_OVERRIDE
    | rights::CAP_DAC_READ_SEARCH
    | rights::CAP_FOWNER
    | rights::CAP_FSETID
    | rights::CAP_IPC_LOCK
    | rights::CAP_SYS_PTRACE
    | rights::CAP_SYS_ADMIN
    | rights::CAP_SYS_RESOURCE;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let Some(options) = parse(&words) else {
        eprintln!("{USAGE}");
        return ExitCode::from(EXIT_USAGE);
    };
    let words: Vec<String> = words
        .into_iter()
        .filter(|word| !ROLES.contains(&word.as_str()))
        .collect();
    match run(options, &words) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("dsec-loader: {error}");
            ExitCode::FAILURE
        }
    }
}

fn parse(words: &[String]) -> Option<Options> {
    let mut options = Options::default();
    let mut words = words.iter();
    while let Some(word) = words.next() {
        match word.as_str() {
            "--run" => options.run = Some(PathBuf::from(words.next()?)),
            "--cache" => options.cache = Some(PathBuf::from(words.next()?)),
            "--cache-bytes" => options.cache_bytes = Some(words.next()?.parse().ok()?),
            "--authorities" => options.authorities = Some(words.next()?.clone()),
            "--front" => options.front = Wish::parse(words.next()?)?,
            "--probe" => options.probe = true,
            "--probe-blocks" => options.probe_blocks = true,
            "--keep" => options.keep = true,
            "--locked" => options.locked = true,
            "--supervise" => options.supervise = true,
            "--worker" => options.worker = true,
            "--again" => options.again = true,
            "--resends" => options.resends = true,
            _ => return None,
        }
    }
    Some(options)
}

fn run(options: Options, words: &[String]) -> Result<ExitCode> {
    if options.probe_blocks {
        return blocks::open().map(|_| ExitCode::SUCCESS);
    }
    let needed = || Error::Invalid(USAGE.into());
    let run = options.run.ok_or_else(needed)?;
    let cache = options.cache.ok_or_else(needed)?;
    let cache_bytes = options.cache_bytes.ok_or_else(needed)?;
    if !run.is_absolute() || !cache.is_absolute() {
        return Err(Error::Invalid(
            "directories are given by absolute paths".into(),
        ));
    }
    if options.probe {
        guard::probe(&cache).doing("asking for pre-content events")?;
        return Ok(ExitCode::SUCCESS);
    }
    let place = Place { run };
    if !options.worker && !options.supervise && !options.keep {
        return detach(&place, words);
    }
    // Signed URLs and images with set-user-id programs are nobody else's.
    dsec_sys::process::set_umask(0o077);
    protect();
    give_up_all_but(RIGHTS)?;
    if options.keep {
        keeper::run(&place, &cache, words)?;
        return Ok(ExitCode::SUCCESS);
    }
    if !options.worker {
        let Some(lock) = supervise::lock(&place, options.locked)? else {
            eprintln!("dsec-loader: another one runs in {}", place.run.display());
            return Ok(ExitCode::from(EXIT_RUNS));
        };
        // The worker goes on without us, and nobody takes its place then.
        supervise::inherit(&lock)?;
        supervise::supervise(&place, words, options.front, &cache)?;
        return Ok(ExitCode::SUCCESS);
    }
    // Two files a layer, and the connections.
    dsec_sys::process::raise_open_files().doing("raising the limit of open files")?;
    let supervisor = std::os::unix::process::parent_id();
    let settings = Settings {
        cache,
        cache_bytes,
        active: place.active(),
        mount: place.mount(),
        waits: place.waits(),
        blocks: place.blocks(),
        supervisor,
        authorities: options.authorities.unwrap_or_else(|| AUTHORITIES.into()),
    };
    let orphan = move || std::os::unix::process::parent_id() != supervisor;
    let device: OwnedFd = dsec_sys::fuse::standard_input().doing("taking the device")?;
    if options.front == Wish::Fanotify {
        let group = device.try_clone().doing("keeping the group")?;
        let run = Place {
            run: place.run.clone(),
        };
        keeper::watch_over(group.into(), run, words.to_vec(), orphan)?;
    }
    Worker::start(
        settings,
        device,
        &place.socket(),
        options.front,
        options.again,
        options.resends,
    )?
    .serve()?;
    if orphan() {
        supervise::tidy(&place)?; // nobody else does
    }
    Ok(ExitCode::SUCCESS)
}

/// Starts the supervisor as a process of its own, and ends when it serves, or with its code when it does not.
fn detach(place: &Place, words: &[String]) -> Result<ExitCode> {
    let own = supervise::own_program()?;
    let mut supervisor = Command::new(own)
        .arg("--supervise")
        .args(words)
        .stdin(Stdio::null())
        .process_group(0)
        .spawn()
        .doing("starting the supervisor")?;
    let deadline = Instant::now() + START_TIMEOUT;
    while Instant::now() < deadline {
        if UnixStream::connect(place.socket())
            .is_err_and(|error| error.raw_os_error() == Some(libc::EPROTOTYPE))
        {
            return Ok(ExitCode::SUCCESS); // it listens, for messages
        }
        if let Some(status) = supervisor.try_wait().doing("waiting for the supervisor")? {
            let code = status.code().and_then(|code| u8::try_from(code).ok());
            return Ok(code.map_or(ExitCode::FAILURE, ExitCode::from));
        }
        std::thread::sleep(POLL);
    }
    let _ = dsec_sys::process::kill(supervisor.id() as i32, libc::SIGTERM); // it takes worker and mount with it
    Err(Error::Busy(format!(
        "the supervisor does not serve within {} s",
        START_TIMEOUT.as_secs()
    )))
}

/// It reads what strangers have made: no right that it does not need, none that comes back by starting a program, and no core
/// with what sandboxes read.
fn give_up_all_but(keep: u64) -> Result<()> {
    let held = rights::bounding_set();
    identity::no_new_privileges()
        .and_then(|()| rights::give_up(held & !keep))
        .and_then(|()| identity::set_limit(libc::RLIMIT_CORE, 0, 0))
        .doing("giving rights up")
}

/// It answers page faults: the kernel is asked to kill anything else first. Not everywhere may it be asked.
fn protect() {
    if let Ok(mut file) = std::fs::OpenOptions::new()
        .write(true)
        .open("/proc/self/oom_score_adj")
    {
        let _ = file.write_all(b"-900");
    }
}
