//! rtnetlink(7): addresses and routes of the network namespace in which a thread opens the socket.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::result::check;

/// Kinds of routes (rtm_type).
pub const UNICAST: u8 = libc::RTN_UNICAST;
pub const LOCAL: u8 = libc::RTN_LOCAL;

/// The loopback device is the first of each namespace.
pub const LOOPBACK: u32 = 1;

const HEADER: usize = 16;
const ERROR: u16 = libc::NLMSG_ERROR as u16;
/// An answer about one route is far shorter.
const ANSWER_BYTES: usize = 8192;
const REPLACE: u16 = (libc::NLM_F_CREATE | libc::NLM_F_REPLACE) as u16;
const NO_DETECTION: u8 = 0x02; // IFA_F_NODAD: usable at once

pub struct Netlink {
    socket: OwnedFd,
    sequence: u32,
}

impl Netlink {
    pub fn open() -> io::Result<Netlink> {
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC;
        // SAFETY: plain numbers; the returned descriptor is new and ours.
        let socket = unsafe {
            let raw = check(libc::socket(libc::AF_NETLINK, kind, libc::NETLINK_ROUTE))?;
            OwnedFd::from_raw_fd(raw)
        };
        Ok(Netlink {
            socket,
            sequence: 0,
        })
    }

    /// A host address of the loopback device, beside those that it has.
    pub fn add_own_address(&mut self, address: IpAddr) -> io::Result<()> {
        let bytes = octets(address);
        let mut body = vec![
            family(address),
            (bytes.len() * 8) as u8,
            NO_DETECTION,
            libc::RT_SCOPE_UNIVERSE,
        ];
        body.extend(LOOPBACK.to_ne_bytes());
        push(&mut body, libc::IFA_LOCAL, &bytes);
        push(&mut body, libc::IFA_ADDRESS, &bytes);
        self.ask(libc::RTM_NEWADDR, REPLACE, &body).map(drop)
    }

    /// Every destination of this family is an address of this machine; who calls one does so from `source`.
    pub fn make_all_local(&mut self, source: IpAddr) -> io::Result<()> {
        let scope = match source {
            IpAddr::V4(_) => libc::RT_SCOPE_HOST,
            IpAddr::V6(_) => libc::RT_SCOPE_UNIVERSE,
        };
        let mut body = vec![
            family(source),
            0, // bits of the destination: all of them
            0,
            0,
            libc::RT_TABLE_LOCAL,
            libc::RTPROT_STATIC,
            scope,
            LOCAL,
        ];
        body.extend(0u32.to_ne_bytes());
        push(&mut body, libc::RTA_OIF, &LOOPBACK.to_ne_bytes());
        push(&mut body, libc::RTA_PREFSRC, &octets(source));
        self.ask(libc::RTM_NEWROUTE, REPLACE, &body).map(drop)
    }

    /// This address is behind a device, which nothing comes before: neither does what makes all others local.
    pub fn lead_to(&mut self, address: IpAddr, device: u32) -> io::Result<()> {
        let bytes = octets(address);
        let mut body = vec![
            family(address),
            (bytes.len() * 8) as u8,
            0,
            0,
            libc::RT_TABLE_LOCAL,
            libc::RTPROT_STATIC,
            libc::RT_SCOPE_LINK,
            UNICAST,
        ];
        body.extend(0u32.to_ne_bytes());
        push(&mut body, libc::RTA_DST, &bytes);
        push(&mut body, libc::RTA_OIF, &device.to_ne_bytes());
        self.ask(libc::RTM_NEWROUTE, REPLACE, &body).map(drop)
    }

    /// The kind of the route that a connection to this address would take; None when there is none.
    pub fn route_kind(&mut self, address: IpAddr) -> io::Result<Option<u8>> {
        let bytes = octets(address);
        let mut body = vec![
            family(address),
            (bytes.len() * 8) as u8,
            0,
            0,
            libc::RT_TABLE_UNSPEC,
            0,
            0,
            0,
        ];
        body.extend(0u32.to_ne_bytes());
        push(&mut body, libc::RTA_DST, &bytes);
        match self.ask(libc::RTM_GETROUTE, 0, &body) {
            Ok(answer) => Ok(answer.get(7).copied()),
            Err(error) => match error.raw_os_error() {
                // No route, one that says "unreachable" or the like, or a family that this machine does not have.
                Some(
                    libc::ENETUNREACH
                    | libc::EHOSTUNREACH
                    | libc::EACCES
                    | libc::EINVAL
                    | libc::ESRCH
                    | libc::EAFNOSUPPORT
                    | libc::EOPNOTSUPP,
                ) => Ok(None),
                _ => Err(error),
            },
        }
    }

    /// The body of the answer; empty when it is only said that it has been done.
    fn ask(&mut self, kind: u16, flags: u16, body: &[u8]) -> io::Result<Vec<u8>> {
        self.sequence = self.sequence.wrapping_add(1);
        let mut message = Vec::with_capacity(HEADER + body.len());
        message.extend(((HEADER + body.len()) as u32).to_ne_bytes());
        message.extend(kind.to_ne_bytes());
        message.extend((flags | (libc::NLM_F_REQUEST | libc::NLM_F_ACK) as u16).to_ne_bytes());
        message.extend(self.sequence.to_ne_bytes());
        message.extend(0u32.to_ne_bytes());
        message.extend_from_slice(body);
        // SAFETY: the true length of the buffer is passed.
        let sent = unsafe {
            libc::send(
                self.socket.as_raw_fd(),
                message.as_ptr().cast(),
                message.len(),
                0,
            )
        };
        if sent < 0 {
            return Err(io::Error::last_os_error());
        }
        let mut answer = Vec::new();
        loop {
            let mut buffer = [0u8; ANSWER_BYTES];
            // SAFETY: the buffer is writable for its length.
            let count = unsafe {
                libc::recv(
                    self.socket.as_raw_fd(),
                    buffer.as_mut_ptr().cast(),
                    buffer.len(),
                    0,
                )
            };
            if count < 0 {
                let error = io::Error::last_os_error();
                match error.kind() {
                    io::ErrorKind::Interrupted => continue,
                    _ => return Err(error),
                }
            }
            let mut rest = &buffer[..count as usize];
            while let Some((found, sequence, part, after)) = first_message(rest) {
                rest = after;
                if sequence != self.sequence {
                    continue; // of a question before, whose answer broke off
                }
                if found != ERROR {
                    answer = part.to_vec();
                    continue;
                }
                let code = part
                    .first_chunk::<4>()
                    .map(|code| i32::from_ne_bytes(*code));
                return match code {
                    Some(0) => Ok(answer),
                    Some(code) => Err(io::Error::from_raw_os_error(code.saturating_neg())),
                    None => Err(io::ErrorKind::InvalidData.into()),
                };
            }
        }
    }
}

/// Kind, sequence, body, and what follows.
fn first_message(bytes: &[u8]) -> Option<(u16, u32, &[u8], &[u8])> {
    let length = u32::from_ne_bytes(*bytes.first_chunk()?) as usize;
    let message = bytes
        .get(..length)
        .filter(|message| message.len() >= HEADER)?;
    let kind = u16::from_ne_bytes([message[4], message[5]]);
    let sequence = u32::from_ne_bytes([message[8], message[9], message[10], message[11]]);
    let after = bytes.get(aligned(length)..).unwrap_or(&[]);
    Some((kind, sequence, &message[HEADER..], after))
}

fn push(body: &mut Vec<u8>, kind: u16, value: &[u8]) {
    body.extend(((4 + value.len()) as u16).to_ne_bytes());
    body.extend(kind.to_ne_bytes());
    body.extend_from_slice(value);
    body.resize(aligned(body.len()), 0);
}

fn aligned(length: usize) -> usize {
    length.div_ceil(4) * 4
}

fn family(address: IpAddr) -> u8 {
    match address {
        IpAddr::V4(_) => libc::AF_INET as u8,
        IpAddr::V6(_) => libc::AF_INET6 as u8,
    }
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_local() {
        let mut netlink = Netlink::open().unwrap();

        for address in ["127.0.0.1", "127.1.2.3"] {
            let kind = netlink.route_kind(address.parse().unwrap()).unwrap();
            assert_eq!(kind, Some(LOCAL), "{address}");
        }
    }

    #[test]
    fn what_is_no_whole_message_is_none() {
        for bytes in [&[][..], &[1, 0, 0], &[16, 0, 0, 0], &[4; 64], &[0; 64]] {
            assert!(first_message(bytes).is_none(), "{bytes:?}");
        }
    }
}
