//! The two mount namespaces of the daemon.
//!
//! The *pinned* one has the host's whole tree as slave (what the host mounts later appears there, nothing gets out) and, below
//! the run directory, the layers. A file of the run directory holds it, so that it outlives any daemon. Paths of the host mean
//! there what they mean on the host. The *bare* one has nothing but what a new sandbox needs in sight: cloning copies every
//! mount, so its cost must not grow with the layers. It is made anew by each daemon.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use dsec_sys::mounts::{self, attr, Propagation};
use dsec_sys::namespaces::{self, Clone, Side, NEW_MOUNT};
use dsec_sys::paths;
use dsec_sys::seqpacket;

use crate::error::{Doing, Error, Result};
use crate::steps::root;
use crate::system::{c_path, Entry, Kernel, MountOption, System};

/// The file that pins the namespace, and the directory of layers in it.
pub const PIN: &str = "launch.mnt";
pub const LAYERS: &str = "layers";

/// Enters the pinned namespace, making it first if there is none. Returns a descriptor of it.
pub fn enter_pinned(system: &Kernel, run: &Path) -> Result<OwnedFd> {
    let pin = run.join(PIN);
    match open_pin(&pin)? {
        Some(namespace) => system
            .enter_mounts(namespace.as_fd())
            .doing_to("enter", &pin)?,
        None => make_pinned(system, run, &pin)?,
    }
    own_namespace()
}

fn own_namespace() -> Result<OwnedFd> {
    File::open("/proc/self/ns/mnt")
        .map(OwnedFd::from)
        .doing("open", "/proc/self/ns/mnt")
}

pub fn own_names() -> Result<OwnedFd> {
    File::open("/proc/self/ns/uts")
        .map(OwnedFd::from)
        .doing("open", "/proc/self/ns/uts")
}

/// The namespace that `pin` holds, None if it is no pin (yet).
fn open_pin(pin: &Path) -> Result<Option<OwnedFd>> {
    let file = match File::open(pin) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => OwnedFd::from(other.doing_to("open", pin)?),
    };
    let pinned = mounts::is_namespace(file.as_fd()).doing_to("look at", pin)?;
    Ok(pinned.then_some(file))
}

/// Only a process that is still on the host can bind the pin there, so one is left behind until that is done.
fn make_pinned(system: &Kernel, run: &Path, pin: &Path) -> Result<()> {
    File::create(pin).doing_to("make", pin)?;
    let source = format!("/proc/{}/ns/mnt", std::process::id());
    let helper = Helper::start(move |go| {
        seqpacket_read(go)?;
        bind_pin(&source, run, pin)
    })?;
    namespaces::unshare(NEW_MOUNT).doing("make", "a mount namespace")?;
    mounts::set_propagation(c"/", Propagation::Slave).doing("make a slave of", "/")?;
    let layers = run.join(LAYERS);
    match system.make_dir(&layers, 0o700) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        other => other.doing_to("make", &layers)?,
    }
    let options = [
        MountOption::Text(c"mode", "0700".into()),
        MountOption::Text(c"size", "64m".into()),
    ];
    let flags = attr::NO_DEVICES | attr::NO_SUID | attr::NO_EXEC;
    let tmpfs = system
        .make_mount(c"tmpfs", &options, flags)
        .doing_to("make a tmpfs for", &layers)?;
    let target = c_path(&layers).doing_to("name", &layers)?;
    system
        .attach_at(tmpfs.as_fd(), &target)
        .doing_to("mount", &layers)?;
    helper
        .go_and_wait()
        .doing_to("pin the mount namespace at", pin)
}

fn bind_pin(source: &str, run: &Path, pin: &Path) -> io::Result<()> {
    let (source, target, run) = (crate::system::c_text(source)?, c_path(pin)?, c_path(run)?);
    match mounts::bind(&source, &target) {
        // The kernel pins no mount namespace on a mount that propagates: into the pinned one, in the end.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            mounts::bind(&run, &run)?;
            mounts::set_propagation(&run, Propagation::Private)?;
            mounts::bind(&source, &target)
        }
        other => other,
    }
}

/// Takes the pin away. The namespace, with all layers, goes with its last process.
pub fn unpin(run: &Path) -> Result<()> {
    let pin = run.join(PIN);
    if open_pin(&pin)?.is_some() {
        let target = c_path(&pin).doing_to("name", &pin)?;
        mounts::unmount(&target, true).doing_to("unmount", &pin)?;
        std::fs::remove_file(&pin).doing_to("remove", &pin)?;
    }
    Ok(())
}

/// Makes the bare namespace and returns a descriptor of it.
pub fn make_bare(system: &Kernel) -> Result<OwnedFd> {
    let (done_read, done_write) = seqpacket::pipe().doing("make", "a pipe")?;
    let helper = Helper::start(move |go| {
        build_bare(&Kernel::on_host())?;
        paths::write_once(done_write.as_fd(), b"d")?;
        seqpacket_read(go)
    })?;
    let mut byte = [0];
    match paths::read_once(done_read.as_fd(), &mut byte)
        .doing("wait for", "the bare mount namespace")?
    {
        1 => {}
        _ => {
            helper
                .go_and_wait()
                .doing("make", "the bare mount namespace")?;
            return Err(Error::Vanished);
        }
    }
    let path = format!("/proc/{}/ns/mnt", helper.pid);
    let namespace = system
        .open_namespace(Path::new(&path))
        .doing("open", &path)?;
    helper
        .go_and_wait()
        .doing("make", "the bare mount namespace")?;
    Ok(namespace)
}

fn build_bare(system: &Kernel) -> io::Result<()> {
    namespaces::unshare(NEW_MOUNT)?;
    mounts::set_propagation(c"/", Propagation::Private)?;
    let tree = system.make_mount(c"tmpfs", &[MountOption::Text(c"mode", "0755".into())], 0)?;
    let directory = || Entry::Directory { mode: 0o755 };
    for name in [c"root", c"scratch", c"empty", c"empty/directory"] {
        system.put(tree.as_fd(), name, directory())?;
    }
    system.put(
        tree.as_fd(),
        c"empty/file",
        Entry::File {
            mode: 0o444,
            content: b"",
        },
    )?;
    // Anywhere will do: nothing but the new tree is left after the pivot.
    system.attach_at(tree.as_fd(), c"/proc")?;
    paths::change_directory(tree.as_fd())?;
    mounts::pivot_here()?;
    debug_assert!(Path::new("/root").exists() && root::ROOT == c"/root");
    // What is bound from here, the masks, takes this over.
    let flags = attr::READ_ONLY | attr::NO_SUID | attr::NO_DEVICES | attr::NO_EXEC;
    mounts::set_attributes(tree.as_fd(), flags, 0, None)
}

fn seqpacket_read(go: OwnedFd) -> io::Result<()> {
    paths::read_once(go.as_fd(), &mut [0]).map(|_| ())
}

/// A forked process that does one thing when told and says by its exit code whether that went well.
pub struct Helper {
    pid: i32,
    process: OwnedFd,
    go: OwnedFd,
}

impl Helper {
    pub fn start(work: impl FnOnce(OwnedFd) -> io::Result<()>) -> Result<Helper> {
        let (go_read, go_write) = seqpacket::pipe().doing("make", "a pipe")?;
        match namespaces::clone(&Clone::default()).doing("clone", "a helper")? {
            Side::Child => {
                drop(go_write);
                let code = work(go_read)
                    .map_or_else(|error| error.raw_os_error().unwrap_or(libc::EIO), |()| 0);
                namespaces::exit_now(code)
            }
            Side::Parent { pid, pidfd } => Ok(Helper {
                pid,
                process: pidfd,
                go: go_write,
            }),
        }
    }

    pub fn go_and_wait(self) -> io::Result<()> {
        // A helper that has failed no longer reads; its exit code says why.
        let _ = paths::write_once(self.go.as_fd(), b"g");
        seqpacket::wait_ready(
            &[(self.process.as_fd(), seqpacket::Interest::Readable)],
            None,
        )?;
        match namespaces::reap_one(self.pid)? >> 8 & 0xff {
            0 => Ok(()),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }
}
