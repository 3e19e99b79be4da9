//! Connecting without waiting, and waiting for those who connect.

use std::io;
use std::mem::size_of;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::result::check;

const BACKLOG: libc::c_int = 16;

/// A connection that is made or under way: wait until it is writable, then ask `connect_error`.
pub fn connect_tcp(address: SocketAddr) -> io::Result<OwnedFd> {
    match address {
        SocketAddr::V4(v4) => {
            let record = libc::sockaddr_in {
                sin_family: libc::AF_INET as u16,
                sin_port: v4.port().to_be(),
                sin_addr: libc::in_addr {
                    s_addr: u32::from_ne_bytes(v4.ip().octets()),
                },
                sin_zero: [0; 8],
            };
            connect(
                libc::AF_INET,
                (&raw const record).cast(),
                size_of::<libc::sockaddr_in>(),
            )
        }
        SocketAddr::V6(v6) => {
            let record = libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as u16,
                sin6_port: v6.port().to_be(),
                sin6_flowinfo: 0,
                sin6_addr: libc::in6_addr {
                    s6_addr: v6.ip().octets(),
                },
                sin6_scope_id: 0,
            };
            connect(
                libc::AF_INET6,
                (&raw const record).cast(),
                size_of::<libc::sockaddr_in6>(),
            )
        }
    }
}

pub fn connect_unix(path: &[u8]) -> io::Result<OwnedFd> {
    let mut record = libc::sockaddr_un {
        sun_family: libc::AF_UNIX as u16,
        sun_path: [0; 108],
    };
    if path.is_empty() || path.len() >= record.sun_path.len() || path.contains(&0) {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    for (slot, byte) in record.sun_path.iter_mut().zip(path) {
        *slot = *byte as libc::c_char;
    }
    connect(
        libc::AF_UNIX,
        (&raw const record).cast(),
        size_of::<libc::sockaddr_un>(),
    )
}

fn connect(family: i32, address: *const libc::sockaddr, length: usize) -> io::Result<OwnedFd> {
    let kind = libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: the callers' record lives through this call and has the length given; the descriptor is new and ours.
    unsafe {
        let fd = OwnedFd::from_raw_fd(check(libc::socket(family, kind, 0))?);
        match check(libc::connect(fd.as_raw_fd(), address, length as u32)) {
            Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => Err(error),
            _ => Ok(fd),
        }
    }
}

/// The result of a connect that was under way.
pub fn connect_error(fd: &impl AsRawFd) -> io::Result<()> {
    let mut error: libc::c_int = 0;
    let mut length = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: SO_ERROR writes one int.
    check(unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ERROR,
            (&raw mut error).cast(),
            &raw mut length,
        )
    })?;
    match error {
        0 => Ok(()),
        number => Err(io::Error::from_raw_os_error(number)),
    }
}

/// The other side may have gone already: no error then.
pub fn shutdown_write(fd: &impl AsRawFd) -> io::Result<()> {
    // SAFETY: no pointers.
    match check(unsafe { libc::shutdown(fd.as_raw_fd(), libc::SHUT_WR) }) {
        Err(error) if error.kind() == io::ErrorKind::NotConnected => Ok(()),
        done => done.map(drop),
    }
}

/// Whether closing tells the other side that the connection was cut, and drops what it has not had yet.
pub fn reset_on_close(fd: &impl AsRawFd, reset: bool) -> io::Result<()> {
    let value = libc::linger {
        l_onoff: libc::c_int::from(reset),
        l_linger: 0,
    };
    // SAFETY: the value lives through the call and has the length given.
    check(unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_LINGER,
            (&raw const value).cast(),
            size_of::<libc::linger>() as libc::socklen_t,
        )
    })
    .map(drop)
}

/// A listening socket of this machine for its host (vsock(7)). Reading it never waits.
pub fn listen_vsock(port: u32) -> io::Result<OwnedFd> {
    let record = libc::sockaddr_vm {
        svm_family: libc::AF_VSOCK as u16,
        svm_reserved1: 0,
        svm_port: port,
        svm_cid: libc::VMADDR_CID_ANY,
        svm_zero: [0; 4],
    };
    let kind = libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: the record lives through the call and has the length given; the descriptor is new and ours.
    unsafe {
        let fd = OwnedFd::from_raw_fd(check(libc::socket(libc::AF_VSOCK, kind, 0))?);
        check(libc::bind(
            fd.as_raw_fd(),
            (&raw const record).cast(),
            size_of::<libc::sockaddr_vm>() as libc::socklen_t,
        ))?;
        check(libc::listen(fd.as_raw_fd(), BACKLOG))?;
        Ok(fd)
    }
}
