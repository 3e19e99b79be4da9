//! Step `view`: the kernel's files that tell of the whole machine are covered by such as tell of the sandbox's share.
//!
//! Copies of the mounts are taken while the launch still sees the host's tree; they are attached by the new process, on its
//! own proc and sysfs, and hold, as masks do, against whoever lacks CAP_SYS_ADMIN over the sandbox's user namespace.

use std::borrow::Cow;
use std::ffi::CStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use dsec_sys::mounts::attr;

use crate::error::{Doing, Result};
use crate::system::{c_path, System};
use crate::view::Source;

/// A copy of a mount, and the path that it is to cover.
pub struct Cover {
    pub mount: OwnedFd,
    pub target: Cow<'static, CStr>,
}

pub fn collect(system: &dyn System, sources: &[Source]) -> Result<Vec<Cover>> {
    let flags = attr::READ_ONLY | attr::NO_SUID | attr::NO_DEVICES | attr::NO_EXEC;
    sources
        .iter()
        .map(|source| {
            let path = c_path(&source.path).doing_to("name", &source.path)?;
            let mount = system
                .clone_mount(&path)
                .doing_to("copy the mount of", &source.path)?;
            system
                .set_attributes(mount.as_fd(), flags)
                .doing_to("make read-only", &source.path)?;
            Ok(Cover {
                mount,
                target: source.target.clone(),
            })
        })
        .collect()
}

/// Not every kernel has every file.
pub fn attach(system: &dyn System, covers: &[Cover], tree: BorrowedFd) -> Result<()> {
    for cover in covers {
        let shown = cover.target.to_string_lossy();
        let target = match system.resolve(tree, &cover.target) {
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => continue,
            other => other.doing("find", &shown)?,
        };
        system
            .attach(cover.mount.as_fd(), target.as_fd())
            .doing("cover", &shown)?;
    }
    Ok(())
}

/// The same for a sandbox that runs, whose mount namespace this process has entered and whose root is `root`: what covered the
/// files is taken away. In between, for some microseconds, the kernel's own are in sight.
pub fn replace(system: &dyn System, covers: &[Cover], root: &OwnedFd) -> Result<()> {
    system
        .change_directory(root.as_fd())
        .doing("enter", "the sandbox's root")?;
    for cover in covers {
        let shown = cover.target.to_string_lossy();
        match system.detach_at(Path::new(shown.trim_start_matches('/'))) {
            // Nothing covers it, or there is no such file.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOENT)) => {}
            other => other.doing("uncover", &shown)?,
        }
        attach(system, std::slice::from_ref(cover), root.as_fd())?;
    }
    Ok(())
}
