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

/// Removes `path` and all that is in it, if that is at most `most` entries; else it stays, with those taken out of it. Gives
/// whether nothing is left.
pub fn remove_small(path: &Path, most: u64) -> io::Result<bool> {
    remove(path, &mut Budget(most))
}

/// Removes `path` and all that is in it. Never follows a link, never leaves the tree, and needs neither stack nor descriptors in
/// proportion to its depth: a directory that lies too deep is first moved up to the top. Success if there is nothing.
pub fn remove_tree(path: &Path) -> io::Result<()> {
    remove(path, &mut Budget(u64::MAX)).map(drop)
}

/// Entries that may still be looked at.
struct Budget(u64);

impl Budget {
    fn is_spent(&mut self) -> bool {
        self.0 = self.0.saturating_sub(1);
        self.0 == 0
    }
}

fn remove(path: &Path, budget: &mut Budget) -> io::Result<bool> {
    let name = c_path(path)?;
    let top = match open_directory(None, &name) {
        Ok(top) => top,
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(true),
        Err(error) => return Err(error),
    };
    let mut moved = 0;
    // Each pass empties the top down to what it moved there, and what is moved there is shallower than before.
    loop {
        let before = moved;
        if !empty(&top, &top, 0, &mut moved, budget)? {
            return Ok(false);
        }
        if moved == before {
            break;
        }
    }
    paths::remove_at(None, &name, true)?;
    Ok(true)
}

fn open_directory(at: Option<BorrowedFd>, name: &CStr) -> io::Result<OwnedFd> {
    paths::open_at(at, name, libc::O_RDONLY | libc::O_DIRECTORY, 0)
}

fn empty(
    directory: &OwnedFd,
    top: &OwnedFd,
    depth: usize,
    moved: &mut u64,
    budget: &mut Budget,
) -> io::Result<bool> {
    for name in names(directory)? {
        if budget.is_spent() {
            return Ok(false);
        }
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
        let below = open_directory(Some(directory.as_fd()), &name)?;
        if !empty(&below, top, depth + 1, moved, budget)? {
            return Ok(false);
        }
        paths::remove_at(Some(directory.as_fd()), &name, true)?;
    }
    Ok(true)
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
    fn a_large_tree_stays_when_only_a_small_one_may_go() {
        let (small, large) = (scratch("small"), scratch("large"));
        for (top, count) in [(&small, 3), (&large, 30)] {
            std::fs::create_dir(top.join("d")).unwrap();
            (0..count).for_each(|n| std::fs::write(top.join(format!("d/{n}")), "x").unwrap());
        }

        assert!(remove_small(&small, 10).unwrap());
        assert!(!remove_small(&large, 10).unwrap());
        assert!(remove_small(Path::new("/nonexistent-dsec/x"), 10).unwrap());

        assert!(!small.exists());
        assert!(std::fs::read_dir(large.join("d")).unwrap().count() >= 20);
        remove_tree(&large).unwrap();
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
