//! Records from and to msgpack maps.

use serde::de::DeserializeOwned;
use serde::Serialize;

use crate::error::ProtocolError;
use crate::raw::is_one_map;

/// Exactly one map; rmp-serde alone would take arrays and bytes after the record.
pub fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T, ProtocolError> {
    if !is_one_map(body) {
        return Err(ProtocolError::NotOneMap);
    }
    rmp_serde::from_slice(body).map_err(ProtocolError::Record)
}

pub fn encode<T: Serialize>(record: &T) -> Result<Vec<u8>, ProtocolError> {
    rmp_serde::to_vec_named(record).map_err(ProtocolError::Encode)
}
