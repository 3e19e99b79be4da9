//! What can go wrong, as far as somebody decides by it.

use std::fmt;
use std::io;
use std::time::Duration;

pub type Result<T> = std::result::Result<T, Error>;

#[derive(Debug)]
pub enum Error {
    /// The kernel refused something of this machine.
    Host {
        doing: String,
        source: io::Error,
    },
    /// A request, or a file that it names, is wrong.
    Invalid(String),
    NotFound(String),
    /// Something has to be given back first.
    Busy(String),
}

impl fmt::Display for Error {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Host { doing, source } => write!(out, "{doing}: {source}"),
            Error::Invalid(why) | Error::NotFound(why) | Error::Busy(why) => out.write_str(why),
        }
    }
}

impl Error {
    /// The word for it in answers.
    pub fn code(&self) -> &'static str {
        match self {
            Error::Host { .. } => "host",
            Error::Invalid(_) => "invalid",
            Error::NotFound(_) => "not_found",
            Error::Busy(_) => "busy",
        }
    }
}

pub trait Doing<T> {
    /// Says what was being done when it failed.
    fn doing(self, what: impl fmt::Display) -> Result<T>;
}

impl<T> Doing<T> for io::Result<T> {
    fn doing(self, what: impl fmt::Display) -> Result<T> {
        self.map_err(|source| Error::Host {
            doing: what.to_string(),
            source,
        })
    }
}

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
