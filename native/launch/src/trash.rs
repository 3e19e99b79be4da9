//! Trees of ended sandboxes that are too large to be removed while somebody waits. They are renamed into one directory beside
//! their former places, and removed from there by a worker that gives way to all others; a later daemon goes on with it.

use std::io;
use std::path::{Path, PathBuf};

use crate::error::{Doing, Error, Result};
use crate::system::System;

/// No sandbox has a name with a dot in front.
const TRASH: &str = ".trash";
/// A sandbox in which little was written is gone sooner than it would be renamed.
const SMALL_ENTRIES: u64 = 64;
/// Names tried for a tree of which one of the same name has not been removed yet.
const NAMES_MAX: u32 = 1000;

/// The trash of the directory that holds sandboxes' directories.
pub fn trash_in(sandboxes: &Path) -> PathBuf {
    sandboxes.join(TRASH)
}

/// `directory` is out of the way afterwards. Gives the trash if something of it lies there now.
pub fn put_away(system: &dyn System, directory: &Path) -> Result<Option<PathBuf>> {
    let small = system
        .remove_small(directory, SMALL_ENTRIES)
        .doing_to("remove", directory)?;
    if small {
        return Ok(None);
    }
    let (Some(above), Some(name)) = (directory.parent(), directory.file_name()) else {
        return Err(Error::Invalid(format!(
            "{directory:?} is not a sandbox's own"
        )));
    };
    let trash = trash_in(above);
    match system.make_dir(&trash, 0o700) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        other => other.doing_to("make", &trash)?,
    }
    let mut number = 0;
    loop {
        let target = trash.join(format!("{}.{number}", name.to_string_lossy()));
        match system.rename(directory, &target) {
            Ok(()) => return Ok(Some(trash)),
            Err(error)
                if number < NAMES_MAX
                    && matches!(error.raw_os_error(), Some(libc::ENOTEMPTY | libc::EEXIST)) =>
            {
                number += 1;
            }
            other => other.doing_to("rename", directory)?,
        }
    }
}

/// Removes all that lies there, also what comes meanwhile. One that resists does not keep the others.
pub fn empty(system: &dyn System, trash: &Path) -> Result<()> {
    let mut resisting = Vec::new();
    loop {
        let trees = system
            .directories_in(trash)
            .doing_to("list", trash)?
            .into_iter()
            .filter(|tree| !resisting.contains(tree))
            .collect::<Vec<_>>();
        if trees.is_empty() {
            return match resisting.first() {
                None => Ok(()),
                Some(tree) => {
                    Err(io::Error::other("something in it resists")).doing_to("remove", tree)
                }
            };
        }
        for tree in trees {
            if system.remove_tree(&tree).is_err() {
                resisting.push(tree);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::system::Kernel;

    fn sandboxes(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("dsec-trash-{}-{name}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        path
    }

    fn fill(directory: &Path, count: usize) {
        std::fs::create_dir_all(directory.join("upper")).unwrap();
        (0..count).for_each(|n| std::fs::write(directory.join(format!("upper/{n}")), "x").unwrap());
    }

    #[test]
    fn a_small_tree_is_removed_at_once_and_a_large_one_is_put_away() {
        let (system, above) = (Kernel::on_host(), sandboxes("both"));
        fill(&above.join("small"), 5);
        fill(&above.join("large"), 500);

        assert_eq!(put_away(&system, &above.join("small")).unwrap(), None);
        let trash = put_away(&system, &above.join("large")).unwrap();

        assert_eq!(trash, Some(trash_in(&above)));
        assert!(!above.join("small").exists() && !above.join("large").exists());
        empty(&system, &trash_in(&above)).unwrap();
        assert_eq!(std::fs::read_dir(trash_in(&above)).unwrap().count(), 0);
        std::fs::remove_dir_all(&above).unwrap();
    }

    #[test]
    fn one_of_the_same_name_is_no_hindrance() {
        let (system, above) = (Kernel::on_host(), sandboxes("same"));
        for _ in 0..3 {
            fill(&above.join("large"), 500);
            put_away(&system, &above.join("large")).unwrap();
        }

        assert_eq!(std::fs::read_dir(trash_in(&above)).unwrap().count(), 3);
        std::fs::remove_dir_all(&above).unwrap();
    }

    #[test]
    fn no_trash_is_nothing_to_do() {
        let system = Kernel::on_host();

        empty(&system, Path::new("/nonexistent-dsec/.trash")).unwrap();
    }
}
