//! Messages between a node and this program; the twin of src/dsec/wire/loader.py, which binds.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

pub const LOADER_VERSION: u32 = 1;
pub const MESSAGE_BYTES_MAX: usize = 128 * 1024;

#[derive(Deserialize)]
pub struct Head {
    pub id: u64,
    pub op: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Request<T> {
    #[allow(dead_code)] // read as part of the head
    id: u64,
    #[allow(dead_code)]
    op: String,
    args: T,
}

#[derive(Serialize)]
struct Reply<'a, T: Serialize> {
    id: u64,
    ok: Option<T>,
    error: Option<Failure<'a>>,
}

#[derive(Serialize)]
struct Failure<'a> {
    code: &'a str,
    message: String,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Nothing {}

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
    rmp_serde::from_slice(message)
        .map_err(|error| Error::Invalid(format!("not a request: {error}")))
}

pub fn decode_args<T: DeserializeOwned>(message: &[u8]) -> Result<T> {
    let request: Request<T> = rmp_serde::from_slice(message)
        .map_err(|error| Error::Invalid(format!("bad arguments: {error}")))?;
    Ok(request.args)
}

pub fn encode_ok<T: Serialize>(id: u64, ok: &T) -> Vec<u8> {
    encode(&Reply {
        id,
        ok: Some(ok),
        error: None,
    })
}

pub fn encode_error(id: u64, error: &Error) -> Vec<u8> {
    encode(&Reply::<Nothing> {
        id,
        ok: None,
        error: Some(Failure {
            code: error.code(),
            message: error.to_string(),
        }),
    })
}

/// Plain data of ours always encodes; an answer that is too long becomes an error for whoever asked.
fn encode<T: Serialize>(reply: &T) -> Vec<u8> {
    rmp_serde::to_vec_named(reply).unwrap_or_default()
}
