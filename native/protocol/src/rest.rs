//! Records of the other operations.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;

fn localhost() -> String {
    "localhost".to_owned()
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConnectArgs {
    #[serde(default = "localhost")]
    pub host: String,
    #[serde(default)]
    pub port: Option<u16>,
    #[serde(default, with = "serde_bytes")]
    pub path: Option<Vec<u8>>,
}

/// Of `listen` and of `accept`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ListenArgs {
    pub host: String,
    pub port: u16,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct UsageReply {
    #[serde(default)]
    pub processes: u64,
    #[serde(default)]
    pub execs: u64,
    #[serde(default)]
    pub sessions: u64,
    #[serde(default)]
    pub agent_rss_bytes: u64,
    #[serde(default)]
    pub disk_used_bytes: u64,
    #[serde(default)]
    pub disk_total_bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClockArgs {
    pub paused_s: f64,
    #[serde(default)]
    pub wall_s: Option<f64>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReseedArgs {
    #[serde(with = "serde_bytes")]
    pub seed: Vec<u8>,
    /// Of a machine of its own: it has been somebody else's until here.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub another: bool,
}

/// What a spare agent becomes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClaimArgs {
    pub sandbox: String,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<ByteBuf, ByteBuf>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    #[serde(default, with = "serde_bytes", skip_serializing_if = "Option::is_none")]
    pub workdir: Option<Vec<u8>>,
    /// Of a machine of its own; elsewhere who made it has named it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hostname: Option<String>,
}
