//! Messages between a node and this program; the twin of src/dsec/wire/egress.py, which binds.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

pub const EGRESS_VERSION: u32 = 1;
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

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Nothing {}

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
    rmp_serde::from_slice(message).ok()
}

pub fn args_of<T: DeserializeOwned>(message: &[u8]) -> Result<T> {
    match rmp_serde::from_slice::<Request<T>>(message) {
        Ok(request) => Ok(request.args),
        Err(error) => Err(Error::Invalid(format!(
            "the request is not understood: {error}"
        ))),
    }
}

pub fn reply<T: Serialize>(id: u64, result: &Result<T>) -> Vec<u8> {
    encode(&match result {
        Ok(answer) => Reply {
            id,
            ok: Some(answer),
            error: None,
        },
        Err(error) => Reply {
            id,
            ok: None,
            error: Some(Failure {
                code: error.code(),
                message: error.to_string(),
            }),
        },
    })
}

pub fn told(denied: &Denied) -> Vec<u8> {
    encode(&Told { id: 0, denied })
}

/// Records of ours have no maps of unknown length nor anything else that cannot be written.
fn encode<T: Serialize>(message: &T) -> Vec<u8> {
    rmp_serde::to_vec_named(message).unwrap_or_default()
}
