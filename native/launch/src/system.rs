//! The system as the steps of a launch see it: one method for each thing they do to it, so that their order, and what they
//! leave behind when one fails, can be tested without being root.

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use dsec_sys::identity::CapabilitySets;
use dsec_sys::namespaces::{self, Clone, Origin, Side};
use dsec_sys::processors::{self, ProcessorSet};
use dsec_sys::seccomp::Instruction;
use dsec_sys::seqpacket::{Interest, Kind};
use dsec_sys::{identity, mounts, passing, paths, score, sealed, seccomp, seqpacket};

use crate::prepare::ORDER_BYTES_MAX;

/// One option of a file system that is being made.
pub enum MountOption<'a> {
    Flag(&'a CStr),
    Text(&'a CStr, String),
    File(&'a CStr, BorrowedFd<'a>),
}

/// How a path is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    Directory,
    Read,
    Write,
    ReadWrite,
    Path,
}

/// What is put into a directory that is being filled.
pub enum Entry<'a> {
    Directory { mode: u32 },
    File { mode: u32, content: &'a [u8] },
    Link { target: &'a CStr },
    Device { mode: u32, major: u32, minor: u32 },
}

pub trait System {
    fn make_dir(&self, path: &Path, mode: u32) -> io::Result<()>;
    fn remove_dir(&self, path: &Path) -> io::Result<()>;
    fn remove_file(&self, path: &Path) -> io::Result<()>;
    /// Removes a directory with all that is in it, which may be hostile.
    fn remove_tree(&self, path: &Path) -> io::Result<()>;
    /// Removes it if it holds no more than `most` entries. Gives whether it is gone.
    fn remove_small(&self, path: &Path, most: u64) -> io::Result<bool>;
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// The directories in a directory; none when it is not there.
    fn directories_in(&self, path: &Path) -> io::Result<Vec<PathBuf>>;
    fn write_file(&self, path: &Path, content: &[u8]) -> io::Result<()>;
    /// Puts `content` in place of what a regular file holds; the descriptor may be of the path alone.
    fn replace_content(&self, file: BorrowedFd, content: &[u8]) -> io::Result<()>;
    /// Gives `path` below `at` (`at` itself, if it is empty) to the user and group `id`.
    fn change_owner(&self, at: BorrowedFd, path: &CStr, id: u32) -> io::Result<()>;
    fn open(&self, path: &Path, access: Access) -> io::Result<OwnedFd>;
    fn open_directory_at(&self, at: BorrowedFd, name: &CStr) -> io::Result<OwnedFd>;
    /// Opens a namespace file, which is a link that must be followed.
    fn open_namespace(&self, path: &Path) -> io::Result<OwnedFd>;
    fn is_directory(&self, file: BorrowedFd) -> io::Result<bool>;
    fn is_directory_at(&self, path: &Path) -> io::Result<bool>;
    fn inode(&self, file: BorrowedFd) -> io::Result<u64>;
    fn listen(&self, path: &Path) -> io::Result<OwnedFd>;
    fn sealed_file(&self, content: &[u8]) -> io::Result<OwnedFd>;
    fn pipe(&self) -> io::Result<(OwnedFd, OwnedFd)>;
    /// Two ends that keep message borders, by which files can be passed.
    fn pair(&self) -> io::Result<(OwnedFd, OwnedFd)>;
    /// Sends one message, and copies of `files` with it.
    fn pass(&self, to: BorrowedFd, message: &[u8], files: &[BorrowedFd]) -> io::Result<()>;
    /// Waits for one message, which is empty when the other end has gone.
    fn take(&self, from: BorrowedFd) -> io::Result<(Vec<u8>, Vec<OwnedFd>)>;
    fn write(&self, file: BorrowedFd, bytes: &[u8]) -> io::Result<()>;
    fn read(&self, file: BorrowedFd, bytes: &mut [u8]) -> io::Result<usize>;
    fn read_file(&self, path: &Path) -> io::Result<Vec<u8>>;
    fn put(&self, at: BorrowedFd, name: &CStr, entry: Entry) -> io::Result<()>;
    fn resolve(&self, root: BorrowedFd, path: &CStr) -> io::Result<OwnedFd>;

    fn make_mount(
        &self,
        kind: &CStr,
        options: &[MountOption],
        attributes: u64,
    ) -> io::Result<OwnedFd>;
    fn clone_mount(&self, path: &CStr) -> io::Result<OwnedFd>;
    fn clone_mount_at(&self, at: BorrowedFd) -> io::Result<OwnedFd>;
    fn clone_tree(&self, path: &CStr) -> io::Result<OwnedFd>;
    fn set_attributes(&self, mount: BorrowedFd, set: u64) -> io::Result<()>;
    fn map_ids(&self, mount: BorrowedFd, users: BorrowedFd) -> io::Result<()>;
    fn attach(&self, mount: BorrowedFd, target: BorrowedFd) -> io::Result<()>;
    fn attach_at(&self, mount: BorrowedFd, path: &CStr) -> io::Result<()>;
    fn detach_at(&self, path: &Path) -> io::Result<()>;
    /// Makes the working directory the root.
    fn change_root(&self) -> io::Result<()>;
    /// A proc of the pid namespace that `process` is in.
    fn make_proc(&self, process: BorrowedFd, attributes: u64) -> io::Result<OwnedFd>;
    fn change_directory(&self, directory: BorrowedFd) -> io::Result<()>;
    fn bind(&self, source: &CStr, target: &CStr) -> io::Result<()>;

    fn enter_mounts(&self, namespace: BorrowedFd) -> io::Result<()>;
    /// Into the uts namespace that `of` is, or that the process `of` is in.
    fn enter_names(&self, of: BorrowedFd) -> io::Result<()>;
    /// Into a namespace of this kind (NEW_…).
    fn enter(&self, namespace: BorrowedFd, kind: u64) -> io::Result<()>;
    fn unshare(&self, namespaces: u64) -> io::Result<()>;
    /// A new process that begins in `origin`, with a cgroup namespace of that place. `meanwhile` is done here, while it comes
    /// to be, and it has nothing of that.
    fn clone(&self, origin: &Origin, how: &Clone, meanwhile: &mut dyn FnMut()) -> io::Result<Side>;
    /// Our own process and that one, which both go on, run on different processors from now on. Where that cannot be, they
    /// take turns.
    fn part_from(&self, process: i32, all: &ProcessorSet);
    fn run_on(&self, processors: &ProcessorSet);
    fn kill(&self, process: BorrowedFd) -> io::Result<()>;
    /// Waits until a pipe has something to say, or a process has ended; an error when it does not in time.
    fn wait_readable(&self, file: BorrowedFd, timeout: Duration) -> io::Result<()>;
    /// Waits, however long, until one of two has something to say or has gone: true when the first has.
    fn wait_either(&self, first: BorrowedFd, second: BorrowedFd) -> io::Result<bool>;

    /// Waits until a file of the kernel says that it has changed since it was read, or the time is over.
    fn wait_changed(&self, file: BorrowedFd, timeout: Duration) -> io::Result<()>;

    /// Acts as `id` on files and as owner of namespaces from now on, with all capabilities.
    fn act_as(&self, id: u32) -> io::Result<()>;
    /// Becomes user and group `id` wholly; capabilities that are kept are still permitted then.
    fn become_user(&self, id: u32, keep_capabilities: bool) -> io::Result<()>;
    fn bound_capabilities(&self, keep: u64) -> io::Result<()>;
    fn set_capabilities(&self, sets: CapabilitySets) -> io::Result<()>;
    fn raise_ambient(&self, capabilities: u64) -> io::Result<()>;
    fn load_filter(&self, filter: &[Instruction]) -> io::Result<()>;
    fn set_limit(&self, resource: u32, soft: u64, hard: u64) -> io::Result<()>;
    /// The file of our own score for memory in the proc of the working directory, open for writing, which goes on meaning us as
    /// another program.
    fn own_score(&self) -> io::Result<OwnedFd>;
    fn set_hostname(&self, name: &str) -> io::Result<()>;
    fn loopback_up(&self) -> io::Result<()>;
    /// A session, signals and a file mask as a new program expects them.
    fn start_afresh(&self) -> io::Result<()>;
    fn arrange(
        &self,
        descriptors: &[Option<BorrowedFd>],
        keep: &[BorrowedFd],
    ) -> io::Result<Vec<OwnedFd>>;
    fn run(&self, program: BorrowedFd, arguments: &[&CStr]) -> io::Error;
}

/// The kernel itself. Paths below `/proc` mean the same wherever this process is.
pub struct Kernel {
    last_capability: u32,
    /// A proc of our own that is attached nowhere: the bare namespace has none.
    proc: Option<OwnedFd>,
}

impl Kernel {
    pub fn new(last_capability: u32) -> io::Result<Kernel> {
        let flags = mounts::attr::NO_SUID | mounts::attr::NO_DEVICES | mounts::attr::NO_EXEC;
        let proc = mounts::Context::open(c"proc")?.create(flags)?;
        Ok(Kernel {
            last_capability,
            proc: Some(proc),
        })
    }

    /// For whoever stays where `/proc` is.
    pub fn on_host() -> Kernel {
        Kernel {
            last_capability: 0,
            proc: None,
        }
    }

    /// What a process must not close that goes on with this.
    pub fn descriptor(&self) -> Option<RawFd> {
        self.proc.as_ref().map(AsRawFd::as_raw_fd)
    }

    /// Where a path begins, and its rest from there.
    fn place<'a>(&'a self, path: &'a Path) -> io::Result<(Option<BorrowedFd<'a>>, CString)> {
        match (&self.proc, path.strip_prefix("/proc")) {
            (Some(proc), Ok(below)) => Ok((Some(proc.as_fd()), c_path(below)?)),
            _ => Ok((None, c_path(path)?)),
        }
    }
}

pub fn c_path(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes())
        .map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
}

pub fn c_text(text: &str) -> io::Result<CString> {
    CString::new(text).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
}

impl System for Kernel {
    fn make_dir(&self, path: &Path, mode: u32) -> io::Result<()> {
        paths::make_dir_at(None, &c_path(path)?, mode)
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        paths::remove_at(None, &c_path(path)?, true)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        paths::remove_at(None, &c_path(path)?, false)
    }

    fn remove_tree(&self, path: &Path) -> io::Result<()> {
        crate::remove::remove_tree(path)
    }

    fn remove_small(&self, path: &Path, most: u64) -> io::Result<bool> {
        crate::remove::remove_small(path, most)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        std::fs::rename(from, to)
    }

    fn directories_in(&self, path: &Path) -> io::Result<Vec<PathBuf>> {
        let entries = match std::fs::read_dir(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut found = Vec::new();
        for entry in entries {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                found.push(entry.path());
            }
        }
        Ok(found)
    }

    fn write_file(&self, path: &Path, content: &[u8]) -> io::Result<()> {
        let (at, path) = self.place(path)?;
        let file = paths::open_at(at, &path, libc::O_WRONLY, 0)?;
        paths::write_once(file.as_fd(), content)
    }

    fn replace_content(&self, file: BorrowedFd, content: &[u8]) -> io::Result<()> {
        use std::io::Write;
        use std::os::fd::AsRawFd;
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let mut file = std::fs::OpenOptions::new()
            .write(true)
            .truncate(true)
            .open(path)?;
        file.write_all(content)
    }

    fn change_owner(&self, at: BorrowedFd, path: &CStr, id: u32) -> io::Result<()> {
        paths::change_owner_at(Some(at), path, id, id)
    }

    fn open(&self, path: &Path, access: Access) -> io::Result<OwnedFd> {
        let flags = match access {
            Access::Directory => libc::O_RDONLY | libc::O_DIRECTORY,
            Access::Read => libc::O_RDONLY,
            Access::Write => libc::O_WRONLY,
            Access::ReadWrite => libc::O_RDWR,
            Access::Path => libc::O_PATH,
        };
        let (at, path) = self.place(path)?;
        paths::open_at(at, &path, flags, 0)
    }

    fn open_directory_at(&self, at: BorrowedFd, name: &CStr) -> io::Result<OwnedFd> {
        paths::open_at(Some(at), name, libc::O_PATH | libc::O_DIRECTORY, 0)
    }

    fn open_namespace(&self, path: &Path) -> io::Result<OwnedFd> {
        let (at, path) = self.place(path)?;
        paths::open_linked_at(at, &path)
    }

    fn is_directory(&self, file: BorrowedFd) -> io::Result<bool> {
        Ok(File::from(file.try_clone_to_owned()?).metadata()?.is_dir())
    }

    fn is_directory_at(&self, path: &Path) -> io::Result<bool> {
        Ok(std::fs::metadata(path)?.is_dir())
    }

    fn inode(&self, file: BorrowedFd) -> io::Result<u64> {
        use std::os::unix::fs::MetadataExt;
        Ok(File::from(file.try_clone_to_owned()?).metadata()?.ino())
    }

    fn listen(&self, path: &Path) -> io::Result<OwnedFd> {
        // By way of the directory, since a socket's address has at most 107 bytes.
        let (directory, name) = path
            .parent()
            .zip(path.file_name())
            .ok_or(io::ErrorKind::InvalidInput)?;
        let directory = self.open(directory, Access::Path)?;
        paths::change_directory(directory.as_fd())?;
        let name = CString::new(name.as_bytes())
            .map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
        seqpacket::listen(Kind::Stream, &name, 16)
    }

    fn sealed_file(&self, content: &[u8]) -> io::Result<OwnedFd> {
        sealed::sealed_file(c"dsec-agent-config", content, 0o400)
    }

    fn pipe(&self) -> io::Result<(OwnedFd, OwnedFd)> {
        seqpacket::pipe()
    }

    fn pair(&self) -> io::Result<(OwnedFd, OwnedFd)> {
        passing::message_pair()
    }

    fn pass(&self, to: BorrowedFd, message: &[u8], files: &[BorrowedFd]) -> io::Result<()> {
        match passing::send_with(&to, message, files)? == message.len() {
            true => Ok(()),
            false => Err(io::ErrorKind::WriteZero.into()),
        }
    }

    fn take(&self, from: BorrowedFd) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
        let mut message = vec![0; ORDER_BYTES_MAX];
        let (length, files) = passing::receive_all(&from, &mut message)?;
        message.truncate(length);
        Ok((message, files))
    }

    fn write(&self, file: BorrowedFd, bytes: &[u8]) -> io::Result<()> {
        paths::write_once(file, bytes)
    }

    fn read(&self, file: BorrowedFd, bytes: &mut [u8]) -> io::Result<usize> {
        paths::read_once(file, bytes)
    }

    fn read_file(&self, path: &Path) -> io::Result<Vec<u8>> {
        let (at, path) = self.place(path)?;
        let mut content = Vec::with_capacity(1024); // a launch reads what is short
        let file = File::from(paths::open_linked_at(at, &path)?);
        file.take(u64::MAX).read_to_end(&mut content)?; // its size, which the kernel's files do not tell, is not asked for
        Ok(content)
    }

    fn put(&self, at: BorrowedFd, name: &CStr, entry: Entry) -> io::Result<()> {
        match entry {
            Entry::Directory { mode } => paths::make_dir_at(Some(at), name, mode),
            Entry::File { mode, content } => {
                let file = paths::open_at(
                    Some(at),
                    name,
                    libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL,
                    mode,
                )?;
                if content.is_empty() {
                    return Ok(());
                }
                paths::write_once(file.as_fd(), content)
            }
            Entry::Link { target } => paths::link_at(target, at, name),
            Entry::Device { mode, major, minor } => {
                paths::make_device_at(at, name, mode, major, minor)
            }
        }
    }

    fn resolve(&self, root: BorrowedFd, path: &CStr) -> io::Result<OwnedFd> {
        paths::resolve_in_root(root, path)
    }

    fn make_mount(
        &self,
        kind: &CStr,
        options: &[MountOption],
        attributes: u64,
    ) -> io::Result<OwnedFd> {
        let context = mounts::Context::open(kind)?;
        let made = configure(&context, options).and_then(|()| context.create(attributes));
        made.map_err(|error| explained(error, &context))
    }

    fn clone_mount(&self, path: &CStr) -> io::Result<OwnedFd> {
        mounts::clone_tree(None, path, false)
    }

    fn clone_mount_at(&self, at: BorrowedFd) -> io::Result<OwnedFd> {
        mounts::clone_tree(Some(at), c"", false)
    }

    fn clone_tree(&self, path: &CStr) -> io::Result<OwnedFd> {
        mounts::clone_tree(None, path, true)
    }

    fn set_attributes(&self, mount: BorrowedFd, set: u64) -> io::Result<()> {
        mounts::set_attributes(mount, set, 0, None)
    }

    fn map_ids(&self, mount: BorrowedFd, users: BorrowedFd) -> io::Result<()> {
        mounts::set_attributes(mount, mounts::attr::ID_MAPPED, 0, Some(users))
    }

    fn attach(&self, mount: BorrowedFd, target: BorrowedFd) -> io::Result<()> {
        mounts::attach(mount, target)
    }

    fn attach_at(&self, mount: BorrowedFd, path: &CStr) -> io::Result<()> {
        mounts::attach_at(mount, path)
    }

    fn detach_at(&self, path: &Path) -> io::Result<()> {
        mounts::unmount(&c_path(path)?, true)
    }

    fn change_root(&self) -> io::Result<()> {
        mounts::change_root_here()
    }

    fn make_proc(&self, process: BorrowedFd, attributes: u64) -> io::Result<OwnedFd> {
        namespaces::done_in_pids_of(process, || self.make_mount(c"proc", &[], attributes))
    }

    fn change_directory(&self, directory: BorrowedFd) -> io::Result<()> {
        paths::change_directory(directory)
    }

    fn bind(&self, source: &CStr, target: &CStr) -> io::Result<()> {
        mounts::bind(source, target)
    }

    fn enter_mounts(&self, namespace: BorrowedFd) -> io::Result<()> {
        namespaces::enter(namespace, namespaces::NEW_MOUNT)
    }

    fn enter_names(&self, of: BorrowedFd) -> io::Result<()> {
        namespaces::enter(of, namespaces::NEW_UTS)
    }

    fn enter(&self, namespace: BorrowedFd, kind: u64) -> io::Result<()> {
        namespaces::enter(namespace, kind)
    }

    fn unshare(&self, namespaces: u64) -> io::Result<()> {
        namespaces::unshare(namespaces)
    }

    fn clone(&self, origin: &Origin, how: &Clone, meanwhile: &mut dyn FnMut()) -> io::Result<Side> {
        namespaces::clone_from(origin, how, meanwhile)
    }

    fn part_from(&self, process: i32, all: &ProcessorSet) {
        let _ = processors::part_from(process, all);
    }

    fn run_on(&self, set: &ProcessorSet) {
        // Who was kept apart can be let go again; for others nothing changes.
        let _ = processors::restrict(set);
    }

    fn kill(&self, process: BorrowedFd) -> io::Result<()> {
        namespaces::signal_process(process, libc::SIGKILL)
    }

    fn wait_readable(&self, file: BorrowedFd, timeout: Duration) -> io::Result<()> {
        match seqpacket::wait_ready(&[(file, Interest::Readable)], Some(timeout))?[0] {
            true => Ok(()),
            false => Err(io::Error::from_raw_os_error(libc::ETIMEDOUT)),
        }
    }

    fn wait_either(&self, first: BorrowedFd, second: BorrowedFd) -> io::Result<bool> {
        let both = [(first, Interest::Readable), (second, Interest::Readable)];
        loop {
            match seqpacket::wait_ready(&both, None) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => return other.map(|ready| ready[0]),
            }
        }
    }

    fn wait_changed(&self, file: BorrowedFd, timeout: Duration) -> io::Result<()> {
        seqpacket::wait_ready(&[(file, Interest::Priority)], Some(timeout)).map(drop)
    }

    fn act_as(&self, id: u32) -> io::Result<()> {
        identity::set_group_ids(None, Some(id), None)?;
        identity::set_user_ids(None, Some(id), None)?;
        // File system ids follow the effective ones. With them went the effective capabilities.
        identity::raise_capabilities()
    }

    fn become_user(&self, id: u32, keep_capabilities: bool) -> io::Result<()> {
        if keep_capabilities {
            identity::keep_capabilities()?;
        }
        identity::clear_groups()?;
        identity::set_group_ids(Some(id), Some(id), Some(id))?;
        identity::set_user_ids(Some(id), Some(id), Some(id))
    }

    fn bound_capabilities(&self, keep: u64) -> io::Result<()> {
        identity::bound_capabilities(keep, self.last_capability)
    }

    fn set_capabilities(&self, sets: CapabilitySets) -> io::Result<()> {
        identity::set_capabilities(sets)
    }

    fn raise_ambient(&self, capabilities: u64) -> io::Result<()> {
        identity::raise_ambient(capabilities)
    }

    fn load_filter(&self, filter: &[Instruction]) -> io::Result<()> {
        seccomp::load_filter(filter)
    }

    fn set_limit(&self, resource: u32, soft: u64, hard: u64) -> io::Result<()> {
        identity::set_limit(resource, soft, hard)
    }

    fn own_score(&self) -> io::Result<OwnedFd> {
        score::open_own_score(c"proc/self/oom_score_adj")
    }

    fn set_hostname(&self, name: &str) -> io::Result<()> {
        identity::set_hostname(name)
    }

    fn loopback_up(&self) -> io::Result<()> {
        seqpacket::loopback_up()
    }

    fn start_afresh(&self) -> io::Result<()> {
        namespaces::new_session()?;
        paths::set_file_mask(0o022);
        seqpacket::reset_signals()
    }

    fn arrange(
        &self,
        descriptors: &[Option<BorrowedFd>],
        keep: &[BorrowedFd],
    ) -> io::Result<Vec<OwnedFd>> {
        sealed::arrange(descriptors, keep)
    }

    fn run(&self, program: BorrowedFd, arguments: &[&CStr]) -> io::Error {
        sealed::run_file(program, arguments, &[])
    }
}

fn configure(context: &mounts::Context, options: &[MountOption]) -> io::Result<()> {
    options.iter().try_for_each(|option| match option {
        MountOption::Flag(key) => context.flag(key),
        MountOption::Text(key, value) => context.string(key, &c_text(value)?),
        MountOption::File(key, file) => context.descriptor(key, *file),
    })
}

/// The error with the kernel's own words, where it left some.
fn explained(error: io::Error, context: &mounts::Context) -> io::Error {
    let message = context.message();
    match error.raw_os_error() {
        Some(number) if !message.is_empty() => io::Error::other(Explained { number, message }),
        _ => error,
    }
}

/// A system error and what the kernel said about it.
#[derive(Debug)]
pub struct Explained {
    pub number: i32,
    pub message: String,
}

impl std::fmt::Display for Explained {
    fn fmt(&self, out: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(
            out,
            "{} ({})",
            io::Error::from_raw_os_error(self.number),
            self.message
        )
    }
}

impl std::error::Error for Explained {}

/// The number of a system error, explained or not.
pub fn errno_of(error: &io::Error) -> Option<i32> {
    let explained = error
        .get_ref()
        .and_then(|inner| inner.downcast_ref::<Explained>());
    error
        .raw_os_error()
        .or(explained.map(|explained| explained.number))
}
