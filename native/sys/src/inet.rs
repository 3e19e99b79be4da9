//! Sockets of TCP, UDP and raw packets, as a forwarder uses them: nothing here waits.

use std::io;
use std::mem::{size_of, MaybeUninit};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use crate::result::check;

const FLAGS: i32 = libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
const CONTROL_BYTES: usize = 128;

/// A listening socket at an address that need not be one of ours yet.
pub fn listen(address: SocketAddr, backlog: i32) -> io::Result<OwnedFd> {
    let socket = bound(address, libc::SOCK_STREAM)?;
    // SAFETY: plain numbers.
    check(unsafe { libc::listen(socket.as_raw_fd(), backlog) })?;
    Ok(socket)
}

/// A socket for datagrams of which one learns for which address they were: see `receive_datagram`.
pub fn datagrams(address: SocketAddr) -> io::Result<OwnedFd> {
    let socket = bound(address, libc::SOCK_DGRAM)?;
    match address {
        SocketAddr::V4(_) => set(&socket, libc::IPPROTO_IP, libc::IP_PKTINFO, 1)?,
        SocketAddr::V6(_) => set(&socket, libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO, 1)?,
    }
    Ok(socket)
}

/// Sends whole packets, with the header of IP, and receives nothing.
pub fn packets(v6: bool) -> io::Result<OwnedFd> {
    let family = if v6 { libc::AF_INET6 } else { libc::AF_INET };
    new_socket(family, libc::SOCK_RAW, libc::IPPROTO_RAW)
}

/// Datagrams to one peer, and from it alone.
pub fn connect_datagrams(peer: SocketAddr) -> io::Result<OwnedFd> {
    let (raw, length) = to_raw(peer);
    let socket = new_socket(i32::from(raw.ss_family), libc::SOCK_DGRAM, 0)?;
    // SAFETY: the record lives through the call and is as long as given.
    check(unsafe { libc::connect(socket.as_raw_fd(), (&raw const raw).cast(), length) })?;
    Ok(socket)
}

fn bound(address: SocketAddr, kind: i32) -> io::Result<OwnedFd> {
    let (raw, length) = to_raw(address);
    let socket = new_socket(i32::from(raw.ss_family), kind, 0)?;
    if address.is_ipv6() {
        set(&socket, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, 1)?;
        set(&socket, libc::IPPROTO_IPV6, libc::IPV6_FREEBIND, 1)?;
    } else {
        set(&socket, libc::IPPROTO_IP, libc::IP_FREEBIND, 1)?;
    }
    // SAFETY: the record lives through the call and is as long as given.
    check(unsafe { libc::bind(socket.as_raw_fd(), (&raw const raw).cast(), length) })?;
    Ok(socket)
}

fn new_socket(family: i32, kind: i32, protocol: i32) -> io::Result<OwnedFd> {
    // SAFETY: plain numbers; the returned descriptor is new and ours.
    unsafe {
        let raw = check(libc::socket(family, kind | FLAGS, protocol))?;
        Ok(OwnedFd::from_raw_fd(raw))
    }
}

/// The next connection, if there is one. Those that ended before they were taken are passed over.
pub fn accept(listener: BorrowedFd) -> io::Result<Option<OwnedFd>> {
    loop {
        let none = std::ptr::null_mut();
        // SAFETY: both address pointers may be null.
        let raw = unsafe { libc::accept4(listener.as_raw_fd(), none, std::ptr::null_mut(), FLAGS) };
        if raw >= 0 {
            // SAFETY: the kernel has just returned this descriptor to us.
            return Ok(Some(unsafe { OwnedFd::from_raw_fd(raw) }));
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EAGAIN) => return Ok(None),
            Some(libc::EINTR | libc::ECONNABORTED | libc::EPROTO) => {}
            _ => return Err(error),
        }
    }
}

/// Of an accepted connection: the address that its client wanted.
pub fn local_address(socket: &impl AsRawFd) -> io::Result<SocketAddr> {
    let mut raw = MaybeUninit::<libc::sockaddr_storage>::zeroed();
    let mut length = size_of::<libc::sockaddr_storage>() as libc::socklen_t;
    // SAFETY: the record is writable for the length given; zeroes are valid for it.
    let raw = unsafe {
        check(libc::getsockname(
            socket.as_raw_fd(),
            raw.as_mut_ptr().cast(),
            &raw mut length,
        ))?;
        raw.assume_init()
    };
    from_raw(&raw).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Whether closing it, also by the end of this process, resets the connection: what has not been sent is lost, and the peer is
/// told. Otherwise it is closed in order.
pub fn reset_on_close(socket: &impl AsRawFd, resets: bool) -> io::Result<()> {
    let linger = libc::linger {
        l_onoff: resets.into(),
        l_linger: 0,
    };
    // SAFETY: the record lives through the call and has the length given.
    check(unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_LINGER,
            (&raw const linger).cast(),
            size_of::<libc::linger>() as libc::socklen_t,
        )
    })
    .map(drop)
}

/// What comes is passed on at once, and no more than `unsent` bytes wait to be sent.
pub fn pass_at_once(socket: &impl AsRawFd, unsent: i32) -> io::Result<()> {
    set(socket, libc::IPPROTO_TCP, libc::TCP_NODELAY, 1)?;
    set(socket, libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, unsent)
}

/// It is readable when so many bytes are there, or the end.
pub fn wake_at(socket: &impl AsRawFd, bytes: usize) -> io::Result<()> {
    let bytes = i32::try_from(bytes).unwrap_or(i32::MAX);
    set(socket, libc::SOL_SOCKET, libc::SO_RCVLOWAT, bytes)
}

/// What waits in it, each way: twice so many bytes, which count what keeps them too, and no more, however fast it was before.
pub fn hold_at_most(socket: &impl AsRawFd, bytes: i32) -> io::Result<()> {
    set(socket, libc::SOL_SOCKET, libc::SO_RCVBUF, bytes)?;
    set(socket, libc::SOL_SOCKET, libc::SO_SNDBUF, bytes)
}

fn set(socket: &impl AsRawFd, level: i32, option: i32, value: i32) -> io::Result<()> {
    // SAFETY: the value lives through the call and has the length given.
    check(unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            option,
            (&raw const value).cast(),
            size_of::<i32>() as libc::socklen_t,
        )
    })
    .map(drop)
}

/// The first bytes that have come, which stay there. None: nothing yet; 0: the end.
pub fn look_ahead(socket: &impl AsRawFd, buffer: &mut [u8]) -> io::Result<Option<usize>> {
    // SAFETY: the buffer is writable for its length.
    let count = unsafe {
        libc::recv(
            socket.as_raw_fd(),
            buffer.as_mut_ptr().cast(),
            buffer.len(),
            libc::MSG_PEEK | libc::MSG_DONTWAIT,
        )
    };
    moved(count)
}

/// Moves up to so many bytes between a socket and a pipe. None: not now; 0: the end.
pub fn splice(from: &impl AsRawFd, to: &impl AsRawFd, bytes: usize) -> io::Result<Option<usize>> {
    let nowhere = std::ptr::null_mut();
    // SAFETY: both offsets may be null.
    let count = unsafe {
        libc::splice(
            from.as_raw_fd(),
            nowhere,
            to.as_raw_fd(),
            std::ptr::null_mut(),
            bytes,
            libc::SPLICE_F_MOVE | libc::SPLICE_F_NONBLOCK,
        )
    };
    moved(count)
}

/// Whether the next byte of a TCP connection is one that its sender called urgent: splice(2) never takes it, nor what follows.
pub fn is_urgent(socket: &impl AsRawFd) -> io::Result<bool> {
    const AT_MARK: u64 = 0x8905;
    let mut is_there: libc::c_int = 0;
    // SAFETY: the number is written to our own variable.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), AT_MARK as _, &raw mut is_there) })?;
    Ok(is_there != 0)
}

/// What has been written and its peer has not confirmed; the end counts as one byte.
pub fn unsent_bytes(socket: &impl AsRawFd) -> io::Result<usize> {
    let mut count: libc::c_int = 0;
    // SAFETY: the number is written to our own variable.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut count) })?;
    Ok(usize::try_from(count).unwrap_or(0))
}

/// Whether a TCP connection is over for both sides, or broken off: what has not been confirmed is lost.
pub fn is_closed(socket: &impl AsRawFd) -> io::Result<bool> {
    const CLOSED: u8 = 7;
    let mut state = 0u8; // the first of many facts
    let mut length = 1;
    // SAFETY: one byte is writable, which is the length given.
    check(unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            (&raw mut state).cast(),
            &raw mut length,
        )
    })?;
    Ok(state == CLOSED)
}

/// What the kernel holds for it, with what keeps that: received, to be sent, and set aside.
pub fn held_bytes(socket: &impl AsRawFd) -> io::Result<u64> {
    const MEMORY: libc::c_int = 55;
    const RECEIVED: usize = 0;
    const SET_ASIDE: usize = 4;
    const QUEUED: usize = 5;
    const WAITING: usize = 7;
    let mut facts = [0u32; 9];
    let mut length = size_of_val(&facts) as libc::socklen_t;
    // SAFETY: the numbers are writable for the length given.
    check(unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            MEMORY,
            facts.as_mut_ptr().cast(),
            &raw mut length,
        )
    })?;
    let parts = [RECEIVED, SET_ASIDE, QUEUED, WAITING];
    Ok(parts.iter().map(|part| u64::from(facts[*part])).sum())
}

fn moved(count: isize) -> io::Result<Option<usize>> {
    if let Ok(count) = usize::try_from(count) {
        return Ok(Some(count));
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::EINTR) => Ok(None),
        _ => Err(error),
    }
}

pub struct Datagram {
    /// Longer than the buffer: cut.
    pub length: usize,
    pub from: SocketAddr,
    pub to: IpAddr,
}

/// The next datagram; None when there is none, or it says nothing of where it was sent to.
pub fn receive_datagram(socket: BorrowedFd, buffer: &mut [u8]) -> io::Result<Option<Datagram>> {
    let mut raw = MaybeUninit::<libc::sockaddr_storage>::zeroed();
    let mut part = libc::iovec {
        iov_base: buffer.as_mut_ptr().cast(),
        iov_len: buffer.len(),
    };
    // Aligned as a header must be.
    let mut room = [0u64; CONTROL_BYTES / 8];
    // SAFETY: a zeroed msghdr is an empty one. Address, buffer and room outlive the call, and their lengths are given.
    // The kernel has written headers that lie in the room, and data of the kind that each header names.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_name = raw.as_mut_ptr().cast();
        message.msg_namelen = size_of::<libc::sockaddr_storage>() as libc::socklen_t;
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        message.msg_control = room.as_mut_ptr().cast();
        message.msg_controllen = CONTROL_BYTES;
        let count = libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT);
        let Some(length) = moved(count)? else {
            return Ok(None);
        };
        let mut to = None;
        let mut header = libc::CMSG_FIRSTHDR(&raw const message);
        while !header.is_null() {
            let data = libc::CMSG_DATA(header);
            match ((*header).cmsg_level, (*header).cmsg_type) {
                (libc::IPPROTO_IP, libc::IP_PKTINFO) => {
                    let found = std::ptr::read_unaligned(data.cast::<libc::in_pktinfo>());
                    let bytes = found.ipi_addr.s_addr.to_ne_bytes();
                    to = Some(IpAddr::V4(Ipv4Addr::from(bytes)));
                }
                (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => {
                    let found = std::ptr::read_unaligned(data.cast::<libc::in6_pktinfo>());
                    to = Some(IpAddr::V6(Ipv6Addr::from(found.ipi6_addr.s6_addr)));
                }
                _ => {}
            }
            header = libc::CMSG_NXTHDR(&raw const message, header);
        }
        let from = from_raw(&raw.assume_init());
        Ok(from.zip(to).map(|(from, to)| Datagram { length, from, to }))
    }
}

/// A whole packet, for the address given. What cannot be sent now is lost, as packets are.
pub fn send_packet(socket: BorrowedFd, packet: &[u8], to: IpAddr) -> io::Result<()> {
    // Raw sockets of IPv6 take no port.
    let (raw, length) = to_raw(SocketAddr::new(to, 0));
    // SAFETY: the packet and the record live through the call, with the lengths given.
    let sent = unsafe {
        libc::sendto(
            socket.as_raw_fd(),
            packet.as_ptr().cast(),
            packet.len(),
            libc::MSG_DONTWAIT,
            (&raw const raw).cast(),
            length,
        )
    };
    moved(sent).map(drop)
}

fn to_raw(address: SocketAddr) -> (libc::sockaddr_storage, libc::socklen_t) {
    // SAFETY: a record of numbers, for which zero is valid.
    let mut raw: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    let length = match address {
        SocketAddr::V4(address) => {
            let record = libc::sockaddr_in {
                sin_family: libc::AF_INET as u16,
                sin_port: address.port().to_be(),
                sin_addr: libc::in_addr {
                    s_addr: u32::from_ne_bytes(address.ip().octets()),
                },
                sin_zero: [0; 8],
            };
            // SAFETY: the storage is larger than, and aligned for, any address.
            unsafe {
                std::ptr::from_mut(&mut raw)
                    .cast::<libc::sockaddr_in>()
                    .write(record)
            };
            size_of::<libc::sockaddr_in>()
        }
        SocketAddr::V6(address) => {
            let record = libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as u16,
                sin6_port: address.port().to_be(),
                sin6_flowinfo: 0,
                sin6_addr: libc::in6_addr {
                    s6_addr: address.ip().octets(),
                },
                sin6_scope_id: address.scope_id(),
            };
            // SAFETY: the storage is larger than, and aligned for, any address.
            unsafe {
                std::ptr::from_mut(&mut raw)
                    .cast::<libc::sockaddr_in6>()
                    .write(record)
            };
            size_of::<libc::sockaddr_in6>()
        }
    };
    (raw, length as libc::socklen_t)
}

fn from_raw(raw: &libc::sockaddr_storage) -> Option<SocketAddr> {
    let place = std::ptr::from_ref(raw);
    match i32::from(raw.ss_family) {
        libc::AF_INET => {
            // SAFETY: the family says that this is what lies there; the storage is larger and aligned.
            let record = unsafe { place.cast::<libc::sockaddr_in>().read() };
            let address = Ipv4Addr::from(record.sin_addr.s_addr.to_ne_bytes());
            Some(SocketAddr::from((address, u16::from_be(record.sin_port))))
        }
        libc::AF_INET6 => {
            // SAFETY: the family says that this is what lies there; the storage is larger and aligned.
            let record = unsafe { place.cast::<libc::sockaddr_in6>().read() };
            let address = Ipv6Addr::from(record.sin6_addr.s6_addr);
            Some(SocketAddr::from((address, u16::from_be(record.sin6_port))))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream, UdpSocket};
    use std::os::fd::AsFd;
    use std::time::{Duration, Instant};

    use super::*;

    fn soon<T>(mut look: impl FnMut() -> Option<T>) -> T {
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            if let Some(found) = look() {
                return found;
            }
            assert!(Instant::now() < until);
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    #[test]
    fn an_accepted_connection_says_where_it_goes_and_can_be_looked_into() {
        let listener = listen("127.0.0.1:0".parse().unwrap(), 4).unwrap();
        let address = local_address(&listener).unwrap();
        assert!(accept(listener.as_fd()).unwrap().is_none());

        let mut client = TcpStream::connect(address).unwrap();
        let socket = soon(|| accept(listener.as_fd()).unwrap());
        client.write_all(b"first bytes").unwrap();

        assert_eq!(local_address(&socket).unwrap(), address);
        let mut buffer = [0; 64];
        for _ in 0..2 {
            let count = soon(|| look_ahead(&socket, &mut buffer).unwrap());
            assert_eq!(&buffer[..count], b"first bytes");
        }
        let pipe = crate::pipes::new_pipe().unwrap();
        assert_eq!(splice(&socket, &pipe.write, 64).unwrap(), Some(11));
        assert_eq!(splice(&socket, &pipe.write, 64).unwrap(), None);
    }

    #[test]
    fn what_nobody_takes_is_held_and_counted() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut far, _) = listener.accept().unwrap();
        near.set_nonblocking(true).unwrap();
        assert_eq!(unsent_bytes(&near).unwrap(), 0);
        let idle = held_bytes(&near).unwrap() + held_bytes(&far).unwrap();
        let block = [7; 64 << 10];
        let mut count = 0;
        loop {
            match near.write(&block) {
                Ok(more) => count += more,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => panic!("{error}"),
            }
        }
        assert!(unsent_bytes(&near).unwrap() > 1);
        let full = held_bytes(&near).unwrap() + held_bytes(&far).unwrap();
        assert!(full >= idle + count as u64, "{idle}, {full}, {count}");

        near.set_nonblocking(false).unwrap();
        near.shutdown(std::net::Shutdown::Write).unwrap();
        let mut all = Vec::new();
        far.read_to_end(&mut all).unwrap();
        assert_eq!(all.len(), count);
        soon(|| (unsent_bytes(&near).unwrap() <= 1).then_some(()));
        assert!(!is_closed(&near).unwrap() && !is_closed(&far).unwrap());
        reset_on_close(&far, true).unwrap();
        drop(far);
        soon(|| is_closed(&near).unwrap().then_some(()));
    }

    #[test]
    fn a_datagram_says_from_where_and_to_which_address_it_is() {
        let socket = datagrams("0.0.0.0:0".parse().unwrap()).unwrap();
        let port = local_address(&socket).unwrap().port();
        let client = UdpSocket::bind("127.0.0.1:0").unwrap();
        client.send_to(b"question", ("127.0.0.9", port)).unwrap();

        let mut buffer = [0; 64];
        let found = soon(|| receive_datagram(socket.as_fd(), &mut buffer).unwrap());

        assert_eq!(&buffer[..found.length], b"question");
        assert_eq!(found.from, client.local_addr().unwrap());
        assert_eq!(found.to, "127.0.0.9".parse::<IpAddr>().unwrap());
    }

    #[test]
    fn addresses_come_back_as_they_went() {
        for text in ["1.2.3.4:5", "[2001:db8::1]:65535"] {
            let address: SocketAddr = text.parse().unwrap();
            assert_eq!(from_raw(&to_raw(address).0), Some(address));
        }
    }
}
