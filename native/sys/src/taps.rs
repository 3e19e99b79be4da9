//! Network devices whose other end is a program: made in this network namespace, for a user who may open them by name.

use std::fs::{self, File};
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use crate::cards::{ask, Card};
use crate::result::{check, check_long};

const TUN: &str = "/dev/net/tun";
const SETTINGS: &str = "/proc/sys/net";

// _IOW('T', 202, int), _IOW('T', 203, int) and _IOW('T', 204, int) of linux/if_tun.h.
const TUNSETIFF: u64 = 0x4004_54ca;
const TUNSETPERSIST: u64 = 0x4004_54cb;
const TUNSETOWNER: u64 = 0x4004_54cc;

const ANSWER_BYTES: usize = 512;

/// It has an address of its own, and sends to `peer` alone, which nothing else in this namespace comes before: not even a
/// route that keeps all addresses here. What comes from it under another address is dropped.
pub fn make_tap(
    name: &str,
    owner: u32,
    (address, prefix): (Ipv4Addr, u8),
    peer: Ipv4Addr,
) -> io::Result<()> {
    let invalid = || io::Error::from_raw_os_error(libc::EINVAL);
    let card = Card::new(name).ok_or_else(invalid)?;
    let tun = File::options().read(true).write(true).open(TUN)?;
    let mut request = card.request();
    request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as i16;
    // SAFETY: the request is of the type that this ioctl takes, and lives through the call.
    check(unsafe { libc::ioctl(tun.as_raw_fd(), TUNSETIFF as _, &raw mut request) })?;
    for (what, value) in [(TUNSETOWNER, u64::from(owner)), (TUNSETPERSIST, 1)] {
        // SAFETY: these take plain numbers.
        check(unsafe { libc::ioctl(tun.as_raw_fd(), what as _, value) })?;
    }
    // A new namespace has the settings of the host's. Those without IPv6 have none of it to turn off.
    for (setting, value) in [
        (format!("ipv6/conf/{name}/disable_ipv6"), "1"),
        (format!("ipv4/conf/{name}/rp_filter"), "1"),
        (format!("ipv4/conf/{name}/accept_local"), "0"),
        (format!("ipv4/conf/{name}/route_localnet"), "0"),
        ("ipv4/conf/all/accept_local".to_owned(), "0"),
        ("ipv4/conf/all/route_localnet".to_owned(), "0"),
    ] {
        match fs::write(format!("{SETTINGS}/{setting}"), value) {
            Err(error)
                if error.kind() == io::ErrorKind::NotFound && setting.starts_with("ipv6") => {}
            written => written?,
        }
    }
    card.set_up(address, prefix)?;
    route_to(&card, peer)
}

/// In the table that is asked first.
fn route_to(card: &Card, peer: Ipv4Addr) -> io::Result<()> {
    let mut request = card.request();
    ask(libc::SIOCGIFINDEX, &mut request)?;
    // SAFETY: the call above has filled this member.
    let index = unsafe { request.ifr_ifru.ifru_ifindex };
    let message = route_message(index as u32, peer);
    let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC;
    // SAFETY: plain numbers.
    let socket = check(unsafe { libc::socket(libc::AF_NETLINK, kind, libc::NETLINK_ROUTE) })?;
    // SAFETY: the kernel has just returned this descriptor to us, so it is open and nobody else owns it.
    let socket = unsafe { OwnedFd::from_raw_fd(socket) };
    let fd = socket.as_fd().as_raw_fd();
    // SAFETY: the true length of the message is passed.
    check_long(unsafe { libc::send(fd, message.as_ptr().cast(), message.len(), 0) } as _)?;
    let mut answer = [0_u8; ANSWER_BYTES];
    // SAFETY: the true length of the buffer is passed.
    let length =
        check_long(unsafe { libc::recv(fd, answer.as_mut_ptr().cast(), answer.len(), 0) } as _)?;
    acknowledged(answer.get(..length as usize).unwrap_or(&[]))
}

/// RTM_NEWROUTE (rtnetlink(7)): numbers in this machine's order, addresses in the net's.
fn route_message(index: u32, peer: Ipv4Addr) -> Vec<u8> {
    let mut body = vec![libc::AF_INET as u8, 32, 0, 0];
    body.extend([
        libc::RT_TABLE_LOCAL,
        libc::RTPROT_STATIC,
        libc::RT_SCOPE_LINK,
        libc::RTN_UNICAST,
    ]);
    body.extend(0_u32.to_ne_bytes());
    for (kind, value) in [
        (libc::RTA_DST, peer.octets()),
        (libc::RTA_OIF, index.to_ne_bytes()),
    ] {
        body.extend(8_u16.to_ne_bytes());
        body.extend(kind.to_ne_bytes());
        body.extend(value);
    }
    let flags = libc::NLM_F_REQUEST | libc::NLM_F_ACK | libc::NLM_F_CREATE | libc::NLM_F_EXCL;
    let mut message = ((body.len() + 16) as u32).to_ne_bytes().to_vec();
    message.extend(libc::RTM_NEWROUTE.to_ne_bytes());
    message.extend((flags as u16).to_ne_bytes());
    message.extend([0; 8]); // sequence and port
    message.extend(body);
    message
}

/// NLMSG_ERROR with the number of an error, or 0.
fn acknowledged(answer: &[u8]) -> io::Result<()> {
    let strange = || io::Error::from_raw_os_error(libc::EPROTO);
    let number = |range| -> Option<i32> {
        let bytes: [u8; 4] = answer
            .get::<std::ops::Range<usize>>(range)?
            .try_into()
            .ok()?;
        Some(i32::from_ne_bytes(bytes))
    };
    let kind = answer.get(4..6).ok_or_else(strange)?;
    if kind != (libc::NLMSG_ERROR as u16).to_ne_bytes() {
        return Err(strange());
    }
    match number(16..20).ok_or_else(strange)? {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(-error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_says_how_long_it_is() {
        let message = route_message(7, Ipv4Addr::new(198, 18, 0, 15));

        assert_eq!(message.len(), 16 + 12 + 8 + 8);
        assert_eq!(message[..4], 44_u32.to_ne_bytes());
        assert_eq!(message[32..36], [198, 18, 0, 15]);
        assert_eq!(message[40..44], 7_u32.to_ne_bytes());
    }

    #[test]
    fn an_answer_is_an_error_or_none() {
        let answer = |number: i32| {
            let mut bytes = vec![0; 20];
            bytes[4..6].copy_from_slice(&(libc::NLMSG_ERROR as u16).to_ne_bytes());
            bytes[16..20].copy_from_slice(&number.to_ne_bytes());
            acknowledged(&bytes)
        };

        assert!(answer(0).is_ok());
        assert_eq!(
            answer(-libc::EEXIST).unwrap_err().raw_os_error(),
            Some(libc::EEXIST)
        );
        assert_eq!(
            acknowledged(&[0; 20]).unwrap_err().raw_os_error(),
            Some(libc::EPROTO)
        );
        assert_eq!(
            acknowledged(&[]).unwrap_err().raw_os_error(),
            Some(libc::EPROTO)
        );
    }
}
