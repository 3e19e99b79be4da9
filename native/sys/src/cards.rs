//! The network cards of a machine, as its first program sets them up: no program of its image is needed for that.

use std::fs;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;

use crate::result::check;

const CLASS: &str = "/sys/class/net";
/// Of one link, as for every card that frames can be sent by.
const ETHERNET: &str = "1";
const PREFIX_MAX: u8 = 32;

pub type HardwareAddress = [u8; 6];

/// A card, by its name in this network namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Card {
    name: [libc::c_char; libc::IFNAMSIZ],
}

impl Card {
    /// None: it is no name of a device.
    pub fn new(name: &str) -> Option<Card> {
        let mut kept = [0; libc::IFNAMSIZ];
        if name.is_empty() || name.len() >= kept.len() || name.contains(['/', '\0']) {
            return None;
        }
        for (to, from) in kept.iter_mut().zip(name.bytes()) {
            *to = from as libc::c_char;
        }
        Some(Card { name: kept })
    }

    /// Frames go out and are received with it from now on.
    pub fn set_hardware_address(&self, address: HardwareAddress) -> io::Result<()> {
        let mut request = self.request();
        // SAFETY: a record of numbers, for which zero is valid.
        let mut hardware: libc::sockaddr = unsafe { std::mem::zeroed() };
        hardware.sa_family = libc::ARPHRD_ETHER;
        for (to, from) in hardware.sa_data.iter_mut().zip(address) {
            *to = from as libc::c_char;
        }
        request.ifr_ifru.ifru_hwaddr = hardware;
        ask(libc::SIOCSIFHWADDR, &mut request)
    }

    /// Gives it its address, and brings it up.
    pub fn set_up(&self, address: Ipv4Addr, prefix: u8) -> io::Result<()> {
        if prefix > PREFIX_MAX {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let mask = Ipv4Addr::from(u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0));
        for (what, value) in [(libc::SIOCSIFADDR, address), (libc::SIOCSIFNETMASK, mask)] {
            let mut request = self.request();
            request.ifr_ifru.ifru_addr = plain(value);
            ask(what, &mut request)?;
        }
        let mut request = self.request();
        request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as i16;
        ask(libc::SIOCSIFFLAGS, &mut request)
    }

    pub(crate) fn request(&self) -> libc::ifreq {
        // SAFETY: a record of numbers, for which zero is valid.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        request.ifr_name = self.name;
        request
    }
}

/// All that are devices, and not made by programs.
pub fn cards() -> io::Result<Vec<Card>> {
    cards_in(Path::new(CLASS))
}

fn cards_in(class: &Path) -> io::Result<Vec<Card>> {
    let mut found = Vec::new();
    let entries = match fs::read_dir(class) {
        // A kernel without networks, or a system that does not show its devices.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(found),
        entries => entries?,
    };
    for entry in entries {
        let path = entry?.path();
        let kind = fs::read_to_string(path.join("type")).unwrap_or_default();
        let card = path.file_name().and_then(|name| Card::new(name.to_str()?));
        if let (true, ETHERNET, Some(card)) = (path.join("device").exists(), kind.trim(), card) {
            found.push(card);
        }
    }
    Ok(found)
}

/// All that goes to no net of its own goes by way of `gateway`.
pub fn set_default_route(gateway: Ipv4Addr) -> io::Result<()> {
    // SAFETY: a record of numbers and a pointer, for which zero is valid.
    let mut route: libc::rtentry = unsafe { std::mem::zeroed() };
    route.rt_dst = plain(Ipv4Addr::UNSPECIFIED);
    route.rt_genmask = plain(Ipv4Addr::UNSPECIFIED);
    route.rt_gateway = plain(gateway);
    route.rt_flags = libc::RTF_UP | libc::RTF_GATEWAY;
    ask(libc::SIOCADDRT, &mut route)
}

fn plain(address: Ipv4Addr) -> libc::sockaddr {
    // SAFETY: a record of numbers, for which zero is valid.
    let mut kept: libc::sockaddr = unsafe { std::mem::zeroed() };
    kept.sa_family = libc::AF_INET as u16;
    // As in sockaddr_in: two bytes of port, then the address.
    for (to, from) in kept.sa_data[2..6].iter_mut().zip(address.octets()) {
        *to = from as libc::c_char;
    }
    kept
}

pub(crate) fn ask<T>(what: u64, request: &mut T) -> io::Result<()> {
    // SAFETY: plain numbers.
    let socket =
        check(unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) })?;
    // SAFETY: the kernel has just returned this descriptor to us, so it is open and nobody else owns it.
    let socket = unsafe { OwnedFd::from_raw_fd(socket) };
    // SAFETY: the request is of the type that this ioctl takes, and lives through the call.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), what as _, std::ptr::from_mut(request)) })
        .map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn only_names_of_devices_are_cards() {
        for wrong in ["", "a/b", "sixteen-bytes-xx", "a\0"] {
            assert!(Card::new(wrong).is_none(), "{wrong:?}");
        }
        assert!(Card::new("fifteen-bytes-x").is_some());
    }

    #[test]
    fn what_programs_have_made_is_no_card() {
        let class = std::env::temp_dir().join(format!("dsec-cards-{}", std::process::id()));
        for (name, kind, device) in [
            ("eth0", "1", true),
            ("br0", "1", false),
            ("lo", "772", false),
        ] {
            let path = class.join(name);
            fs::create_dir_all(&path).unwrap();
            fs::write(path.join("type"), format!("{kind}\n")).unwrap();
            if device {
                symlink("/", path.join("device")).unwrap();
            }
        }

        let found = cards_in(&class).unwrap();
        fs::remove_dir_all(&class).unwrap();

        assert_eq!(found, vec![Card::new("eth0").unwrap()]);
    }

    #[test]
    fn a_system_that_shows_no_devices_has_no_cards() {
        assert_eq!(cards_in(Path::new("/none/such")).unwrap(), vec![]);
    }

    #[test]
    fn an_address_lies_where_the_kernel_looks_for_it() {
        let kept = plain(Ipv4Addr::new(198, 18, 0, 15));

        let bytes: Vec<u8> = kept.sa_data.iter().map(|byte| *byte as u8).collect();
        assert_eq!(&bytes[..6], &[0, 0, 198, 18, 0, 15]);
    }

    #[test]
    fn a_card_that_is_not_there_is_an_error() {
        let card = Card::new("none-such").unwrap();

        let error = card.set_hardware_address([2, 0, 0, 0, 0, 1]).unwrap_err();
        assert!(matches!(
            error.raw_os_error(),
            Some(libc::ENODEV | libc::EPERM)
        ));
    }
}
