//! dsec-launch: turns plans into running sandboxes, and holds what must outlive the node (docs/internals/launcher.md).

mod agent;
mod args;
mod children;
mod claim;
mod connections;
mod daemon;
mod destroy;
mod error;
#[cfg(test)]
mod fake;
mod filter;
mod launch;
mod layers;
mod namespace;
mod prepare;
mod process;
mod records;
mod remove;
mod sandboxes;
mod steps;
mod sysfs;
mod system;
mod trash;
mod undo;
mod view;
mod wire;
mod workers;

use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use dsec_sys::seqpacket::{listen, signal_descriptor, Kind};
use dsec_sys::{identity, namespaces, paths, seqpacket};

use crate::agent::Agent;
use crate::args::Args;
use crate::daemon::{Daemon, Setting};
use crate::error::{Doing, Result};
use crate::layers::Layers;
use crate::records::Records;
use crate::sandboxes::Sandboxes;
use crate::steps::root;
use crate::sysfs::Sysfs;
use crate::system::{c_path, Kernel};
use crate::view::Views;

const EXIT_FAILED: i32 = 1;
const EXIT_USAGE: i32 = 2;
/// Another launcher serves this run directory.
const EXIT_LOCKED: i32 = 3;

fn main() {
    let code = match args::parse(std::env::args().skip(1)) {
        Ok(args) => run(args).unwrap_or_else(|error| {
            eprintln!("dsec-launch: {error}");
            EXIT_FAILED
        }),
        Err(wrong) => {
            eprintln!("dsec-launch: {wrong}\n{}", args::USAGE);
            EXIT_USAGE
        }
    };
    std::process::exit(code);
}

fn run(args: Args) -> Result<i32> {
    // 1. One launcher for a run directory.
    paths::set_file_mask(0); // every mode here is meant as it is written
    let run = std::fs::canonicalize(&args.run).doing_to("find", &args.run)?;
    let Some(lock) = lock(&run.join("launch.lock"))? else {
        eprintln!("dsec-launch: another one serves {}", run.display());
        return Ok(EXIT_LOCKED);
    };
    if args.unpin {
        view::end_left_over(&run);
        return namespace::unpin(&run).map(|()| 0);
    }

    // 2. Load what is needed while the caller still waits for the verdict.
    let agent = Agent::load(&args.agent)?;
    let ready = match args.foreground {
        true => None,
        false => match detach()? {
            Detached::Parent(code) => return Ok(code),
            Detached::Daemon(ready) => Some(ready),
        },
    };
    // Fails only for the leader of a group, which has a session of its own if its starter wanted that.
    let _ = namespaces::new_session();
    identity::clear_groups().doing("leave", "all groups")?;

    // 3. Namespaces: the pinned one, where layers live, and the bare one, from which sandboxes are cloned.
    let system =
        Kernel::new(identity::last_capability()).doing("make", "a proc of the launcher's own")?;
    let host_mounts = namespace::enter_pinned(&system, &run)?;
    let bare_mounts = namespace::make_bare(&system)?;
    let own_names = namespace::own_names()?;
    let layers_by_name = args.layers_by_name || !root::takes_detached_layers(&system);
    let layers = Layers::open(&system, &run)?;
    let views = Views::open(&system, layers.directory(), &run, args.lxcfs)?;
    let sysfs = Sysfs::open(&system, layers.directory())?;
    let (sandboxes, missed) = Sandboxes::adopt(Records::open(layers.directory())?)?;

    // 4. Serve.
    let signals = signal_descriptor(&[libc::SIGCHLD, libc::SIGTERM, libc::SIGINT])
        .doing("block", "signals")?;
    let listener = listen_at(&run)?;
    let pid = run.join("launch.pid");
    write_own(&pid, &format!("{}\n", std::process::id())).doing_to("write", &pid)?;
    if let Some(ready) = ready {
        become_silent(&system)?;
        paths::write_once(ready.as_fd(), b"r").doing("tell", "readiness")?;
    }
    let test_hooks = args.test_hooks;
    let setting = Setting {
        system: &system,
        run,
        agent,
        layers,
        views,
        sysfs,
        sandboxes,
        host_mounts,
        bare_mounts,
        own_names,
        layers_by_name,
        listener,
        signals,
        lock,
        test_hooks,
    };
    Daemon::new(setting, missed)?.serve()?;
    Ok(0)
}

/// Replaces the file. Sandboxes' files are made without a umask, ours are for us alone.
fn write_own(path: &Path, text: &str) -> std::io::Result<()> {
    let mut file = std::fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(path)?;
    file.write_all(text.as_bytes())
}

fn lock(path: &Path) -> Result<Option<OwnedFd>> {
    let name = c_path(path).doing_to("name", path)?;
    let file =
        paths::open_at(None, &name, libc::O_RDWR | libc::O_CREAT, 0o600).doing_to("open", path)?;
    let taken = paths::try_lock(file.as_fd()).doing_to("lock", path)?;
    Ok(taken.then_some(file))
}

fn listen_at(run: &Path) -> Result<OwnedFd> {
    // By way of the directory, since a socket's address has at most 107 bytes.
    std::env::set_current_dir(run).doing_to("enter", run)?;
    match std::fs::remove_file("launch.sock") {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(error).doing_to("remove the socket in", run)
        }
        _ => {}
    }
    let listener = listen(Kind::Messages, c"launch.sock", 64).doing_to("listen in", run)?;
    std::env::set_current_dir("/").doing("enter", "/")?;
    Ok(listener)
}

enum Detached {
    Parent(i32),
    Daemon(OwnedFd),
}

/// Goes on in a process of its own. The parent waits until that serves, or has failed, and has its exit code.
fn detach() -> Result<Detached> {
    let (ready_read, ready_write) = seqpacket::pipe().doing("make", "a pipe")?;
    match namespaces::clone(&namespaces::Clone::default()).doing("clone", "the daemon")? {
        namespaces::Side::Child => Ok(Detached::Daemon(ready_write)),
        namespaces::Side::Parent { pid, .. } => {
            drop(ready_write);
            match paths::read_once(ready_read.as_fd(), &mut [0]).doing("wait for", "the daemon")? {
                0 => {
                    let status = namespaces::reap_one(pid).doing("wait for", "the daemon")?;
                    Ok(Detached::Parent((status >> 8 & 0xff).max(EXIT_FAILED)))
                }
                _ => Ok(Detached::Parent(0)),
            }
        }
    }
}

/// Lets go of the starter's terminal and pipes.
fn become_silent(system: &Kernel) -> Result<()> {
    use crate::system::{Access, System};
    let null = system
        .open(Path::new("/dev/null"), Access::ReadWrite)
        .doing("open", "/dev/null")?;
    seqpacket::replace_standard(null.as_fd()).doing("replace", "standard descriptors")
}
