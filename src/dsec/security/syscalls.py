"""seccomp in words: which system calls the agent and the commands of a sandbox may make (seccomp(2)).

Two filters. The agent runs under `AGENT`; each command gets `EXEC` on top of it. Calls that have no business in a
sandbox fail with EPERM; numbers that nobody has thought about yet fail with ENOSYS, so that newer C libraries fall
back instead of failing. `clone3` is ENOSYS for commands because its flags lie in memory, where a filter cannot look.
"""

from __future__ import annotations

import hashlib

from dsec.wire.codec import pack
from dsec.wire.launch import ArgRule, FilterSpec, SyscallRule


def _words(text: str) -> list[str]:
    return text.split()


_KNOWN = _words("""
read write open close stat fstat lstat poll lseek mmap mprotect munmap brk rt_sigaction rt_sigprocmask
rt_sigreturn pread64 pwrite64 readv writev access pipe select sched_yield mremap msync mincore madvise shmget
shmat shmctl dup dup2 pause nanosleep getitimer alarm setitimer getpid sendfile connect accept sendto recvfrom
sendmsg recvmsg shutdown bind listen getsockname getpeername setsockopt getsockopt fork vfork execve exit
wait4 kill uname semget semop semctl shmdt msgget msgsnd msgrcv msgctl fcntl flock fsync fdatasync truncate
ftruncate getdents getcwd chdir fchdir rename mkdir rmdir creat link unlink symlink readlink chmod fchmod
chown fchown lchown umask gettimeofday getrlimit getrusage sysinfo times getuid getgid setuid setgid geteuid
getegid setpgid getppid getpgrp setsid setreuid setregid getgroups setgroups setresuid getresuid setresgid
getresgid getpgid setfsuid setfsgid getsid capget capset rt_sigpending rt_sigtimedwait rt_sigqueueinfo
rt_sigsuspend sigaltstack utime mknod statfs fstatfs getpriority setpriority sched_setparam sched_getparam
sched_setscheduler sched_getscheduler sched_get_priority_max sched_get_priority_min sched_rr_get_interval
mlock munlock mlockall munlockall modify_ldt prctl arch_prctl setrlimit sync gettid readahead setxattr
lsetxattr fsetxattr getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr removexattr lremovexattr
fremovexattr tkill time futex sched_setaffinity sched_getaffinity set_thread_area io_setup io_destroy
io_getevents io_submit io_cancel get_thread_area epoll_create remap_file_pages getdents64 set_tid_address
restart_syscall semtimedop fadvise64 timer_create timer_settime timer_gettime timer_getoverrun timer_delete
clock_gettime clock_getres clock_nanosleep exit_group epoll_wait epoll_ctl tgkill utimes mq_open mq_unlink
mq_timedsend mq_timedreceive mq_notify mq_getsetattr waitid ioprio_set ioprio_get inotify_init
inotify_add_watch inotify_rm_watch openat mkdirat mknodat fchownat futimesat newfstatat unlinkat renameat
linkat symlinkat readlinkat fchmodat faccessat pselect6 ppoll set_robust_list get_robust_list splice tee
sync_file_range vmsplice utimensat epoll_pwait signalfd timerfd_create eventfd fallocate timerfd_settime
timerfd_gettime accept4 signalfd4 eventfd2 epoll_create1 dup3 pipe2 inotify_init1 preadv pwritev
rt_tgsigqueueinfo recvmmsg prlimit64 name_to_handle_at syncfs sendmmsg getcpu process_vm_readv
process_vm_writev sched_setattr sched_getattr renameat2 seccomp getrandom memfd_create execveat membarrier
mlock2 copy_file_range preadv2 pwritev2 pkey_mprotect pkey_alloc pkey_free statx io_pgetevents rseq
pidfd_send_signal pidfd_open close_range openat2 faccessat2 epoll_pwait2 landlock_create_ruleset
landlock_add_rule landlock_restrict_self memfd_secret futex_waitv
""")

# Kernel attack surface, host-wide state, or a way around namespaces. None of it works for an unprivileged user in an
# ordinary container either, but for those that have had holes of their own: refused before the kernel looks.
_DENIED = _words("""
acct add_key adjtimex bpf clock_adjtime clock_settime delete_module fanotify_init fanotify_mark finit_module
fsconfig fsmount fsopen fspick get_mempolicy init_module io_uring_enter io_uring_register io_uring_setup
ioperm iopl kcmp kexec_file_load kexec_load keyctl mbind migrate_pages mount mount_setattr move_mount
move_pages open_by_handle_at open_tree perf_event_open pidfd_getfd pivot_root process_madvise process_mrelease
quotactl quotactl_fd reboot request_key set_mempolicy set_mempolicy_home_node setdomainname sethostname setns
settimeofday swapoff swapon syslog umount2 userfaultfd vhangup
""")

_DENIED_TO_COMMANDS = ["unshare", "chroot"]

_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK = 1, 2, 10, 16
_NAMESPACE_FLAGS = (0x80, 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)

# A lease makes whoever opens or executes the file wait until it is given up, for 45 s: the agent among them. The kernel
# looks at the low half of the argument only.
_REFUSED_FCNTL = SyscallRule("fcntl", [ArgRule(1, 1024, mask=0xFFFF_FFFF)])  # F_SETLEASE

# The host's pools of huge pages are kept for somebody, and no memory limit of a sandbox counts them.
_REFUSED_HUGE_PAGES = [
    SyscallRule("mmap", [ArgRule(3, 0x40000, mask=0x40000)]),  # MAP_HUGETLB
    SyscallRule("memfd_create", [ArgRule(1, 4, mask=4)]),  # MFD_HUGETLB
    SyscallRule("shmget", [ArgRule(2, 0o4000, mask=0o4000)]),  # SHM_HUGETLB
]

# At any limit of core files but 1, a crash runs the program that the host's core_pattern may name: as root of the host
# and outside all limits of the sandbox (core(5): a limit of 0 keeps nothing from a pipe). So it is 1, and whoever sets
# it to 0, as agents of keys insist on, is told that it is done. Who asks for the old value as well would see none.
_CORE = 4
_REFUSED_CORE_LIMIT = SyscallRule(
    "prlimit64", [ArgRule(1, _CORE), ArgRule(2, 0, negate=True, wide=True), ArgRule(3, 0, negate=True, wide=True)]
)
_IGNORED_CORE_LIMITS = [
    SyscallRule("setrlimit", [ArgRule(0, _CORE)]),
    SyscallRule("prlimit64", [ArgRule(1, _CORE), ArgRule(2, 0, negate=True, wide=True)]),
]

# The host has fs.aio-max-nr contexts for everybody, whoever their owner is: libraries fall back to threads.
_MISSING_TO_COMMANDS = ["clone3", "io_setup"]

# personality(2): the default, 32-bit layouts as Docker allows them, and the query. No way to switch randomisation off.
_PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)

# Requests of terminals, pipes, sockets and plain files. There are no device nodes to speak to, TIOCSTI and TIOCLINUX
# type into terminals, the set-flags and extent-swapping requests change files behind the back of read-only rules.
# fmt: off
_IOCTLS = (
    0x5401, 0x5402, 0x5403, 0x5404, 0x5405, 0x5406, 0x5407, 0x5408, 0x5409, 0x540A, 0x540B,  # TCGETS … TCFLSH
    0x540C, 0x540D, 0x540E, 0x540F, 0x5410, 0x5411, 0x5413, 0x5414,  # TIOCEXCL … TIOCSWINSZ, not TIOCSTI
    0x541B, 0x5420, 0x5421, 0x5422, 0x5424, 0x5425, 0x5429,  # FIONREAD, TIOCPKT, FIONBIO, TIOCNOTTY … TIOCGSID
    0x802C542A, 0x402C542B, 0x402C542C, 0x402C542D,  # TCGETS2 … TCSETSF2
    0x80045430, 0x40045431, 0x80045439, 0x5441, 0x80045438, 0x80045440,  # pseudo terminals
    0x5450, 0x5451, 0x5452, 0x5460,  # FIONCLEX, FIOCLEX, FIOASYNC, FIOQSIZE
    0x8905, 0x8906, 0x8907, 0x8910, 0x8912, 0x8913, 0x8915, 0x8919, 0x891B, 0x8921, 0x8927, 0x8933,  # SIOCG…
    0x80086601, 0x80087601, 0x801C581F, 0xC020660B, 0x40049409, 0x4020940D, 0x2,  # flags (reading), FIEMAP, FICLONE
)
# fmt: on


def _always(names: list[str]) -> list[SyscallRule]:
    return [SyscallRule(name) for name in names]


def _one_of(syscall: str, index: int, values: tuple[int, ...]) -> list[SyscallRule]:
    return [SyscallRule(syscall, [ArgRule(index, value)]) for value in values]


def _sockets() -> list[SyscallRule]:
    """Local and IP families, and of netlink only routing: vsock ignores namespaces, packet and alg are surface."""
    allowed = [*_one_of("socket", 0, (_AF_UNIX, _AF_INET, _AF_INET6)), *_one_of("socketpair", 0, (_AF_UNIX,))]
    return [*allowed, SyscallRule("socket", [ArgRule(0, _AF_NETLINK), ArgRule(2, 0)])]


def _refused_sockets() -> list[SyscallRule]:
    families = [ArgRule(0, f, negate=True) for f in (_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK)]
    return [
        SyscallRule("socket", families),
        SyscallRule("socket", [ArgRule(0, _AF_NETLINK), ArgRule(2, 0, negate=True)]),
        SyscallRule("socketpair", [ArgRule(0, _AF_UNIX, negate=True)]),
    ]


AGENT = FilterSpec(
    deny=[*_always(_DENIED), *_refused_sockets(), *_REFUSED_HUGE_PAGES],
    allow=[
        *_always(_KNOWN),
        *_always(["clone", "clone3", "unshare", "chroot", "ptrace", "ioctl", "personality"]),
        *_sockets(),
    ],
)

# Of the agent that mounts a sandbox's terminals and message queues itself, as long as it has the right: a mount(2) of
# something new, with these flags alone. No bind, no remount, no move.
_TERMINALS, _QUEUES = 0x2 | 0x8, 0x2 | 0x4 | 0x8  # MS_NOSUID, MS_NODEV, MS_NOEXEC
LIGHT_AGENT = FilterSpec(
    deny=[
        *(rule for rule in AGENT.deny if rule.syscall != "mount"),
        SyscallRule("mount", [ArgRule(3, flags, negate=True, wide=True) for flags in (_TERMINALS, _QUEUES)]),
    ],
    allow=[*AGENT.allow, *(SyscallRule("mount", [ArgRule(3, flags, wide=True)]) for flags in (_TERMINALS, _QUEUES))],
)

EXEC = FilterSpec(
    deny=[
        *_always(_DENIED),
        *_always(_DENIED_TO_COMMANDS),
        *_refused_sockets(),
        *_REFUSED_HUGE_PAGES,
        _REFUSED_FCNTL,
        _REFUSED_CORE_LIMIT,
        SyscallRule("clone", [ArgRule(0, 0, mask=sum(_NAMESPACE_FLAGS), negate=True)]),
        SyscallRule("personality", [ArgRule(0, value, negate=True) for value in _PERSONALITIES]),
    ],
    ignore=_IGNORED_CORE_LIMITS,
    nosys=_always(_MISSING_TO_COMMANDS),
    allow=[
        *_always(_KNOWN),
        *_always(["clone", "ptrace"]),
        *_one_of("personality", 0, _PERSONALITIES),
        *_one_of("ioctl", 1, _IOCTLS),
        *_sockets(),
    ],
)


def filter_name(spec: FilterSpec) -> str:
    """The name under which a filter is given to the launcher: the digest of its content."""
    return hashlib.sha256(pack(spec)).hexdigest()[:32]
