//! What the machine is to be made of: lines of words, written by the node into the initramfs.
//!
//! ```text
//! pids 1032
//! layer l0 l0b
//! layer l1
//! disk upper
//! vsock 1024
//! network 198.18.0.15 24 198.18.0.14 198.18.0.53
//! ```
//! Layers lowest first, each by its metadata's device and its data's, if that is apart. A device is named by its serial number, or,
//! where the monitor gives it none, by its path. With a vsock the agent listens there, without one it serves two serial ports.
//! Where there is a network its card has this address and prefix, the gateway, and the resolver.

use std::fs;
use std::net::Ipv4Addr;
use std::path::Path;

use dsec_sys::failure::{Doing, Error, Result};

#[derive(Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Processes that commands may have at once.
    pub pids: u64,
    pub layers: Vec<Layer>,
    /// Of what the sandbox writes: an ext4 file system.
    pub disk: String,
    /// The port where the agent listens to the host.
    pub vsock: Option<u32>,
    pub network: Option<Network>,
}

#[derive(Debug, PartialEq, Eq)]
pub struct Network {
    pub address: Ipv4Addr,
    pub prefix: u8,
    pub gateway: Ipv4Addr,
    pub resolver: Ipv4Addr,
}

#[derive(Debug, PartialEq, Eq)]
pub struct Layer {
    pub meta: String,
    pub blob: Option<String>,
}

impl Plan {
    pub fn read(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path).doing("read", path.display())?;
        Self::parse(&text)
    }

    pub fn parse(text: &str) -> Result<Self> {
        let mut plan = Self::default();
        for line in text.lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            match words.as_slice() {
                [] => {}
                ["pids", count] => {
                    plan.pids = count
                        .parse()
                        .map_err(|_| Error::new(format!("no number of processes: {line}")))?;
                }
                ["layer", meta, blob @ ..] if blob.len() < 2 => plan.layers.push(Layer {
                    meta: (*meta).to_owned(),
                    blob: blob.first().map(|blob| (*blob).to_owned()),
                }),
                ["vsock", port] => {
                    let port = port.parse();
                    plan.vsock =
                        Some(port.map_err(|_| Error::new(format!("no number of a port: {line}")))?);
                }
                ["network", address, prefix, gateway, resolver] => {
                    let network = Network::parse([address, gateway, resolver], prefix);
                    plan.network =
                        Some(network.ok_or_else(|| Error::new(format!("no network: {line}")))?);
                }
                ["disk", serial] => plan.disk = (*serial).to_owned(),
                _ => return Err(Error::new(format!("a line of the plan is strange: {line}"))),
            }
        }
        match plan.pids > 0 && !plan.disk.is_empty() {
            true => Ok(plan),
            false => Err(Error::new("the plan names no disk or no processes".into())),
        }
    }
}

impl Network {
    fn parse(addresses: [&str; 3], prefix: &str) -> Option<Self> {
        let [address, gateway, resolver] = addresses.map(|text| text.parse().ok());
        Some(Self {
            address: address?,
            prefix: prefix.parse().ok().filter(|prefix| *prefix <= 32)?,
            gateway: gateway?,
            resolver: resolver?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_keep_their_order() {
        let plan = Plan::parse("pids 9\nlayer a b\nlayer c\ndisk d\n").unwrap();

        let names: Vec<_> = plan
            .layers
            .iter()
            .map(|l| (l.meta.as_str(), l.blob.as_deref()))
            .collect();
        assert_eq!(names, [("a", Some("b")), ("c", None)]);
        assert_eq!((plan.pids, plan.disk.as_str()), (9, "d"));
    }

    #[test]
    fn a_vsock_is_asked_for_by_its_port() {
        let plan = |more| Plan::parse(&format!("pids 9\ndisk d\n{more}")).unwrap();

        assert_eq!(plan("").vsock, None);
        assert_eq!(plan("vsock 1024\n").vsock, Some(1024));
    }

    #[test]
    fn a_network_is_an_address_and_two_others() {
        let plan = Plan::parse("pids 9\ndisk d\nnetwork 198.18.0.15 24 198.18.0.14 198.18.0.53\n");

        let network = plan.unwrap().network.unwrap();
        assert_eq!(network.address, Ipv4Addr::new(198, 18, 0, 15));
        assert_eq!(network.prefix, 24);
        assert_eq!(network.gateway, Ipv4Addr::new(198, 18, 0, 14));
        assert_eq!(network.resolver, Ipv4Addr::new(198, 18, 0, 53));
    }

    #[test]
    fn what_is_strange_or_missing_is_refused() {
        for text in [
            "",
            "pids 1",
            "disk d",
            "pids x\ndisk d",
            "pids 1\ndisk d\nlayer",
            "pids 1\ndisk d\nlayer a b c",
            "pids 1\ndisk d\nother",
            "pids 1\ndisk d\nvsock",
            "pids 1\ndisk d\nvsock -1",
            "pids 1\ndisk d\nnetwork",
            "pids 1\ndisk d\nnetwork 198.18.0.15 33 198.18.0.14 198.18.0.53",
            "pids 1\ndisk d\nnetwork 198.18.0.15 24 198.18.0.14 somewhere",
        ] {
            assert!(Plan::parse(text).is_err(), "{text}");
        }
    }
}
