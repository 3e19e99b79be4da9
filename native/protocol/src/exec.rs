//! Records of execs.

use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;
use std::collections::BTreeMap;

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tty {
    pub cols: u16,
    pub rows: u16,
}

fn grace_default() -> f64 {
    2.0
}

/// Exactly one of `argv` and `shell`. `env` is added to the sandbox's own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Exec {
    pub id: String,
    #[serde(default)]
    pub argv: Option<Vec<ByteBuf>>,
    #[serde(default, with = "serde_bytes")]
    pub shell: Option<Vec<u8>>,
    #[serde(default, with = "serde_bytes")]
    pub cwd: Option<Vec<u8>>,
    #[serde(default)]
    pub env: BTreeMap<ByteBuf, ByteBuf>,
    #[serde(default)]
    pub user: Option<String>,
    #[serde(default)]
    pub stdin: bool,
    #[serde(default)]
    pub tty: Option<Tty>,
    #[serde(default)]
    pub timeout_s: Option<f64>,
    #[serde(default = "grace_default")]
    pub grace_s: f64,
    #[serde(default)]
    pub output_bytes_max: Option<u64>,
    #[serde(default)]
    pub merge_stderr: bool,
    #[serde(default)]
    pub rlimits: BTreeMap<String, u64>,
    #[serde(default)]
    pub session: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ExecUsage {
    #[serde(default)]
    pub wall_us: u64,
    #[serde(default)]
    pub user_us: u64,
    #[serde(default)]
    pub system_us: u64,
    #[serde(default)]
    pub max_rss_bytes: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ExecEnd {
    pub status: String,
    #[serde(default)]
    pub code: Option<i32>,
    #[serde(default)]
    pub signal: Option<i32>,
    #[serde(default)]
    pub cause: Option<String>,
    #[serde(default)]
    pub out_bytes: u64,
    #[serde(default)]
    pub err_bytes: u64,
    #[serde(default)]
    pub usage: ExecUsage,
    #[serde(default)]
    pub session_ended: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ExecState {
    pub id: String,
    #[serde(default)]
    pub pid: i32,
    #[serde(default)]
    pub out: u64,
    #[serde(default)]
    pub err: u64,
    #[serde(default)]
    pub stdin: u64,
    #[serde(default)]
    pub end: Option<ExecEnd>,
    #[serde(default)]
    pub session: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ExecStarted {
    pub id: String,
    #[serde(default)]
    pub pid: i32,
    #[serde(default)]
    pub existing: bool,
    #[serde(default)]
    pub stdin: u64,
    #[serde(default)]
    pub out: u64,
    #[serde(default)]
    pub err: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Attach {
    pub id: String,
    #[serde(default)]
    pub out: u64,
    #[serde(default)]
    pub err: u64,
}

/// Arguments of detach, exit_ack and kill.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExecRef {
    pub id: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ack {
    pub id: String,
    pub out: u64,
    pub err: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Signal {
    pub id: String,
    pub signal: i32,
    #[serde(default)]
    pub tree: bool,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Resize {
    pub id: String,
    pub cols: u16,
    pub rows: u16,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ExecList {
    #[serde(default)]
    pub execs: Vec<ExecState>,
}

/// Body of END on an exec stream, from the agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExecEnded {
    pub end: ExecEnd,
}

/// Body of END from the host: no more input.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StdinEnd {
    #[serde(default)]
    pub offset: u64,
}
