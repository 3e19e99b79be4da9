//! What goes wrong in a program of a node, as far as the node decides by it, and how it is told.

use std::fmt;
use std::io;

use serde::Serialize;

use crate::desk::{self, Failure};

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
    /// There are as many as there may be, somebody else has it, or something has to be given back first.
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

/// The answer to request `id`.
pub fn answer<T: Serialize>(id: u64, result: std::result::Result<&T, &Error>) -> Vec<u8> {
    let result = result.map_err(|error| Failure {
        code: error.code(),
        message: error.to_string(),
    });
    desk::reply(id, result.as_ref().copied())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::desk::Nothing;

    #[test]
    fn a_failure_is_told_by_its_word_and_what_was_being_done() {
        let failed: io::Result<()> = Err(io::ErrorKind::NotFound.into());
        let error = failed.doing("opening it").unwrap_err();
        let told = answer::<Nothing>(3, Err(&error));
        let host = Failure {
            code: "host",
            message: format!("opening it: {}", io::Error::from(io::ErrorKind::NotFound)),
        };
        assert_eq!(told, desk::reply::<Nothing, _>(3, Err(&host)));
        assert_eq!(answer(3, Ok(&7)), desk::reply::<_, Failure>(3, Ok(&7)));
        let codes = [Error::Invalid, Error::NotFound, Error::Busy].map(|of| of("why".into()));
        assert_eq!(
            codes.each_ref().map(Error::code),
            ["invalid", "not_found", "busy"]
        );
        assert_eq!(codes[0].to_string(), "why");
    }
}
