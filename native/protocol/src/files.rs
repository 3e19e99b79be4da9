//! Records of file operations.

use serde::{Deserialize, Serialize};

fn yes() -> bool {
    true
}

fn directory_mode() -> u32 {
    0o755
}

fn list_limit() -> u64 {
    1000
}

/// Arguments of stat and archive.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PathArgs {
    #[serde(with = "serde_bytes")]
    pub path: Vec<u8>,
    #[serde(default = "yes")]
    pub follow: bool,
    #[serde(default)]
    pub user: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FileStat {
    #[serde(with = "serde_bytes")]
    pub name: Vec<u8>,
    pub kind: String,
    #[serde(default)]
    pub size: u64,
    #[serde(default)]
    pub mode: u32,
    #[serde(default)]
    pub uid: u32,
    #[serde(default)]
    pub gid: u32,
    #[serde(default)]
    pub mtime_ns: i64,
    #[serde(default, with = "serde_bytes")]
    pub target: Option<Vec<u8>>,
    #[serde(default)]
    pub nlink: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ListArgs {
    #[serde(with = "serde_bytes")]
    pub path: Vec<u8>,
    #[serde(default, with = "serde_bytes")]
    pub after: Option<Vec<u8>>,
    #[serde(default = "list_limit")]
    pub limit: u64,
    #[serde(default)]
    pub user: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ListReply {
    #[serde(default)]
    pub entries: Vec<FileStat>,
    #[serde(default)]
    pub more: bool,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReadArgs {
    #[serde(with = "serde_bytes")]
    pub path: Vec<u8>,
    #[serde(default)]
    pub offset: u64,
    #[serde(default)]
    pub length: Option<u64>,
    #[serde(default)]
    pub user: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WriteArgs {
    #[serde(with = "serde_bytes")]
    pub path: Vec<u8>,
    #[serde(default)]
    pub offset: Option<u64>,
    #[serde(default)]
    pub append: bool,
    #[serde(default)]
    pub mode: Option<u32>,
    #[serde(default = "yes")]
    pub parents: bool,
    #[serde(default)]
    pub user: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Written {
    #[serde(default)]
    pub bytes: u64,
    #[serde(default)]
    pub entries: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MkdirArgs {
    #[serde(with = "serde_bytes")]
    pub path: Vec<u8>,
    #[serde(default = "yes")]
    pub parents: bool,
    #[serde(default = "directory_mode")]
    pub mode: u32,
    #[serde(default)]
    pub user: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MoveArgs {
    #[serde(with = "serde_bytes")]
    pub source: Vec<u8>,
    #[serde(with = "serde_bytes")]
    pub target: Vec<u8>,
    #[serde(default = "yes")]
    pub replace: bool,
    #[serde(default)]
    pub user: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RemoveArgs {
    #[serde(with = "serde_bytes")]
    pub path: Vec<u8>,
    #[serde(default)]
    pub recursive: bool,
    #[serde(default)]
    pub missing_ok: bool,
    #[serde(default)]
    pub user: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChmodArgs {
    #[serde(with = "serde_bytes")]
    pub path: Vec<u8>,
    pub mode: u32,
    #[serde(default)]
    pub user: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChownArgs {
    #[serde(with = "serde_bytes")]
    pub path: Vec<u8>,
    #[serde(default)]
    pub owner: Option<String>,
    #[serde(default)]
    pub group: Option<String>,
    #[serde(default = "yes")]
    pub follow: bool,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SymlinkArgs {
    #[serde(with = "serde_bytes")]
    pub path: Vec<u8>,
    #[serde(with = "serde_bytes")]
    pub target: Vec<u8>,
    #[serde(default)]
    pub user: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExtractArgs {
    #[serde(with = "serde_bytes")]
    pub path: Vec<u8>,
    #[serde(default)]
    pub user: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WatchArgs {
    #[serde(with = "serde_bytes")]
    pub path: Vec<u8>,
    #[serde(default)]
    pub recursive: bool,
}

/// Body of EVENT on a watch stream.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct WatchEvent {
    pub kind: String,
    #[serde(default, with = "serde_bytes")]
    pub path: Vec<u8>,
    #[serde(default, with = "serde_bytes")]
    pub source: Option<Vec<u8>>,
    #[serde(default)]
    pub directory: bool,
}
