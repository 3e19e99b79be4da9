//! A sandbox's network namespace: found by a process, set up, and steered to sockets of ours in it.

use std::fs::File;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use dsec_sys::namespaces::{enter, open_process, NEW_NET};
use dsec_sys::netlink::Netlink;
use dsec_sys::seqpacket::{loopback_up, wait_ready, Interest};
use dsec_sys::{bpf, inet};

use crate::error::{Doing, Error, Result};
use crate::limits::BACKLOG;
use crate::steering;

/// Device and inode.
pub type Id = (u64, u64);

/// Our ports there, which nobody is sent to: one that no program wants, or any when somebody has it.
const PORTS: [u16; 2] = [1, 0];
const OWN_NETWORK: &str = "/proc/self/ns/net";
const FIRST_NETWORK: &str = "/proc/1/ns/net";
const NO_PINGS: &str = "/proc/sys/net/ipv4/icmp_echo_ignore_all";
const NO_PINGS_6: &str = "/proc/sys/net/ipv6/icmp/echo_ignore_all";
const NO_IPV6: &str = "/proc/sys/net/ipv6/conf/lo/disable_ipv6";

static SAID: AtomicBool = AtomicBool::new(false);

pub struct Found {
    /// Readable when it has ended.
    pub process: OwnedFd,
    pub id: Id,
    pub network: File,
}

/// What is served of one family.
pub struct Family {
    pub listener: OwnedFd,
    pub questions: OwnedFd,
    pub packets: OwnedFd,
}

pub struct Sockets {
    pub v4: Family,
    pub v6: Option<Family>,
    /// Steers for as long as it is open.
    pub link: OwnedFd,
}

/// The namespace of a process that began at `start`. Never our own, nor that of the first process.
pub fn find(pid: i32, start: u64) -> Result<Found> {
    let gone = || Error::NotFound(format!("process {pid}, which began at {start}, has ended"));
    if pid <= 1 {
        return Err(Error::Invalid(format!("{pid} is no process of a sandbox")));
    }
    let process = open_process(pid).map_err(|error| absent(error, gone))?;
    let network = File::open(format!("/proc/{pid}/ns/net")).map_err(|error| absent(error, gone))?;
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .map_err(|error| absent(error, gone))?;
    // It still runs: the number was its own all the time.
    let ended = wait_ready(
        &[(process.as_fd(), Interest::Readable)],
        Some(std::time::Duration::ZERO),
    )
    .doing("looking at a process")?;
    if ended[0] || start_in(&stat) != Some(start) {
        return Err(gone());
    }
    let id = id_of(&network).doing("looking at a network")?;
    let own = File::open(OWN_NETWORK).and_then(|own| id_of(&own));
    let own = own.doing("looking at the host's network")?;
    // Where nobody may look at the first process, ours is the host's.
    let first = File::open(FIRST_NETWORK).and_then(|first| id_of(&first));
    if id == own || first.is_ok_and(|first| id == first) {
        return Err(Error::Invalid(format!(
            "process {pid} is in the host's own network"
        )));
    }
    Ok(Found {
        process,
        id,
        network,
    })
}

fn absent(error: io::Error, gone: impl FnOnce() -> Error) -> Error {
    match error.raw_os_error() {
        Some(libc::ESRCH | libc::ENOENT | libc::EINVAL) => gone(),
        _ => Error::Host {
            doing: "finding a process".into(),
            source: error,
        },
    }
}

fn id_of(file: &File) -> io::Result<Id> {
    file.metadata().map(|facts| (facts.dev(), facts.ino()))
}

/// Field 22 of /proc/PID/stat. The name before may hold blanks and parentheses.
fn start_in(stat: &str) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_ascii_whitespace().nth(19)?.parse().ok()
}

impl Sockets {
    /// Sets the namespace up and steers it. May be repeated once the sockets of before are closed.
    pub fn make(network: &File) -> Result<Sockets> {
        let map = bpf::socket_map(steering::SOCKETS).doing("making a map of sockets")?;
        let program = bpf::load_socket_chooser(&steering::program(map.as_raw_fd()))
            .doing("loading the steering program")?;
        // Of this thread alone, which ends with it.
        let made = std::thread::scope(|scope| {
            let thread = std::thread::Builder::new()
                .name("into a network".into())
                .spawn_scoped(scope, || {
                    enter(network.as_fd(), NEW_NET).doing("entering a network")?;
                    set_up()
                })
                .doing("starting a thread")?;
            thread
                .join()
                .unwrap_or_else(|_| Err(Error::Busy("the network was not entered".into())))
        });
        let (v4, v6) = made?;
        let mut sockets = vec![
            (steering::TCP, &v4.listener),
            (steering::UDP, &v4.questions),
        ];
        if let Some(v6) = &v6 {
            sockets.push((steering::TCP_6, &v6.listener));
            sockets.push((steering::UDP_6, &v6.questions));
        }
        for (number, socket) in sockets {
            bpf::set_socket(map.as_fd(), number, socket.as_fd()).doing("giving a socket")?;
        }
        let link =
            bpf::attach_to_network(program.as_fd(), network.as_fd()).doing("steering a network")?;
        Ok(Sockets { v4, v6, link })
    }
}

/// In the namespace of this thread.
fn set_up() -> Result<(Family, Option<Family>)> {
    loopback_up().doing("bringing lo up")?;
    set(NO_PINGS, b"1").doing("refusing pings")?;
    let mut netlink = Netlink::open().doing("asking for routes")?;
    let v4 = family(&mut netlink, steering::OWN.into(), steering::OURS.into())?;
    if !Path::new(NO_IPV6).exists() {
        return Ok((v4, None));
    }
    set(NO_PINGS_6, b"1").doing("refusing pings")?;
    // A machine may have switched it off for everybody: then it is off here, too.
    let on = set(NO_IPV6, b"0");
    let v6 = on.doing("having IPv6").and_then(|()| {
        family(
            &mut netlink,
            steering::OWN_6.into(),
            steering::OURS_6.into(),
        )
    });
    match v6 {
        Ok(v6) => Ok((v4, Some(v6))),
        Err(error) => {
            // Once: it is the same for all.
            if !SAID.swap(true, Ordering::Relaxed) {
                eprintln!("dsec-egress: networks without IPv6: {error}");
            }
            Ok((v4, None))
        }
    }
}

fn family(netlink: &mut Netlink, own: IpAddr, ours: IpAddr) -> Result<Family> {
    netlink.add_own_address(own).doing("adding an address")?;
    netlink.make_all_local(own).doing("adding a route")?;
    Ok(Family {
        listener: bound(|port| inet::listen(SocketAddr::new(ours, port), BACKLOG))
            .doing("listening in a network")?,
        questions: bound(|port| inet::datagrams(SocketAddr::new(ours, port)))
            .doing("taking questions in a network")?,
        packets: inet::packets(own.is_ipv6()).doing("sending packets in a network")?,
    })
}

fn bound(make: impl Fn(u16) -> io::Result<OwnedFd>) -> io::Result<OwnedFd> {
    let mut last = Err(io::ErrorKind::AddrInUse.into());
    for port in PORTS {
        last = make(port);
        if !matches!(&last, Err(error) if error.raw_os_error() == Some(libc::EADDRINUSE)) {
            break;
        }
    }
    last
}

/// A setting of the kernel's, which is there: files that are not may not be made here.
fn set(path: &str, value: &[u8]) -> std::io::Result<()> {
    let mut file = std::fs::OpenOptions::new().write(true).open(path)?;
    std::io::Write::write_all(&mut file, value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_start_of_a_process_is_found_whatever_its_name() {
        let stat = "7 (a) b (c)) S 1 7 7 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 4711 1 1 18446744073709551615";
        assert_eq!(start_in(stat), Some(4711));
        assert_eq!(start_in("7 (a"), None);
        assert_eq!(start_in("7 (a) S 1"), None);
    }

    #[test]
    fn neither_our_own_network_nor_another_process_is_taken() {
        let pid = std::process::id() as i32;
        let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
        let start = start_in(&stat).unwrap();

        assert!(matches!(find(pid, start), Err(Error::Invalid(_))));
        assert!(matches!(find(pid, start + 1), Err(Error::NotFound(_))));
        assert!(matches!(find(1, 0), Err(Error::Invalid(_))));
        assert!(matches!(find(-1, 0), Err(Error::Invalid(_))));
        assert!(matches!(find(i32::MAX, 0), Err(Error::NotFound(_))));
    }
}
