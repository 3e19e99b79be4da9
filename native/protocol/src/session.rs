//! Records of sessions.

use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;
use std::collections::BTreeMap;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SessionOpen {
    pub name: String,
    #[serde(default, with = "serde_bytes")]
    pub shell: Option<Vec<u8>>,
    #[serde(default, with = "serde_bytes")]
    pub cwd: Option<Vec<u8>>,
    #[serde(default)]
    pub env: BTreeMap<ByteBuf, ByteBuf>,
    #[serde(default)]
    pub user: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SessionRef {
    pub name: String,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SessionState {
    pub name: String,
    #[serde(default)]
    pub pid: i32,
    #[serde(default)]
    pub busy: Option<String>,
    #[serde(default)]
    pub existing: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SessionList {
    #[serde(default)]
    pub sessions: Vec<SessionState>,
}
