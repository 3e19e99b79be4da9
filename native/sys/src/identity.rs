//! Who this process is: user and group ids, capabilities, limits. Every call concerns this thread only, as in the kernel.

use std::io;

/// One more than the highest capability that the masks here can name.
const CAPABILITIES: u32 = 64;
const CAPABILITY_VERSION_3: u32 = 0x2008_0522;

#[repr(C)]
struct CapabilityHeader {
    version: u32,
    pid: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct CapabilityHalf {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

/// Capability sets as bit masks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CapabilitySets {
    pub effective: u64,
    pub permitted: u64,
    pub inheritable: u64,
}

fn check(result: libc::c_long) -> io::Result<()> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Sets real, effective and saved group id; None leaves one as it is.
pub fn set_group_ids(
    real: Option<u32>,
    effective: Option<u32>,
    saved: Option<u32>,
) -> io::Result<()> {
    let [real, effective, saved] = [real, effective, saved].map(|id| id.unwrap_or(u32::MAX));
    // SAFETY: plain numbers. The system call itself, since the C library would change all threads.
    check(unsafe { libc::syscall(libc::SYS_setresgid, real, effective, saved) })
}

/// Sets real, effective and saved user id; None leaves one as it is.
pub fn set_user_ids(
    real: Option<u32>,
    effective: Option<u32>,
    saved: Option<u32>,
) -> io::Result<()> {
    let [real, effective, saved] = [real, effective, saved].map(|id| id.unwrap_or(u32::MAX));
    // SAFETY: plain numbers.
    check(unsafe { libc::syscall(libc::SYS_setresuid, real, effective, saved) })
}

/// Leaves all supplementary groups.
pub fn clear_groups() -> io::Result<()> {
    // SAFETY: a list of length zero is not read.
    check(unsafe { libc::syscall(libc::SYS_setgroups, 0, std::ptr::null::<u32>()) })
}

pub fn capabilities() -> io::Result<CapabilitySets> {
    let header = CapabilityHeader {
        version: CAPABILITY_VERSION_3,
        pid: 0,
    };
    let mut halves = [CapabilityHalf::default(); 2];
    // SAFETY: version 3 reads the header and writes two halves, which is what is given.
    check(unsafe {
        libc::syscall(
            libc::SYS_capget,
            std::ptr::addr_of!(header),
            halves.as_mut_ptr(),
        )
    })?;
    let join = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
    Ok(CapabilitySets {
        effective: join(halves[0].effective, halves[1].effective),
        permitted: join(halves[0].permitted, halves[1].permitted),
        inheritable: join(halves[0].inheritable, halves[1].inheritable),
    })
}

pub fn set_capabilities(sets: CapabilitySets) -> io::Result<()> {
    let header = CapabilityHeader {
        version: CAPABILITY_VERSION_3,
        pid: 0,
    };
    let half = |shift: u32| CapabilityHalf {
        effective: (sets.effective >> shift) as u32,
        permitted: (sets.permitted >> shift) as u32,
        inheritable: (sets.inheritable >> shift) as u32,
    };
    let halves = [half(0), half(32)];
    // SAFETY: version 3 reads the header and two halves, which is what is given.
    check(unsafe {
        libc::syscall(
            libc::SYS_capset,
            std::ptr::addr_of!(header),
            halves.as_ptr(),
        )
    })
}

/// Makes every permitted capability effective: after a change of the effective user id away from 0 none is.
pub fn raise_capabilities() -> io::Result<()> {
    let sets = capabilities()?;
    set_capabilities(CapabilitySets {
        effective: sets.permitted,
        ..sets
    })
}

/// Permitted capabilities survive the next change of user ids (not the next execve).
pub fn keep_capabilities() -> io::Result<()> {
    // SAFETY: plain numbers.
    check(unsafe { libc::prctl(libc::PR_SET_KEEPCAPS, 1, 0, 0, 0) }.into())
}

/// The kernel's highest capability number.
pub fn last_capability() -> u32 {
    // SAFETY: plain numbers; PR_CAPBSET_READ of a number that does not exist is EINVAL.
    let known = |cap: u32| unsafe { libc::prctl(libc::PR_CAPBSET_READ, libc::c_ulong::from(cap), 0, 0, 0) } >= 0;
    (0..CAPABILITIES)
        .take_while(|&cap| known(cap))
        .last()
        .unwrap_or(0)
}

/// Takes everything but `keep` out of the bounding set, up to capability `last`.
pub fn bound_capabilities(keep: u64, last: u32) -> io::Result<()> {
    for cap in (0..=last).filter(|cap| keep >> cap & 1 == 0) {
        // SAFETY: plain numbers.
        check(
            unsafe { libc::prctl(libc::PR_CAPBSET_DROP, libc::c_ulong::from(cap), 0, 0, 0) }.into(),
        )?;
    }
    Ok(())
}

/// Makes `raise` ambient: a program without file capabilities has them after execve, whoever runs it. They must be permitted and inheritable.
pub fn raise_ambient(raise: u64) -> io::Result<()> {
    for cap in (0..CAPABILITIES).filter(|cap| raise >> cap & 1 == 1) {
        let (option, cap) = (libc::PR_CAP_AMBIENT_RAISE, libc::c_ulong::from(cap));
        // SAFETY: plain numbers.
        check(unsafe { libc::prctl(libc::PR_CAP_AMBIENT, option, cap, 0, 0) }.into())?;
    }
    Ok(())
}

/// Execve grants nothing from now on, for this process and all that descend from it.
pub fn no_new_privileges() -> io::Result<()> {
    // SAFETY: plain numbers.
    check(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }.into())
}

/// The number of a resource limit by its lower-case name ("nofile"), None for one that Linux does not have.
pub fn resource(name: &str) -> Option<u32> {
    Some(match name {
        "cpu" => libc::RLIMIT_CPU,
        "fsize" => libc::RLIMIT_FSIZE,
        "data" => libc::RLIMIT_DATA,
        "stack" => libc::RLIMIT_STACK,
        "core" => libc::RLIMIT_CORE,
        "rss" => libc::RLIMIT_RSS,
        "nproc" => libc::RLIMIT_NPROC,
        "nofile" => libc::RLIMIT_NOFILE,
        "memlock" => libc::RLIMIT_MEMLOCK,
        "as" => libc::RLIMIT_AS,
        "locks" => libc::RLIMIT_LOCKS,
        "sigpending" => libc::RLIMIT_SIGPENDING,
        "msgqueue" => libc::RLIMIT_MSGQUEUE,
        "nice" => libc::RLIMIT_NICE,
        "rtprio" => libc::RLIMIT_RTPRIO,
        "rttime" => libc::RLIMIT_RTTIME,
        _ => return None,
    })
}

/// Sets a limit of this process.
pub fn set_limit(resource: u32, soft: u64, hard: u64) -> io::Result<()> {
    let limit = libc::rlimit {
        rlim_cur: soft,
        rlim_max: hard,
    };
    // SAFETY: the record lives through the call and is only read.
    check(unsafe { libc::setrlimit(resource, &limit) }.into())
}

/// Names this host within its UTS namespace.
pub fn set_hostname(name: &str) -> io::Result<()> {
    // SAFETY: the true length of the buffer is passed.
    check(unsafe { libc::sethostname(name.as_ptr().cast(), name.len()) }.into())
}
