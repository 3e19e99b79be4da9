//! What went wrong, in one line for a person: of small programs that can only say it and end.

use std::fmt;
use std::io;

#[derive(Debug)]
pub struct Error {
    what: String,
    source: Option<io::Error>,
}

pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub fn new(what: String) -> Self {
        Self { what, source: None }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.source {
            Some(source) => write!(f, "{}: {source}", self.what),
            None => f.write_str(&self.what),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|error| error as _)
    }
}

/// Says what was being done to what.
pub trait Doing<T> {
    fn doing(self, verb: &str, what: impl fmt::Display) -> Result<T>;
}

impl<T> Doing<T> for io::Result<T> {
    fn doing(self, verb: &str, what: impl fmt::Display) -> Result<T> {
        self.map_err(|source| Error {
            what: format!("cannot {verb} {what}"),
            source: Some(source),
        })
    }
}
