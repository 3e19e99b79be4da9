//! With whose rights a single-threaded program acts on files, and becoming somebody for good.

use std::io;

use crate::result::{check, check_long};

pub const CAP_CHOWN: u64 = 1 << 0;
pub const CAP_DAC_OVERRIDE: u64 = 1 << 1;
pub const CAP_DAC_READ_SEARCH: u64 = 1 << 2;
pub const CAP_FOWNER: u64 = 1 << 3;
pub const CAP_FSETID: u64 = 1 << 4;
pub const CAP_SETGID: u64 = 1 << 6;
pub const CAP_SETUID: u64 = 1 << 7;
pub const CAP_LINUX_IMMUTABLE: u64 = 1 << 9;
pub const CAP_NET_ADMIN: u64 = 1 << 12;
pub const CAP_IPC_LOCK: u64 = 1 << 14;
pub const CAP_SYS_PTRACE: u64 = 1 << 19;
pub const CAP_SYS_ADMIN: u64 = 1 << 21;
pub const CAP_SYS_RESOURCE: u64 = 1 << 24;
pub const CAP_MKNOD: u64 = 1 << 27;
pub const CAP_MAC_OVERRIDE: u64 = 1 << 32;
/// Capabilities that the kernel asks about when files are used: those that setfsuid(2) drops.
pub const CAPS_OF_FILES: u64 = CAP_CHOWN
    | CAP_DAC_OVERRIDE
    | CAP_DAC_READ_SEARCH
    | CAP_FOWNER
    | CAP_FSETID
    | CAP_LINUX_IMMUTABLE
    | CAP_MKNOD
    | CAP_MAC_OVERRIDE;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CapSets {
    pub effective: u64,
    pub permitted: u64,
    pub inheritable: u64,
}

#[repr(C)]
struct CapHeader {
    version: u32,
    pid: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct CapData {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

const VERSION_3: u32 = 0x2008_0522;

pub fn own_capabilities() -> io::Result<CapSets> {
    let mut header = CapHeader {
        version: VERSION_3,
        pid: 0,
    };
    let mut data = [CapData::default(); 2];
    // SAFETY: header and data have the layout of version 3 and live during the call.
    check_long(unsafe { libc::syscall(libc::SYS_capget, &raw mut header, data.as_mut_ptr()) })?;
    let join = |low: u32, high: u32| (u64::from(high) << 32) | u64::from(low);
    Ok(CapSets {
        effective: join(data[0].effective, data[1].effective),
        permitted: join(data[0].permitted, data[1].permitted),
        inheritable: join(data[0].inheritable, data[1].inheritable),
    })
}

pub fn set_own_capabilities(sets: CapSets) -> io::Result<()> {
    check_long(raw_capset(sets)).map(drop)
}

/// Parts with these capabilities for good: they can neither be raised again nor come back by an execve.
pub fn give_up(capabilities: u64) -> io::Result<()> {
    for capability in (0..64).filter(|number| capabilities & (1 << number) != 0) {
        // SAFETY: no pointers.
        check(unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) })?;
    }
    let held = own_capabilities()?;
    // The ambient set follows what is permitted and inheritable.
    set_own_capabilities(CapSets {
        effective: held.effective & !capabilities,
        permitted: held.permitted & !capabilities,
        inheritable: held.inheritable & !capabilities,
    })
}

/// Does `work` with the effective ids of root: some files of the kernel can be written by root alone, and what is made belongs
/// to root. Afterwards all is as before, but for ambient capabilities, which count only for an execve of this process. It ends
/// if that cannot be done: it would go on with wrong rights.
pub fn as_root<T>(work: impl FnOnce() -> T) -> io::Result<T> {
    let (before, (uid, gid)) = (own_capabilities()?, own_ids());
    keep_capabilities(true)?;
    let result = set_effective(0, 0).map(|()| work());
    let back = set_effective(uid, gid)
        .and_then(|()| keep_capabilities(false))
        .and_then(|()| set_own_capabilities(before));
    if back.is_err() {
        std::process::abort();
    }
    result
}

/// Real and saved ids stay as they are. The group first: away from root no capability is effective.
fn set_effective(uid: u32, gid: u32) -> io::Result<()> {
    // SAFETY: plain numbers.
    unsafe {
        check_long(libc::syscall(libc::SYS_setresgid, u32::MAX, gid, u32::MAX))?;
        check_long(libc::syscall(libc::SYS_setresuid, u32::MAX, uid, u32::MAX)).map(drop)
    }
}

fn keep_capabilities(keep: bool) -> io::Result<()> {
    // SAFETY: plain numbers.
    check(unsafe { libc::prctl(libc::PR_SET_KEEPCAPS, i32::from(keep), 0, 0, 0) }).map(drop)
}

/// Safe between clone and exec: allocates nothing. -1 and errno on failure.
pub(crate) fn raw_capset(sets: CapSets) -> libc::c_long {
    let mut header = CapHeader {
        version: VERSION_3,
        pid: 0,
    };
    let half = |shift: u32| CapData {
        effective: (sets.effective >> shift) as u32,
        permitted: (sets.permitted >> shift) as u32,
        inheritable: (sets.inheritable >> shift) as u32,
    };
    let data = [half(0), half(32)];
    // SAFETY: header and data have the layout of version 3 and live during the call.
    unsafe { libc::syscall(libc::SYS_capset, &raw mut header, data.as_ptr()) }
}

/// The bounding set of this process.
pub fn bounding_set() -> u64 {
    // SAFETY: no pointers; of an unknown capability, and there is none above that, it gives -1.
    let read = |capability: u64| unsafe { libc::prctl(libc::PR_CAPBSET_READ, capability, 0, 0, 0) };
    (0..64u64)
        .map(|capability| (capability, read(capability)))
        .take_while(|(_, held)| *held >= 0)
        .fold(0, |set, (capability, held)| {
            set | u64::from(held == 1) << capability
        })
}

pub fn set_groups(groups: &[u32]) -> io::Result<()> {
    // SAFETY: the slice is valid for its length during the call.
    check_long(unsafe { libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) })
        .map(drop)
}

pub fn own_groups() -> io::Result<Vec<u32>> {
    // SAFETY: with a size of 0 nothing is written and the count is given.
    let count = check(unsafe { libc::getgroups(0, std::ptr::null_mut()) })?;
    let mut groups = vec![0u32; count as usize];
    // SAFETY: the buffer is writable for the count given.
    let count = check(unsafe { libc::getgroups(count, groups.as_mut_ptr()) })?;
    groups.truncate(count as usize);
    Ok(groups)
}

/// Effective user and group.
pub fn own_ids() -> (u32, u32) {
    // SAFETY: neither call can fail or touches memory.
    unsafe { (libc::geteuid(), libc::getegid()) }
}

/// File-system user and group of this thread. setfsuid reports no error, so the result is read back.
pub fn set_fs_ids(uid: u32, gid: u32) -> io::Result<()> {
    // SAFETY: no pointers; -1 as an argument changes nothing and gives the present id.
    let (now_uid, now_gid) = unsafe {
        libc::setfsgid(gid);
        libc::setfsuid(uid);
        (libc::setfsuid(u32::MAX), libc::setfsgid(u32::MAX))
    };
    if (now_uid as u32, now_gid as u32) != (uid, gid) {
        return Err(io::Error::from_raw_os_error(libc::EPERM));
    }
    Ok(())
}

/// Becomes somebody for good: groups, ids, then exactly the capabilities `keep` of those held.
pub fn become_for_good(uid: u32, gid: u32, groups: &[u32], keep: u64) -> io::Result<()> {
    set_groups(groups)?;
    // SAFETY: no pointers.
    unsafe {
        check_long(libc::syscall(libc::SYS_setresgid, gid, gid, gid))?;
        check_long(libc::syscall(libc::SYS_setresuid, uid, uid, uid))?;
    }
    let kept = own_capabilities()?.permitted & keep;
    set_own_capabilities(CapSets {
        effective: kept,
        permitted: kept,
        inheritable: 0,
    })
}
