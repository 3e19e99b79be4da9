//! What a monitor is confined to; the twin of `JailPlan` in src/dsec/wire/jail.py, which binds.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use serde::Deserialize;
use serde_bytes::ByteBuf;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    pub uid: u32,
    pub gid: u32,
    /// Files that a process enters a cgroup by, one of each hierarchy.
    pub cgroups: Vec<String>,
    /// A directory that exists: the root is mounted there, and seen by nobody else.
    pub root: String,
    pub binds: Vec<Bind>,
    /// Symbolic links to make: path → target.
    #[serde(default)]
    pub links: BTreeMap<String, String>,
    #[serde(default)]
    pub files: Vec<SmallFile>,
    /// Made in the network namespace of the jail.
    #[serde(default)]
    pub tap: Option<Tap>,
    /// Resource limits by their lower-case names.
    #[serde(default)]
    pub limits: BTreeMap<String, u64>,
    pub argv: Vec<ByteBuf>,
    #[serde(default)]
    pub env: Vec<ByteBuf>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bind {
    pub source: String,
    /// Absolute, in the new root.
    pub target: String,
    #[serde(default)]
    pub writable: bool,
    /// A device node, which works there.
    #[serde(default)]
    pub device: bool,
    /// A device that the host keeps for itself: a node of its own, which belongs to the program.
    #[serde(default)]
    pub owned: bool,
}

/// Made in the new root, for reading.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SmallFile {
    pub path: String,
    pub content: ByteBuf,
}

/// A network device that the program may open by its name.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tap {
    pub name: String,
    /// Of the namespace's end.
    pub address: String,
    pub prefix: u8,
    /// The one address that is sent to it.
    pub peer: String,
}

impl Tap {
    /// Address and peer.
    pub fn addresses(&self) -> Option<(Ipv4Addr, Ipv4Addr)> {
        Some((self.address.parse().ok()?, self.peer.parse().ok()?))
    }
}
