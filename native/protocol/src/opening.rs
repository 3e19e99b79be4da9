//! Records of the connection itself: hello, failures, credit.

use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;
use std::collections::BTreeMap;

use crate::exec::ExecState;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hello {
    pub generation_min: u32,
    pub generation_max: u32,
    pub sandbox: String,
    #[serde(default)]
    pub features: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HelloReply {
    pub generation: u32,
    pub version: String,
    pub boot_id: String,
    #[serde(default)]
    pub execs: Vec<ExecState>,
    #[serde(default)]
    pub features: Vec<String>,
}

/// Body of ERR: ends a stream.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Failure {
    pub code: String,
    pub message: String,
    #[serde(default)]
    pub errno: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Credit {
    pub bytes: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Empty {}

/// Arguments of an operation that takes none; unlike `Empty` it refuses fields.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NoArgs {}

/// What the launcher tells the agent at its start (section 7).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AgentConfig {
    pub sandbox: String,
    #[serde(default)]
    pub env: BTreeMap<ByteBuf, ByteBuf>,
    #[serde(default)]
    pub user: Option<String>,
    #[serde(default, with = "serde_bytes")]
    pub workdir: Option<Vec<u8>>,
    #[serde(default)]
    pub caps_exec: u64,
    #[serde(default, with = "serde_bytes")]
    pub filter_exec: Vec<u8>,
    #[serde(default)]
    pub no_new_privs: bool,
    #[serde(default)]
    pub nofile: Option<u64>,
    /// It serves nobody yet: nothing runs before `claim` has said for whom.
    #[serde(default)]
    pub spare: bool,
    /// What is still to be made, by the agent, before anything can miss it. None: all is there.
    #[serde(default)]
    pub light: Option<Light>,
}

/// What a sandbox begins without: network namespace, ipc namespace with its message queues, terminals.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Light {
    /// Options that devpts is mounted with.
    pub terminals: String,
    /// Kernel settings of the ipc namespace: path below /proc/sys, of which descriptor 7 is the directory, and value.
    pub settings: BTreeMap<String, String>,
}
