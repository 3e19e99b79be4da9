//! Processes in new namespaces, and moving between namespaces.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use crate::paths::{read_once, write_once};
use crate::seqpacket::pipe;

pub const NEW_USER: u64 = libc::CLONE_NEWUSER as u64;
pub const NEW_MOUNT: u64 = libc::CLONE_NEWNS as u64;
pub const NEW_PID: u64 = libc::CLONE_NEWPID as u64;
pub const NEW_IPC: u64 = libc::CLONE_NEWIPC as u64;
pub const NEW_UTS: u64 = libc::CLONE_NEWUTS as u64;
pub const NEW_NET: u64 = libc::CLONE_NEWNET as u64;
pub const NEW_CGROUP: u64 = libc::CLONE_NEWCGROUP as u64;

const CLONE_PIDFD: u64 = libc::CLONE_PIDFD as u64;
const CLONE_PARENT: u64 = libc::CLONE_PARENT as u64;
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// How a new process differs from ours.
#[derive(Default)]
pub struct Clone<'a> {
    /// NEW_… flags.
    pub namespaces: u64,
    /// A cgroup2 directory in which it begins.
    pub cgroup: Option<BorrowedFd<'a>>,
    /// It becomes a child of our parent, which reaps it.
    pub sibling: bool,
}

/// Which side of a clone this is.
pub enum Side {
    Child,
    Parent { pid: i32, pidfd: OwnedFd },
}

#[repr(C)]
#[derive(Default)]
struct CloneArguments {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

/// A copy of this process as fork(2) makes it, with new namespaces. The caller must have one thread only: then the child may
/// do whatever its parent may (allocate, run any code), since no lock can be held by a thread that is missing there.
pub fn clone(how: &Clone) -> io::Result<Side> {
    let mut pidfd: i32 = -1;
    let mut arguments = CloneArguments {
        flags: how.namespaces | CLONE_PIDFD,
        pidfd: std::ptr::addr_of_mut!(pidfd) as u64,
        exit_signal: libc::SIGCHLD as u64,
        ..CloneArguments::default()
    };
    if how.sibling {
        arguments.flags |= CLONE_PARENT;
        arguments.exit_signal = 0; // taken from our own
    }
    if let Some(cgroup) = how.cgroup {
        arguments.flags |= CLONE_INTO_CGROUP;
        arguments.cgroup = cgroup.as_raw_fd() as u64;
    }
    // SAFETY: `arguments` and `pidfd` live through the call and have the sizes given. Memory is not shared with the child (no
    // CLONE_VM), so it goes on with its own copy of this stack; one thread is the caller's promise.
    let result = unsafe {
        libc::syscall(
            libc::SYS_clone3,
            std::ptr::addr_of_mut!(arguments),
            std::mem::size_of::<CloneArguments>(),
        )
    };
    match result {
        0 => Ok(Side::Child),
        pid if pid > 0 => {
            // SAFETY: clone3 succeeded with CLONE_PIDFD, so the kernel has stored a new descriptor there.
            let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
            Ok(Side::Parent {
                pid: pid as i32,
                pidfd,
            })
        }
        _ => Err(io::Error::last_os_error()),
    }
}

/// Where a process has been before it begins: its cgroup namespace has its roots there.
#[derive(Default)]
pub struct Origin<'a> {
    /// A cgroup2 directory.
    pub cgroup: Option<BorrowedFd<'a>>,
    /// The `tasks` files of version 1 directories, open for writing. It stays in these.
    pub tasks: &'a [BorrowedFd<'a>],
}

/// As `clone`, by way of a process that is born in `origin`, makes a cgroup namespace there and clones on. No process is ever
/// moved in a way that makes the kernel wait for all processors (a grace period of 5 to 20 ms, as writing to `cgroup.procs`
/// does): a thread that moves only itself, by `tasks`, is spared it, and so is birth in a cgroup. `how.sibling` holds for both.
/// This process does `meanwhile`, of which the new one inherits nothing.
pub fn clone_from(origin: &Origin, how: &Clone, meanwhile: &mut dyn FnMut()) -> io::Result<Side> {
    let (told, tell) = pipe()?;
    let first = Clone {
        namespaces: 0,
        cgroup: origin.cgroup,
        sibling: how.sibling,
    };
    match clone(&first)? {
        Side::Child => {
            drop(told);
            let word = match settle(origin).and_then(|()| clone(how)) {
                Ok(Side::Child) => return Ok(Side::Child),
                Ok(Side::Parent { pid, .. }) => pid,
                Err(error) => -error.raw_os_error().unwrap_or(libc::EIO),
            };
            // When that fails there is nobody to tell, and whoever is born finds its pipes closed.
            let _ = write_once(tell.as_fd(), &word.to_ne_bytes());
            exit_now(0)
        }
        Side::Parent { .. } => {
            drop(tell);
            meanwhile();
            let mut word = [0; 4];
            match (
                read_once(told.as_fd(), &mut word)?,
                i32::from_ne_bytes(word),
            ) {
                (4, pid) if pid > 0 => open_process(pid).map(|pidfd| Side::Parent { pid, pidfd }),
                (4, errno) => Err(io::Error::from_raw_os_error(-errno)),
                _ => Err(io::ErrorKind::UnexpectedEof.into()),
            }
        }
    }
}

fn settle(origin: &Origin) -> io::Result<()> {
    origin
        .tasks
        .iter()
        .try_for_each(|tasks| write_once(*tasks, b"0"))?;
    unshare(NEW_CGROUP)
}

/// What `work` gives when it is done by a process in the pid namespace of `process`, as a proc of that namespace is made only
/// there. It shares memory and descriptors with this process, which stands still meanwhile; whatever else `work` does to its own
/// process is gone afterwards. Children of this process begin in that namespace from then on.
pub fn done_in_pids_of<T>(
    process: BorrowedFd,
    work: impl FnOnce() -> io::Result<T>,
) -> io::Result<T> {
    const STACK_BYTES: usize = 64 * 1024;
    struct Order<W, T> {
        work: Option<W>,
        result: Option<io::Result<T>>,
    }
    extern "C" fn carry_out<W: FnOnce() -> io::Result<T>, T>(order: *mut libc::c_void) -> i32 {
        // SAFETY: our caller passes its own order and stands still until this process has ended.
        let order = unsafe { &mut *order.cast::<Order<W, T>>() };
        order.result = order.work.take().map(|work| work());
        0
    }
    fn entry<W: FnOnce() -> io::Result<T>, T>(
        _: &Order<W, T>,
    ) -> extern "C" fn(*mut libc::c_void) -> i32 {
        carry_out::<W, T>
    }

    enter(process, NEW_PID)?;
    let mut order = Order {
        work: Some(work),
        result: None,
    };
    let mut stack = Vec::<u128>::with_capacity(STACK_BYTES / 16);
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_FILES | libc::SIGCHLD;
    let run = entry(&order);
    // SAFETY: the stack is large enough and grows down from its aligned end; it and the order outlive the new process, since
    // CLONE_VFORK stops this thread, the only one, until then. No lock of the allocator is held here.
    let pid = unsafe {
        let top = stack.as_mut_ptr().add(STACK_BYTES / 16);
        libc::clone(run, top.cast(), flags, (&raw mut order).cast())
    };
    if pid < 0 {
        return Err(io::Error::last_os_error());
    }
    reap_one(pid)?;
    order
        .result
        .unwrap_or_else(|| Err(io::ErrorKind::UnexpectedEof.into()))
}

/// Moves this process into new namespaces of the kinds given (NEW_… flags).
pub fn unshare(namespaces: u64) -> io::Result<()> {
    // SAFETY: plain numbers.
    if unsafe { libc::unshare(namespaces as i32) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Moves this process into the namespace that `fd` refers to, which must be of the kind `namespace` (a NEW_… flag).
pub fn enter(fd: BorrowedFd, namespace: u64) -> io::Result<()> {
    // SAFETY: plain numbers; the descriptor is borrowed, hence open.
    if unsafe { libc::setns(fd.as_raw_fd(), namespace as i32) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Whoever else wants the processor has it first.
pub fn give_way() {
    const LEAST: i32 = 19;
    // SAFETY: plain numbers. It cannot fail for a process that asks for less.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, LEAST) };
}

/// Ends this process at once: no destructor, no exit handler.
pub fn exit_now(code: i32) -> ! {
    // SAFETY: _exit takes any number and does not return.
    unsafe { libc::_exit(code) }
}

/// The process that runs in `pidfd` gets `signal`.
pub fn signal_process(pidfd: BorrowedFd, signal: i32) -> io::Result<()> {
    let none = std::ptr::null::<libc::siginfo_t>();
    // SAFETY: the descriptor is borrowed, hence open; a null siginfo is allowed.
    if unsafe {
        libc::syscall(
            libc::SYS_pidfd_send_signal,
            pidfd.as_raw_fd(),
            signal,
            none,
            0,
        )
    } != 0
    {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// A descriptor of the process `pid`. It names that process for ever, also when the number is used again.
pub fn open_process(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: plain numbers.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just returned this descriptor to us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// A child of this process that has ended: its pid and wait status. None when no child has; an error when there are no children.
pub fn reap() -> io::Result<Option<(i32, i32)>> {
    let mut status = 0;
    // SAFETY: the status is written to our own variable.
    match unsafe { libc::waitpid(-1, &mut status, libc::WNOHANG) } {
        0 => Ok(None),
        pid if pid > 0 => Ok(Some((pid, status))),
        _ => Err(io::Error::last_os_error()),
    }
}

/// What has become of one process.
pub enum Fate {
    /// It has ended, with this wait status, and is reaped.
    Ended(i32),
    Runs,
    /// Not our child, or reaped before.
    Stranger,
}

/// Reaps this child if it has ended. Unlike `reap` it does not look at all the others.
pub fn fate_of(pid: i32) -> Fate {
    let mut status = 0;
    // SAFETY: the status is written to our own variable.
    match unsafe { libc::waitpid(pid.max(1), &mut status, libc::WNOHANG) } {
        0 => Fate::Runs,
        found if found > 0 => Fate::Ended(status),
        _ => Fate::Stranger,
    }
}

/// The first half of becoming a daemon: a session of one's own. Fails when this process leads a group already.
pub fn new_session() -> io::Result<()> {
    // SAFETY: no arguments.
    if unsafe { libc::setsid() } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[repr(C)]
#[derive(Default)]
struct ProcessFacts {
    mask: u64,
    cgroup: u64,
    ids: [u32; 11],
    exit_code: i32,
    more: [u64; 4],
}

/// The wait status of an ended process that somebody else has reaped, where the kernel still knows it.
pub fn exit_status(pidfd: BorrowedFd) -> Option<i32> {
    const EXIT: u64 = 1 << 3;
    const GET_FACTS: libc::c_ulong = 0xC000_FF0B | (64 << 16);
    let mut facts = ProcessFacts {
        mask: EXIT,
        ..ProcessFacts::default()
    };
    // SAFETY: the number of the request says 64 bytes, and the buffer is larger than that.
    let result =
        unsafe { libc::ioctl(pidfd.as_raw_fd(), GET_FACTS, std::ptr::addr_of_mut!(facts)) };
    (result == 0 && facts.mask & EXIT != 0).then_some(facts.exit_code)
}

/// Waits for the child `pid` to end; its wait status.
pub fn reap_one(pid: i32) -> io::Result<i32> {
    let mut status = 0;
    // SAFETY: the status is written to our own variable.
    if unsafe { libc::waitpid(pid, &mut status, 0) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(status)
}
