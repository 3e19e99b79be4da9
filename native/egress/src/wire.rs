//! Messages between a node and this program; the twin of src/dsec/wire/egress.py, which binds.

use dsec_protocol::desk::{self, Head};
use dsec_protocol::failing;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

pub use dsec_protocol::desk::{Nothing, MESSAGE_BYTES_MAX};

pub const EGRESS_VERSION: u32 = 1;

#[derive(Serialize)]
struct Told<'a> {
    id: u64,
    denied: &'a Denied<'a>,
}

#[derive(Serialize)]
pub struct Denied<'a> {
    pub sandbox: &'a str,
    pub target: &'a str,
    pub port: u16,
    pub protocol: &'static str,
    pub reason: &'static str,
    pub count: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HelloArgs {
    pub version: u32,
    pub resolvers: Vec<String>,
    pub private: Vec<String>,
    pub binding_s: f64,
    pub peek_s: f64,
    pub dial_s: f64,
    pub idle_s: f64,
}

#[derive(Serialize)]
pub struct HelloAnswer {
    pub version: u32,
    pub pid: u32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RuleArgs {
    pub host: String,
    /// First and last, both included.
    pub ports: Vec<(u16, u16)>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttachArgs {
    pub sandbox: String,
    pub pid: i32,
    /// In ticks: field 22 of /proc/PID/stat.
    pub start: u64,
    /// None: everything that is public.
    pub rules: Option<Vec<RuleArgs>>,
    /// At once; 0: our own bound.
    pub connections: u32,
}

#[derive(Serialize)]
pub struct AttachAnswer {
    pub fresh: bool,
    pub ipv6: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RulesArgs {
    pub sandbox: String,
    pub rules: Option<Vec<RuleArgs>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DetachArgs {
    pub sandbox: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CountsArgs {
    pub after: String,
}

#[derive(Clone, Default, Serialize)]
pub struct Counts {
    pub sandbox: String,
    pub alive: bool,
    pub up_bytes: u64,
    pub down_bytes: u64,
    pub connections: u64,
    pub open: u64,
    pub questions: u64,
    pub denied: u64,
}

#[derive(Serialize)]
pub struct CountsAnswer {
    pub sandboxes: Vec<Counts>,
    pub more: bool,
}

/// None for what is no request: nobody could be answered.
pub fn head_of(message: &[u8]) -> Option<Head> {
    desk::head(message).ok()
}

pub fn args_of<T: DeserializeOwned>(message: &[u8]) -> Result<T> {
    desk::args(message).map_err(Error::Invalid)
}

pub fn reply<T: Serialize>(id: u64, result: &Result<T>) -> Vec<u8> {
    failing::answer(id, result.as_ref())
}

pub fn told(denied: &Denied) -> Vec<u8> {
    desk::encode(&Told { id: 0, denied }).unwrap_or_default()
}
