//! What the two processes may still ask of the kernel, once they serve. Whatever is not named is EPERM.

use dsec_sys::identity::{resource, set_limit};
use dsec_sys::seccomp::{allow_only, load_filter, When};
use libc::c_long;

use crate::error::{Doing, Result};

use When::{Always, Argument, Missing};

/// In the flags of opening a file: what is there may be written, as a setting of a sandbox's network is.
const MAKES: u32 = (libc::O_CREAT | libc::O_TRUNC) as u32;
const EXECUTABLE: u32 = libc::PROT_EXEC as u32;
/// Whether a byte is urgent, and how much is not sent yet.
const ASKED_OF_SOCKETS: [u32; 2] = [0x8905, libc::TIOCOUTQ as u32];

/// Making a map, putting something in, loading a program, attaching it.
const OF_BPF: [u32; 4] = [0, 2, 5, 28];

/// Memory, time, and the end of a process, which the standard library asks for by itself.
const OF_ANY: [c_long; 22] = [
    libc::SYS_brk,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_futex,
    libc::SYS_getrandom,
    libc::SYS_clock_gettime,
    libc::SYS_restart_syscall,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigaction,
    libc::SYS_sigaltstack,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_close,
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_fstat,
];

const OF_SERVER: [c_long; 20] = [
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_wait,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_accept4,
    libc::SYS_connect,
    libc::SYS_shutdown,
    libc::SYS_getsockname,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    libc::SYS_recvfrom,
    libc::SYS_sendto,
    libc::SYS_splice,
    libc::SYS_pipe2,
    libc::SYS_pread64,
    libc::SYS_lseek,
    libc::SYS_statx,
    libc::SYS_fcntl,
    libc::SYS_writev,
];

const OF_KEEPER: [c_long; 24] = [
    libc::SYS_pidfd_open,
    libc::SYS_statx,
    libc::SYS_newfstatat,
    libc::SYS_lseek,
    libc::SYS_fcntl,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_bind,
    libc::SYS_listen,
    libc::SYS_getsockname,
    libc::SYS_setsockopt,
    libc::SYS_recvfrom,
    libc::SYS_sendto,
    libc::SYS_wait4,
    libc::SYS_readlink,
    libc::SYS_readlinkat,
    libc::SYS_dup,
    libc::SYS_writev,
    // A thread enters a network and ends.
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_getuid,
    libc::SYS_set_tid_address,
];

/// It carries what sandboxes send: it opens no file and starts nothing, makes no socket but those of the internet, and nobody
/// can be made to listen.
pub fn confine_server() -> Result<()> {
    let own = [std::process::id()];
    let sockets = [libc::AF_INET as u32, libc::AF_INET6 as u32];
    let mut calls = of_any(&own);
    calls.extend(OF_SERVER.map(|number| (number, Always)));
    calls.push((libc::SYS_socket, Argument(0, u32::MAX, &sockets)));
    calls.push((libc::SYS_ioctl, Argument(1, u32::MAX, &ASKED_OF_SOCKETS)));
    leave_no_trace()?;
    load_filter(&allow_only(&calls)).doing("loading the server's filter of system calls")
}

/// It has rights, so that the filter is what keeps it from mounting, loading modules, tracing, starting programs, and whatever
/// else these would allow.
pub fn confine_keeper() -> Result<()> {
    let own = [std::process::id()];
    let thread = [(libc::CLONE_THREAD | libc::CLONE_VM) as u32];
    let families = [libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK].map(|family| family as u32);
    let up = [libc::SIOCSIFFLAGS as u32];
    let networks = [libc::CLONE_NEWNET as u32];
    let names = [libc::PR_SET_NAME as u32];
    let mut calls = of_any(&own);
    calls.extend(OF_KEEPER.map(|number| (number, Always)));
    calls.push((libc::SYS_clone, Argument(0, thread[0], &thread)));
    // Its flags are in memory, where no filter looks.
    calls.push((libc::SYS_clone3, Missing));
    calls.push((libc::SYS_openat, Argument(2, MAKES, &[0])));
    calls.push((libc::SYS_socket, Argument(0, u32::MAX, &families)));
    calls.push((libc::SYS_ioctl, Argument(1, u32::MAX, &up)));
    calls.push((libc::SYS_setns, Argument(1, u32::MAX, &networks)));
    calls.push((libc::SYS_bpf, Argument(0, u32::MAX, &OF_BPF)));
    calls.push((libc::SYS_prctl, Argument(0, u32::MAX, &names)));
    calls.push((libc::SYS_prlimit64, Argument(2, u32::MAX, &[0]))); // a look at them
    leave_no_trace()?;
    load_filter(&allow_only(&calls)).doing("loading the keeper's filter of system calls")
}

fn of_any(own: &[u32; 1]) -> Vec<(c_long, When<'_>)> {
    let mut calls: Vec<_> = OF_ANY.map(|number| (number, Always)).into();
    for number in [libc::SYS_mmap, libc::SYS_mprotect] {
        calls.push((number, Argument(2, EXECUTABLE, &[0])));
    }
    calls.push((libc::SYS_tgkill, Argument(0, u32::MAX, own))); // abort
    calls
}

/// A core would hold what sandboxes have sent.
fn leave_no_trace() -> Result<()> {
    let kind = resource("core").unwrap_or(libc::RLIMIT_CORE);
    set_limit(kind, 0, 0).doing("giving cores up")
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;
    use std::net::{TcpListener, TcpStream, UdpSocket};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    /// Filters are of the thread that loads them.
    fn confined<T: Send>(confine: fn() -> Result<()>, work: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                dsec_sys::identity::no_new_privileges().unwrap();
                confine().unwrap();
                work()
            });
            thread.join().unwrap()
        })
    }

    fn is_denied<T>(result: std::io::Result<T>) -> bool {
        result.is_err_and(|error| error.kind() == ErrorKind::PermissionDenied)
    }

    #[test]
    fn the_server_opens_no_file_starts_nothing_and_listens_nowhere() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let denied = confined(confine_server, || {
            assert!(TcpStream::connect(address).is_ok());
            [
                ("open", is_denied(std::fs::read("/etc/passwd"))),
                ("make", is_denied(std::fs::File::create("/tmp/dsec-none"))),
                ("list", is_denied(std::fs::read_dir("/"))),
                ("unix", is_denied(UnixStream::pair())),
                ("bind", is_denied(UdpSocket::bind("127.0.0.1:0"))),
                ("listen", is_denied(TcpListener::bind("127.0.0.1:0"))),
                ("netlink", is_denied(dsec_sys::netlink::Netlink::open())),
                ("kill", is_denied(dsec_sys::process::kill(1, 0))),
                (
                    "start",
                    is_denied(std::process::Command::new("/bin/true").spawn()),
                ),
                ("process", is_denied(dsec_sys::namespaces::open_process(1))),
                ("bpf", is_denied(dsec_sys::bpf::socket_map(1))),
                ("thread", std::thread::Builder::new().spawn(|| ()).is_err()),
            ]
        });
        for (what, denied) in denied {
            assert!(denied, "{what}");
        }
    }

    #[test]
    fn the_keeper_starts_nothing_and_speaks_with_nobody() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let denied = confined(confine_keeper, || {
            assert!(std::fs::read("/proc/self/stat").is_ok());
            assert!(std::thread::spawn(|| 7)
                .join()
                .is_ok_and(|seven| seven == 7));
            [
                (
                    "start",
                    is_denied(std::process::Command::new("/bin/true").spawn()),
                ),
                ("connect", is_denied(TcpStream::connect(address))),
                ("unix", is_denied(UnixStream::pair())),
                ("remove", is_denied(std::fs::remove_file("/tmp/dsec-none"))),
                ("make", is_denied(std::fs::File::create("/tmp/dsec-none"))),
                ("kill", is_denied(dsec_sys::process::kill(1, 0))),
                ("unshare", is_denied(dsec_sys::namespaces::unshare(0))),
                ("mounts", {
                    let own = std::fs::File::open("/proc/self/ns/mnt").unwrap();
                    let mounts = libc::CLONE_NEWNS as u64;
                    is_denied(dsec_sys::namespaces::enter(own.as_fd(), mounts))
                }),
                ("limits", is_denied(set_limit(libc::RLIMIT_CORE, 0, 0))),
            ]
        });
        for (what, denied) in denied {
            assert!(denied, "{what}");
        }
    }
}
