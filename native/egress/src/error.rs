//! What can go wrong, as far as somebody decides by it.

use std::fmt;
use std::io;

pub type Result<T> = std::result::Result<T, Error>;

#[derive(Debug)]
pub enum Error {
    /// The kernel refused something of this machine.
    Host {
        doing: String,
        source: io::Error,
    },
    /// A request is wrong.
    Invalid(String),
    NotFound(String),
    /// There are as many as there may be, or somebody else has it.
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
