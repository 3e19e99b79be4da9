//! What the agent says when it does not do something, and what makes it stop.

use std::fmt;
use std::io;

use dsec_protocol::error::ProtocolError;
use dsec_protocol::opening::Failure;
use dsec_sys::errno::{errno_name, errno_of};

/// Becomes an ERR frame: nothing happened, or the stream is over.
#[derive(Debug)]
pub struct Refusal {
    pub code: &'static str,
    pub message: String,
    pub errno: Option<String>,
}

impl Refusal {
    pub fn new(code: &'static str, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            errno: None,
        }
    }

    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new("invalid", message)
    }

    pub fn system(code: &'static str, what: impl fmt::Display, error: &io::Error) -> Self {
        Self {
            code,
            message: format!("{what}: {error}"),
            errno: Some(errno_name(errno_of(error))),
        }
    }

    /// A file operation on `path` that failed.
    pub fn file(path: &[u8], error: &io::Error) -> Self {
        Self::system("file", String::from_utf8_lossy(path), error)
    }

    pub fn into_failure(self) -> Failure {
        let mut message = self.message;
        if message.len() > 1024 {
            let cut = (0..=1024).rev().find(|at| message.is_char_boundary(*at));
            message.truncate(cut.unwrap_or(0));
        }
        Failure {
            code: self.code.to_owned(),
            message,
            errno: self.errno,
        }
    }
}

impl From<ProtocolError> for Refusal {
    fn from(error: ProtocolError) -> Self {
        Self::invalid(error.to_string())
    }
}

/// What ends the agent's start, or its run.
#[derive(Debug)]
pub enum AgentError {
    Usage,
    /// A descriptor of the start protocol (section 7) is not there.
    Missing(&'static str),
    Config(ProtocolError),
    System {
        attempt: &'static str,
        source: io::Error,
    },
}

impl AgentError {
    pub fn at(attempt: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::System { attempt, source }
    }
}

impl fmt::Display for AgentError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Usage => write!(
                f,
                "usage: dsec-agent --listen PATH | --fd | --ports DATA BELL | --vsock PORT"
            ),
            Self::Missing(what) => write!(f, "{what} was not handed over"),
            Self::Config(error) => write!(f, "reading the configuration: {error}"),
            Self::System { attempt, source } => write!(f, "{attempt}: {source}"),
        }
    }
}

impl std::error::Error for AgentError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Config(error) => Some(error),
            Self::System { source, .. } => Some(source),
            _ => None,
        }
    }
}
