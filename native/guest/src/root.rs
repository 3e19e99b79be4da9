//! The root file system of the sandbox: layers united by an overlay, with what it writes on a disk of its own.

use std::ffi::CString;
use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{symlink, DirBuilderExt};
use std::path::Path;

use dsec_sys::machine::{self, NO_ACCESS_TIMES, NO_DEVICES, NO_EXEC, NO_SUID, READ_ONLY};
use dsec_sys::mounts::bind;

use crate::devices;
use crate::plan::{Layer, Plan};
use dsec_sys::failure::{Doing, Error, Result};

const LAYERS: &str = "/layers";
const DISK: &str = "/disk";
const ROOT: &str = "/root";
const ETC: &str = "/etc-files";
const PLAIN: u64 = NO_SUID | NO_DEVICES | NO_EXEC;
/// Of our cgroup: the agent and the work are below it.
pub const CGROUP: &str = "/sys/fs/cgroup/dsec";

pub fn mount_kernel() -> Result<()> {
    mount("devtmpfs", "dev", "/dev", NO_SUID, "mode=755")?;
    mount("proc", "proc", "/proc", PLAIN, "")?;
    mount("sysfs", "sysfs", "/sys", PLAIN, "")
}

/// At /root, with all that is to be mounted in it.
pub fn make(plan: &Plan) -> Result<()> {
    make_directory(DISK)?;
    let disk = devices::disk(&plan.disk)?;
    // Without a journal and with no barriers: what a machine that has died has written is not used again, and a snapshot is
    // taken of one that stands still.
    mount(
        "ext4",
        &shown(&disk)?,
        DISK,
        NO_ACCESS_TIMES,
        "nobarrier,discard",
    )?;
    let (upper, work) = (format!("{DISK}/upper"), format!("{DISK}/work"));
    make_directory(&upper)?;
    make_directory(&work)?;
    make_directory(LAYERS)?;
    // An overlay has one layer at least.
    make_directory(&format!("{LAYERS}/e"))?;
    let mut lowers = String::new();
    for (number, layer) in plan.layers.iter().enumerate().rev() {
        mount_layer(number, layer)?;
        lowers.push_str(&format!("{number}:"));
    }
    // Short names, as all of them are to fit one page.
    std::env::set_current_dir(LAYERS).doing("enter", LAYERS)?;
    // A disk that another machine has written: what says that it had no end is removed on purpose.
    let _ = std::fs::remove_dir_all(format!("{work}/work/incompat"));
    let options = format!(
        "lowerdir={lowers}e,upperdir={upper},workdir={work},index=off,metacopy=off,volatile"
    );
    make_directory(ROOT)?;
    mount("overlay", "root", ROOT, 0, &options)?;
    furnish()?;
    bind_etc()
}

fn mount_layer(number: usize, layer: &Layer) -> Result<()> {
    let target = format!("{LAYERS}/{number}");
    make_directory(&target)?;
    let meta = devices::disk(&layer.meta)?;
    let mut options = String::new();
    if let Some(blob) = &layer.blob {
        let blob = devices::disk(blob)?;
        // A layer that holds no data has nothing to lie on a device.
        if !devices::is_empty(&blob)? {
            options = format!("device={}", shown(&blob)?);
        }
    }
    // What is memory already needs no copy in the guest's.
    if shown(&meta)?.starts_with("/dev/pmem") {
        let more = if options.is_empty() { "" } else { "," };
        options = format!("dax=always{more}{options}");
    }
    mount("erofs", &shown(&meta)?, &target, READ_ONLY, &options)
}

/// What every program expects to find.
fn furnish() -> Result<()> {
    for name in ["dev", "proc", "sys", "run", "tmp"] {
        let path = format!("{ROOT}/{name}");
        let mode = if name == "tmp" { 0o1777 } else { 0o755 };
        match fs::DirBuilder::new().mode(mode).create(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
                check_directory(&path)?;
            }
            made => made
                .and_then(|()| fs::set_permissions(&path, permissions(mode)))
                .doing("make", &path)?,
        }
    }
    for (name, kind, flags, options) in [
        (
            "pts",
            "devpts",
            NO_SUID | NO_EXEC,
            "newinstance,ptmxmode=0666,mode=0620,gid=5",
        ),
        ("shm", "tmpfs", NO_SUID | NO_DEVICES, "mode=1777"),
        ("mqueue", "mqueue", PLAIN, ""),
    ] {
        let path = format!("/dev/{name}");
        make_directory(&path)?;
        mount(kind, name, &path, flags, options)?;
    }
    for (name, target) in [
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
    ] {
        let path = format!("/dev/{name}");
        match symlink(target, &path) {
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            made => made.doing("make", &path)?,
        }
    }
    mount("cgroup2", "cgroup2", "/sys/fs/cgroup", PLAIN, "nsdelegate")?;
    mount(
        "tmpfs",
        "run",
        &format!("{ROOT}/run"),
        NO_SUID | NO_DEVICES,
        "mode=755",
    )?;
    for name in ["dev", "proc", "sys"] {
        let (from, to) = (format!("/{name}"), format!("{ROOT}/{name}"));
        machine::move_mount(&text(&from)?, &text(&to)?).doing("move", &from)?;
    }
    Ok(())
}

/// Files that are the machine's own, and not the environment's: the agent fills them in once it knows for whom. They are not on the
/// disk, so that a snapshot has none of them. What is no file there is left as it is.
fn bind_etc() -> Result<()> {
    make_directory(ETC)?;
    mount(
        "tmpfs",
        "etc",
        ETC,
        NO_SUID | NO_DEVICES | NO_EXEC,
        "mode=755",
    )?;
    let etc = format!("{ROOT}/etc");
    make_directory(&etc)?;
    check_directory(&etc)?;
    for name in ["hosts", "hostname", "machine-id", "resolv.conf"] {
        let (source, target) = (format!("{ETC}/{name}"), format!("{etc}/{name}"));
        File::create(&source).doing("make", &source)?;
        match fs::symlink_metadata(&target) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                File::create(&target).doing("make", &target)?;
            }
            found if !found.as_ref().is_ok_and(fs::Metadata::is_file) => continue,
            _ => {}
        }
        bind(&text(&source)?, &text(&target)?).doing("bind", &target)?;
    }
    Ok(())
}

/// A symbolic link in the place of one of these would be followed.
fn check_directory(path: &str) -> Result<()> {
    let found = fs::symlink_metadata(path).doing("look at", path)?;
    match found.is_dir() {
        true => Ok(()),
        false => Err(Error::new(format!(
            "{} of the image is no directory",
            path.trim_start_matches(ROOT)
        ))),
    }
}

/// The overlay becomes the root. An initramfs cannot be unmounted, so what takes room in it goes.
pub fn enter() -> Result<()> {
    for name in [
        "modules",
        "dsec-agent",
        "init",
        "modules.order",
        "dsec.plan",
    ] {
        let path = Path::new("/").join(name);
        let gone = match path.is_dir() {
            true => fs::remove_dir_all(&path),
            false => fs::remove_file(&path),
        };
        gone.doing("remove", path.display())?;
    }
    std::env::set_current_dir(ROOT).doing("enter", ROOT)?;
    machine::move_mount(c".", c"/").doing("move", ROOT)?;
    machine::chroot_here().doing("enter", ROOT)
}

/// The agent's and that of commands, as a container has them. Gives the directory above both.
pub fn make_cgroups(pids: u64) -> Result<OwnedFd> {
    let write = |path: String, value: &str| fs::write(&path, value).doing("write", path);
    write(
        "/sys/fs/cgroup/cgroup.subtree_control".into(),
        "+memory +pids",
    )?;
    make_directory(CGROUP)?;
    write(format!("{CGROUP}/cgroup.subtree_control"), "+memory +pids")?;
    for part in ["agent", "work"] {
        make_directory(&format!("{CGROUP}/{part}"))?;
    }
    write(format!("{CGROUP}/work/pids.max"), &pids.to_string())?;
    // Each command's own cgroup counts what the kernel has ended of it for memory.
    write(format!("{CGROUP}/work/cgroup.subtree_control"), "+memory")?;
    write(format!("{CGROUP}/agent/cgroup.procs"), "1")?;
    File::open(CGROUP).doing("open", CGROUP).map(OwnedFd::from)
}

fn mount(kind: &str, source: &str, target: &str, flags: u64, options: &str) -> Result<()> {
    machine::mount(
        &text(kind)?,
        &text(source)?,
        &text(target)?,
        flags,
        &text(options)?,
    )
    .doing("mount", format_args!("{kind} at {target}"))
}

fn make_directory(path: &str) -> Result<()> {
    match fs::create_dir(path) {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
        made => made.doing("make", path),
    }
}

fn permissions(mode: u32) -> fs::Permissions {
    std::os::unix::fs::PermissionsExt::from_mode(mode)
}

fn shown(path: &Path) -> Result<String> {
    path.to_str()
        .map(str::to_owned)
        .ok_or_else(|| Error::new(format!("{} is no text", path.display())))
}

fn text(value: &str) -> Result<CString> {
    CString::new(value).map_err(|_| Error::new("a path holds a zero byte".into()))
}
