//! The sysfs of all sandboxes: one, made in a network namespace that has nothing but `lo`, with what is masked in it.
//!
//! The kernel has a sysfs for each network namespace. Of its own a sandbox would see the same, since it has no network, but every
//! file system costs a place in the tables that the kernel keeps for each memory cgroup of the machine, and it looks through
//! all sysfs that there are to find out that a new one is needed: both grow with the square of sandboxes.
//!
//! The network namespace, and an ipc namespace beside it, are where light sandboxes begin, which have none of their own yet.
//!
//! Mounts and namespaces live in the pinned mount namespace, so that sandboxes see `lo` under a later daemon too.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use dsec_sys::mounts::{self, attr};
use dsec_sys::namespaces::{self, NEW_IPC, NEW_NET};

use crate::error::{Doing, Result};
use crate::namespace::Helper;
use crate::steps::Lobby;
use crate::system::{c_path, Access, Kernel, System};

const PLACE: &str = ".sysfs";
const NETWORK: &str = "network";
const IPC: &str = "ipc";
const EMPTY_FILE: &str = "empty-file";
const EMPTY_DIRECTORY: &str = "empty-directory";
const TREES: &str = "trees";
/// Different lists of masks that are kept. A sandbox holds the mounts that it was given, so older ones may go.
const TREES_MAX: usize = 16;
const BELOW: &str = "/sys/";
const FLAGS: u64 = attr::READ_ONLY | attr::NO_SUID | attr::NO_DEVICES | attr::NO_EXEC;

pub struct Sysfs<'a> {
    system: &'a Kernel,
    place: PathBuf,
    network: OwnedFd,
    ipc: OwnedFd,
    /// Masks and the mount that has them, the oldest first.
    made: VecDeque<(Vec<String>, PathBuf)>,
    count: u64,
}

/// True for a mask that `Sysfs::tree` sees to.
pub fn is_below(mask: &str) -> bool {
    mask.starts_with(BELOW)
}

impl<'a> Sysfs<'a> {
    /// `below` is the directory of layers in the pinned namespace. What an earlier daemon has made is used by its sandboxes only.
    pub fn open(system: &'a Kernel, below: &Path) -> Result<Sysfs<'a>> {
        let place = below.join(PLACE);
        let trees = place.join(TREES);
        for directory in [&place, &trees, &place.join(EMPTY_DIRECTORY)] {
            make_missing(system, directory)?;
        }
        let file = place.join(EMPTY_FILE);
        File::create(&file).doing_to("make", &file)?;
        for path in system.directories_in(&trees).doing_to("list", &trees)? {
            remove(system, &path)?;
        }
        Ok(Sysfs {
            system,
            network: namespace_at(system, &place.join(NETWORK), NEW_NET)?,
            ipc: namespace_at(system, &place.join(IPC), NEW_IPC)?,
            place,
            made: VecDeque::new(),
            count: 0,
        })
    }

    pub fn lobby(&self) -> Lobby<'_> {
        Lobby {
            network: self.network.as_fd(),
            ipc: self.ipc.as_fd(),
        }
    }

    /// Where a sysfs is mounted in which those of `masks` are masked that lie in it.
    pub fn tree(&mut self, masks: &[String]) -> Result<PathBuf> {
        let wanted = || masks.iter().filter(|mask| is_below(mask));
        let found = self.made.iter().find(|(made, _)| wanted().eq(made));
        if let Some((_, path)) = found {
            return Ok(path.clone());
        }
        if self.made.len() >= TREES_MAX {
            if let Some((_, oldest)) = self.made.pop_front() {
                remove(self.system, &oldest)?;
            }
        }
        self.count += 1;
        let path = self.place.join(TREES).join(self.count.to_string());
        self.system.make_dir(&path, 0o755).doing_to("make", &path)?;
        let masks: Vec<String> = wanted().cloned().collect();
        let made = Helper::start(|_| self.mount(&path, &masks))
            .and_then(|helper| helper.go_and_wait().doing_to("mount sysfs at", &path));
        if let Err(error) = made {
            remove(self.system, &path)?;
            return Err(error);
        }
        self.made.push_back((masks, path.clone()));
        Ok(path)
    }

    /// By a process of its own, which enters the network namespace for good.
    fn mount(&self, path: &Path, masks: &[String]) -> io::Result<()> {
        namespaces::enter(self.network.as_fd(), NEW_NET)?;
        let sysfs = self.system.make_mount(c"sysfs", &[], FLAGS)?;
        self.system.attach_at(sysfs.as_fd(), &c_path(path)?)?;
        masks.iter().try_for_each(|mask| self.hide(path, mask))
    }

    fn hide(&self, path: &Path, mask: &str) -> io::Result<()> {
        let target = match self
            .system
            .open(&path.join(&mask[BELOW.len()..]), Access::Path)
        {
            // Not every kernel has every file.
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(()),
            other => other?,
        };
        let empty = match self.system.is_directory(target.as_fd())? {
            true => EMPTY_DIRECTORY,
            false => EMPTY_FILE,
        };
        let copy = self.system.clone_mount(&c_path(&self.place.join(empty))?)?;
        self.system.set_attributes(copy.as_fd(), FLAGS)?;
        self.system.attach(copy.as_fd(), target.as_fd())
    }
}

fn make_missing(system: &Kernel, path: &Path) -> Result<()> {
    match system.make_dir(path, 0o755) {
        Err(error) if error.raw_os_error() == Some(libc::EEXIST) => Ok(()),
        other => other.doing_to("make", path),
    }
}

fn remove(system: &Kernel, path: &Path) -> Result<()> {
    match system.detach_at(path) {
        // Nothing is mounted there.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
        other => other.doing_to("unmount", path)?,
    }
    system.remove_dir(path).doing_to("remove", path)
}

/// The namespace of this kind that `pin` holds, made first if it holds none.
fn namespace_at(system: &Kernel, pin: &Path, kind: u64) -> Result<OwnedFd> {
    let pinned = match File::open(pin) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            File::create(pin).doing_to("make", pin)?;
            false
        }
        other => {
            let file = other.doing_to("open", pin)?;
            mounts::is_namespace(file.as_fd()).doing_to("look at", pin)?
        }
    };
    if !pinned {
        Helper::start(|_| {
            namespaces::unshare(kind)?;
            let made = match kind {
                NEW_NET => {
                    system.loopback_up()?;
                    c"/proc/self/ns/net"
                }
                _ => c"/proc/self/ns/ipc",
            };
            mounts::bind(made, &c_path(pin)?)
        })?
        .go_and_wait()
        .doing_to("pin a namespace at", pin)?;
    }
    system.open_namespace(pin).doing_to("open", pin)
}
