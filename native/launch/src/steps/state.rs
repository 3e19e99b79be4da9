//! Steps `directories` and `socket`: the sandbox's own places on the host.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use dsec_sys::mounts::attr;

use crate::error::{Doing, Result};
use crate::steps::volumes;
use crate::system::{c_path, MountOption, System};
use crate::undo::{Made, Undo};
use crate::wire::LaunchPlan;

/// Where a size-limited upper is mounted, below the state directory.
pub const DISK: &str = "disk";

/// Makes what is missing of the state directory. Returns the directory that holds `upper` and `work`.
pub fn make(system: &dyn System, plan: &LaunchPlan, undo: &mut Undo) -> Result<PathBuf> {
    let directory = PathBuf::from(&plan.directory);
    make_missing(system, &directory, 0o700, undo)?;
    let holder = match (&plan.upper_device, plan.upper_tmpfs_bytes) {
        (Some(device), _) => {
            let mount = volumes::mount_of_device(system, device)?;
            attach_disk(system, &directory, &mount, undo)?
        }
        (None, Some(bytes)) => {
            let mount = make_tmpfs(system, &directory, bytes)?;
            attach_disk(system, &directory, &mount, undo)?
        }
        (None, None) => directory,
    };
    make_missing(system, &holder.join("upper"), 0o755, undo)?;
    let work = holder.join("work");
    if !make_missing(system, &work, 0o700, undo)? {
        // What an overlay of before left there means nothing, and a volatile one forbids to be mounted again by it.
        system.remove_tree(&work).doing_to("remove", &work)?;
        make_missing(system, &work, 0o700, undo)?;
    }
    Ok(holder)
}

fn make_tmpfs(system: &dyn System, directory: &Path, bytes: u64) -> Result<OwnedFd> {
    // A bound on inodes too, so that small files cannot take what the size forbids: one for each 4 KiB.
    let inodes = (bytes / 4096).max(1024);
    let options = [
        MountOption::Text(c"size", bytes.to_string()),
        MountOption::Text(c"nr_inodes", inodes.to_string()),
        MountOption::Text(c"mode", "0700".into()),
    ];
    system
        .make_mount(c"tmpfs", &options, attr::NO_DEVICES)
        .doing_to("make a tmpfs for", directory)
}

fn attach_disk(
    system: &dyn System,
    directory: &Path,
    mount: &OwnedFd,
    undo: &mut Undo,
) -> Result<PathBuf> {
    let path = directory.join(DISK);
    make_missing(system, &path, 0o700, undo)?;
    let target = c_path(&path).doing_to("name", &path)?;
    system
        .attach_at(mount.as_fd(), &target)
        .doing_to("mount", &path)?;
    undo.add(Made::Mount(path.clone()));
    Ok(path)
}

/// True when it was missing. Only then is it ours to take back.
fn make_missing(system: &dyn System, path: &Path, mode: u32, undo: &mut Undo) -> Result<bool> {
    match system.make_dir(path, mode) {
        Err(error) if error.raw_os_error() == Some(libc::EEXIST) => Ok(false),
        other => {
            other.doing_to("make", path)?;
            undo.add(Made::Tree(path.to_path_buf()));
            Ok(true)
        }
    }
}

pub fn listen(system: &dyn System, plan: &LaunchPlan, undo: &mut Undo) -> Result<OwnedFd> {
    let path = Path::new(&plan.socket);
    let socket = system.listen(path).doing_to("listen at", path)?;
    undo.add(Made::File(path.to_path_buf()));
    Ok(socket)
}
