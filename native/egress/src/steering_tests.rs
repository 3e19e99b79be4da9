use std::net::IpAddr;

use super::*;

const SOCKET: u64 = 0x1000;

/// Runs the program as the kernel would: the verdict, and the number of the socket that was given.
fn run(
    address: IpAddr,
    protocol: i32,
    port: u16,
    has_socket: bool,
    assigns: bool,
) -> (u64, Option<u32>) {
    let code = program(9);
    let mut registers = [0u64; 11];
    let mut key = 0;
    let (mut asked, mut given, mut released) = (None, None, true);
    let mut at = 0;
    for _ in 0..200 {
        let step = code[at];
        let (to, from) = (
            usize::from(step.registers & 15),
            usize::from(step.registers >> 4),
        );
        at += 1;
        let value = step.value as i64 as u64;
        let jumps = match step.operation {
            0xbf => {
                registers[to] = registers[from];
                false
            }
            0xb7 => {
                registers[to] = value;
                false
            }
            0x07 => {
                registers[to] = registers[to].wrapping_add(value);
                false
            }
            0x57 => {
                registers[to] &= value;
                false
            }
            0x61 => {
                registers[to] = u64::from(context(step.jump, address, protocol, port));
                false
            }
            0x63 => {
                assert_eq!((to, step.jump), (10, KEY));
                key = registers[from] as u32;
                false
            }
            0x18 => {
                assert_eq!(step.value, 9);
                at += 1;
                false
            }
            0x85 => {
                registers[0] = match step.value {
                    HELPER_LOOKUP => {
                        asked = Some(key);
                        released = !has_socket;
                        if has_socket {
                            SOCKET
                        } else {
                            0
                        }
                    }
                    HELPER_ASSIGN => {
                        assert_eq!(registers[2], SOCKET);
                        given = asked.filter(|_| assigns);
                        if assigns {
                            0
                        } else {
                            (-1i64) as u64
                        }
                    }
                    HELPER_RELEASE => {
                        assert_eq!(registers[1], SOCKET);
                        released = true;
                        0
                    }
                    other => panic!("helper {other}"),
                };
                false
            }
            0x05 => true,
            0x15 => registers[to] == value,
            0x16 => registers[to] as u32 == step.value as u32,
            0x56 => registers[to] as u32 != step.value as u32,
            0x95 => {
                assert!(released, "a socket is kept");
                return (registers[0], given);
            }
            other => panic!("operation {other:#x}"),
        };
        if jumps {
            assert!(step.jump >= 0, "the kernel wants an end");
            at += step.jump as usize;
        }
    }
    panic!("no end");
}

fn context(offset: i16, address: IpAddr, protocol: i32, port: u16) -> u32 {
    let part = |bytes: &[u8], at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap());
    match (offset, address) {
        (FAMILY, IpAddr::V4(_)) => libc::AF_INET as u32,
        (FAMILY, IpAddr::V6(_)) => libc::AF_INET6 as u32,
        (PROTOCOL, _) => protocol as u32,
        (LOCAL_PORT, _) => u32::from(port),
        (LOCAL_V4, IpAddr::V4(address)) => part(&address.octets(), 0),
        (44..=56, IpAddr::V6(address)) => part(&address.octets(), (offset - LOCAL_V6) as usize),
        _ => panic!("nothing of this family at {offset}"),
    }
}

fn chosen(address: &str, protocol: i32, port: u16) -> (u64, Option<u32>) {
    run(address.parse().unwrap(), protocol, port, true, true)
}

#[test]
fn only_what_leaves_the_sandbox_is_steered() {
    let (tcp, udp) = (libc::IPPROTO_TCP, libc::IPPROTO_UDP);
    for address in [
        "127.0.0.1",
        "127.255.255.255",
        "198.18.0.1",
        "::1",
        "fd64:7365:6300::1",
    ] {
        for (protocol, port) in [(tcp, 80), (udp, 53), (udp, 9)] {
            assert_eq!(chosen(address, protocol, port), (1, None), "{address}");
        }
    }
    for address in [
        "1.1.1.1",
        "126.255.255.255",
        "128.0.0.1",
        "198.18.0.2",
        "0.0.0.127",
        "255.255.255.255",
    ] {
        assert_eq!(chosen(address, tcp, 80), (1, Some(TCP)), "{address}");
        assert_eq!(chosen(address, tcp, 53), (1, Some(TCP)), "{address}");
        assert_eq!(chosen(address, udp, 53), (1, Some(UDP)), "{address}");
        assert_eq!(chosen(address, udp, 54), (0, None), "{address}");
        assert_eq!(chosen(address, 132, 53), (0, None), "{address}");
    }
    for address in [
        "2a00::1",
        "::2",
        "::1:0:1",
        "::1:0:0:1",
        "1::1",
        "fd64:7365:6300::2",
        "fd64:7365::1",
        "fd64:7365:6301::1",
        "fd64:7364:6300::1",
        "0:0:6300::1",
        "::ffff:127.0.0.1",
    ] {
        assert_eq!(chosen(address, tcp, 80), (1, Some(TCP_6)), "{address}");
        assert_eq!(chosen(address, udp, 53), (1, Some(UDP_6)), "{address}");
        assert_eq!(chosen(address, udp, 5353), (0, None), "{address}");
    }
}

#[test]
fn without_a_socket_nothing_passes() {
    let address = "1.1.1.1".parse().unwrap();
    assert_eq!(run(address, libc::IPPROTO_TCP, 80, false, true), (0, None));
    assert_eq!(run(address, libc::IPPROTO_TCP, 80, true, false), (0, None));
}
