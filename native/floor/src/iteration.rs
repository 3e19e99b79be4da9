//! One create and one destroy.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use dsec_sys::namespaces::{self, Clone, Side};
use dsec_sys::{identity, mounts, paths, sealed, seqpacket};

use crate::place::Place;

const ID_BASE: u32 = 0x7000_0000;
const IDS: u32 = 65_536;
const NAMESPACES: u64 = namespaces::NEW_USER
    | namespaces::NEW_MOUNT
    | namespaces::NEW_PID
    | namespaces::NEW_IPC
    | namespaces::NEW_UTS
    | namespaces::NEW_NET;
const BUSY_MAX: Duration = Duration::from_secs(10);
/// Where the new program finds its socket.
const SOCKET: i32 = 3;

pub struct Spent {
    pub create_us: u128,
    pub destroy_us: u128,
}

pub fn run(place: &Place, number: usize) -> io::Result<Spent> {
    let name = text(&format!("i{number}"))?;
    let began = Instant::now();
    let cgroups = make_cgroups(place, &name)?;
    let tree = make_tree(place)?;
    let (mine, theirs) = UnixStream::pair()?;
    let how = Clone {
        namespaces: NAMESPACES,
        cgroup: cgroups.directory.as_ref().map(|fd| fd.as_fd()),
        ..Clone::default()
    };
    let (pid, process) = match namespaces::clone(&how)? {
        Side::Child => {
            let code = become_program(place, &cgroups, theirs)
                .raw_os_error()
                .unwrap_or(1);
            namespaces::exit_now(code)
        }
        Side::Parent { pid, pidfd } => (pid, pidfd),
    };
    drop(theirs);
    let map = format!("0 {ID_BASE} {IDS}");
    std::fs::write(format!("/proc/{pid}/uid_map"), &map)?;
    std::fs::write(format!("/proc/{pid}/gid_map"), &map)?;
    paths::write_once(mine.as_fd(), b"g")?;
    let answered = paths::read_once(mine.as_fd(), &mut [0])?;
    let created = Instant::now();
    namespaces::signal_process(process.as_fd(), libc::SIGKILL)?;
    let status = namespaces::reap_one(pid)?;
    if answered != 1 {
        return Err(io::Error::other(format!(
            "the new process ended with {status:#x} and no answer"
        )));
    }
    drop((cgroups, tree));
    clean_up(place, &name)?;
    let ended = Instant::now();
    Ok(Spent {
        create_us: (created - began).as_micros(),
        destroy_us: (ended - created).as_micros(),
    })
}

struct Cgroups {
    directory: Option<OwnedFd>,
    tasks: Vec<OwnedFd>,
}

fn make_cgroups(place: &Place, name: &CStr) -> io::Result<Cgroups> {
    let make = |above: &OwnedFd| {
        paths::make_dir_at(Some(above.as_fd()), name, 0o755)?;
        paths::open_at(
            Some(above.as_fd()),
            name,
            libc::O_RDONLY | libc::O_DIRECTORY,
            0,
        )
    };
    let open =
        |at: &OwnedFd, file: &CStr| paths::open_at(Some(at.as_fd()), file, libc::O_WRONLY, 0);
    let directory = place.cgroup2.as_ref().map(make).transpose()?;
    let mut tasks = Vec::new();
    for (index, above) in place.cgroup1.iter().enumerate() {
        let cgroup = make(above)?;
        if let Some((_, [cpus, mems])) =
            place.cpuset.as_ref().filter(|(cpuset, _)| *cpuset == index)
        {
            paths::write_once(open(&cgroup, c"cpuset.cpus")?.as_fd(), cpus)?;
            paths::write_once(open(&cgroup, c"cpuset.mems")?.as_fd(), mems)?;
        }
        tasks.push(open(&cgroup, c"tasks")?);
    }
    Ok(Cgroups { directory, tasks })
}

fn make_tree(place: &Place) -> io::Result<OwnedFd> {
    let state = place.state.as_fd();
    let make = |name: &CStr| {
        paths::make_dir_at(Some(state), name, 0o755)?;
        paths::open_at(Some(state), name, libc::O_PATH | libc::O_DIRECTORY, 0)
    };
    let (upper, work) = (make(c"upper")?, make(c"work")?);
    let overlay = mounts::Context::open(c"overlay")?;
    overlay.descriptor(c"lowerdir+", place.rootfs.as_fd())?;
    overlay.descriptor(c"upperdir", upper.as_fd())?;
    overlay.descriptor(c"workdir", work.as_fd())?;
    overlay.flag(c"volatile")?;
    let tree = overlay.create(mounts::attr::NO_DEVICES)?;
    mounts::attach_at(tree.as_fd(), c"/root")?;
    Ok(tree)
}

/// The new process's side. Returns only the error.
fn become_program(place: &Place, cgroups: &Cgroups, socket: UnixStream) -> io::Error {
    let prepare = || -> io::Result<Vec<OwnedFd>> {
        // A thread that moves itself this way is spared the wait for all processors that moving another by `cgroup.procs` is.
        for tasks in &cgroups.tasks {
            paths::write_once(tasks.as_fd(), b"0")?;
        }
        namespaces::unshare(namespaces::NEW_CGROUP)?;
        paths::read_once(socket.as_fd(), &mut [0])?;
        identity::clear_groups()?;
        identity::set_group_ids(Some(0), Some(0), Some(0))?;
        identity::set_user_ids(Some(0), Some(0), Some(0))?;
        // What comes from another user namespace is locked and cannot become the root; a copy of it can.
        let tree = mounts::clone_tree(None, c"/root", true)?;
        mounts::attach_at(tree.as_fd(), c"/root")?;
        paths::change_directory(tree.as_fd())?;
        mounts::pivot_here()?;
        // As standard descriptors too: a program that finds those closed opens /dev/null, which is not there.
        let socket = Some(socket.as_fd());
        sealed::arrange(&[socket; 4], &[place.program.as_fd()])
    };
    match prepare() {
        Ok(kept) => sealed::run_file(kept[0].as_fd(), &[c"dsec-floor", c"--answer"], &[]),
        Err(error) => error,
    }
}

/// What the new program does: says that it is there, and waits for its end.
pub fn answer() -> io::Result<()> {
    let socket = sealed::inherited(SOCKET)?;
    paths::write_once(socket.as_fd(), b"a")?;
    paths::read_once(socket.as_fd(), &mut [0]).map(drop)
}

fn clean_up(place: &Place, name: &CStr) -> io::Result<()> {
    mounts::unmount(c"/root", false)?;
    for cgroup in place.cgroup1.iter().chain(&place.cgroup2) {
        remove_when_free(Some(cgroup.as_fd()), name)?;
    }
    let state = Some(place.state.as_fd());
    paths::remove_at(state, c"work/work/incompat/volatile/dirty", false)?;
    [
        c"upper",
        c"work/work/incompat/volatile",
        c"work/work/incompat",
        c"work/work",
        c"work",
    ]
    .iter()
    .try_for_each(|directory| paths::remove_at(state, directory, true))
}

/// Removes a cgroup; the kernel may need a moment after its last process has ended.
pub fn remove_when_free(above: Option<BorrowedFd>, name: &CStr) -> io::Result<()> {
    let deadline = Instant::now() + BUSY_MAX;
    loop {
        match paths::remove_at(above, name, true) {
            Err(error)
                if error.raw_os_error() == Some(libc::EBUSY) && Instant::now() < deadline =>
            {
                seqpacket::wait_ready(&[], Some(Duration::from_micros(100)))?;
            }
            other => return other,
        }
    }
}

fn text(text: &str) -> io::Result<CString> {
    CString::new(text).map_err(|_| io::ErrorKind::InvalidInput.into())
}
