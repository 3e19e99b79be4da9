//! What a launch has made so far, and taking it back.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::system::System;

/// How long the kernel may take to end a process or to let go of a cgroup.
const PATIENCE: Duration = Duration::from_secs(10);

/// One thing that was made.
pub enum Made {
    Cgroup(PathBuf),
    Tree(PathBuf),
    File(PathBuf),
    Mount(PathBuf),
    Process(OwnedFd),
}

/// Everything made, in order.
#[derive(Default)]
pub struct Undo {
    made: Vec<Made>,
}

impl Undo {
    pub fn add(&mut self, made: Made) {
        self.made.push(made);
    }

    /// Takes everything back, the last first; one failure does not keep the rest from being tried. Says what is left.
    pub fn roll_back(&mut self, system: &dyn System) -> Vec<String> {
        let mut left = Vec::new();
        while let Some(made) = self.made.pop() {
            if let Err(what) = take_back(system, &made) {
                left.push(what);
            }
        }
        left
    }

    /// The launch has succeeded: nothing is taken back.
    pub fn keep(&mut self) {
        self.made.clear();
    }
}

fn take_back(system: &dyn System, made: &Made) -> Result<(), String> {
    let (path, result) = match made {
        Made::Process(process) => {
            let ended = system
                .kill(process.as_fd())
                .and_then(|()| system.wait_readable(process.as_fd(), PATIENCE));
            return match ended {
                Err(error) if error.raw_os_error() != Some(libc::ESRCH) => {
                    Err(format!("process: {error}"))
                }
                _ => Ok(()),
            };
        }
        Made::Cgroup(path) => (path, remove_cgroup(system, path)),
        Made::Tree(path) => (path, system.remove_tree(path)),
        Made::File(path) => (path, system.remove_file(path)),
        Made::Mount(path) => (path, system.detach_at(path)),
    };
    result.map_err(|error| format!("{}: {error}", path.display()))
}

/// Removes an empty cgroup; the kernel may need a moment after its last process has ended. Success when it is not there.
pub fn remove_cgroup(system: &dyn System, path: &Path) -> std::io::Result<()> {
    let deadline = Instant::now() + PATIENCE;
    let mut pause = Duration::from_micros(200);
    loop {
        match system.remove_dir(path) {
            Err(error)
                if error.raw_os_error() == Some(libc::EBUSY) && Instant::now() < deadline =>
            {
                // Version 1 has no event to wait for.
                std::thread::sleep(pause);
                pause = (pause * 2).min(Duration::from_millis(20));
            }
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(()),
            other => return other,
        }
    }
}
