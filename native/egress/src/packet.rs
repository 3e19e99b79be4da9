//! Datagrams as whole packets: an answer comes from the address and port that were asked, whatever they are, without our
//! holding port 53 of a sandbox.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

const UDP: u8 = 17;
const HOPS: u8 = 64;

/// None when the two are of different families, or it is too long.
pub fn datagram(from: SocketAddr, to: SocketAddr, payload: &[u8]) -> Option<Vec<u8>> {
    let length = u16::try_from(8 + payload.len()).ok()?;
    let mut udp = Vec::with_capacity(usize::from(length));
    udp.extend(from.port().to_be_bytes());
    udp.extend(to.port().to_be_bytes());
    udp.extend(length.to_be_bytes());
    udp.extend([0, 0]);
    udp.extend_from_slice(payload);
    let mut pseudo = Vec::with_capacity(40 + udp.len());
    let header = match (from.ip(), to.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            pseudo.extend(from.octets());
            pseudo.extend(to.octets());
            header_v4(from, to, length)?
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            pseudo.extend(from.octets());
            pseudo.extend(to.octets());
            header_v6(from, to, length)
        }
        _ => return None,
    };
    pseudo.extend(u32::from(length).to_be_bytes());
    pseudo.extend([0, 0, 0, UDP]);
    pseudo.extend_from_slice(&udp);
    let sum = match checksum(&pseudo) {
        0 => 0xffff, // zero would mean that there is none
        sum => sum,
    };
    udp[6..8].copy_from_slice(&sum.to_be_bytes());
    Some([header, udp].concat())
}

fn header_v4(from: Ipv4Addr, to: Ipv4Addr, length: u16) -> Option<Vec<u8>> {
    let mut header = vec![0x45, 0];
    header.extend(length.checked_add(20)?.to_be_bytes());
    header.extend([0, 0, 0x40, 0, HOPS, UDP, 0, 0]);
    header.extend(from.octets());
    header.extend(to.octets());
    let sum = checksum(&header);
    header[10..12].copy_from_slice(&sum.to_be_bytes());
    Some(header)
}

fn header_v6(from: Ipv6Addr, to: Ipv6Addr, length: u16) -> Vec<u8> {
    let mut header = vec![0x60, 0, 0, 0];
    header.extend(length.to_be_bytes());
    header.extend([UDP, HOPS]);
    header.extend(from.octets());
    header.extend(to.octets());
    header
}

fn checksum(bytes: &[u8]) -> u16 {
    let mut sum: u32 = 0;
    for pair in bytes.chunks(2) {
        let low = pair.get(1).copied().unwrap_or(0);
        sum += u32::from(u16::from_be_bytes([pair[0], low]));
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_of_what_is_sent_are_right() {
        let cases = [
            ("1.2.3.4:53", "198.18.0.1:999"),
            ("[2a00::1]:53", "[fd64::1]:999"),
        ];
        for (from, to) in cases {
            for payload in [&b""[..], b"odd", b"even"] {
                let packet = datagram(from.parse().unwrap(), to.parse().unwrap(), payload).unwrap();
                let (header, addresses) = match packet[0] >> 4 {
                    4 => {
                        assert_eq!(checksum(&packet[..20]), 0);
                        (20, &packet[12..20])
                    }
                    _ => (40, &packet[8..40]),
                };
                let udp = &packet[header..];
                let mut all = addresses.to_vec();
                all.extend((udp.len() as u32).to_be_bytes());
                all.extend([0, 0, 0, 17]);
                all.extend(udp);
                assert_eq!(checksum(&all), 0, "{from}");
                assert_eq!(udp[..4], [0, 53, 3, 231]);
                assert_eq!(&udp[8..], payload);
            }
        }
        let mixed = datagram(
            "1.2.3.4:53".parse().unwrap(),
            "[fd64::1]:9".parse().unwrap(),
            b"",
        );
        assert!(mixed.is_none());
        let long = vec![0; 65_520];
        assert!(datagram(
            "1.2.3.4:53".parse().unwrap(),
            "1.2.3.4:9".parse().unwrap(),
            &long
        )
        .is_none());
    }
}
