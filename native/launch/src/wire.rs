//! Messages between a node and this daemon; the twin of src/dsec/wire/launch.py, which binds.

use std::collections::BTreeMap;

use dsec_protocol::desk::{self, Head};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;

use crate::error::{Error, Result};

pub use dsec_protocol::desk::{Nothing, MESSAGE_BYTES_MAX};

pub const LAUNCH_VERSION: u32 = 1;

#[derive(Serialize)]
struct Told<'a> {
    id: u64,
    event: &'a ExitEvent,
}

#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct LaunchFailure {
    pub step: String,
    pub errno: Option<String>,
    pub detail: String,
}

#[derive(Clone, Debug, Serialize)]
pub struct ExitEvent {
    pub sandbox: String,
    pub pid: i32,
    pub status: i32,
    pub oom_kills: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HelloArgs {
    pub version: u32,
}

#[derive(Serialize)]
pub struct HelloAnswer<'a> {
    pub version: u32,
    pub pid: u32,
    pub agent_digest: &'a str,
    /// Plans with a view are known.
    pub views: bool,
    /// Why no live view can be given just now; None when it can.
    pub no_live_view: Option<String>,
    /// Light plans are known.
    pub light: bool,
    /// Cgroups of version 1 can be kept, and taken again.
    pub keeps_cgroups: bool,
    /// Sandboxes can be prepared.
    pub prepares: bool,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ArgRule {
    pub index: u8,
    pub equals: u64,
    #[serde(default = "all_bits")]
    pub mask: u64,
    #[serde(default)]
    pub negate: bool,
    #[serde(default)]
    pub wide: bool,
}

fn all_bits() -> u64 {
    u64::MAX
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SyscallRule {
    pub syscall: String,
    #[serde(default)]
    pub when: Vec<ArgRule>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FilterSpec {
    #[serde(default)]
    pub deny: Vec<SyscallRule>,
    /// Answered with 0, and not done.
    #[serde(default)]
    pub ignore: Vec<SyscallRule>,
    #[serde(default)]
    pub nosys: Vec<SyscallRule>,
    #[serde(default)]
    pub allow: Vec<SyscallRule>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FilterArgs {
    pub name: String,
    pub spec: FilterSpec,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerMount {
    pub digest: String,
    pub kind: String,
    pub meta: String,
    #[serde(default)]
    pub blob: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerRef {
    pub digest: String,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BindMount {
    pub path: String,
    pub kind: BindKind,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum BindKind {
    Readonly,
    Masked,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EtcFile {
    pub path: String,
    pub content: ByteBuf,
}

/// What a sandbox is shown of the machine: its own share.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct ResourceView {
    pub cpus: u32,
    pub memory_bytes: u64,
    #[serde(default)]
    pub live: bool,
}

/// How that is kept true: by whom, or not at all.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum ViewKind {
    Live,
    Static,
    #[default]
    Host,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ViewArgs {
    pub sandbox: String,
    pub view: ResourceView,
}

#[derive(Serialize)]
pub struct Viewed {
    pub view: ViewKind,
}

/// A directory of the host, or a file system on a device, at a path inside.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VolumeBind {
    pub path: String,
    pub source: String,
    /// Of the ext4 that is mounted then; `source` is only its name.
    #[serde(default)]
    pub device: Option<String>,
    #[serde(default)]
    pub readonly: bool,
    /// What `source` must be; 0: whatever it is.
    #[serde(default)]
    pub inode: u64,
    /// Both are files.
    #[serde(default)]
    pub file: bool,
}

/// A character device below `/dev` of the sandbox.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DevicePlan {
    pub path: String,
    pub major: u32,
    pub minor: u32,
    #[serde(default)]
    pub readonly: bool,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LaunchPlan {
    #[serde(default = "this_version")]
    pub version: u32,
    pub sandbox: String,
    pub id_base: u32,
    pub lowers: Vec<String>,
    pub directory: String,
    #[serde(default)]
    pub upper_tmpfs_bytes: Option<u64>,
    #[serde(default)]
    pub upper_device: Option<String>,
    pub socket: String,
    pub hostname: String,
    #[serde(default)]
    pub etc_files: Vec<EtcFile>,
    #[serde(default)]
    pub binds: Vec<BindMount>,
    #[serde(default)]
    pub masks: Vec<String>,
    #[serde(default)]
    pub readonly_proc: Vec<String>,
    #[serde(default = "default_shm")]
    pub shm_bytes: u64,
    #[serde(default)]
    pub cgroup2: Option<String>,
    #[serde(default)]
    pub cgroup2_files: BTreeMap<String, String>,
    #[serde(default)]
    pub cgroup1: BTreeMap<String, String>,
    #[serde(default)]
    pub cgroup1_files: BTreeMap<String, BTreeMap<String, String>>,
    /// Controller → a directory beside the one wanted, with limits that are those wanted: it is renamed.
    #[serde(default)]
    pub cgroup1_from: BTreeMap<String, String>,
    #[serde(default)]
    pub rlimits: BTreeMap<String, Vec<u64>>,
    #[serde(default)]
    pub sysctls: BTreeMap<String, String>,
    #[serde(default)]
    pub caps_agent: u64,
    #[serde(default)]
    pub caps_exec: u64,
    #[serde(default)]
    pub filter_agent: Option<String>,
    #[serde(default)]
    pub filter_exec: Option<String>,
    #[serde(default = "yes")]
    pub no_new_privs: bool,
    #[serde(default)]
    pub env: BTreeMap<ByteBuf, ByteBuf>,
    #[serde(default)]
    pub user: Option<String>,
    #[serde(default)]
    pub workdir: Option<ByteBuf>,
    #[serde(default)]
    pub nofile: Option<u64>,
    #[serde(default)]
    pub spare: bool,
    #[serde(default)]
    pub named: String,
    #[serde(default)]
    pub light: bool,
    #[serde(default)]
    pub view: Option<ResourceView>,
    #[serde(default)]
    pub volumes: Vec<VolumeBind>,
    #[serde(default)]
    pub devices: Vec<DevicePlan>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TidyArgs {
    pub sandboxes: String,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClaimArgs {
    pub sandbox: String,
    pub pid: i32,
    pub start_ticks: u64,
    pub hostname: String,
    #[serde(default)]
    pub etc_files: Vec<EtcFile>,
    /// Path of a file of the sandbox's cgroups → value.
    #[serde(default)]
    pub cgroup_files: BTreeMap<String, String>,
}

fn this_version() -> u32 {
    LAUNCH_VERSION
}

fn default_shm() -> u64 {
    64 * 1024 * 1024
}

fn yes() -> bool {
    true
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Launched {
    pub pid: i32,
    pub start_ticks: u64,
    pub cgroup_id: u64,
    pub steps_us: BTreeMap<String, u64>,
    #[serde(default)]
    pub view: ViewKind,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DestroyArgs {
    pub sandbox: String,
    #[serde(default)]
    pub pid: Option<i32>,
    #[serde(default)]
    pub start_ticks: Option<u64>,
    #[serde(default)]
    pub directory: Option<String>,
    #[serde(default = "yes")]
    pub remove_directory: bool,
    #[serde(default)]
    pub socket: Option<String>,
    #[serde(default)]
    pub cgroup2: Option<String>,
    #[serde(default)]
    pub cgroup1: BTreeMap<String, String>,
    /// Controller → what its directory is to be called from now on, instead of being removed.
    #[serde(default)]
    pub cgroup1_to: BTreeMap<String, String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ListArgs {
    #[serde(default)]
    pub after: Option<String>,
}

#[derive(Serialize)]
pub struct Listed {
    pub sandboxes: Vec<ListedSandbox>,
    pub more: bool,
    pub layers: Vec<String>,
    pub filters: Vec<String>,
}

#[derive(Serialize)]
pub struct ListedSandbox {
    pub sandbox: String,
    pub pid: i32,
    pub start_ticks: u64,
}

pub fn decode_head(message: &[u8]) -> Result<Head> {
    desk::head(message).map_err(Error::Invalid)
}

pub fn decode_args<T: DeserializeOwned>(message: &[u8]) -> Result<T> {
    desk::args(message).map_err(Error::Invalid)
}

pub fn encode_ok<T: Serialize>(id: u64, ok: &T) -> Vec<u8> {
    desk::reply::<_, LaunchFailure>(id, Ok(ok))
}

pub fn encode_error(id: u64, error: &LaunchFailure) -> Vec<u8> {
    desk::reply::<Nothing, _>(id, Err(error))
}

pub fn encode_event(event: &ExitEvent) -> Result<Vec<u8>> {
    encode(&Told { id: 0, event })
}

pub fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>> {
    desk::encode(value).map_err(Error::Invalid)
}
