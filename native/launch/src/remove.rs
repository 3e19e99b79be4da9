//! Removing a directory whose content is hostile.

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use dsec_sys::paths;

use crate::system::c_path;

/// Directories open at a time, one for each level.
const DEPTH_MAX: usize = 64;

/// Removes `path` and all that is in it. Never follows a link, never leaves the tree, and needs neither stack nor descriptors in
/// proportion to its depth: a directory that lies too deep is first moved up to the top. Success if there is nothing.
pub fn remove_tree(path: &Path) -> io::Result<()> {
    let name = c_path(path)?;
    let top = match open_directory(None, &name) {
        Ok(top) => top,
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(()),
        Err(error) => return Err(error),
    };
    let mut moved = 0;
    // Each pass empties the top down to what it moved there, and what is moved there is shallower than before.
    loop {
        let before = moved;
        empty(&top, &top, 0, &mut moved)?;
        if moved == before {
            break;
        }
    }
    paths::remove_at(None, &name, true)
}

fn open_directory(at: Option<BorrowedFd>, name: &CStr) -> io::Result<OwnedFd> {
    paths::open_at(at, name, libc::O_RDONLY | libc::O_DIRECTORY, 0)
}

fn empty(directory: &OwnedFd, top: &OwnedFd, depth: usize, moved: &mut u64) -> io::Result<()> {
    for name in names(directory)? {
        match paths::remove_at(Some(directory.as_fd()), &name, false) {
            Ok(()) => continue,
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => continue,
            Err(error) if error.raw_os_error() == Some(libc::EISDIR) => {}
            Err(error) => return Err(error),
        }
        if depth >= DEPTH_MAX {
            move_up(directory, &name, top, moved)?;
            continue;
        }
        empty(
            &open_directory(Some(directory.as_fd()), &name)?,
            top,
            depth + 1,
            moved,
        )?;
        paths::remove_at(Some(directory.as_fd()), &name, true)?;
    }
    Ok(())
}

fn move_up(directory: &OwnedFd, name: &CStr, top: &OwnedFd, moved: &mut u64) -> io::Result<()> {
    loop {
        *moved += 1;
        let higher = CString::new(format!(".dsec-remove-{moved}"))
            .map_err(|_| io::ErrorKind::InvalidInput)?;
        match paths::rename_at(directory.as_fd(), name, top.as_fd(), &higher) {
            // The name is taken by what somebody put there on purpose.
            Err(error)
                if matches!(
                    error.raw_os_error(),
                    Some(libc::ENOTEMPTY | libc::EEXIST | libc::ENOTDIR)
                ) => {}
            other => return other,
        }
    }
}

fn names(directory: &OwnedFd) -> io::Result<Vec<CString>> {
    // By number, so that the listing is of this very directory, whatever its path means by now.
    let listing = File::from(directory.try_clone()?);
    let path = format!("/proc/self/fd/{}", listing.as_raw_fd());
    std::fs::read_dir(path)?
        .map(|entry| {
            CString::new(entry?.file_name().as_bytes())
                .map_err(|_| io::ErrorKind::InvalidInput.into())
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(name: &str) -> std::path::PathBuf {
        let path = std::env::temp_dir().join(format!("dsec-remove-{}-{name}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        path
    }

    #[test]
    fn nothing_there_is_success() {
        remove_tree(Path::new("/nonexistent-dsec/x")).unwrap();
    }

    #[test]
    fn links_are_removed_and_never_followed() {
        let (outside, inside) = (scratch("outside"), scratch("inside"));
        std::fs::write(outside.join("kept"), "x").unwrap();
        std::os::unix::fs::symlink(&outside, inside.join("link")).unwrap();

        remove_tree(&inside).unwrap();

        assert!(!inside.exists());
        assert!(outside.join("kept").exists());
        remove_tree(&outside).unwrap();
    }

    #[test]
    fn a_very_deep_tree_goes() {
        let top = scratch("deep");
        let mut at = open_directory(None, &c_path(&top).unwrap()).unwrap();
        for _ in 0..5000 {
            paths::make_dir_at(Some(at.as_fd()), c"d", 0o700).unwrap();
            at = open_directory(Some(at.as_fd()), c"d").unwrap();
        }

        remove_tree(&top).unwrap();

        assert!(!top.exists());
    }
}
