//! A root file system of nothing but what the plan names, in memory, and of a size for that only.

use std::ffi::CString;
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{chown, FileTypeExt};
use std::path::{Component, Path, PathBuf};

use dsec_sys::machine::{make_device, mount, NO_DEVICES, NO_EXEC, NO_SUID};
use dsec_sys::mounts::{
    attach_at, attr, clone_tree, pivot_here, set_attributes, set_propagation, Propagation,
};

use dsec_sys::namespaces::{enter, NEW_MOUNT};

use crate::plan::{Bind, Plan};
use dsec_sys::failure::{Doing, Error, Result};

/// Directories, empty files and links only.
const ROOT_OPTIONS: &str = "mode=755,size=1m,nr_inodes=1024";
const DEVICES: &str = "/dev";
const DEVICES_OPTIONS: &str = "mode=755,size=64k,nr_inodes=64";

/// Afterwards this process sees only that.
pub fn make(plan: &Plan) -> Result<()> {
    set_propagation(c"/", Propagation::Private).doing("part from", "the mounts of the host")?;
    let root = Path::new(&plan.root);
    let target = text(&plan.root)?;
    mount(
        c"tmpfs",
        c"jail",
        &target,
        NO_SUID | NO_DEVICES,
        &text(ROOT_OPTIONS)?,
    )
    .doing("mount the root at", &plan.root)?;
    if plan.binds.iter().any(|bind| bind.owned) {
        let target = below(root, DEVICES)?;
        fs::create_dir(&target).doing("make", target.display())?;
        mount(
            c"tmpfs",
            c"devices",
            &text_of(&target)?,
            NO_SUID | NO_EXEC,
            &text(DEVICES_OPTIONS)?,
        )
        .doing("mount", target.display())?;
    }
    for bind in &plan.binds {
        match bind.owned {
            true => make_owned(root, bind, plan)?,
            false => attach(root, bind)?,
        }
    }
    for (path, to) in &plan.links {
        let path = below(root, path)?;
        make_parent(&path)?;
        std::os::unix::fs::symlink(to, &path).doing("make", path.display())?;
    }
    for file in &plan.files {
        let path = below(root, &file.path)?;
        make_parent(&path)?;
        // A file that is there is of the host.
        File::create_new(&path)
            .and_then(|mut made| made.write_all(&file.content))
            .doing("make", path.display())?;
    }
    std::env::set_current_dir(root).doing("enter", &plan.root)?;
    pivot_here().doing("enter", "the new root")
}

fn attach(root: &Path, bind: &Bind) -> Result<()> {
    let found = fs::metadata(&bind.source).doing("look at", &bind.source)?;
    let target = below(root, &bind.target)?;
    make_parent(&target)?;
    let made = match found.is_dir() {
        true => fs::create_dir_all(&target),
        false => File::create(&target).map(drop),
    };
    made.doing("make", target.display())?;
    let copy = copied(&bind.source).doing("copy the mount of", &bind.source)?;
    let mut set = attr::NO_SUID;
    if !bind.writable && !bind.device {
        set |= attr::READ_ONLY;
    }
    if !bind.device {
        set |= attr::NO_DEVICES;
    }
    let clear = if bind.device { attr::NO_DEVICES } else { 0 };
    set_attributes(copy.as_fd(), set, clear, None).doing("set attributes of", &bind.source)?;
    attach_at(copy.as_fd(), &text_of(&target)?).doing("mount", target.display())
}

/// What the loader serves is mounted where it is alone: a mount can be copied only within its own namespace.
fn copied(source: &str) -> std::io::Result<OwnedFd> {
    let Some((process, path)) = of_process(source) else {
        return clone_tree(None, &CString::new(source)?, false);
    };
    let here = File::open("/proc/self/ns/mnt")?;
    let there = File::open(format!("/proc/{process}/ns/mnt"))?;
    enter(there.as_fd(), NEW_MOUNT)?;
    let copy = CString::new(path).map(|path| clone_tree(None, &path, false));
    enter(here.as_fd(), NEW_MOUNT)?;
    copy?
}

/// Of a path by way of a process: which, and the path as that process sees it.
fn of_process(source: &str) -> Option<(u32, &str)> {
    let (process, path) = source.strip_prefix("/proc/")?.split_once("/root")?;
    Some((
        process.parse().ok()?,
        path.starts_with('/').then_some(path)?,
    ))
}

fn make_owned(root: &Path, bind: &Bind, plan: &Plan) -> Result<()> {
    let found = fs::metadata(&bind.source).doing("look at", &bind.source)?;
    let kind = found.file_type();
    if !kind.is_char_device() && !kind.is_block_device() {
        return Err(Error::new(format!("{} is no device", bind.source)));
    }
    let target = below(root, &bind.target)?;
    make_parent(&target)?;
    make_device(&text_of(&target)?, &found).doing("make", target.display())?;
    chown(&target, Some(plan.uid), Some(plan.gid)).doing("give away", target.display())
}

/// Only plain names: the root is still one of many directories here.
fn below(root: &Path, path: &str) -> Result<PathBuf> {
    let mut parts = Path::new(path).components();
    let plain = parts.next() == Some(Component::RootDir)
        && parts.clone().next().is_some()
        && parts.all(|part| matches!(part, Component::Normal(_)));
    match plain {
        true => Ok(root.join(path.trim_start_matches('/'))),
        false => Err(Error::new(format!("{path:?} is no plain absolute path"))),
    }
}

fn make_parent(path: &Path) -> Result<()> {
    match path.parent() {
        Some(parent) => fs::create_dir_all(parent).doing("make", parent.display()),
        None => Ok(()),
    }
}

fn text_of(path: &Path) -> Result<CString> {
    let name = path
        .to_str()
        .ok_or_else(|| Error::new(format!("{} is no text", path.display())))?;
    text(name)
}

fn text(value: &str) -> Result<CString> {
    CString::new(value).map_err(|_| Error::new("a path holds a zero byte".into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_by_way_of_a_process_is_told_from_others() {
        assert_eq!(of_process("/proc/7/root/run/x"), Some((7, "/run/x")));
        for other in [
            "/proc/self/root/x",
            "/proc/7/rootx",
            "/proc/7/root",
            "/usr",
            "/proc/x/root/y",
        ] {
            assert_eq!(of_process(other), None, "{other}");
        }
    }

    #[test]
    fn targets_stay_in_the_root() {
        let root = Path::new("/r");

        assert_eq!(below(root, "/usr/lib").unwrap(), Path::new("/r/usr/lib"));
        for wrong in ["usr", "/", "/a/../b", "..", "", "/.."] {
            assert!(below(root, wrong).is_err(), "{wrong}");
        }
    }
}
