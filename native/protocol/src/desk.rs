//! What a node and a program of its own on the same machine say to each other: one message a packet, a map of MessagePack.
//! Requests refuse what they do not know.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

pub const MESSAGE_BYTES_MAX: usize = 128 * 1024;

/// The part of a request that says what the rest is.
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

/// Either `ok` or `error`.
#[derive(Serialize)]
pub struct Reply<'a, T, E> {
    id: u64,
    ok: Option<&'a T>,
    error: Option<&'a E>,
}

/// A failure by a word that programs decide by, and by others for people.
#[derive(Serialize)]
pub struct Failure {
    pub code: &'static str,
    pub message: String,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Nothing {}

/// The operation and id of a request, whatever its arguments are; or why it is none.
pub fn head(message: &[u8]) -> Result<Head, String> {
    rmp_serde::from_slice(message).map_err(|error| format!("not a request: {error}"))
}

/// The arguments of a request, which must be exactly those of its operation.
pub fn args<T: DeserializeOwned>(message: &[u8]) -> Result<T, String> {
    let request: Request<T> =
        rmp_serde::from_slice(message).map_err(|error| format!("bad arguments: {error}"))?;
    Ok(request.args)
}

/// The answer to request `id`.
pub fn reply<T: Serialize, E: Serialize>(id: u64, result: Result<&T, &E>) -> Vec<u8> {
    let reply = Reply {
        id,
        ok: result.ok(),
        error: result.err(),
    };
    // Plain data always encodes: it has no maps of unknown length, nor anything else that cannot be written.
    encode(&reply).unwrap_or_default()
}

pub fn encode<T: Serialize>(record: &T) -> Result<Vec<u8>, String> {
    rmp_serde::to_vec_named(record).map_err(|error| format!("not encodable: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(fields: &[(&str, u64)]) -> Vec<u8> {
        let fields: std::collections::BTreeMap<_, _> = fields.iter().copied().collect();
        let request = std::collections::BTreeMap::from([("args", fields)]);
        let mut bytes = encode(&request).unwrap();
        // A map of three, with id and op before what is there.
        bytes[0] = 0x83;
        bytes.splice(1..1, *b"\xa2id\x07\xa2op\xa3add");
        bytes
    }

    #[derive(Deserialize, Debug)]
    #[serde(deny_unknown_fields)]
    struct Number {
        number: u64,
    }

    #[test]
    fn a_request_is_read_in_two_steps() {
        let message = request(&[("number", 5)]);
        let head = head(&message).unwrap();

        assert_eq!((head.id, head.op.as_str()), (7, "add"));
        assert_eq!(args::<Number>(&message).unwrap().number, 5);
        assert!(args::<Nothing>(&request(&[])).is_ok());
    }

    #[test]
    fn what_is_no_request_or_not_of_its_operation_is_refused() {
        assert!(head(b"").is_err() && head(b"\x01").is_err());
        assert!(args::<Number>(&request(&[])).is_err());
        let more = request(&[("number", 5), ("other", 1)]);
        assert!(head(&more).is_ok());
        assert!(args::<Number>(&more).unwrap_err().contains("other"));
    }

    #[test]
    fn an_answer_says_what_came_of_it() {
        let ok = reply::<_, Failure>(7, Ok(&5_u64));
        assert_eq!(ok, b"\x83\xa2id\x07\xa2ok\x05\xa5error\xc0");
        let failure = Failure {
            code: "busy",
            message: String::new(),
        };
        let error = reply::<Nothing, _>(7, Err(&failure));
        assert!(error.starts_with(b"\x83\xa2id\x07\xa2ok\xc0\xa5error\x82\xa4code\xa4busy"));
    }
}
