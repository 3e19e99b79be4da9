//! What can be wrong with bytes from the other side.

use std::fmt;

#[derive(Debug)]
pub enum ProtocolError {
    /// The length field is outside 5 … 1 MiB.
    FrameLength(u32),
    /// The type field is none of ours.
    FrameType(u8),
    /// A DATA body is too short, too long, or names an unknown channel.
    DataBody(&'static str),
    /// A body is not exactly one msgpack map of bounded depth.
    NotOneMap,
    /// A map does not decode as the record it should be.
    Record(rmp_serde::decode::Error),
    /// A record of ours does not encode.
    Encode(rmp_serde::encode::Error),
}

impl fmt::Display for ProtocolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::FrameLength(length) => write!(f, "a frame length of {length}"),
            Self::FrameType(kind) => write!(f, "a frame of type {kind}"),
            Self::DataBody(what) => write!(f, "a DATA body {what}"),
            Self::NotOneMap => write!(f, "a body that is not one msgpack map"),
            Self::Record(error) => write!(f, "a record that does not decode: {error}"),
            Self::Encode(error) => write!(f, "a record that does not encode: {error}"),
        }
    }
}

impl std::error::Error for ProtocolError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Record(error) => Some(error),
            Self::Encode(error) => Some(error),
            _ => None,
        }
    }
}
