//! UNIX sockets that keep message borders, listening sockets in a directory, and waiting on descriptors.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

/// What a socket carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Stream,
    Messages,
}

fn check(result: i32) -> io::Result<i32> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(result)
}

fn owned(result: i32) -> io::Result<OwnedFd> {
    let number = check(result)?;
    // SAFETY: the kernel has just returned this descriptor to us, so it is open and nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// A listening socket at `path`, for its owner only. The path has at most 107 bytes.
pub fn listen(kind: Kind, path: &CStr, backlog: i32) -> io::Result<OwnedFd> {
    let kind = match kind {
        Kind::Stream => libc::SOCK_STREAM,
        Kind::Messages => libc::SOCK_SEQPACKET | libc::SOCK_NONBLOCK,
    };
    // SAFETY: plain numbers.
    let socket = owned(unsafe { libc::socket(libc::AF_UNIX, kind | libc::SOCK_CLOEXEC, 0) })?;
    // SAFETY: a record of numbers, for which zero is valid.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as u16;
    let bytes = path.to_bytes();
    if bytes.len() >= address.sun_path.len() {
        return Err(io::Error::from_raw_os_error(libc::ENAMETOOLONG));
    }
    for (to, from) in address.sun_path.iter_mut().zip(bytes) {
        *to = *from as libc::c_char;
    }
    let size = std::mem::size_of::<libc::sockaddr_un>() as u32;
    // The mode of the new file is that of the socket's inode less the mask: never open to others, not even for a moment.
    // SAFETY: plain numbers.
    check(unsafe { libc::fchmod(socket.as_raw_fd(), 0o600) })?;
    // SAFETY: the address lives through the call, the size is its own.
    check(unsafe {
        libc::bind(
            socket.as_raw_fd(),
            (std::ptr::addr_of!(address)).cast(),
            size,
        )
    })?;
    // SAFETY: plain numbers.
    check(unsafe { libc::listen(socket.as_raw_fd(), backlog) })?;
    Ok(socket)
}

/// The next connection, without waiting; it does not block either.
pub fn accept(socket: BorrowedFd) -> io::Result<OwnedFd> {
    let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: both address pointers may be null.
    owned(unsafe {
        libc::accept4(
            socket.as_raw_fd(),
            std::ptr::null_mut(),
            std::ptr::null_mut(),
            flags,
        )
    })
}

/// One message. `Ok(None)` when the peer has gone; a message longer than the buffer is an error and lost.
pub fn receive(socket: BorrowedFd, buffer: &mut [u8]) -> io::Result<Option<usize>> {
    let flags = libc::MSG_TRUNC | libc::MSG_DONTWAIT;
    // SAFETY: the true length of the buffer is passed; with MSG_TRUNC the result may be larger, but no more is written.
    let length = unsafe {
        libc::recv(
            socket.as_raw_fd(),
            buffer.as_mut_ptr().cast(),
            buffer.len(),
            flags,
        )
    };
    match length {
        0 => Ok(None),
        length if length < 0 => Err(io::Error::last_os_error()),
        length if length as usize > buffer.len() => {
            Err(io::Error::from_raw_os_error(libc::EMSGSIZE))
        }
        length => Ok(Some(length as usize)),
    }
}

/// Sends one message without waiting.
pub fn send(socket: BorrowedFd, message: &[u8]) -> io::Result<()> {
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    // SAFETY: the true length of the buffer is passed.
    let sent = unsafe {
        libc::send(
            socket.as_raw_fd(),
            message.as_ptr().cast(),
            message.len(),
            flags,
        )
    };
    if sent < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// A pipe whose ends are closed by execve: (read, write).
pub fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut ends = [0_i32; 2];
    // SAFETY: the kernel writes two numbers, which is what is given.
    check(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) })?;
    // SAFETY: both have just been returned to us.
    Ok(unsafe { (OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1])) })
}

/// What to wait for on a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interest {
    Readable,
    Writable,
    /// Changes of files such as cgroup.events.
    Priority,
}

/// Waits until one of the descriptors is ready (or its peer has gone) or the time is over (None: no bound); true for each that is.
pub fn wait_ready(
    descriptors: &[(BorrowedFd, Interest)],
    timeout: Option<Duration>,
) -> io::Result<Vec<bool>> {
    let mut entries: Vec<libc::pollfd> = descriptors
        .iter()
        .map(|(fd, interest)| libc::pollfd {
            fd: fd.as_raw_fd(),
            events: match interest {
                Interest::Readable => libc::POLLIN,
                Interest::Writable => libc::POLLOUT,
                Interest::Priority => libc::POLLPRI,
            },
            revents: 0,
        })
        .collect();
    let time = timeout.map(|time| libc::timespec {
        tv_sec: time.as_secs() as libc::time_t,
        tv_nsec: time.subsec_nanos().into(),
    });
    let time = time
        .as_ref()
        .map_or(std::ptr::null(), |time| time as *const libc::timespec);
    let count = entries.len() as libc::nfds_t;
    // SAFETY: the list and its true length; the time is null or lives through the call; no signal mask.
    check(unsafe { libc::ppoll(entries.as_mut_ptr(), count, time, std::ptr::null()) })?;
    Ok(entries.iter().map(|entry| entry.revents != 0).collect())
}

/// Blocks the signals given for this process and returns a descriptor that is readable when one is pending.
pub fn signal_descriptor(signals: &[i32]) -> io::Result<OwnedFd> {
    let mut set = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigemptyset fills the whole set.
    check(unsafe { libc::sigemptyset(set.as_mut_ptr()) })?;
    // SAFETY: filled by the call above.
    let mut set = unsafe { set.assume_init() };
    for &signal in signals {
        // SAFETY: the set is valid; a bad number is an error.
        check(unsafe { libc::sigaddset(&mut set, signal) })?;
    }
    // SAFETY: the set is valid; the old mask is not asked for.
    check(unsafe { libc::sigprocmask(libc::SIG_BLOCK, &set, std::ptr::null_mut()) })?;
    // SAFETY: the set is valid.
    owned(unsafe { libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) })
}

/// A signal, and the process that it is about.
pub struct Signal {
    pub number: i32,
    pub pid: i32,
}

/// Takes the next pending signal from such a descriptor. Of several children that end at about the same time it may tell of
/// one only.
pub fn next_signal(descriptor: BorrowedFd) -> Option<Signal> {
    let mut record = std::mem::MaybeUninit::<libc::signalfd_siginfo>::uninit();
    let size = std::mem::size_of::<libc::signalfd_siginfo>();
    // SAFETY: the true size of the record is passed.
    let read = unsafe { libc::read(descriptor.as_raw_fd(), record.as_mut_ptr().cast(), size) };
    if read != size as isize {
        return None;
    }
    // SAFETY: the kernel has written all of it.
    let record = unsafe { record.assume_init() };
    Some(Signal {
        number: record.ssi_signo as i32,
        pid: record.ssi_pid as i32,
    })
}

/// Unblocks all signals and gives each its default action: what a new program expects.
pub fn reset_signals() -> io::Result<()> {
    for signal in [
        libc::SIGPIPE,
        libc::SIGHUP,
        libc::SIGINT,
        libc::SIGTERM,
        libc::SIGCHLD,
    ] {
        // SAFETY: the default action needs no handler of ours.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
    let mut set = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigemptyset fills the whole set.
    check(unsafe { libc::sigemptyset(set.as_mut_ptr()) })?;
    // SAFETY: filled by the call above; the old mask is not asked for.
    check(unsafe { libc::sigprocmask(libc::SIG_SETMASK, set.as_ptr(), std::ptr::null_mut()) })?;
    Ok(())
}

/// Brings the loopback device of this network namespace up.
pub fn loopback_up() -> io::Result<()> {
    // SAFETY: plain numbers.
    let socket =
        owned(unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) })?;
    // SAFETY: a record of numbers, for which zero is valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    request.ifr_name[0] = b'l' as libc::c_char;
    request.ifr_name[1] = b'o' as libc::c_char;
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as i16;
    // SAFETY: the request lives through the call and is of the type that this ioctl takes.
    check(unsafe {
        libc::ioctl(
            socket.as_raw_fd(),
            libc::SIOCSIFFLAGS as _,
            std::ptr::addr_of!(request),
        )
    })?;
    Ok(())
}

/// Makes descriptors 0, 1 and 2 copies of `file`.
pub fn replace_standard(file: BorrowedFd) -> io::Result<()> {
    for number in 0..3 {
        // SAFETY: plain numbers; the descriptor is borrowed, hence open. Standard descriptors are nobody's to close.
        check(unsafe { libc::dup2(file.as_raw_fd(), number) })?;
    }
    Ok(())
}
