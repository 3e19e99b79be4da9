//! What can go wrong, as far as somebody decides by it.

use std::fmt;
use std::time::Duration;

pub use dsec_protocol::failing::{Doing, Error, Result};

/// Why a store did not give what it was asked for. The word goes to the sandbox's owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreError {
    pub cause: Cause,
    pub detail: String,
}

/// A read that got EIO for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FailedRead {
    pub cause: Cause,
    /// By the clock of `monotonic`.
    pub at: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// It is there, and has no such object.
    Gone,
    /// It wants other credentials.
    Denied,
    /// No answer in time.
    Unreachable,
    /// It answered that it cannot now.
    Unavailable,
    /// What came is not what was published.
    Corrupt,
}

impl Cause {
    pub fn word(self) -> &'static str {
        match self {
            Cause::Gone => "gone",
            Cause::Denied => "denied",
            Cause::Unreachable => "unreachable",
            Cause::Unavailable => "unavailable",
            Cause::Corrupt => "corrupt",
        }
    }
}

impl StoreError {
    pub fn new(cause: Cause, detail: impl fmt::Display) -> Self {
        Self {
            cause,
            detail: detail.to_string(),
        }
    }
}
