//! An interpreter that is up, with what calls import: each call is a fork of it, which is there before the call comes.
//!
//! It says messages of a length (u32, big endian) and so many bytes: a text once it is up; of each fork its pid, and when it has
//! ended what wait4(2) tells, as the kernel writes it. A fork waits for a byte with descriptors, and what it is to do is in the
//! last of them: what the interpreter itself has had in memory, every later call can read in its own.
//! `src/dsec/backends/fncall/zygote.py` is the other side.

use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicI32;
use std::time::Duration;

use dsec_sys::launch_child::{launch, Command};
use dsec_sys::namespaces::open_process;
use dsec_sys::passing::{send_with, socket_pair};
use dsec_sys::paths::open_at;
use dsec_sys::process::{kill, Ended};
use dsec_sys::rooted::c_path;
use dsec_sys::sealed::sealed_file;
use dsec_sys::seqpacket::{wait_ready, Interest};
use dsec_sys::signals::KILL;

use crate::program::programs_of;
use crate::wire::Warm;

const SOCKET: i32 = 3;
const MESSAGE_BYTES_MAX: usize = 64 << 10;

pub struct Interpreter {
    pid: i32,
    process: OwnedFd,
    socket: UnixStream,
    /// The fork that waits, once it has said so.
    next: Option<i32>,
}

/// What became of a fork.
pub struct Fate {
    pub ended: Ended,
    pub cpu_us: u64,
    pub rss_bytes: u64,
}

impl Interpreter {
    /// Returns when it is up and has imported what it was told to.
    pub fn start(warm: &Warm) -> io::Result<Self> {
        let (ours, theirs) = socket_pair()?;
        let null = open_at(None, c"/dev/null", libc::O_RDWR, 0)?;
        let number = null.as_raw_fd();
        let command = Command {
            programs: programs_of(&warm.argv, &warm.env)?,
            argv: warm
                .argv
                .iter()
                .map(|word| c_path(word))
                .collect::<io::Result<_>>()?,
            env: warm
                .env
                .iter()
                .map(|word| c_path(word))
                .collect::<io::Result<_>>()?,
            directories: vec![c"/".to_owned()],
            descriptors: vec![
                (number, 0),
                (number, 1),
                (number, 2),
                (theirs.as_raw_fd(), SOCKET),
            ],
            no_new_privs: true,
            ..Command::default()
        };
        let pid =
            launch(&command, u64::MAX, &AtomicI32::new(0)).map_err(|failure| failure.error)?;
        let started = Self {
            pid,
            process: open_process(pid)?,
            socket: UnixStream::from(ours),
            next: None,
        };
        started
            .socket
            .set_read_timeout(Some(Duration::from_millis(warm.wait_ms.max(1))))?;
        let said = started.message()?;
        started.socket.set_read_timeout(None)?;
        match said.as_slice() {
            b"ready" => Ok(started),
            other => Err(io::Error::other(format!(
                "the interpreter: {}",
                String::from_utf8_lossy(other)
            ))),
        }
    }

    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// An error when it, or the fork that waits, is lost.
    pub fn check(&mut self) -> io::Result<()> {
        self.next = Some(self.ready()?);
        Ok(())
    }

    /// The pid of the fork that waits for what it is to do.
    pub fn ready(&mut self) -> io::Result<i32> {
        let pid = match self.next.take() {
            Some(pid) => pid,
            None => <[u8; 4]>::try_from(self.message()?)
                .map(i32::from_ne_bytes)
                .map_err(|_| io::Error::other("the interpreter says no pid"))?,
        };
        // Of one that has ended already the end would be taken for that of the call.
        let fork = open_process(pid)?;
        let ends = [
            (self.source(), Interest::Readable),
            (self.process.as_fd(), Interest::Readable),
            (fork.as_fd(), Interest::Readable),
        ];
        match wait_ready(&ends, Some(Duration::ZERO))?.contains(&true) {
            true => Err(io::Error::other(
                "it, or the fork that was ready, has ended",
            )),
            false => Ok(pid),
        }
    }

    /// Has it do `what`, which is JSON, with these descriptors as its 0, 1 and 2.
    pub fn run(&mut self, what: &str, standard: [&OwnedFd; 3]) -> io::Result<()> {
        let order = sealed_file(c"order", what.as_bytes(), 0o400)?;
        let [stdin, stdout, stderr] = standard;
        let passed = [stdin, stdout, stderr, &order].map(AsFd::as_fd);
        match send_with(&self.socket, b"\0", &passed)? {
            1 => Ok(()),
            _ => Err(io::ErrorKind::WriteZero.into()),
        }
    }

    /// Readable when the fork has ended.
    pub fn source(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Waits for the end of the fork.
    pub fn fate(&mut self) -> io::Result<Fate> {
        let said = self.message()?;
        let (status, usage) = said
            .split_at_checked(4)
            .ok_or_else(|| io::Error::other("the interpreter says nothing of the end"))?;
        let status = status.try_into().map_or(-1, i32::from_ne_bytes);
        // struct rusage: seconds and microseconds of user and system time, then KiB.
        let number = |index: usize| -> u64 {
            let bytes = usage.get(index * 8..index * 8 + 8);
            let word = bytes.and_then(|bytes| bytes.try_into().ok());
            word.map_or(0, u64::from_ne_bytes)
        };
        Ok(Fate {
            ended: match libc::WIFSIGNALED(status) {
                true => Ended::Signaled(libc::WTERMSIG(status)),
                false => Ended::Exited(libc::WEXITSTATUS(status)),
            },
            cpu_us: (number(0) + number(2)) * 1_000_000 + number(1) + number(3),
            rss_bytes: number(4) * 1024,
        })
    }

    fn message(&self) -> io::Result<Vec<u8>> {
        let mut socket = &self.socket;
        let mut head = [0; 4];
        socket.read_exact(&mut head)?;
        let length = u32::from_be_bytes(head) as usize;
        if length > MESSAGE_BYTES_MAX {
            return Err(io::Error::other("the interpreter says too much"));
        }
        let mut message = vec![0; length];
        socket.read_exact(&mut message)?;
        Ok(message)
    }
}

impl Drop for Interpreter {
    fn drop(&mut self) {
        let _ = kill(self.pid, KILL);
    }
}
