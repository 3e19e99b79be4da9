//! Steps `overlay`, `binds` and `etc`: the sandbox's tree, built outside, in a mount namespace that only this launch has. The
//! sandbox's own is copied from it by another user namespace, so all that is mounted here arrives locked: nobody inside can
//! unmount it, change it or look below it.

use std::collections::BTreeSet;
use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use dsec_sys::mounts::attr;

use crate::error::{missing_is_fine, Doing, Result};
use crate::steps::Job;
use crate::sysfs::is_below;
use crate::system::{c_path, c_text, Entry, MountOption, System};
use crate::wire::{BindKind, LaunchPlan};

/// Places in the bare namespace (namespace::make_bare).
pub const ROOT: &CStr = c"/root";
pub const ROOT_PATH: &str = "/root";
const SCRATCH: &CStr = c"/scratch";
const EMPTY_FILE: &CStr = c"/empty/file";
const EMPTY_DIRECTORY: &CStr = c"/empty/directory";
pub const KERNEL_MOUNT: u64 = attr::NO_SUID | attr::NO_DEVICES | attr::NO_EXEC;
/// Written by the new process before it is protected, with all below.
const SETTINGS: &str = "/proc/sys";

/// At least: devices and the files of `/etc` need some pages of what `/dev/shm` may hold.
const SCRATCH_BYTES: u64 = 1 << 20;
/// Each is some 700 bytes that count against the sandbox's memory.
const SCRATCH_INODES: u64 = 65_536;

/// Copies of the mounts that the overlay is made of, attached nowhere. For the end of each the kernel waits for all processors.
pub struct Parts {
    /// The lowest first.
    lowers: Vec<OwnedFd>,
    /// The directory with `upper` and `work`.
    holder: OwnedFd,
    sysfs: OwnedFd,
}

/// Takes the copies while the launch is still where layers and host are visible.
pub fn collect(system: &dyn System, job: &Job, holder: &Path) -> Result<Parts> {
    let copy = |path: &Path| {
        let text = c_path(path).doing_to("name", path)?;
        system
            .clone_mount(&text)
            .doing_to("copy the mount of", path)
    };
    let lowers = job
        .lowers
        .iter()
        .map(|path| copy(path))
        .collect::<Result<_>>()?;
    let sysfs = c_path(&job.sysfs).doing_to("name", &job.sysfs)?;
    Ok(Parts {
        lowers,
        holder: copy(holder)?,
        sysfs: system
            .clone_tree(&sysfs)
            .doing_to("copy the mounts of", &job.sysfs)?,
    })
}

/// Mounts the overlay, and sysfs in it. Layers and upper are mapped to the ids of `users`, so that on disk all ids stay as in the image.
pub fn overlay(
    system: &dyn System,
    parts: &Parts,
    users: &OwnedFd,
    by_name: bool,
) -> Result<OwnedFd> {
    let Parts {
        lowers,
        holder,
        sysfs,
    } = parts;
    for lower in lowers {
        system
            .map_ids(lower.as_fd(), users.as_fd())
            .doing("map the ids of", "a layer")?;
    }
    system
        .map_ids(holder.as_fd(), users.as_fd())
        .doing("map the ids of", "the state directory")?;
    let root = if by_name {
        let root = make_overlay(system, name_layers(system, lowers, holder)?)?;
        // Its own copies of them are enough. This process must leave them too, and nothing else may stay in the namespace.
        system
            .change_directory(root.as_fd())
            .doing("enter", "the overlay")?;
        system
            .detach_at(Path::new("/scratch"))
            .doing("unmount", "the layers")?;
        root
    } else {
        let open = |name: &CStr| {
            system
                .open_directory_at(holder.as_fd(), name)
                .doing("open", name.to_string_lossy())
        };
        let (upper, work) = (open(c"upper")?, open(c"work")?);
        let mut layers: Vec<MountOption> = lowers
            .iter()
            .rev()
            .map(|lower| MountOption::File(c"lowerdir+", lower.as_fd()))
            .collect();
        layers.push(MountOption::File(c"upperdir", upper.as_fd()));
        layers.push(MountOption::File(c"workdir", work.as_fd()));
        make_overlay(system, layers)?
    };
    system
        .attach_at(root.as_fd(), ROOT)
        .doing("mount", "the overlay")?;
    attach_inside(system, &root, sysfs, Path::new("/sys"))?;
    Ok(root)
}

fn make_overlay(system: &dyn System, layers: Vec<MountOption>) -> Result<OwnedFd> {
    let mut options = layers;
    // An upper must be a whole layer by itself, whatever the kernel's defaults are; no redirect of a foreign layer is followed.
    for (key, value) in [
        (c"metacopy", "off"),
        (c"redirect_dir", "nofollow"),
        (c"index", "off"),
        (c"xino", "off"),
    ] {
        options.push(MountOption::Text(key, value.into()));
    }
    options.push(MountOption::Flag(c"volatile"));
    options.push(MountOption::Text(c"source", "dsec".into()));
    // No device node of an image is live, nor one that somebody puts there.
    system
        .make_mount(c"overlay", &options, attr::NO_DEVICES)
        .doing("make", "the overlay")
}

/// Attaches the layers below `/scratch` and enters it: relative names are short, and of a text the kernel reads 255 bytes.
fn name_layers(
    system: &dyn System,
    lowers: &[OwnedFd],
    holder: &OwnedFd,
) -> Result<Vec<MountOption<'static>>> {
    let place = system
        .make_mount(c"tmpfs", &[], 0)
        .doing("make", "the place of layers")?;
    system
        .attach_at(place.as_fd(), SCRATCH)
        .doing("mount", "the place of layers")?;
    let mut names = Vec::new();
    for mount in lowers.iter().chain([holder]) {
        let name = format!("{:x}", names.len());
        let path = c_text(&name).doing("name", "a layer")?;
        system
            .put(place.as_fd(), &path, Entry::Directory { mode: 0o755 })
            .doing("make a place for", "a layer")?;
        attach_inside(system, &place, mount, Path::new(&name))?;
        names.push(name);
    }
    system
        .change_directory(place.as_fd())
        .doing("enter", "the place of layers")?;
    let holder = names.pop().unwrap_or_default();
    names.reverse();
    Ok(vec![
        MountOption::Text(c"lowerdir", names.join(":")),
        MountOption::Text(c"upperdir", format!("{holder}/upper")),
        MountOption::Text(c"workdir", format!("{holder}/work")),
    ])
}

/// Whether overlays can be made of mounts that are attached nowhere, given by descriptor: kernels from 6.15 on. Tried.
pub fn takes_detached_layers(system: &dyn System) -> bool {
    let try_it = || {
        let files = system.make_mount(c"tmpfs", &[], 0)?;
        let directory = |name| {
            system.put(files.as_fd(), name, Entry::Directory { mode: 0o755 })?;
            system.open_directory_at(files.as_fd(), name)
        };
        let (upper, lower) = (directory(c"upper")?, directory(c"lower")?);
        let layers = [&upper, &lower].map(|fd| MountOption::File(c"lowerdir+", fd.as_fd()));
        system.make_mount(c"overlay", &layers, 0)
    };
    try_it().is_ok()
}

/// Makes the file system in memory that `/dev`, `/dev/shm` and the files of `/etc` come from. One for all: the kernel keeps a
/// word for every file system of the machine in every memory cgroup of the machine.
pub fn scratch(system: &dyn System, plan: &LaunchPlan) -> Result<OwnedFd> {
    let owner = plan.id_base.to_string();
    let options = [
        MountOption::Text(c"size", plan.shm_bytes.max(SCRATCH_BYTES).to_string()),
        MountOption::Text(c"nr_inodes", SCRATCH_INODES.to_string()),
        MountOption::Text(c"mode", "0755".into()),
        MountOption::Text(c"uid", owner.clone()),
        MountOption::Text(c"gid", owner),
    ];
    let flags = attr::NO_SUID | attr::NO_EXEC;
    let scratch = system
        .make_mount(c"tmpfs", &options, flags)
        .doing("make", "the tmpfs of /dev")?;
    let put = |name: &CStr, entry| {
        system
            .put(scratch.as_fd(), name, entry)
            .doing("make", name.to_string_lossy())
    };
    // Owned by the range's first id, since that is who makes them. Devices are made, not bound: inside they have an owner, and
    // nobody there can make others, for that takes rights in the initial user namespace.
    put(c"dev", Entry::Directory { mode: 0o755 })?;
    put(c"etc", Entry::Directory { mode: 0o755 })?;
    put(c"shm", Entry::Directory { mode: 0o1777 })?;
    put(c"proc", Entry::Directory { mode: 0o555 })?; // a place to build it at
    device_entries()
        .into_iter()
        .try_for_each(|(name, entry)| put(name, entry))?;
    system
        .attach_at(scratch.as_fd(), SCRATCH)
        .doing("mount", "the tmpfs of /dev")?;
    Ok(scratch)
}

/// Adds the devices that the plan asks for, and binds `/dev` and `/dev/shm`.
pub fn devices(
    system: &dyn System,
    plan: &LaunchPlan,
    scratch: &OwnedFd,
    root: &OwnedFd,
) -> Result<()> {
    for (name, entry) in asked_devices(plan)? {
        system
            .put(scratch.as_fd(), &name, entry)
            .doing("make", name.to_string_lossy())?;
    }
    let devices = system
        .clone_mount(c"/scratch/dev")
        .doing("copy the mount of", "/dev")?;
    attach_inside(system, root, &devices, Path::new("/dev"))?;

    let shared = system
        .clone_mount(c"/scratch/shm")
        .doing("copy the mount of", "/dev/shm")?;
    system
        .set_attributes(shared.as_fd(), attr::NO_DEVICES)
        .doing("set attributes of", "/dev/shm")?;
    attach_inside(system, root, &shared, Path::new("/dev/shm"))
}

/// Those that the plan asks for, with the directories that they are in: no other is to be had inside, where nobody may make one.
fn asked_devices(plan: &LaunchPlan) -> Result<Vec<(CString, Entry<'static>)>> {
    let mut directories = BTreeSet::new();
    for device in &plan.devices {
        let above = Path::new(&device.path)
            .ancestors()
            .skip(1)
            .filter(|above| above.components().count() > 2);
        directories.extend(above.map(|above| (above.components().count(), above)));
    }
    let mut entries = Vec::new();
    for (_, directory) in directories {
        entries.push((relative(directory)?, Entry::Directory { mode: 0o755 }));
    }
    for device in &plan.devices {
        let entry = Entry::Device {
            mode: if device.readonly { 0o444 } else { 0o666 },
            major: device.major,
            minor: device.minor,
        };
        entries.push((relative(Path::new(&device.path))?, entry));
    }
    Ok(entries)
}

fn relative(path: &Path) -> Result<CString> {
    let below = path.strip_prefix("/").unwrap_or(path);
    c_path(below).doing_to("name", path)
}

/// Whether a name below `/dev` is, or lies in, something that every sandbox has there.
pub fn is_own_device(name: &str) -> bool {
    let first = name.split('/').next().unwrap_or_default();
    device_entries()
        .iter()
        .any(|(own, _)| own.to_bytes().strip_prefix(b"dev/") == Some(first.as_bytes()))
}

fn etc_name(index: usize) -> Result<CString> {
    c_text(&format!("etc/{index}")).doing("name", "a file of /etc")
}

fn device_entries() -> Vec<(&'static CStr, Entry<'static>)> {
    let device = |major, minor| Entry::Device {
        mode: 0o666,
        major,
        minor,
    };
    let link = |target| Entry::Link { target };
    vec![
        (c"dev/null", device(1, 3)),
        (c"dev/zero", device(1, 5)),
        (c"dev/full", device(1, 7)),
        (c"dev/random", device(1, 8)),
        (c"dev/urandom", device(1, 9)),
        (c"dev/tty", device(5, 0)),
        (c"dev/ptmx", link(c"pts/ptmx")),
        (c"dev/fd", link(c"/proc/self/fd")),
        (c"dev/stdin", link(c"/proc/self/fd/0")),
        (c"dev/stdout", link(c"/proc/self/fd/1")),
        (c"dev/stderr", link(c"/proc/self/fd/2")),
        (c"dev/pts", Entry::Directory { mode: 0o755 }),
        (c"dev/shm", Entry::Directory { mode: 0o1777 }),
        (c"dev/mqueue", Entry::Directory { mode: 0o1777 }),
    ]
}

/// Makes the protected paths: read-only or hidden, and each directory above them a mount of its own, because a mount point
/// cannot be renamed: else a parent could be moved away and built anew.
pub fn binds(system: &dyn System, plan: &LaunchPlan, root: &OwnedFd) -> Result<()> {
    let mut steps: BTreeSet<(usize, PathBuf, Option<Protection>)> = BTreeSet::new();
    let ends: BTreeSet<&Path> = plan
        .binds
        .iter()
        .map(|bind| Path::new(&bind.path))
        .collect();
    for bind in &plan.binds {
        let path = Path::new(&bind.path);
        for above in path
            .ancestors()
            .skip(1)
            .filter(|above| above.parent().is_some() && !ends.contains(above))
        {
            steps.insert((above.components().count(), above.to_path_buf(), None));
        }
        let protection = match bind.kind {
            BindKind::Readonly => Protection::ReadOnly,
            BindKind::Masked => Protection::Masked,
        };
        steps.insert((
            path.components().count(),
            path.to_path_buf(),
            Some(protection),
        ));
    }
    // From the top down: what is bound later lies on what was bound before.
    steps
        .into_iter()
        .try_for_each(|(_, path, protection)| protect(system, root, &path, protection))
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Protection {
    ReadOnly,
    Masked,
}

fn protect(
    system: &dyn System,
    root: &OwnedFd,
    path: &Path,
    protection: Option<Protection>,
) -> Result<()> {
    let target = resolve(system, root, path)?;
    if protection == Some(Protection::Masked) {
        return mask(system, &target, path);
    }
    let copy = system
        .clone_mount_at(target.as_fd())
        .doing_to("copy the mount of", path)?;
    if protection == Some(Protection::ReadOnly) {
        system
            .set_attributes(copy.as_fd(), attr::READ_ONLY)
            .doing_to("make read-only", path)?;
    }
    system
        .attach(copy.as_fd(), target.as_fd())
        .doing_to("bind over", path)
}

/// Puts an empty file or directory, whichever fits, over `target`.
fn mask(system: &dyn System, target: &OwnedFd, path: &Path) -> Result<()> {
    let is_directory = system.is_directory(target.as_fd());
    let empty = empty_for(is_directory.doing_to("look at", path)?);
    let copy = system
        .clone_mount(empty)
        .doing_to("copy the mount for", path)?;
    system
        .attach(copy.as_fd(), target.as_fd())
        .doing_to("mask", path)
}

/// What can be mounted over a directory, or a file. Looked at before, not tried: a mount that fails costs the kernel 0.1 ms to
/// take back.
pub fn empty_for(is_directory: bool) -> &'static CStr {
    if is_directory {
        EMPTY_DIRECTORY
    } else {
        EMPTY_FILE
    }
}

/// Binds the given files of `/etc` over those of the image; a symbolic link there is covered itself, not followed.
pub fn etc(
    system: &dyn System,
    plan: &LaunchPlan,
    scratch: &OwnedFd,
    root: &OwnedFd,
) -> Result<()> {
    for (index, file) in plan.etc_files.iter().enumerate() {
        let path = Path::new(&file.path);
        let protected = |kind: BindKind| {
            plan.binds
                .iter()
                .any(|bind| bind.kind == kind && path.starts_with(&bind.path))
        };
        if protected(BindKind::Masked) {
            continue;
        }
        let entry = Entry::File {
            mode: 0o644,
            content: &file.content,
        };
        system
            .put(scratch.as_fd(), &etc_name(index)?, entry)
            .doing_to("make", path)?;
        let source = c_text(&format!("/scratch/etc/{index}")).doing_to("name", path)?;
        let copy = system
            .clone_mount(&source)
            .doing_to("copy the mount of", path)?;
        let read_only = if protected(BindKind::Readonly) {
            attr::READ_ONLY
        } else {
            0
        };
        system
            .set_attributes(copy.as_fd(), attr::NO_DEVICES | read_only)
            .doing_to("set attributes of", path)?;
        attach_inside(system, root, &copy, path)?;
    }
    Ok(())
}

/// Mounts the proc of the new process's pid namespace, where it can be masked until there is a tree.
pub fn proc(system: &dyn System, process: BorrowedFd) -> Result<OwnedFd> {
    let proc = system
        .make_proc(process, KERNEL_MOUNT)
        .doing("make", "/proc")?;
    system
        .attach_at(proc.as_fd(), c"/scratch/proc")
        .doing("mount", "/proc")?;
    Ok(proc)
}

/// Hides and protects parts of it. Their paths are the kernel's own: nothing that an image can plant. Those of sysfs are hidden
/// by `Sysfs`.
pub fn masks(system: &dyn System, plan: &LaunchPlan, proc: &OwnedFd) -> Result<()> {
    // There are many of them: named from here, not opened.
    system
        .change_directory(proc.as_fd())
        .doing("enter", "/proc")?;
    let below = |path: &str| c_text(path.trim_start_matches("/proc/")).doing("name", path);
    for path in plan.readonly_proc.iter().filter(|path| !is_setting(path)) {
        missing_is_fine(read_only(system, &below(path)?)).doing("make read-only", path)?;
    }
    for path in plan.masks.iter().filter(|path| !is_below(path)) {
        missing_is_fine(hide(system, &below(path)?)).doing("mask", path)?;
    }
    Ok(())
}

/// Whether what is to be read-only can be so only after the new process has written there.
pub fn is_setting(path: &str) -> bool {
    Path::new(path).starts_with(SETTINGS)
}

/// Makes what is below the working directory read-only. With what is mounted there: inside, that is locked to it.
pub fn read_only(system: &dyn System, path: &CStr) -> std::io::Result<()> {
    let copy = system.clone_tree(path)?;
    system.set_attributes(copy.as_fd(), attr::READ_ONLY)?;
    system.attach_at(copy.as_fd(), path)
}

fn hide(system: &dyn System, path: &CStr) -> std::io::Result<()> {
    let shown = Path::new(std::ffi::OsStr::from_bytes(path.to_bytes()));
    let empty = empty_for(system.is_directory_at(shown)?);
    system.bind(empty, path)
}

pub fn attach_inside(
    system: &dyn System,
    root: &OwnedFd,
    mount: &OwnedFd,
    path: &Path,
) -> Result<()> {
    let target = resolve(system, root, path)?;
    system
        .attach(mount.as_fd(), target.as_fd())
        .doing_to("mount", path)
}

fn resolve(system: &dyn System, root: &OwnedFd, path: &Path) -> Result<OwnedFd> {
    let text = c_path(path).doing_to("name", path)?;
    system
        .resolve(root.as_fd(), &text)
        .doing_to("find in the image", path)
}

/// The user namespace of a new process, by which mounts are mapped.
pub fn users_of(system: &dyn System, pid: i32) -> Result<OwnedFd> {
    let path = PathBuf::from(format!("/proc/{pid}/ns/user"));
    system.open_namespace(&path).doing_to("open", &path)
}
