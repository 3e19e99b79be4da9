//! An interpreter that is up, with what calls import: each call is a fork of it.
//!
//! It is sent a byte with descriptors, and answers with a length (u32, big endian) and a JSON text. What a fork is to do is in
//! the last descriptor, and read by the fork alone: what the interpreter itself has had in memory, every later call can read in
//! its own. `src/dsec/backends/fncall/zygote.py` is the other side.

use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicI32;
use std::time::Duration;

use dsec_sys::launch_child::{launch, Command};
use dsec_sys::passing::{send_with, socket_pair};
use dsec_sys::paths::open_at;
use dsec_sys::process::{kill, Ended};
use dsec_sys::rooted::c_path;
use dsec_sys::sealed::sealed_file;
use dsec_sys::signals::KILL;

use crate::program::{json_text, programs_of};
use crate::wire::Warm;

const SOCKET: i32 = 3;
const ANSWER_BYTES_MAX: usize = 64 << 10;

pub struct Interpreter {
    pid: i32,
    socket: UnixStream,
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
            socket: UnixStream::from(ours),
        };
        started
            .socket
            .set_read_timeout(Some(Duration::from_millis(warm.wait_ms.max(1))))?;
        let said = started.answer()?;
        started.socket.set_read_timeout(None)?;
        match said.as_str() {
            "ready" => Ok(started),
            _ => Err(io::Error::other(format!("the interpreter: {said}"))),
        }
    }

    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Forks one with these descriptors as its 0, 1 and 2; `what` is JSON. Gives its pid.
    pub fn fork(&mut self, what: &str, standard: [&OwnedFd; 3]) -> io::Result<i32> {
        let order = sealed_file(c"order", what.as_bytes(), 0o400)?;
        let [stdin, stdout, stderr] = standard;
        let passed = [stdin, stdout, stderr, &order].map(AsFd::as_fd);
        if send_with(&self.socket, b"\0", &passed)? != 1 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        let said = self.answer()?;
        said.parse()
            .map_err(|_| io::Error::other(format!("the interpreter: {said}")))
    }

    /// Readable when the fork has ended.
    pub fn source(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Waits for the end of the fork.
    pub fn fate(&mut self) -> io::Result<Fate> {
        let said = self.answer()?;
        let mut numbers = said.split(' ').map(str::parse::<i64>);
        let mut next = || match numbers.next() {
            Some(Ok(number)) => Ok(number),
            _ => Err(io::Error::other("the interpreter says nothing of the end")),
        };
        let (status, cpu_us, rss) = (next()?, next()?, next()?);
        let status = i32::try_from(status).unwrap_or(-1);
        Ok(Fate {
            ended: match libc::WIFSIGNALED(status) {
                true => Ended::Signaled(libc::WTERMSIG(status)),
                false => Ended::Exited(libc::WEXITSTATUS(status)),
            },
            cpu_us: cpu_us.unsigned_abs(),
            rss_bytes: rss.unsigned_abs() * 1024,
        })
    }

    fn answer(&self) -> io::Result<String> {
        let mut socket = &self.socket;
        let mut head = [0; 4];
        socket.read_exact(&mut head)?;
        let length = u32::from_be_bytes(head) as usize;
        if length > ANSWER_BYTES_MAX {
            return Err(io::Error::other("the interpreter says too much"));
        }
        let mut text = vec![0; length];
        socket.read_exact(&mut text)?;
        Ok(json_text(&text))
    }
}

impl Drop for Interpreter {
    fn drop(&mut self) {
        let _ = kill(self.pid, KILL);
    }
}
