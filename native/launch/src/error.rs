//! What can go wrong here, and how it is told to the node.

use std::fmt;
use std::io;
use std::path::Path;

use crate::wire::LaunchFailure;

/// The one error of this crate: what was attempted, on what, and why it failed.
#[derive(Debug)]
pub enum Error {
    /// A system call failed.
    Call {
        doing: &'static str,
        on: String,
        source: io::Error,
    },
    /// A request asks for something that is not to be had or makes no sense.
    Invalid(String),
    /// Refused because of what is there already or still in use.
    Refused { why: String, errno: i32 },
    /// The test hook made this step fail.
    Hook,
    /// The new process ended without a word.
    Vanished,
    /// Somebody else has taken away what was made ahead.
    Damaged(String),
    /// The new process reported this failure of its own step.
    Inside {
        step: String,
        errno: i32,
        detail: String,
    },
}

pub type Result<T> = std::result::Result<T, Error>;

impl fmt::Display for Error {
    fn fmt(&self, out: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Error::Call { doing, on, source } => write!(out, "{doing} {on}: {source}"),
            Error::Invalid(what) => out.write_str(what),
            Error::Refused { why, .. } => out.write_str(why),
            Error::Hook => out.write_str("test hook"),
            Error::Vanished => out.write_str("the process ended before it became the agent"),
            Error::Damaged(what) => {
                write!(out, "{what}, which was made ahead, is not there any more")
            }
            Error::Inside { detail, .. } => out.write_str(detail),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Call { source, .. } => Some(source),
            _ => None,
        }
    }
}

impl Error {
    /// The number of the system error behind it, if there is one.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Error::Call { source, .. } => crate::system::errno_of(source),
            Error::Invalid(_) => Some(libc::EINVAL),
            Error::Refused { errno, .. } => Some(*errno),
            Error::Hook => Some(libc::EIO),
            Error::Vanished | Error::Damaged(_) => None,
            Error::Inside { errno, .. } => (*errno != 0).then_some(*errno),
        }
    }

    /// As the node is told: `step` failed (a failure inside names its own).
    pub fn into_failure(self, step: &str) -> LaunchFailure {
        let step = match &self {
            Error::Inside { step, .. } => step.clone(),
            _ => step.to_string(),
        };
        let mut detail = self.to_string();
        detail.truncate(detail.floor_char_boundary_of(1000));
        LaunchFailure {
            step,
            errno: self.errno().map(errno_name),
            detail,
        }
    }
}

trait FloorBoundary {
    fn floor_char_boundary_of(&self, at: usize) -> usize;
}

impl FloorBoundary for String {
    fn floor_char_boundary_of(&self, at: usize) -> usize {
        (0..=at.min(self.len()))
            .rev()
            .find(|&index| self.is_char_boundary(index))
            .unwrap_or(0)
    }
}

/// Not every kernel has every file.
pub fn missing_is_fine(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
        other => other,
    }
}

/// Says what was being done to what, when a system call fails.
pub trait Doing<T> {
    fn doing(self, what: &'static str, on: impl fmt::Display) -> Result<T>;
    fn doing_to(self, what: &'static str, on: &Path) -> Result<T>;
}

impl<T> Doing<T> for io::Result<T> {
    fn doing(self, what: &'static str, on: impl fmt::Display) -> Result<T> {
        self.map_err(|source| Error::Call {
            doing: what,
            on: on.to_string(),
            source,
        })
    }

    fn doing_to(self, what: &'static str, on: &Path) -> Result<T> {
        self.map_err(|source| Error::Call {
            doing: what,
            on: on.display().to_string(),
            source,
        })
    }
}

/// "ENOENT" for 2; the number itself where we have no name for it.
pub fn errno_name(number: i32) -> String {
    let name = match number {
        libc::EPERM => "EPERM",
        libc::ENOENT => "ENOENT",
        libc::ESRCH => "ESRCH",
        libc::EINTR => "EINTR",
        libc::EIO => "EIO",
        libc::ENXIO => "ENXIO",
        libc::E2BIG => "E2BIG",
        libc::ENOEXEC => "ENOEXEC",
        libc::EBADF => "EBADF",
        libc::EAGAIN => "EAGAIN",
        libc::ENOMEM => "ENOMEM",
        libc::EACCES => "EACCES",
        libc::EFAULT => "EFAULT",
        libc::ENOTBLK => "ENOTBLK",
        libc::EBUSY => "EBUSY",
        libc::EEXIST => "EEXIST",
        libc::EXDEV => "EXDEV",
        libc::ENODEV => "ENODEV",
        libc::ENOTDIR => "ENOTDIR",
        libc::EISDIR => "EISDIR",
        libc::EINVAL => "EINVAL",
        libc::ENFILE => "ENFILE",
        libc::EMFILE => "EMFILE",
        libc::EFBIG => "EFBIG",
        libc::ENOSPC => "ENOSPC",
        libc::EROFS => "EROFS",
        libc::EMLINK => "EMLINK",
        libc::EPIPE => "EPIPE",
        libc::ERANGE => "ERANGE",
        libc::ENAMETOOLONG => "ENAMETOOLONG",
        libc::ENOSYS => "ENOSYS",
        libc::ENOTEMPTY => "ENOTEMPTY",
        libc::ELOOP => "ELOOP",
        libc::EOVERFLOW => "EOVERFLOW",
        libc::EUSERS => "EUSERS",
        libc::EMSGSIZE => "EMSGSIZE",
        libc::EOPNOTSUPP => "EOPNOTSUPP",
        libc::EADDRINUSE => "EADDRINUSE",
        libc::ETIMEDOUT => "ETIMEDOUT",
        libc::ESTALE => "ESTALE",
        libc::EUCLEAN => "EUCLEAN",
        libc::EDQUOT => "EDQUOT",
        libc::ECANCELED => "ECANCELED",
        _ => return format!("E{number}"),
    };
    name.to_string()
}
