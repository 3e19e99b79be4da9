//! Network devices whose other end is a program: made in this network namespace, for a user who may open them by name.

use std::fs::{self, File};
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::AsRawFd;

use crate::cards::{ask, Card};
use crate::netlink::Netlink;
use crate::result::check;

const TUN: &str = "/dev/net/tun";
const SETTINGS: &str = "/proc/sys/net";

// _IOW('T', 202, int), _IOW('T', 203, int) and _IOW('T', 204, int) of linux/if_tun.h.
const TUNSETIFF: u64 = 0x4004_54ca;
const TUNSETPERSIST: u64 = 0x4004_54cb;
const TUNSETOWNER: u64 = 0x4004_54cc;

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

fn route_to(card: &Card, peer: Ipv4Addr) -> io::Result<()> {
    let mut request = card.request();
    ask(libc::SIOCGIFINDEX, &mut request)?;
    // SAFETY: the call above has filled this member.
    let index = unsafe { request.ifr_ifru.ifru_ifindex };
    Netlink::open()?.lead_to(peer.into(), index as u32)
}
