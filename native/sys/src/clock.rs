//! The clock that all processes of a machine share.

use std::time::Duration;

/// Time since some moment that is the same for all processes outside of time namespaces: CLOCK_MONOTONIC.
pub fn monotonic() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the record is valid during the call, which cannot fail for this clock.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
