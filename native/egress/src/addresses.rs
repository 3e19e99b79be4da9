//! Addresses: ranges of them, and which are public.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

/// An address, or all that begin with the same bits. Mapped addresses of IPv4 are those of IPv4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    first: IpAddr,
    bits: u8,
}

#[derive(Debug, PartialEq, Eq)]
pub struct NoRange;

impl fmt::Display for NoRange {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("not an address, or ADDRESS/BITS without bits set beyond the first BITS")
    }
}

impl Range {
    pub fn new(first: IpAddr, bits: u8) -> Result<Range, NoRange> {
        let most = if first.is_ipv4() { 32 } else { 128 };
        // A range of mapped addresses would hold nothing: those are looked for as addresses of IPv4.
        if bits > most || canonical(first) != first {
            return Err(NoRange);
        }
        let range = Range { first, bits };
        let rest = match first {
            IpAddr::V4(first) => u128::from(u32::from(first)) & low_bits(32 - bits),
            IpAddr::V6(first) => u128::from(first) & low_bits(128 - bits),
        };
        if rest == 0 {
            Ok(range)
        } else {
            Err(NoRange)
        }
    }

    pub fn contains(&self, address: IpAddr) -> bool {
        match (self.first, address) {
            (IpAddr::V4(first), IpAddr::V4(address)) => {
                let differ = u128::from(u32::from(first) ^ u32::from(address));
                differ & !low_bits(32 - self.bits) == 0
            }
            (IpAddr::V6(first), IpAddr::V6(address)) => {
                let differ = u128::from(first) ^ u128::from(address);
                differ & !low_bits(128 - self.bits) == 0
            }
            _ => false,
        }
    }
}

impl FromStr for Range {
    type Err = NoRange;

    fn from_str(text: &str) -> Result<Range, NoRange> {
        let (address, bits) = match text.split_once('/') {
            Some((address, bits)) => (address, Some(bits)),
            None => (text, None),
        };
        let first: IpAddr = address.parse().map_err(|_| NoRange)?;
        let bits = match bits {
            None if first.is_ipv4() => 32,
            None => 128,
            Some(bits) if bits.is_empty() || !bits.bytes().all(|byte| byte.is_ascii_digit()) => {
                return Err(NoRange)
            }
            Some(bits) => bits.parse().map_err(|_| NoRange)?,
        };
        Range::new(first, bits)
    }
}

fn low_bits(count: u8) -> u128 {
    match count {
        128 => u128::MAX,
        count => (1 << count) - 1,
    }
}

/// A mapped address of IPv4 (::ffff:a.b.c.d) is that address.
pub fn canonical(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V6(v6) => v6.to_ipv4_mapped().map_or(address, IpAddr::V4),
        IpAddr::V4(_) => address,
    }
}

/// Whether it is an address of somebody on the internet, by the registries of special addresses. Of NAT64 the address behind
/// it counts, which is who answers.
pub fn is_public(address: IpAddr) -> bool {
    match canonical(address) {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

const fn v4(a: u8, b: u8, c: u8, d: u8, bits: u8) -> (u32, u8) {
    (u32::from_be_bytes([a, b, c, d]), bits)
}

const SPECIAL_V4: [(u32, u8); 16] = [
    v4(0, 0, 0, 0, 8),        // this network
    v4(10, 0, 0, 0, 8),       // private
    v4(100, 64, 0, 0, 10),    // carriers'
    v4(127, 0, 0, 0, 8),      // loopback
    v4(168, 63, 129, 16, 32), // the host service of a large cloud, at an address that looks public
    v4(169, 254, 0, 0, 16),   // link-local, metadata services
    v4(172, 16, 0, 0, 12),    // private
    v4(192, 0, 0, 0, 24),     // protocols
    v4(192, 0, 2, 0, 24),     // documentation
    v4(192, 88, 99, 0, 24),   // relays of 6to4
    v4(192, 168, 0, 0, 16),   // private
    v4(198, 18, 0, 0, 15),    // benchmarking; a sandbox's own are of these
    v4(198, 51, 100, 0, 24),  // documentation
    v4(203, 0, 113, 0, 24),   // documentation
    v4(224, 0, 0, 0, 4),      // multicast
    v4(240, 0, 0, 0, 4),      // reserved
];

fn is_public_v4(address: Ipv4Addr) -> bool {
    let address = u32::from(address);
    !SPECIAL_V4
        .iter()
        .any(|(first, bits)| (address ^ first) >> (32 - bits) == 0)
}

const fn v6(parts: [u16; 3], bits: u8) -> (u128, u8) {
    let [a, b, c] = parts;
    (
        (a as u128) << 112 | (b as u128) << 96 | (c as u128) << 80,
        bits,
    )
}

const NAT64: (u128, u8) = v6([0x64, 0xff9b, 0], 96);
const GLOBAL_V6: (u128, u8) = v6([0x2000, 0, 0], 3);
const SPECIAL_V6: [(u128, u8); 4] = [
    v6([0x2001, 0, 0], 23),     // protocols, Teredo
    v6([0x2001, 0xdb8, 0], 32), // documentation
    v6([0x2002, 0, 0], 16),     // 6to4: an address of IPv4 inside
    v6([0x3fff, 0, 0], 20),     // documentation
];

fn is_public_v6(address: Ipv6Addr) -> bool {
    let address = u128::from(address);
    let within = |(first, bits): (u128, u8)| (address ^ first) >> (128 - bits) == 0;
    if within(NAT64) {
        return is_public_v4(Ipv4Addr::from(address as u32));
    }
    within(GLOBAL_V6) && !SPECIAL_V6.into_iter().any(within)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn public_is_what_somebody_on_the_internet_has() {
        for text in [
            "1.1.1.1",
            "8.8.8.8",
            "93.184.216.34",
            "100.63.255.255",
            "100.128.0.0",
            "172.15.255.255",
            "172.32.0.1",
            "198.17.255.255",
            "198.20.0.0",
            "223.255.255.255",
            "2606:2800::1",
            "2a00:1450::1",
            "2001:4860::8888",
            "64:ff9b::808:808",
            "::ffff:8.8.8.8",
        ] {
            assert!(is_public(text.parse().unwrap()), "{text}");
        }
        for text in [
            "0.0.0.0",
            "10.0.0.1",
            "100.64.0.1",
            "100.127.255.255",
            "127.0.0.1",
            "169.254.169.254",
            "172.16.0.1",
            "172.31.255.255",
            "192.0.0.192",
            "192.0.2.1",
            "192.88.99.1",
            "192.168.1.1",
            "198.18.0.1",
            "198.19.255.255",
            "198.51.100.1",
            "203.0.113.1",
            "224.0.0.1",
            "239.1.1.1",
            "240.0.0.1",
            "255.255.255.255",
            "168.63.129.16",
            "100.100.100.200",
            "::",
            "::1",
            "::127.0.0.1",
            "::8.8.8.8",
            "::ffff:10.0.0.1",
            "::ffff:169.254.169.254",
            "::ffff:0:10.0.0.1",
            "64:ff9b::a00:1",
            "64:ff9b::a9fe:a9fe",
            "64:ff9b:1::808:808",
            "100::1",
            "2001::1",
            "2001:db8::1",
            "2002:808:808::1",
            "2002:a00:1::1",
            "3fff::1",
            "5f00::1",
            "fc00::1",
            "fd00:ec2::254",
            "fe80::1",
            "fec0::1",
            "ff02::1",
        ] {
            assert!(!is_public(text.parse().unwrap()), "{text}");
        }
    }

    #[test]
    fn a_range_holds_what_begins_like_it() {
        let range: Range = "10.1.0.0/16".parse().unwrap();
        assert!(range.contains("10.1.255.255".parse().unwrap()));
        assert!(!range.contains("10.2.0.0".parse().unwrap()));
        assert!(!range.contains("::1".parse().unwrap()));
        let all: Range = "0.0.0.0/0".parse().unwrap();
        assert!(all.contains("255.255.255.255".parse().unwrap()));
        assert!(!all.contains("::".parse().unwrap()));
        let one: Range = "2a00::1".parse().unwrap();
        assert!(one.contains("2a00::1".parse().unwrap()));
        assert!(!one.contains("2a00::2".parse().unwrap()));
        let all: Range = "::/0".parse().unwrap();
        assert!(all.contains("ffff::".parse().unwrap()));
    }

    #[test]
    fn what_is_no_range_is_refused() {
        for text in [
            "",
            "10.0.0.0/",
            "10.0.0.0/33",
            "10.0.0.1/24",
            "::/129",
            "a",
            "10.0.0/8",
            "10.0.0.0/+8",
            "10.0.0.0/8/8",
            "::ffff:10.0.0.1",
            "::1/64",
            "fe80::1%1",
            "10.0.0.0/256",
            "010.0.0.1",
        ] {
            assert_eq!(text.parse::<Range>(), Err(NoRange), "{text}");
        }
    }
}
