//! What is where everybody may write, before the first call; after each call it is so again, or the container is given up.
//!
//! Well-known directories are emptied by name. Whatever a call has written elsewhere shows in the number of inodes of the file
//! systems: all that can be written lies in memory, where the kernel counts them exactly (mm/shmem.c). A file of the image that
//! is changed or removed shows as well, since the overlay then has a copy or a whiteout of it.
//!
//! Ends of connections outlive their processes and keep their ports for a minute: the next call could not have those.

use std::collections::BTreeSet;
use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use dsec_sys::rooted::{c_path, disk_space, open_in_root, DIRECTORY};

use crate::leftovers::{entries, remove_ipc, remove_tree};

/// Places where any user may write in nearly every image.
const OPEN_TO_ALL: [&str; 6] = [
    "/tmp",
    "/var/tmp",
    "/dev/shm",
    "/dev/mqueue",
    "/run/lock",
    "/var/lock",
];
const FILE_SYSTEMS: [&str; 3] = ["/", "/dev", "/dev/shm"];
const IPC_TABLES: [&str; 3] = [
    "/proc/sysvipc/shm",
    "/proc/sysvipc/sem",
    "/proc/sysvipc/msg",
];
const WRITABLE_BY_ALL: u32 = 0o002;
const STICKY: u32 = 0o1000;
/// Of the network namespace: lines and the fields that count what holds a port.
const SOCKETS: [(&str, &str, &[&str]); 2] = [
    ("/proc/net/sockstat", "TCP:", &["inuse", "tw"]),
    ("/proc/net/sockstat6", "TCP6:", &["inuse"]),
];
/// The two ends of a connection within the container say goodbye to each other beside those who are killed.
const GOODBYE_MAX: Duration = Duration::from_millis(200);

pub struct Baseline {
    names: Vec<(&'static str, BTreeSet<Vec<u8>>)>,
    inodes: Vec<(&'static str, u64)>,
    ipc: usize,
    sockets: u64,
}

impl Baseline {
    pub fn take() -> Self {
        for path in OPEN_TO_ALL {
            copy_up(path);
        }
        let there = |path: &&'static str| names_in(path).ok().map(|names| (*path, names));
        Self {
            names: OPEN_TO_ALL.iter().filter_map(there).collect(),
            inodes: FILE_SYSTEMS
                .iter()
                .map(|path| (*path, inodes_of(path)))
                .collect(),
            ipc: ipc_objects(),
            sockets: sockets(),
        }
    }

    /// After the processes and the directories of these users are gone. The error says what has stayed.
    pub fn restore(&self, uids: &[u32]) -> Result<(), String> {
        for (path, before) in &self.names {
            let now =
                names_in(path).map_err(|error| format!("{path}, which cannot be read: {error}"))?;
            for name in now.difference(before) {
                let entry =
                    Path::new(path).join(std::ffi::OsStr::new(&*String::from_utf8_lossy(name)));
                remove_named(path, name)
                    .map_err(|error| format!("{}: {error}", entry.display()))?;
            }
            if before.difference(&now).next().is_some() {
                return Err(format!("{path} without something that was there"));
            }
        }
        if ipc_objects() > self.ipc {
            for uid in uids {
                remove_ipc(*uid).map_err(|error| format!("System V objects: {error}"))?;
            }
        }
        if ipc_objects() != self.ipc {
            return Err("System V objects".to_owned());
        }
        let until = Instant::now() + GOODBYE_MAX;
        while sockets() > self.sockets {
            if Instant::now() > until {
                return Err("connections".to_owned());
            }
            std::thread::sleep(GOODBYE_MAX / 20);
        }
        for (path, before) in &self.inodes {
            let now = inodes_of(path);
            if now != *before {
                return Err(format!("{now} inodes on {path}, where {before} were"));
            }
        }
        Ok(())
    }
}

/// The first file in a directory of the image makes the overlay copy that directory: it is so from the start. Of a directory
/// where everybody may write, everybody may set attributes unless it is sticky (xattr_permission, fs/xattr.c).
fn copy_up(path: &str) {
    let mode = std::fs::metadata(path).map_or(0, |facts| facts.permissions().mode());
    if mode & WRITABLE_BY_ALL != 0 && mode & STICKY == 0 {
        let _ = std::fs::set_permissions(path, Permissions::from_mode(mode | STICKY));
    }
    let probe = Path::new(path).join(".dsec-call");
    if std::fs::create_dir(&probe).is_ok() {
        let _ = std::fs::remove_dir(&probe);
    }
}

fn remove_named(path: &str, name: &[u8]) -> io::Result<()> {
    use std::os::unix::ffi::OsStrExt;
    let root = Path::new(path);
    remove_tree(root, &root.join(std::ffi::OsStr::from_bytes(name)))
}

fn names_in(path: &str) -> io::Result<BTreeSet<Vec<u8>>> {
    let root = dsec_sys::paths::open_at(None, c"/", DIRECTORY, 0)?;
    let directory = open_in_root(&root, &c_path(path.as_bytes())?, DIRECTORY, 0)?;
    Ok(entries(&directory)?.into_iter().collect())
}

fn inodes_of(path: &str) -> u64 {
    c_path(path.as_bytes())
        .and_then(|path| disk_space(&path))
        .map_or(0, |space| space.used_inodes)
}

fn sockets() -> u64 {
    SOCKETS
        .iter()
        .map(|(table, line, fields)| {
            let text = std::fs::read_to_string(table).unwrap_or_default();
            counted(&text, line, fields)
        })
        .sum()
}

/// In lines such as `TCP: inuse 0 orphan 0 tw 2`.
fn counted(text: &str, line: &str, fields: &[&str]) -> u64 {
    let Some(rest) = text.lines().find_map(|found| found.strip_prefix(line)) else {
        return 0;
    };
    let words: Vec<&str> = rest.split_whitespace().collect();
    words
        .chunks_exact(2)
        .filter(|pair| fields.contains(&pair[0]))
        .filter_map(|pair| pair[1].parse::<u64>().ok())
        .sum()
}

fn ipc_objects() -> usize {
    let lines = |table: &&str| {
        std::fs::read_to_string(table).map_or(0, |text| text.lines().count().saturating_sub(1))
    };
    IPC_TABLES.iter().map(lines).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_are_counted_by_the_fields_of_their_line() {
        let text =
            "sockets: used 9\nTCP: inuse 1 orphan 5 tw 200 alloc 1 mem 303\nUDP: inuse 7 mem 0\n";

        assert_eq!(counted(text, "TCP:", &["inuse", "tw"]), 201);
        assert_eq!(counted(text, "TCP6:", &["inuse"]), 0);
    }
}
