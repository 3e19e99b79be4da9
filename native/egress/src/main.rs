//! dsec-egress: what sandboxes with a network reach, they reach through this. `docs/internals/egress.md`.

mod addresses;
mod bindings;
mod confine;
mod denied;
mod desk;
mod dns;
mod error;
mod flow;
mod keeper;
mod limits;
mod memory;
mod network;
mod packet;
mod peek;
mod policy;
mod question;
mod random;
mod rate;
mod sandbox;
mod server;
mod settings;
mod shared;
mod slab;
mod steering;
mod talk;
mod wire;

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use dsec_sys::passing::message_pair;
use dsec_sys::seqpacket::{self, Kind};
use dsec_sys::{identity, namespaces, paths, process, rights};

use crate::error::{Doing, Error, Result};
use crate::server::Server;
use crate::shared::Shared;

const USAGE: &str = "usage: dsec-egress --run DIR [--held BYTES]";
const EXIT_FAILED: i32 = 1;
const EXIT_USAGE: i32 = 2;
/// Another one serves this run directory.
const EXIT_LOCKED: i32 = 3;
const SOCKET: &str = "egress.sock";
const BACKLOG: i32 = 16;
/// Descriptors, if we may have as many: for thousands of sandboxes and tens of thousands of connections.
const DESCRIPTORS: [u64; 3] = [1 << 20, 1 << 18, 1 << 16];
/// Owns nothing.
const NOBODY: u32 = 65_534;
/// What the keeper needs: ports below 1024 and packets in sandboxes' networks, routes and programs there, finding and entering
/// these networks.
const CAPABILITIES: u64 = 1 << 10 | 1 << 12 | 1 << 13 | 1 << 19 | 1 << 21;

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let code = match parse(&words) {
        Some((run, held)) => run_in(run, held).unwrap_or_else(|error| {
            eprintln!("dsec-egress: {error}");
            EXIT_FAILED
        }),
        None => {
            eprintln!("{USAGE}");
            EXIT_USAGE
        }
    };
    std::process::exit(code);
}

/// The run directory, and what connections may hold in the kernel if it is given.
fn parse(words: &[String]) -> Option<(&Path, Option<u64>)> {
    match words {
        [run, path] if run == "--run" => Some((Path::new(path), None)),
        [run, path, held, bytes] if run == "--run" && held == "--held" => {
            Some((Path::new(path), Some(bytes.parse().ok()?)))
        }
        _ => None,
    }
}

fn run_in(run: &Path, held: Option<u64>) -> Result<i32> {
    let run = std::fs::canonicalize(run).doing(format!("finding {}", run.display()))?;
    process::set_umask(0o077);
    let Some(lock) = lock(&run)? else {
        eprintln!("dsec-egress: another one serves {}", run.display());
        return Ok(EXIT_LOCKED);
    };
    let ready = match detach()? {
        Detached::Parent(code) => return Ok(code),
        Detached::Daemon(ready) => ready,
    };
    // Fails only for the leader of a group, which has a session of its own if its starter wanted that.
    let _ = namespaces::new_session();
    let descriptors = raise_descriptors()?;
    let (ours, theirs) = message_pair().doing("making a pair of sockets")?;
    match namespaces::clone(&namespaces::Clone::default()).doing("starting the server")? {
        namespaces::Side::Child => {
            drop(ours);
            let shared = || Shared::new(descriptors, held);
            serve(&run, shared, theirs, ready).map(|()| 0)
        }
        namespaces::Side::Parent { pid, .. } => {
            drop((theirs, ready));
            give_up_all_but(CAPABILITIES)?;
            confine::confine_keeper()?;
            keeper::keep(&ours)?;
            let status = namespaces::reap_one(pid).doing("waiting for the server")?;
            drop(lock); // held by both until now
            Ok(status >> 8 & 0xff)
        }
    }
}

/// What reads what strangers send has no rights.
fn serve(
    run: &Path,
    shared: impl FnOnce() -> Result<Shared>,
    keeper: OwnedFd,
    ready: OwnedFd,
) -> Result<()> {
    let signals =
        seqpacket::signal_descriptor(&[libc::SIGTERM, libc::SIGINT]).doing("blocking signals")?;
    let listener = listen(run)?;
    give_up_all_but(0)?;
    rights::become_for_good(NOBODY, NOBODY, &[], 0).doing("becoming nobody")?;
    let server = Server::new(listener, signals, keeper, shared()?)?;
    confine::confine_server()?;
    paths::write_once(ready.as_fd(), b"r").doing("telling that it serves")?;
    drop(ready);
    server.serve()
}

fn lock(run: &Path) -> Result<Option<OwnedFd>> {
    let path = run.join("egress.lock");
    let name = std::ffi::CString::new(path.as_os_str().as_bytes())
        .map_err(|_| Error::Invalid("a path with a null byte".into()))?;
    let file = paths::open_at(None, &name, libc::O_RDWR | libc::O_CREAT, 0o600)
        .doing(format!("opening {}", path.display()))?;
    let taken = paths::try_lock(file.as_fd()).doing(format!("locking {}", path.display()))?;
    Ok(taken.then_some(file))
}

enum Detached {
    Parent(i32),
    Daemon(OwnedFd),
}

/// Goes on in a process of its own. The parent waits until that serves, or has failed, and has its exit code.
fn detach() -> Result<Detached> {
    let (told, tell) = seqpacket::pipe().doing("making a pipe")?;
    match namespaces::clone(&namespaces::Clone::default()).doing("starting the daemon")? {
        namespaces::Side::Child => Ok(Detached::Daemon(tell)),
        namespaces::Side::Parent { pid, .. } => {
            drop(tell);
            match paths::read_once(told.as_fd(), &mut [0]).doing("waiting for the daemon")? {
                0 => {
                    let status = namespaces::reap_one(pid).doing("waiting for the daemon")?;
                    Ok(Detached::Parent((status >> 8 & 0xff).max(EXIT_FAILED)))
                }
                _ => Ok(Detached::Parent(0)),
            }
        }
    }
}

fn raise_descriptors() -> Result<u64> {
    let kind = identity::resource("nofile").unwrap_or(libc::RLIMIT_NOFILE);
    for count in DESCRIPTORS {
        if identity::set_limit(kind, count, count).is_ok() {
            return Ok(count);
        }
    }
    let (_, most) = process::raise_open_files().doing("raising the limit of open files")?;
    Ok(most)
}

/// None comes back by starting a program.
fn give_up_all_but(keep: u64) -> Result<()> {
    identity::clear_groups().doing("leaving all groups")?;
    identity::bound_capabilities(keep, identity::last_capability()).doing("giving rights up")?;
    if keep != 0 {
        let held = identity::capabilities()
            .doing("looking at rights")?
            .permitted
            & keep;
        let sets = identity::CapabilitySets {
            effective: held,
            permitted: held,
            inheritable: 0,
        };
        identity::set_capabilities(sets).doing("giving rights up")?;
    }
    identity::no_new_privileges().doing("giving rights up")
}

fn listen(run: &Path) -> Result<OwnedFd> {
    // By way of the directory, since a socket's address has at most 107 bytes.
    std::env::set_current_dir(run).doing(format!("entering {}", run.display()))?;
    match std::fs::remove_file(SOCKET) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(error).doing("removing the socket of before")
        }
        _ => {}
    }
    let listener = seqpacket::listen(Kind::Messages, c"egress.sock", BACKLOG)
        .doing(format!("listening in {}", run.display()))?;
    std::env::set_current_dir("/").doing("entering /")?;
    Ok(listener)
}
