//! Messages between a node and this program; the twin of src/dsec/wire/loader.py, which binds.

use dsec_protocol::{desk, failing};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

pub use dsec_protocol::desk::{Head, Nothing, MESSAGE_BYTES_MAX};

pub const LOADER_VERSION: u32 = 1;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HelloArgs {
    pub version: u32,
}

#[derive(Serialize)]
pub struct HelloAnswer {
    pub version: u32,
    pub pid: u32,
    /// Requests that a dead worker had read come again: nobody is left waiting.
    pub resends: bool,
    pub front: &'static str,
    /// Layers can be block devices.
    pub blocks: bool,
}

/// Where the data object of a layer is.
#[derive(Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct SourceArgs {
    #[serde(default)]
    pub path: Option<String>,
    #[serde(default)]
    pub url: Option<String>,
    /// Of the host in `url`, with the port.
    #[serde(default)]
    pub addresses: Vec<String>,
}

#[derive(Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct AddArgs {
    pub digest: String,
    /// As a block device too; its path is the answer.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub block: bool,
    /// A file of records of 48 bytes.
    pub index: String,
    pub chunk_size: u32,
    pub size: u64,
    pub source: SourceArgs,
}

#[derive(Serialize)]
pub struct AddAnswer {
    /// The file to give to EROFS as its device, or the device to give to a machine.
    pub path: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerArgs {
    pub digest: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourceChange {
    pub digest: String,
    pub source: SourceArgs,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PrefetchArgs {
    pub digest: String,
    #[serde(default)]
    pub chunks: Vec<u32>,
    /// All of it.
    #[serde(default)]
    pub whole: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StatsArgs {
    #[serde(default)]
    pub digest: Option<String>,
}

#[derive(Serialize)]
pub struct LayerStats {
    pub digest: String,
    pub size: u64,
    pub chunk_size: u32,
    pub chunks: u64,
    pub present: u64,
    pub touched: u64,
    pub waiting: u64,
    pub read_bytes: u64,
    pub fetched_bytes: u64,
    pub fetches: u64,
    pub hits: u64,
    pub misses: u64,
    pub errors: u64,
    pub corrupt: u64,
    pub evicted_bytes: u64,
    pub held_bytes: u64,
    /// Why the store failed last, since somebody last asked.
    pub error: Option<StoreFailure>,
}

#[derive(Serialize)]
pub struct StoreFailure {
    pub cause: &'static str,
    pub detail: String,
}

#[derive(Serialize)]
pub struct StatsAnswer {
    pub layers: Vec<LayerStats>,
    pub cache_bytes: u64,
    pub cache_bytes_max: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FailureArgs {
    pub digests: Vec<String>,
}

#[derive(Serialize)]
pub struct FailureAnswer {
    pub failure: Option<ReadFailure>,
}

#[derive(Serialize)]
pub struct ReadFailure {
    pub digest: String,
    pub cause: &'static str,
    /// Seconds of CLOCK_MONOTONIC.
    pub at_s: f64,
}

#[derive(Serialize)]
pub struct TraceAnswer {
    pub chunks: Vec<u32>,
}

#[derive(Serialize)]
pub struct EvictAnswer {
    pub freed_bytes: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EvictArgs {
    pub bytes: u64,
}

pub fn decode_head(message: &[u8]) -> Result<Head> {
    desk::head(message).map_err(Error::Invalid)
}

pub fn decode_args<T: DeserializeOwned>(message: &[u8]) -> Result<T> {
    desk::args(message).map_err(Error::Invalid)
}

/// An answer that is too long becomes an error for whoever asked.
pub fn encode_ok<T: Serialize>(id: u64, ok: &T) -> Vec<u8> {
    failing::answer(id, Ok(ok))
}

pub fn encode_error(id: u64, error: &Error) -> Vec<u8> {
    failing::answer::<Nothing>(id, Err(error))
}
