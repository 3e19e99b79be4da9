//! Ending a sandbox and removing what it has on the host, from a record alone.

use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::error::{Doing, Error, Result};
use crate::process;
use crate::steps::check::{check_beside, check_name, check_path};
use crate::steps::state::DISK;
use crate::system::{Access, System};
use crate::trash::put_away;
use crate::undo::remove_cgroup;
use crate::wire::{DestroyArgs, LaunchFailure};

/// How long the kernel may take to end everything. Freeing much memory takes a while.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long to believe that nothing changes.
const CHANGE_INTERVAL: Duration = Duration::from_millis(50);

/// Kills everything of the sandbox, waits for it, removes cgroups, socket, tmpfs and, if asked, the directory. What is not
/// there is no error; the first thing that fails ends it, and it can be asked again. Gives the trash if the directory lies there
/// now, which is to be emptied.
pub fn destroy(
    system: &dyn System,
    args: &DestroyArgs,
) -> std::result::Result<Option<PathBuf>, LaunchFailure> {
    check(args).map_err(|error| error.into_failure("check"))?;
    kill(system, args).map_err(|error| error.into_failure("kill"))?;
    remove_cgroups(system, args).map_err(|error| error.into_failure("cgroups"))?;
    remove_files(system, args).map_err(|error| error.into_failure("directories"))
}

fn check(args: &DestroyArgs) -> Result<()> {
    check_name(&args.sandbox)?;
    let paths = args
        .directory
        .iter()
        .chain(&args.socket)
        .chain(&args.cgroup2)
        .chain(args.cgroup1.values())
        .chain(args.cgroup1_to.values());
    check_beside(&args.cgroup1, &args.cgroup1_to)?;
    paths.into_iter().try_for_each(|path| {
        check_path(path)?;
        match Path::new(path).components().count() {
            // A record with a hole in it must not empty the root or a whole hierarchy.
            0..=2 => Err(Error::Invalid(format!("{path:?} is not a sandbox's own"))),
            _ => Ok(()),
        }
    })
}

fn kill(system: &dyn System, args: &DestroyArgs) -> Result<()> {
    let process = match (args.pid, args.start_ticks) {
        (Some(pid), Some(start_ticks)) if pid > 1 => process::find(pid, start_ticks),
        _ => None,
    };
    if let Some(path) = args.cgroup2.as_deref().map(Path::new) {
        kill_cgroup(system, path)?;
    }
    if let Some(process) = process {
        // The first process of a pid namespace takes all others of it along, and ends after them.
        match system.kill(process.as_fd()) {
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
            other => other.doing("kill", &args.sandbox)?,
        }
        system
            .wait_readable(process.as_fd(), PATIENCE)
            .doing("wait for the end of", &args.sandbox)?;
    }
    args.cgroup2
        .as_deref()
        .map_or(Ok(()), |path| wait_empty(system, Path::new(path)))
}

fn kill_cgroup(system: &dyn System, path: &Path) -> Result<()> {
    let file = path.join("cgroup.kill");
    match system.write_file(&file, b"1") {
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
        other => other.doing_to("write to", &file),
    }
}

fn wait_empty(system: &dyn System, path: &Path) -> Result<()> {
    let events = path.join("cgroup.events");
    let deadline = Instant::now() + PATIENCE;
    let gone =
        |error: &io::Error| matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENODEV));
    loop {
        // Read after it was opened: a change since then ends the wait below.
        let file = match system.open(&events, Access::Read) {
            Err(error) if gone(&error) => return Ok(()),
            other => other.doing_to("open", &events)?,
        };
        let mut text = [0; 128];
        let length = match system.read(file.as_fd(), &mut text) {
            Err(error) if gone(&error) => return Ok(()),
            other => other.doing_to("read", &events)?,
        };
        if text[..length]
            .split(|&byte| byte == b'\n')
            .any(|line| line == b"populated 0")
        {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(io::Error::from_raw_os_error(libc::ETIMEDOUT))
                .doing_to("wait for the end of all in", path);
        }
        system
            .wait_changed(file.as_fd(), CHANGE_INTERVAL)
            .doing_to("wait for a change of", &events)?;
        // Something may have been born between the kill and its effect.
        kill_cgroup(system, path)?;
    }
}

fn remove_cgroups(system: &dyn System, args: &DestroyArgs) -> Result<()> {
    for (controller, path) in &args.cgroup1 {
        let kept = args.cgroup1_to.get(controller);
        // What cannot be kept is removed as the others are.
        let renamed = kept.map(|kept| system.rename(Path::new(path), Path::new(kept)));
        if !matches!(renamed, Some(Ok(()))) {
            remove_cgroup_tree(system, Path::new(path))?;
        }
    }
    if let Some(path) = &args.cgroup2 {
        remove_cgroup_tree(system, Path::new(path))?;
    }
    Ok(())
}

/// Bottom up; commands may have made cgroups below `work/`, at any depth that the kernel allows.
fn remove_cgroup_tree(system: &dyn System, path: &Path) -> Result<()> {
    // Most have nothing below, and listing one costs the kernel more than the attempt.
    if system.remove_dir(path).is_ok() {
        return Ok(());
    }
    for below in system.directories_in(path).doing_to("list", path)? {
        remove_cgroup_tree(system, &below)?;
    }
    remove_cgroup(system, path).doing_to("remove", path)
}

fn remove_files(system: &dyn System, args: &DestroyArgs) -> Result<Option<PathBuf>> {
    let gone = |result: io::Result<()>| match result {
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR)) => Ok(()),
        other => other,
    };
    if let Some(path) = args.socket.as_deref().map(Path::new) {
        gone(system.remove_file(path)).doing_to("remove", path)?;
    }
    let Some(directory) = args.directory.as_deref().map(PathBuf::from) else {
        return Ok(None);
    };
    let disk = directory.join(DISK);
    match system.detach_at(&disk) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {} // a plain directory
        other => gone(other).doing_to("unmount", &disk)?,
    }
    match args.remove_directory {
        true => put_away(system, &directory),
        false => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::Fake;

    fn args() -> DestroyArgs {
        let pair = |a: &str, b: &str| (a.to_string(), b.to_string());
        DestroyArgs {
            sandbox: "s".into(),
            cgroup1: [pair("cpu", "/cg1/cpu/n/s"), pair("pids", "/cg1/pids/n/s")].into(),
            cgroup1_to: [pair("cpu", "/cg1/cpu/n/kept")].into(),
            ..DestroyArgs::default()
        }
    }

    #[test]
    fn a_cgroup_that_is_to_be_kept_is_renamed_and_the_others_go() {
        let system = Fake::new(None);

        destroy(&system, &args()).unwrap();

        assert_eq!(
            *system.log.borrow(),
            ["rename /cg1/cpu/n/s", "remove_dir /cg1/pids/n/s"]
        );
    }

    #[test]
    fn one_that_cannot_be_kept_is_removed() {
        let system = Fake::new(Some(0));

        destroy(&system, &args()).unwrap();

        assert!(system.place("remove_dir /cg1/cpu/n/s") > system.place("rename /cg1/cpu/n/s"));
    }

    #[test]
    fn nothing_is_renamed_to_anywhere_else() {
        for (controller, path) in [
            ("cpu", "/cg1/cpu/kept"),
            ("cpu", "/cg1/cpu/n/s"),
            ("memory", "/cg1/memory/n/kept"),
            ("cpu", "/cg1/cpu/n/../kept"),
        ] {
            let to = [(controller.to_string(), path.to_string())].into();
            let args = DestroyArgs {
                cgroup1_to: to,
                ..args()
            };
            assert_eq!(destroy(&Fake::new(None), &args).unwrap_err().step, "check");
        }
    }
}
