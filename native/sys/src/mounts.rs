//! The mount API of file descriptors: contexts, detached mounts, attributes, and the few old calls that have no twin there.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Attributes of one mount, as of mount_setattr(2).
pub mod attr {
    pub const READ_ONLY: u64 = 0x1;
    pub const NO_SUID: u64 = 0x2;
    pub const NO_DEVICES: u64 = 0x4;
    pub const NO_EXEC: u64 = 0x8;
    pub const ID_MAPPED: u64 = 0x0010_0000;
}

/// Where the changes of one mount go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Propagation {
    Private,
    /// Mounts made in the original appear here, never the other way.
    Slave,
}

const OPEN_TREE_CLONE: libc::c_uint = 1;
const OPEN_TREE_CLOEXEC: libc::c_uint = libc::O_CLOEXEC as libc::c_uint;
const FSOPEN_CLOEXEC: libc::c_uint = 1;
const FSMOUNT_CLOEXEC: libc::c_uint = 1;
const FSCONFIG_SET_FLAG: libc::c_uint = 0;
const FSCONFIG_SET_STRING: libc::c_uint = 1;
const FSCONFIG_SET_FD: libc::c_uint = 5;
const FSCONFIG_CMD_CREATE: libc::c_uint = 6;
const MOVE_MOUNT_F_EMPTY_PATH: libc::c_uint = 0x4;
const MOVE_MOUNT_T_EMPTY_PATH: libc::c_uint = 0x40;
const NSFS_MAGIC: i64 = 0x6e73_6673;

#[repr(C)]
struct MountAttr {
    set: u64,
    clear: u64,
    propagation: u64,
    user_namespace: u64,
}

fn check(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(result)
}

fn owned(result: libc::c_long) -> io::Result<OwnedFd> {
    let number = check(result)?;
    // SAFETY: the kernel has just returned this descriptor to us, so it is open and nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(number as i32) })
}

/// A copy of the mount at `path` (below `at` when relative), attached nowhere; with `recursive` all that is mounted below it too.
pub fn clone_tree(at: Option<BorrowedFd>, path: &CStr, recursive: bool) -> io::Result<OwnedFd> {
    let mut flags = OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | libc::AT_SYMLINK_NOFOLLOW as libc::c_uint;
    if path.is_empty() {
        flags |= libc::AT_EMPTY_PATH as libc::c_uint;
    }
    if recursive {
        flags |= libc::AT_RECURSIVE as libc::c_uint;
    }
    let at = at.map_or(libc::AT_FDCWD, |fd| fd.as_raw_fd());
    // SAFETY: `path` is a valid C string for the time of the call; the kernel writes nothing to our memory.
    owned(unsafe { libc::syscall(libc::SYS_open_tree, at, path.as_ptr(), flags) })
}

/// Attaches the detached mount `mount` over what `target` refers to.
pub fn attach(mount: BorrowedFd, target: BorrowedFd) -> io::Result<()> {
    let flags = MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH;
    let (from, to) = (mount.as_raw_fd(), target.as_raw_fd());
    // SAFETY: both descriptors are borrowed, hence open; both paths are the static empty string.
    check(unsafe {
        libc::syscall(
            libc::SYS_move_mount,
            from,
            c"".as_ptr(),
            to,
            c"".as_ptr(),
            flags,
        )
    })?;
    Ok(())
}

/// Attaches the detached mount `mount` at `path`.
pub fn attach_at(mount: BorrowedFd, path: &CStr) -> io::Result<()> {
    let flags = MOVE_MOUNT_F_EMPTY_PATH;
    let from = mount.as_raw_fd();
    // SAFETY: the descriptor is borrowed, hence open; `path` is a valid C string for the time of the call.
    check(unsafe {
        libc::syscall(
            libc::SYS_move_mount,
            from,
            c"".as_ptr(),
            libc::AT_FDCWD,
            path.as_ptr(),
            flags,
        )
    })?;
    Ok(())
}

/// Sets and clears attributes of the mount that `mount` is the root of; `users` is the user namespace of an id-mapped one.
pub fn set_attributes(
    mount: BorrowedFd,
    set: u64,
    clear: u64,
    users: Option<BorrowedFd>,
) -> io::Result<()> {
    let user_namespace = users.map_or(0, |fd| fd.as_raw_fd() as u64);
    let attributes = MountAttr {
        set,
        clear,
        propagation: 0,
        user_namespace,
    };
    let (fd, flags) = (mount.as_raw_fd(), libc::AT_EMPTY_PATH);
    // SAFETY: `attributes` lives through the call and the size passed is its own; the kernel only reads it.
    check(unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            fd,
            c"".as_ptr(),
            flags,
            &attributes as *const MountAttr,
            std::mem::size_of::<MountAttr>(),
        )
    })?;
    Ok(())
}

/// A file system that is being configured; `create` turns it into a detached mount.
pub struct Context {
    fd: OwnedFd,
}

impl Context {
    pub fn open(kind: &CStr) -> io::Result<Context> {
        // SAFETY: `kind` is a valid C string for the time of the call.
        let fd = owned(unsafe { libc::syscall(libc::SYS_fsopen, kind.as_ptr(), FSOPEN_CLOEXEC) })?;
        Ok(Context { fd })
    }

    fn configure(
        &self,
        command: libc::c_uint,
        key: Option<&CStr>,
        value: Option<&CStr>,
        aux: i32,
    ) -> io::Result<()> {
        let key = key.map_or(std::ptr::null(), CStr::as_ptr);
        let value = value.map_or(std::ptr::null(), CStr::as_ptr);
        // SAFETY: `key` and `value` are null or valid C strings for the time of the call, as the commands used here want them.
        check(unsafe {
            libc::syscall(
                libc::SYS_fsconfig,
                self.fd.as_raw_fd(),
                command,
                key,
                value,
                aux,
            )
        })?;
        Ok(())
    }

    pub fn flag(&self, key: &CStr) -> io::Result<()> {
        self.configure(FSCONFIG_SET_FLAG, Some(key), None, 0)
    }

    pub fn string(&self, key: &CStr, value: &CStr) -> io::Result<()> {
        self.configure(FSCONFIG_SET_STRING, Some(key), Some(value), 0)
    }

    pub fn descriptor(&self, key: &CStr, value: BorrowedFd) -> io::Result<()> {
        self.configure(FSCONFIG_SET_FD, Some(key), None, value.as_raw_fd())
    }

    /// Makes the superblock and a detached mount of it with these attributes.
    pub fn create(&self, attributes: u64) -> io::Result<OwnedFd> {
        self.configure(FSCONFIG_CMD_CREATE, None, None, 0)?;
        // SAFETY: plain numbers; the kernel returns a new descriptor.
        owned(unsafe {
            libc::syscall(
                libc::SYS_fsmount,
                self.fd.as_raw_fd(),
                FSMOUNT_CLOEXEC,
                attributes,
            )
        })
    }

    /// What the kernel had to say about the last failure, in its own words; empty when it said nothing.
    pub fn message(&self) -> String {
        let mut text = [0_u8; 512];
        // SAFETY: the buffer is ours and its true length is passed.
        let length =
            unsafe { libc::read(self.fd.as_raw_fd(), text.as_mut_ptr().cast(), text.len()) };
        let length = usize::try_from(length).unwrap_or(0);
        String::from_utf8_lossy(&text[..length]).trim().to_string()
    }
}

/// Changes where the mounts at and below `path` propagate to.
pub fn set_propagation(path: &CStr, propagation: Propagation) -> io::Result<()> {
    let kind = match propagation {
        Propagation::Private => libc::MS_PRIVATE,
        Propagation::Slave => libc::MS_SLAVE,
    };
    let none = std::ptr::null();
    // SAFETY: `path` is a valid C string; the other pointers may be null for a change of propagation.
    let result = unsafe {
        libc::mount(
            none,
            path.as_ptr(),
            none,
            kind | libc::MS_REC,
            std::ptr::null(),
        )
    };
    check(result.into())?;
    Ok(())
}

/// Binds `source` over `target`.
pub fn bind(source: &CStr, target: &CStr) -> io::Result<()> {
    // SAFETY: both paths are valid C strings; type and data may be null for a bind.
    let result = unsafe {
        libc::mount(
            source.as_ptr(),
            target.as_ptr(),
            std::ptr::null(),
            libc::MS_BIND,
            std::ptr::null(),
        )
    };
    check(result.into())?;
    Ok(())
}

/// Unmounts what is at `path`, never through a symbolic link; with `detach` even while it is in use.
pub fn unmount(path: &CStr, detach: bool) -> io::Result<()> {
    let flags = libc::UMOUNT_NOFOLLOW | if detach { libc::MNT_DETACH } else { 0 };
    // SAFETY: `path` is a valid C string for the time of the call.
    check(unsafe { libc::umount2(path.as_ptr(), flags) }.into())?;
    Ok(())
}

/// Makes the working directory, which is the root of a mount, the root, and lets go of the old root.
pub fn pivot_here() -> io::Result<()> {
    // SAFETY: both paths are static C strings.
    check(unsafe { libc::syscall(libc::SYS_pivot_root, c".".as_ptr(), c".".as_ptr()) })?;
    // The old root now lies on top of the new one; `.` still names it.
    // SAFETY: a static C string.
    check(unsafe { libc::umount2(c".".as_ptr(), libc::MNT_DETACH) }.into())?;
    std::env::set_current_dir("/")
}

/// Makes the working directory the root of this process. What lies below it in its mount namespace stays there.
pub fn change_root_here() -> io::Result<()> {
    // SAFETY: a static C string.
    check(unsafe { libc::chroot(c".".as_ptr()) }.into())?;
    Ok(())
}

/// True when `fd` is a file of the file system of namespaces, such as a pinned namespace.
pub fn is_namespace(fd: BorrowedFd) -> io::Result<bool> {
    let mut facts = std::mem::MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: the buffer is large enough for what fstatfs writes.
    check(unsafe { libc::fstatfs(fd.as_raw_fd(), facts.as_mut_ptr()) }.into())?;
    // SAFETY: fstatfs succeeded and has filled it.
    let facts = unsafe { facts.assume_init() };
    #[allow(clippy::unnecessary_cast)] // the type of f_type differs between C libraries
    Ok(facts.f_type as i64 == NSFS_MAGIC)
}

/// The id of the mount that `fd` lies on: two equal ids are one mount.
pub fn mount_id(fd: BorrowedFd) -> io::Result<u64> {
    let mut facts = std::mem::MaybeUninit::<libc::statx>::zeroed();
    // SAFETY: the path is static, the buffer is large enough for what statx writes.
    let result = unsafe {
        libc::statx(
            fd.as_fd().as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            libc::STATX_MNT_ID,
            facts.as_mut_ptr(),
        )
    };
    check(result.into())?;
    // SAFETY: zeroed before and filled by the kernel.
    Ok(unsafe { facts.assume_init() }.stx_mnt_id)
}
