//! Starting a command: clone, and everything that the child does before it becomes the program.
//!
//! The child shares memory with us while we are stopped (CLONE_VM | CLONE_VFORK): no page tables are copied, and it
//! reports the step that failed by a plain store. Between clone and exec it allocates nothing, takes no lock and calls
//! no function that does.

use std::arch::asm;
use std::ffi::{c_char, CString};
use std::io;
use std::os::fd::RawFd;
use std::ptr;
use std::sync::atomic::AtomicI32;

use crate::processors::{allowed, restrict, ProcessorSet};
use crate::rights::{raw_capset, CapSets};

/// What the child was doing when it failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Step {
    Clone = 0,
    Session,
    Cgroup,
    Limits,
    Descriptors,
    Terminal,
    Bounding,
    Groups,
    Ids,
    Capabilities,
    Directory,
    Privileges,
    Filter,
    Execute,
}

const STEPS: [Step; 14] = [
    Step::Clone,
    Step::Session,
    Step::Cgroup,
    Step::Limits,
    Step::Descriptors,
    Step::Terminal,
    Step::Bounding,
    Step::Groups,
    Step::Ids,
    Step::Capabilities,
    Step::Directory,
    Step::Privileges,
    Step::Filter,
    Step::Execute,
];

#[derive(Debug)]
pub struct LaunchFailure {
    pub step: Step,
    pub error: io::Error,
}

/// Ids and capabilities of the command; without it the child stays who we are.
#[derive(Clone, Debug)]
pub struct Become {
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
    /// Permitted and effective set afterwards, as far as we hold it.
    pub capabilities: u64,
    /// Capabilities to take out of the bounding set.
    pub drop_bounding: u64,
}

/// A command with every decision made.
#[derive(Debug, Default)]
pub struct Command {
    /// Tried in turn, as execvp would.
    pub programs: Vec<CString>,
    pub argv: Vec<CString>,
    pub env: Vec<CString>,
    /// Tried in turn; the last one that fails is the failure.
    pub directories: Vec<CString>,
    pub identity: Option<Become>,
    /// (resource, soft, hard) in order.
    pub limits: Vec<(u32, u64, u64)>,
    /// (ours, number in the child): numbers below 10. All others are closed.
    pub descriptors: Vec<(RawFd, RawFd)>,
    /// Descriptor 0 becomes the controlling terminal.
    pub terminal: bool,
    /// Where it may run; None: wherever we may.
    pub processors: Option<ProcessorSet>,
    /// The file of our own score for memory, which the child sets back to 0 as soon as it has inherited what it was.
    pub score: Option<RawFd>,
    /// Directory descriptor of the cgroup to start in.
    pub cgroup: Option<RawFd>,
    /// The command becomes the parent of its orphaned descendants.
    pub subreaper: bool,
    pub no_new_privs: bool,
    /// Array of `struct sock_filter`; empty for none.
    pub filter: Vec<u8>,
}

#[repr(C)]
struct SockFprog {
    len: u16,
    filter: *const u8,
}

/// Everything the child reads, as pointers that the parent keeps alive.
struct Child<'a> {
    command: &'a Command,
    programs: Vec<*const c_char>,
    argv: Vec<*const c_char>,
    env: Vec<*const c_char>,
    capabilities: CapSets,
    enter_cgroup: bool,
    failed: bool,
    step: Step,
    errno: i32,
}

#[repr(C)]
#[derive(Default)]
struct CloneArgs {
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

const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;
const STACK_BYTES: usize = 32 * 1024;

/// Starts the command and gives its pid. An error means that nothing of it runs; its remains are still to be reaped.
/// This thread is stopped until the child has become the program. The kernel writes its pid to `started` before it runs, so
/// that another thread can end what does not come that far.
pub fn launch(command: &Command, held: u64, started: &AtomicI32) -> Result<i32, LaunchFailure> {
    let pointers = |strings: &[CString]| {
        let mut list: Vec<*const c_char> = strings.iter().map(|s| s.as_ptr()).collect();
        list.push(ptr::null());
        list
    };
    let keep = command
        .identity
        .as_ref()
        .map_or(held, |identity| identity.capabilities & held);
    let mut child = Child {
        command,
        programs: pointers(&command.programs),
        argv: pointers(&command.argv),
        env: pointers(&command.env),
        capabilities: CapSets {
            effective: keep,
            permitted: keep,
            inheritable: 0,
        },
        enter_cgroup: false,
        failed: false,
        step: Step::Clone,
        errno: 0,
    };
    // The child inherits it: one that was born elsewhere would have to be moved.
    let everywhere = command.processors.as_ref().and_then(confine);
    let pid = start(&mut child, started);
    if let Some(everywhere) = everywhere {
        // It was allowed before.
        let _ = restrict(&everywhere);
    }
    if pid < 0 {
        let error = io::Error::from_raw_os_error(-pid as i32);
        return Err(LaunchFailure {
            step: Step::Clone,
            error,
        });
    }
    // SAFETY: the child wrote these through its own pointer while this thread was stopped; it has exec'd or exited.
    let (failed, step, errno) = unsafe {
        (
            ptr::read_volatile(&raw const child.failed),
            ptr::read_volatile(&raw const child.step),
            ptr::read_volatile(&raw const child.errno),
        )
    };
    match failed {
        false => Ok(pid as i32),
        true => Err(LaunchFailure {
            step: STEPS[step as usize],
            error: io::Error::from_raw_os_error(errno),
        }),
    }
}

/// Gives where this thread might run until now. None, and nothing is changed: what that would change is how a program sees its
/// share, which is no reason not to run it.
fn confine(processors: &ProcessorSet) -> Option<ProcessorSet> {
    let before = allowed().ok()?;
    restrict(processors).ok()?;
    Some(before)
}

/// The pid, or a negated errno.
fn start(child: &mut Child<'_>, started: &AtomicI32) -> i64 {
    // As it is: to clear it would be to touch all of its pages.
    let stack = Vec::<u128>::with_capacity(STACK_BYTES / 16);
    let base = stack.as_ptr() as u64;
    let flags = (libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PARENT_SETTID) as u64;
    let parent_tid = started.as_ptr() as u64;
    let mut args = CloneArgs {
        flags,
        parent_tid,
        exit_signal: libc::SIGCHLD as u64,
        stack: base,
        stack_size: STACK_BYTES as u64,
        ..CloneArgs::default()
    };
    if let Some(fd) = child.command.cgroup {
        args.flags |= CLONE_INTO_CGROUP;
        args.cgroup = fd as u64;
        // SAFETY: as for the plain clone below.
        let pid = unsafe {
            clone_onto(
                libc::SYS_clone3,
                &raw const args as u64,
                std::mem::size_of::<CloneArgs>() as u64,
                0,
                child,
            )
        };
        if pid >= 0 {
            return pid;
        }
        // A filter that hides clone3, or a kernel that refuses the placement: the child moves itself.
        child.enter_cgroup = true;
    }
    // SAFETY: the stack is 16-aligned, large enough for `child_main`, and lives until the child has exec'd or exited,
    // because CLONE_VFORK stops this thread until then.
    unsafe {
        clone_onto(
            libc::SYS_clone,
            flags | libc::SIGCHLD as u64,
            base + STACK_BYTES as u64,
            parent_tid,
            child,
        )
    }
}

/// Clones with a stack of its own for the child, which calls `child_main(child)` on it.
///
/// # Safety
/// `first`, `second` and `third` must be valid arguments of `number` (clone or clone3) that give the child a fresh, aligned stack;
/// with CLONE_VM they must ask for CLONE_VFORK as well.
unsafe fn clone_onto(
    number: i64,
    first: u64,
    second: u64,
    third: u64,
    child: &mut Child<'_>,
) -> i64 {
    let result: i64;
    // SAFETY: in the parent this is one system call that keeps all registers but rax, rcx and r11. The child never comes
    // out of the block: it calls a function that does not return, on its own stack.
    unsafe {
        asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, r12",
            "call r13",
            "ud2",
            "2:",
            inlateout("rax") number => result,
            in("rdi") first,
            in("rsi") second,
            in("rdx") third,
            in("r10") 0u64,
            in("r8") 0u64,
            in("r12") ptr::from_mut(child),
            in("r13") child_main as extern "C" fn(*mut Child<'_>) -> !,
            lateout("rcx") _,
            lateout("r11") _,
        );
    }
    result
}

extern "C" fn child_main(child: *mut Child<'_>) -> ! {
    // SAFETY: the parent is stopped and passed a valid, exclusive pointer.
    let child = unsafe { &mut *child };
    let mut step = Step::Session;
    // SAFETY: see `prepare`; all pointers in `child` are kept alive by the stopped parent.
    let errno = unsafe { prepare(child, &mut step) };
    child.step = step;
    child.errno = errno;
    child.failed = true;
    // SAFETY: ends this process only; runs no handlers.
    unsafe {
        libc::syscall(libc::SYS_exit_group, 127);
        libc::_exit(127)
    }
}

/// Returns only on failure, with errno.
///
/// # Safety
/// Runs in the cloned child. Only system calls: no allocation, no locks, no unwinding.
unsafe fn prepare(child: &mut Child<'_>, step: &mut Step) -> i32 {
    macro_rules! attempt {
        ($step:expr, $call:expr) => {
            if $call < 0 {
                *step = $step;
                return *libc::__errno_location();
            }
        };
    }
    let command = child.command;
    // SAFETY: each call gets pointers into `child`, which are valid, and lengths that belong to them.
    unsafe {
        if let Some(score) = command.score {
            // We, who cannot while we are stopped, do it again afterwards.
            libc::write(score, c"0".as_ptr().cast(), 1);
        }
        attempt!(Step::Session, libc::setsid());
        if command.subreaper {
            libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
        }
        if let (Some(fd), true) = (command.cgroup, child.enter_cgroup) {
            attempt!(Step::Cgroup, enter_cgroup(fd));
        }
        libc::umask(0o022);
        attempt!(Step::Descriptors, place_descriptors(command));
        // After the descriptors: a low limit of open files must not get in their way.
        for (resource, soft, hard) in &command.limits {
            let limit = [*soft, *hard];
            attempt!(
                Step::Limits,
                libc::syscall(libc::SYS_prlimit64, 0, *resource, limit.as_ptr(), 0)
            );
        }
        if command.terminal {
            attempt!(Step::Terminal, libc::ioctl(0, libc::TIOCSCTTY, 0));
        }
        if let Some(identity) = &command.identity {
            for capability in 0..64u64 {
                if identity.drop_bounding & (1 << capability) != 0 {
                    attempt!(
                        Step::Bounding,
                        libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0)
                    );
                }
            }
            let (uid, gid, groups) = (identity.uid, identity.gid, &identity.groups);
            attempt!(
                Step::Groups,
                libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr())
            );
            attempt!(Step::Ids, libc::syscall(libc::SYS_setresgid, gid, gid, gid));
            // Without this, leaving uid 0 would drop what `capabilities` is still to choose from.
            libc::prctl(libc::PR_SET_KEEPCAPS, 1, 0, 0, 0);
            attempt!(Step::Ids, libc::syscall(libc::SYS_setresuid, uid, uid, uid));
            libc::prctl(libc::PR_SET_KEEPCAPS, 0, 0, 0, 0);
        }
        // A filter without no_new_privs needs capabilities that the command will not have, so it comes before they go.
        if !command.no_new_privs {
            attempt!(Step::Filter, load_filter(&command.filter));
        }
        if command.identity.is_some() {
            attempt!(Step::Capabilities, raw_capset(child.capabilities));
        }
        *step = Step::Directory;
        if let Some(errno) = change_directory(command) {
            return errno;
        }
        if command.no_new_privs {
            attempt!(
                Step::Privileges,
                libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            );
        }
        reset_signals();
        if command.no_new_privs {
            attempt!(Step::Filter, load_filter(&command.filter));
        }
        *step = Step::Execute;
        execute(child)
    }
}

unsafe fn enter_cgroup(directory: RawFd) -> libc::c_long {
    // SAFETY: literals and a live descriptor.
    unsafe {
        let flags = libc::O_WRONLY | libc::O_CLOEXEC;
        let fd = libc::openat(directory, c"cgroup.procs".as_ptr(), flags);
        if fd < 0 {
            return -1;
        }
        libc::write(fd, c"0".as_ptr().cast(), 1) as libc::c_long
    }
}

/// First above all target numbers, then to them: sources and targets may overlap.
unsafe fn place_descriptors(command: &Command) -> libc::c_int {
    let mut high = [-1; 10];
    // SAFETY: no pointers.
    unsafe {
        for (ours, number) in &command.descriptors {
            let fd = libc::fcntl(*ours, libc::F_DUPFD_CLOEXEC, 10);
            if fd < 0 || !(0..10).contains(number) {
                return -1;
            }
            high[*number as usize] = fd;
        }
        let mut highest = 2;
        for (number, fd) in high.iter().enumerate() {
            let number = number as libc::c_int;
            if *fd >= 0 {
                if libc::dup2(*fd, number) < 0 {
                    return -1;
                }
                highest = number.max(2);
            } else if number > 2 {
                libc::close(number);
            }
        }
        libc::syscall(libc::SYS_close_range, highest + 1, i32::MAX, 0) as libc::c_int
    }
}

unsafe fn load_filter(filter: &[u8]) -> libc::c_int {
    const INSTRUCTION_BYTES: usize = 8;
    if filter.is_empty() {
        return 0;
    }
    let program = SockFprog {
        len: (filter.len() / INSTRUCTION_BYTES) as u16,
        filter: filter.as_ptr(),
    };
    // SAFETY: the program points to `len` instructions, which the kernel checks.
    unsafe {
        libc::prctl(
            libc::PR_SET_SECCOMP,
            libc::SECCOMP_MODE_FILTER,
            &raw const program,
            0,
            0,
        )
    }
}

unsafe fn change_directory(command: &Command) -> Option<i32> {
    let mut errno = None;
    for directory in &command.directories {
        // SAFETY: the string is valid.
        unsafe {
            if libc::chdir(directory.as_ptr()) == 0 {
                return None;
            }
            errno = Some(*libc::__errno_location());
        }
    }
    errno
}

unsafe fn reset_signals() {
    // SAFETY: a zeroed sigset_t is the empty mask.
    unsafe {
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
        let none: libc::sigset_t = std::mem::zeroed();
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut());
    }
}

/// As execvp: a program that may not be executed is remembered, a missing one is passed by.
unsafe fn execute(child: &Child<'_>) -> i32 {
    let mut errno = libc::ENOENT;
    for program in &child.programs {
        if program.is_null() {
            break;
        }
        // SAFETY: both arrays end with a null pointer.
        unsafe {
            libc::execve(*program, child.argv.as_ptr(), child.env.as_ptr());
            match *libc::__errno_location() {
                libc::ENOENT | libc::ENOTDIR => {}
                libc::EACCES => errno = libc::EACCES,
                other => return other,
            }
        }
    }
    errno
}

/// Numbers of the limits that a caller may name.
pub fn limit_number(name: &str) -> Option<u32> {
    Some(match name {
        "nofile" => libc::RLIMIT_NOFILE,
        "core" => libc::RLIMIT_CORE,
        "fsize" => libc::RLIMIT_FSIZE,
        "nproc" => libc::RLIMIT_NPROC,
        "stack" => libc::RLIMIT_STACK,
        "as" => libc::RLIMIT_AS,
        "cpu" => libc::RLIMIT_CPU,
        "data" => libc::RLIMIT_DATA,
        "memlock" => libc::RLIMIT_MEMLOCK,
        _ => return None,
    })
}
