//! Cgroups of execs: `work/<exec>` below the sandbox's cgroup2 directory, reached by descriptor only.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;

use dsec_sys::rooted::{
    c_path, mkdir_at, open_in_root, rmdir_at, DIRECTORY, PATH_ONLY_DIRECTORY, READ_NONBLOCKING,
    WRITE_ONLY,
};

const PIDS_BYTES_MAX: u64 = 1 << 20;

pub struct WorkCgroup {
    work: OwnedFd,
    /// Ended, but with processes that live on: removed once they are gone.
    lingering: Vec<CString>,
    /// A sweep may find something.
    due: bool,
}

/// Name of an exec's cgroup below `work`.
#[derive(Clone, Debug)]
pub struct ExecCgroup {
    name: CString,
}

impl WorkCgroup {
    pub fn open(sandbox: &OwnedFd) -> io::Result<Self> {
        let work = open_in_root(sandbox, c"work", PATH_ONLY_DIRECTORY, 0)?;
        Ok(Self {
            work,
            lingering: Vec::new(),
            due: false,
        })
    }

    /// A new cgroup and a descriptor to start in it. A name may still be in use by processes of an exec of before.
    pub fn create(&mut self, name: &str) -> io::Result<(ExecCgroup, OwnedFd)> {
        self.sweep();
        let mut cgroup = c_path(name.as_bytes())?;
        let mut attempt = 0;
        while let Err(error) = mkdir_at(&self.work, &cgroup, 0o755) {
            if error.kind() != io::ErrorKind::AlreadyExists || attempt == 64 {
                return Err(error);
            }
            attempt += 1;
            cgroup = c_path(format!("{name}.{attempt}").as_bytes())?;
        }
        // CLONE_INTO_CGROUP wants a real descriptor, not an O_PATH one.
        match open_in_root(&self.work, &cgroup, DIRECTORY, 0) {
            Ok(fd) => Ok((ExecCgroup { name: cgroup }, fd)),
            Err(error) => {
                self.remove(ExecCgroup { name: cgroup });
                Err(error)
            }
        }
    }

    pub fn pids(&self, cgroup: &ExecCgroup) -> Vec<i32> {
        let mut text = String::new();
        let read = self
            .open_file(cgroup, "cgroup.procs", READ_NONBLOCKING)
            .and_then(|file| file.take(PIDS_BYTES_MAX).read_to_string(&mut text));
        match read {
            Ok(_) => text.lines().filter_map(|line| line.parse().ok()).collect(),
            Err(_) => Vec::new(),
        }
    }

    /// The kernel has ended something of it for memory. Only where memory is counted here.
    pub fn was_out_of_memory(&self, cgroup: &ExecCgroup) -> bool {
        let mut text = String::new();
        let read = self
            .open_file(cgroup, "memory.events", READ_NONBLOCKING)
            .and_then(|file| file.take(PIDS_BYTES_MAX).read_to_string(&mut text));
        let count = |line: &str| line.strip_prefix("oom_kill ")?.trim().parse::<u64>().ok();
        read.is_ok() && text.lines().filter_map(count).any(|kills| kills > 0)
    }

    /// Kills everything in it, also what is being forked.
    pub fn kill(&self, cgroup: &ExecCgroup) -> io::Result<()> {
        self.open_file(cgroup, "cgroup.kill", WRITE_ONLY)?
            .write_all(b"1")
    }

    /// Removes it as soon as it is empty, at the next sweep: the host need not wait for that.
    pub fn remove(&mut self, cgroup: ExecCgroup) {
        self.lingering.push(cgroup.name);
        self.due = true;
    }

    /// Something may have become empty.
    pub fn note_reaped(&mut self) {
        self.due = !self.lingering.is_empty();
    }

    pub fn sweep_if_due(&mut self) {
        if std::mem::take(&mut self.due) {
            self.sweep();
        }
    }

    /// Removes what has become empty.
    fn sweep(&mut self) {
        let work = &self.work;
        self.lingering.retain(|name| match rmdir_at(work, name) {
            Ok(()) => false,
            Err(error) => error.kind() != io::ErrorKind::NotFound,
        });
    }

    /// Everything below `work`, whoever started it.
    pub fn kill_all(&self) {
        let kill = open_in_root(&self.work, c"cgroup.kill", WRITE_ONLY, 0);
        if let Ok(fd) = kill {
            // Without the right to it the caller's walk does the work.
            let _ = File::from(fd).write_all(b"1");
        }
    }

    /// All that commands have started stands still, or goes on.
    pub fn freeze(&self, still: bool) -> io::Result<()> {
        let word: &[u8] = match still {
            true => b"1",
            false => b"0",
        };
        open_in_root(&self.work, c"cgroup.freeze", WRITE_ONLY, 0)
            .and_then(|fd| File::from(fd).write_all(word))
    }

    fn open_file(&self, cgroup: &ExecCgroup, file: &str, flags: i32) -> io::Result<File> {
        let mut path = cgroup.name.as_bytes().to_vec();
        path.push(b'/');
        path.extend_from_slice(file.as_bytes());
        open_in_root(&self.work, &c_path(&path)?, flags, 0).map(File::from)
    }
}
