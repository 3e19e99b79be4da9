//! What a user of a call has left: processes, System V objects, files. All of it is known by its owner.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use dsec_sys::identity::set_user_ids;
use dsec_sys::ipc::{remove_object, Object};
use dsec_sys::paths::open_at;
use dsec_sys::process::{kill, reap_one, Reaped};
use dsec_sys::rooted::{c_path, open_in_root, rmdir_at, unlink_at, DIRECTORY};
use dsec_sys::signals::KILL;

/// A process that is killed goes at once, unless it stands in the kernel waiting for a disk.
const END_MAX: Duration = Duration::from_secs(5);
const DEPTH_MAX: usize = 512;

/// Who ends processes of others: nobody else is this user.
const ENDER: u32 = 60_000;
const ROOT: u32 = 0;

/// Kills every process of the user, and gives what of them was ours to reap. True when none is left.
///
/// The kernel signals all that are there before another can be forked, and a process with a signal waiting forks none
/// (kernel/fork.c, copy_process): one pass is enough. A user's processes are of that user alone: none can become another.
pub fn end_processes(
    uid: u32,
    known: Option<i32>,
    mut reaped: impl FnMut(&Reaped),
) -> io::Result<bool> {
    as_user(uid, || {
        let _ = kill(-1, KILL);
    })?;
    let until = Instant::now() + END_MAX;
    let mut pause = Duration::from_micros(100);
    while has_processes(uid, known) {
        if Instant::now() > until {
            return Ok(false);
        }
        // The last of them become our children, as we are the next above that asks for them.
        while let Some(ended) = reap_one() {
            reaped(&ended);
        }
        if has_processes(uid, known) {
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(20));
        }
    }
    Ok(true)
}

/// As who has made them: nobody else may.
pub fn remove_ipc(uid: u32) -> io::Result<()> {
    let tables = [
        ("/proc/sysvipc/shm", Object::SharedMemory),
        ("/proc/sysvipc/sem", Object::Semaphores),
        ("/proc/sysvipc/msg", Object::Queue),
    ];
    let mut found = Vec::new();
    for (table, object) in tables {
        for line in fs::read_to_string(table)
            .unwrap_or_default()
            .lines()
            .skip(1)
        {
            let id = line
                .split_whitespace()
                .nth(1)
                .and_then(|id| id.parse().ok());
            found.extend(id.map(|id: i32| (object, id)));
        }
    }
    if found.is_empty() {
        return Ok(());
    }
    as_user(uid, || {
        for (object, id) in found {
            let _ = remove_object(object, id);
        }
    })
}

/// All below `root`/the last part of `path`, and that itself. Follows no link, and goes `DEPTH_MAX` deep.
pub fn remove_tree(root: &Path, path: &Path) -> io::Result<()> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let root = open_at(
        None,
        &c_path(root.as_os_str().as_encoded_bytes())?,
        DIRECTORY,
        0,
    )?;
    remove_at(&root, name.as_encoded_bytes(), 0)
}

fn remove_at(parent: &OwnedFd, name: &[u8], depth: usize) -> io::Result<()> {
    let name = c_path(name)?;
    match unlink_at(parent, &name) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::EISDIR | libc::EPERM)) => {}
        result => return result,
    }
    if depth > DEPTH_MAX {
        return Err(io::Error::other("directories that are too deep"));
    }
    let directory = open_in_root(parent, &name, DIRECTORY | libc::O_NOFOLLOW, 0)?;
    for entry in entries(&directory)? {
        remove_at(&directory, &entry, depth + 1)?;
    }
    drop(directory);
    rmdir_at(parent, &name)
}

/// Names in a directory that is open, which nobody changes meanwhile.
pub fn entries(directory: &OwnedFd) -> io::Result<Vec<Vec<u8>>> {
    use std::os::fd::AsRawFd;
    let path = format!("/proc/self/fd/{}", directory.as_fd().as_raw_fd());
    fs::read_dir(path)?
        .map(|entry| entry.map(|entry| entry.file_name().into_encoded_bytes()))
        .collect()
}

/// By the effective id alone, which says whom we may signal and what we may remove. Who signals us is held against the real
/// and the saved id: no user's can, and through the saved one we are root again (kill(2), setresuid(2)).
fn as_user(uid: u32, work: impl FnOnce()) -> io::Result<()> {
    set_user_ids(Some(ENDER), Some(uid), Some(ROOT))?;
    work();
    set_user_ids(Some(ROOT), Some(ROOT), Some(ROOT))
}

fn has_processes(uid: u32, known: Option<i32>) -> bool {
    let own = std::process::id() as i32;
    let Ok(table) = fs::read_dir("/proc") else {
        return true;
    };
    for entry in table.flatten() {
        let Some(pid) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse::<i32>().ok())
        else {
            continue;
        };
        if pid == 1 || pid == own || Some(pid) == known {
            continue;
        }
        // Owned by root when it may not be dumped: then its status says whose it is.
        let owner = entry.metadata().map(|facts| facts.uid());
        if owner.is_ok_and(|owner| owner == uid) || status_uid(pid) == Some(uid) {
            return true;
        }
    }
    false
}

/// The real user of a process, as /proc/PID/status says.
fn status_uid(pid: i32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    line.split_whitespace().next()?.parse().ok()
}
