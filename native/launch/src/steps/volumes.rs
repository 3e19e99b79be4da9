//! Step `volumes`: directories of the host in the sandbox's tree. They are mounted where the rest of the tree is built, so they
//! arrive locked: nobody inside can unmount one, make a read-only one writable, or look below it.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use dsec_sys::mounts::attr;

use crate::error::{Doing, Error, Result};
use crate::steps::Job;
use crate::system::{c_path, c_text, Access, Entry, MountOption, System};
use crate::wire::VolumeBind;

/// A mount of a volume, attached nowhere yet.
pub struct Volume<'a> {
    mount: OwnedFd,
    bind: &'a VolumeBind,
}

/// Takes the mounts while the launch is still where the host is visible.
pub fn collect<'a>(system: &dyn System, job: &Job<'a>) -> Result<Vec<Volume<'a>>> {
    job.plan
        .volumes
        .iter()
        .map(|bind| {
            let mount = match &bind.device {
                Some(device) => mount_of_device(system, device)?,
                None => mount_of_directory(system, bind)?,
            };
            let read_only = if bind.readonly { attr::READ_ONLY } else { 0 };
            system
                .set_attributes(mount.as_fd(), attr::NO_SUID | attr::NO_DEVICES | read_only)
                .doing("set attributes of", &bind.source)?;
            Ok(Volume { mount, bind })
        })
        .collect()
}

/// Of a device that is mounted already the kernel gives the same file system once more.
pub fn mount_of_device(system: &dyn System, device: &str) -> Result<OwnedFd> {
    let options = [
        MountOption::Text(c"source", device.into()),
        // The kernel would fill the tables of all inodes to come, and with them the file of the host that holds it; and what is
        // removed inside would stay there.
        MountOption::Flag(c"noinit_itable"),
        MountOption::Flag(c"discard"),
    ];
    system
        .make_mount(c"ext4", &options, attr::NO_DEVICES)
        .doing("mount", device)
}

/// A place where the host has mounted something that is not in sight here must not be taken for it: its number tells.
fn mount_of_directory(system: &dyn System, bind: &VolumeBind) -> Result<OwnedFd> {
    let path = Path::new(&bind.source);
    if bind.inode != 0 {
        let file = system.open(path, Access::Path).doing_to("open", path)?;
        let found = system.inode(file.as_fd()).doing_to("look at", path)?;
        if found != bind.inode {
            return Err(Error::Refused {
                why: format!("{} is not what it is on the host", bind.source),
                errno: libc::ESTALE,
            });
        }
    }
    let text = c_path(path).doing_to("name", path)?;
    system
        .clone_mount(&text)
        .doing_to("copy the mount of", path)
}

/// Mounts them, each on a directory, or a file, that is made where the image has none. No symbolic link on the way is followed.
pub fn attach(
    system: &dyn System,
    volumes: &[Volume],
    users: &OwnedFd,
    tree: &OwnedFd,
) -> Result<()> {
    for volume in volumes {
        let path = Path::new(&volume.bind.path);
        map(system, volume, users)?;
        let target = place(system, tree, path, volume.bind.file)?;
        system
            .attach(volume.mount.as_fd(), target.as_fd())
            .doing_to("mount", path)?;
    }
    Ok(())
}

/// As with layers, ids on the disk are those seen inside. Not every file system can do that; what is only read may then be
/// shown as nobody's, and gives what it gives to everybody.
fn map(system: &dyn System, volume: &Volume, users: &OwnedFd) -> Result<()> {
    match system.map_ids(volume.mount.as_fd(), users.as_fd()) {
        Err(error) if volume.bind.readonly && error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
        other => other.doing("map the ids of", &volume.bind.source),
    }
}

fn place(system: &dyn System, tree: &OwnedFd, path: &Path, file: bool) -> Result<OwnedFd> {
    let made = |last: bool| match last && file {
        true => Entry::File {
            mode: 0o644,
            content: b"",
        },
        false => Entry::Directory { mode: 0o755 },
    };
    let mut place = None;
    let mut done = std::path::PathBuf::from("/");
    for part in path.components().skip(1) {
        let above = place.take();
        let above = above.as_ref().unwrap_or(tree);
        done.push(part);
        let text = c_path(&done).doing_to("name", &done)?;
        let found = match system.resolve(tree.as_fd(), &text) {
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {
                let name = c_text(&part.as_os_str().to_string_lossy()).doing_to("name", &done)?;
                system
                    .put(above.as_fd(), &name, made(done == path))
                    .doing_to("make", &done)?;
                system.resolve(tree.as_fd(), &text)
            }
            other => other,
        };
        place = Some(found.doing_to("find in the image", &done)?);
    }
    let place = place.ok_or_else(|| Error::Invalid("the root cannot be covered".into()))?;
    let directory = system
        .is_directory(place.as_fd())
        .doing_to("look at", path)?;
    match (directory, file) {
        (true, false) | (false, true) => Ok(place),
        (false, false) => Err(Error::Refused {
            why: format!("{} is no directory in the image", path.display()),
            errno: libc::ENOTDIR,
        }),
        (true, true) => Err(Error::Refused {
            why: format!("{} is a directory in the image", path.display()),
            errno: libc::EISDIR,
        }),
    }
}
