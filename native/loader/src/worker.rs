//! The worker: serves the mount that its supervisor holds, and the control socket.

use std::ffi::CString;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use dsec_sys::process::kill;
use dsec_sys::seqpacket::{
    accept, listen, next_signal, receive, send, signal_descriptor, wait_ready, Interest, Kind,
};

use crate::blocks;
use crate::error::{Doing, Error, Result};
use crate::front::{Front, Wish};
use crate::fuse::Fuse;
use crate::guard::Guard;
use crate::library::{Library, Settings};
use crate::shelf::Shelf;
use crate::wire::{self, *};

const READERS: usize = 4;
const CONNECTIONS_MAX: usize = 16;
const BACKLOG: i32 = 16;

pub struct Worker {
    library: Arc<Library>,
    listener: OwnedFd,
    signals: OwnedFd,
    connections: Vec<OwnedFd>,
    resends: bool,
    ended: bool,
}

impl Worker {
    pub fn start(
        settings: Settings,
        device: OwnedFd,
        socket: &Path,
        wish: Wish,
        again: bool,
        resends: bool,
    ) -> Result<Worker> {
        let signals =
            signal_descriptor(&[libc::SIGTERM, libc::SIGINT]).doing("blocking signals")?;
        let shelf = Arc::new(Shelf::default());
        let device = File::from(device);
        let library = match wish {
            Wish::Fanotify => start_guard(settings, device, shelf, again)?,
            Wish::Fuse | Wish::Auto => {
                let front = Front::Fuse(Arc::new(Fuse::new(device, Arc::clone(&shelf))));
                let library = Library::new(settings, shelf, front)?;
                library.restore()?;
                library
            }
        };
        library.watch().doing("starting a thread")?;
        let _ = std::fs::remove_file(socket);
        let path = CString::new(socket.as_os_str().as_bytes())
            .map_err(|_| Error::Invalid("a path with NUL".into()))?;
        let listener = listen(Kind::Messages, &path, BACKLOG)
            .doing(format!("listening at {}", socket.display()))?;
        if let Front::Fuse(fuse) = &library.front {
            start_readers(&library.front)?;
            if again {
                fuse.resend();
            }
        }
        Ok(Worker {
            library,
            listener,
            signals,
            connections: Vec::new(),
            resends,
            ended: false,
        })
    }

    /// Until it is told to end.
    pub fn serve(&mut self) -> Result<()> {
        let mut buffer = vec![0; MESSAGE_BYTES_MAX];
        while !self.ended {
            let mut interests = vec![
                (self.signals.as_fd(), Interest::Readable),
                (self.listener.as_fd(), Interest::Readable),
            ];
            interests.extend(
                self.connections
                    .iter()
                    .map(|socket| (socket.as_fd(), Interest::Readable)),
            );
            match wait_ready(&interests, None) {
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                other => other.map(drop).doing("waiting for requests")?,
            }
            self.ended = next_signal(self.signals.as_fd()).is_some();
            while let Ok(socket) = accept(self.listener.as_fd()) {
                if self.connections.len() == CONNECTIONS_MAX {
                    self.connections.remove(0);
                }
                self.connections.push(socket);
            }
            let connections = std::mem::take(&mut self.connections);
            self.connections = connections
                .into_iter()
                .filter(|socket| self.take_requests(socket, &mut buffer))
                .collect();
        }
        self.library.close();
        Ok(())
    }

    /// False when the connection has gone.
    fn take_requests(&mut self, socket: &OwnedFd, buffer: &mut [u8]) -> bool {
        loop {
            match receive(socket.as_fd(), buffer) {
                Ok(Some(length)) => {
                    let reply = self.request(&buffer[..length]);
                    if send(socket.as_fd(), &reply).is_err() {
                        return false; // who does not read its answers does not need them
                    }
                }
                Ok(None) => return false,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return true,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
    }

    fn request(&mut self, message: &[u8]) -> Vec<u8> {
        let head = match wire::decode_head(message) {
            Ok(head) => head,
            Err(error) => return wire::encode_error(0, &error),
        };
        let answer = self
            .answer(&head, message)
            .unwrap_or_else(|error| wire::encode_error(head.id, &error));
        if answer.is_empty() || answer.len() > MESSAGE_BYTES_MAX {
            return wire::encode_error(
                head.id,
                &Error::Invalid("the answer is too long; ask for one layer".into()),
            );
        }
        answer
    }

    fn answer(&mut self, head: &Head, message: &[u8]) -> Result<Vec<u8>> {
        let library = &self.library;
        let done = |()| wire::encode_ok(head.id, &Nothing {});
        match head.op.as_str() {
            "hello" => {
                let args: HelloArgs = wire::decode_args(message)?;
                if args.version != LOADER_VERSION {
                    return Err(Error::Invalid(format!(
                        "this loader speaks version {LOADER_VERSION}, not {}",
                        args.version
                    )));
                }
                let answer = HelloAnswer {
                    version: LOADER_VERSION,
                    pid: std::process::id(),
                    resends: self.resends,
                    front: library.front.name(),
                    blocks: blocks::open().is_ok(),
                };
                Ok(wire::encode_ok(head.id, &answer))
            }
            "add" => {
                let path = library.add(&wire::decode_args(message)?)?;
                let path = path.to_string_lossy().into_owned();
                Ok(wire::encode_ok(head.id, &AddAnswer { path }))
            }
            "source" => {
                let args: SourceChange = wire::decode_args(message)?;
                library.set_source(&args.digest, &args.source).map(done)
            }
            "remove" => {
                let args: LayerArgs = wire::decode_args(message)?;
                library.remove(&args.digest).map(done)
            }
            "prefetch" => {
                let args: PrefetchArgs = wire::decode_args(message)?;
                library
                    .prefetch(&args.digest, &args.chunks, args.whole)
                    .map(done)
            }
            "trace" => {
                let args: LayerArgs = wire::decode_args(message)?;
                let chunks = library.trace(&args.digest)?;
                Ok(wire::encode_ok(head.id, &TraceAnswer { chunks }))
            }
            "stats" => {
                let args: StatsArgs = wire::decode_args(message)?;
                Ok(wire::encode_ok(
                    head.id,
                    &library.stats(args.digest.as_deref())?,
                ))
            }
            "failure" => {
                let args: FailureArgs = wire::decode_args(message)?;
                let failure = library.failure(&args.digests);
                Ok(wire::encode_ok(head.id, &FailureAnswer { failure }))
            }
            "evict" => {
                let args: EvictArgs = wire::decode_args(message)?;
                let freed_bytes = library.evict(args.bytes);
                Ok(wire::encode_ok(head.id, &EvictAnswer { freed_bytes }))
            }
            "shutdown" => {
                let Nothing {} = wire::decode_args(message)?;
                self.ended = true;
                Ok(done(()))
            }
            op => Err(Error::Invalid(format!("no operation {op:?}"))),
        }
    }
}

/// Its own files are opened by events, so events are read before anything is served; others' wait until it is.
fn start_guard(
    settings: Settings,
    group: File,
    shelf: Arc<Shelf>,
    again: bool,
) -> Result<Arc<Library>> {
    let guard = Guard::new(group, Arc::clone(&shelf), &settings.waits, again)?;
    let guard = Arc::new(guard);
    let (stale, _numbers) = if again {
        guard.take_over()?
    } else {
        (Vec::new(), Vec::new())
    };
    let front = Front::Guard(Arc::clone(&guard));
    start_readers(&front)?;
    let library = Library::new(settings, shelf, front)?;
    library.restore()?;
    guard.settle(stale);
    guard.open();
    Ok(library)
}

fn start_readers(front: &Front) -> Result<()> {
    for _ in 0..READERS {
        let front = front.clone();
        std::thread::Builder::new()
            .name("readers".into())
            .spawn(move || match front.work() {
                // Unmounted, or aborted: the supervisor is to end too, so that another one can start afresh.
                Ok(()) => drop(kill(std::process::id() as i32, libc::SIGTERM)),
                Err(error) => {
                    eprintln!("dsec-loader: {error}");
                    std::process::exit(1); // another worker takes the requests over
                }
            })
            .doing("starting a thread")?;
    }
    Ok(())
}
