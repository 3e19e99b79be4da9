//! `dsec-pages SOCKET MEMORY`: gives a machine that was restored by Firecracker its memory, page by page, as it is touched
//! (docs/internals/vm.md).
//!
//! The monitor connects to SOCKET once and hands over what it has mapped and the descriptor by which the kernel tells of pages that
//! are missing. This process lives as long as the monitor does. It serves memory to a guest that may be hostile, so it needs no right,
//! and runs in a jail like the monitor's.

mod memory;
mod regions;

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use dsec_sys::passing::receive_with;
use dsec_sys::seqpacket::{wait_ready, Interest};
use dsec_sys::userfault::{peer_process, Faults};

use dsec_sys::failure::{Doing, Error, Result};
use memory::Memory;

const MESSAGE_BYTES_MAX: usize = 64 << 10;
/// A monitor connects as soon as it is told to load.
const CONNECTED: Duration = Duration::from_secs(120);

fn main() -> ExitCode {
    let words: Vec<_> = std::env::args_os().skip(1).collect();
    let [socket, memory] = words.as_slice() else {
        eprintln!("usage: dsec-pages SOCKET MEMORY");
        return ExitCode::from(2);
    };
    match run(Path::new(socket), Path::new(memory)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("dsec-pages: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(socket: &Path, path: &Path) -> Result<()> {
    let file = File::open(path).doing("open", path.display())?;
    let listener = listen(socket)?;
    let ready = wait_ready(&[(listener.as_fd(), Interest::Readable)], Some(CONNECTED))
        .doing("wait for", "the monitor")?;
    if ready != [true] {
        return Err(Error::new("no monitor has connected".into()));
    }
    let (monitor, _) = listener.accept().doing("accept", "the monitor")?;
    let ended = peer_process(monitor.as_fd()).doing("watch", "the monitor")?;
    let mut message = vec![0; MESSAGE_BYTES_MAX];
    let (count, faults) = receive_with(&monitor, &mut message).doing("hear", "the monitor")?;
    let regions = regions::parse(&message[..count])?;
    let faults = faults.ok_or_else(|| Error::new("the monitor sent no descriptor".into()))?;
    let memory = Memory::new(file, regions, Faults::new(faults))?;
    serve(memory, &ended)
}

/// Under another name first: whoever sees the path can connect to it.
fn listen(path: &Path) -> Result<UnixListener> {
    let mut early = path.as_os_str().to_owned();
    early.push(".new");
    let listener = UnixListener::bind(&early).doing("listen at", path.display())?;
    std::fs::rename(&early, path).doing("listen at", path.display())?;
    Ok(listener)
}

fn serve(mut memory: Memory, ended: &OwnedFd) -> Result<()> {
    loop {
        let waited = [
            (memory.faults().as_fd(), Interest::Readable),
            (ended.as_fd(), Interest::Readable),
        ];
        let ready = match wait_ready(&waited, None) {
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            ready => ready.doing("wait for", "faults")?,
        };
        if ready.get(1) == Some(&true) {
            return Ok(());
        }
        memory.serve()?;
    }
}
