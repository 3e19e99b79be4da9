//! From C's -1 to `io::Result`.

use std::io;

pub(crate) fn check(value: libc::c_int) -> io::Result<libc::c_int> {
    if value == -1 {
        return Err(io::Error::last_os_error());
    }
    Ok(value)
}

pub(crate) fn check_long(value: libc::c_long) -> io::Result<libc::c_long> {
    if value == -1 {
        return Err(io::Error::last_os_error());
    }
    Ok(value)
}
