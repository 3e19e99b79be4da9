//! A spare becomes somebody's sandbox: what differs from one to the next is put in place. Nothing has run in it yet.

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use crate::error::{Doing, Error, Result};
use crate::process;
use crate::steps::cgroups;
use crate::steps::check::{check_hostname, check_name, check_path};
use crate::system::{c_text, System};
use crate::wire::ClaimArgs;

/// Sets limits, host name and files of /etc. A spare for which that has failed is of no use to anybody.
pub fn claim(system: &dyn System, own_names: &OwnedFd, args: &ClaimArgs) -> Result<()> {
    check(args)?;
    let process = process::find(args.pid, args.start_ticks).ok_or(Error::Vanished)?;
    let root = PathBuf::from(format!("/proc/{}/root", args.pid));
    let root = system.open_namespace(&root).doing_to("open", &root)?;
    // The number was its own when its root was opened, if it has not ended by now.
    if process::find(args.pid, args.start_ticks).is_none() {
        return Err(Error::Vanished);
    }
    let limits = args.cgroup_files.iter();
    let limits: Vec<_> = limits
        .map(|(path, value)| (path.into(), value.as_str()))
        .collect();
    cgroups::replace(system, &limits)?;
    rename(system, own_names, &process, &args.hostname)?;
    for file in &args.etc_files {
        let path = c_text(&file.path).doing("name", &file.path)?;
        let target = system
            .resolve(root.as_fd(), &path)
            .doing("find in the sandbox", &file.path)?;
        system
            .replace_content(target.as_fd(), &file.content)
            .doing("write", &file.path)?;
    }
    Ok(())
}

fn check(args: &ClaimArgs) -> Result<()> {
    check_name(&args.sandbox)?;
    check_hostname(&args.hostname)?;
    if args.pid <= 1 {
        return Err(Error::Invalid(format!(
            "{} is no sandbox's process",
            args.pid
        )));
    }
    args.cgroup_files
        .keys()
        .chain(args.etc_files.iter().map(|file| &file.path))
        .try_for_each(|path| check_path(path))
}

/// The host name of the sandbox's own namespace. It belongs to a namespace below ours, so we may.
fn rename(system: &dyn System, own_names: &OwnedFd, process: &OwnedFd, name: &str) -> Result<()> {
    system
        .enter_names(process.as_fd())
        .doing("enter", "the uts namespace of the sandbox")?;
    let renamed = system.set_hostname(name);
    system
        .enter_names(own_names.as_fd())
        .doing("return to", "our own uts namespace")?;
    renamed.doing("set", "the host name")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::{null, Fake};
    use crate::wire::EtcFile;

    fn args() -> ClaimArgs {
        let pid = std::process::id() as i32;
        let text = std::fs::read(process::stat_path(pid)).unwrap();
        ClaimArgs {
            sandbox: "s".into(),
            pid,
            start_ticks: process::parse_stat(&text).unwrap().start_ticks,
            hostname: "claimed".into(),
            etc_files: vec![EtcFile {
                path: "/etc/hostname".into(),
                content: serde_bytes::ByteBuf::from("claimed\n"),
            }],
            cgroup_files: [("/cg1/cpu/s/cpu.cfs_quota_us".to_string(), "7".to_string())].into(),
        }
    }

    #[test]
    fn limits_name_and_files_are_those_of_the_sandbox() {
        let system = Fake::new(None);

        claim(&system, &null(), &args()).unwrap();

        let order = [
            "write_file /cg1/cpu/s/cpu.cfs_quota_us 7",
            "set_hostname claimed",
            "resolve \"/etc/hostname\"",
            "replace_content claimed",
        ];
        let places: Vec<usize> = order.iter().map(|call| system.place(call)).collect();
        assert!(places.windows(2).all(|pair| pair[0] < pair[1]));
    }

    #[test]
    fn the_daemon_is_back_in_its_own_names_whatever_fails() {
        for number in 0.. {
            let system = Fake::new(Some(number));

            let failed = claim(&system, &null(), &args()).is_err();

            if !system.has_failed() {
                assert!(number > 5 && !failed);
                break;
            }
            assert!(failed, "call {number}");
            let log = system.log.borrow();
            let renamed = log.iter().any(|call| call.starts_with("set_hostname"));
            let entered = log.iter().filter(|call| *call == "enter_names").count();
            assert!(!renamed || entered == 2, "call {number}: {log:?}");
        }
    }

    #[test]
    fn a_process_that_is_another_by_now_is_not_touched() {
        let system = Fake::new(None);
        let args = ClaimArgs {
            start_ticks: 1,
            ..args()
        };

        assert!(matches!(
            claim(&system, &null(), &args),
            Err(Error::Vanished)
        ));
        assert!(system.log.borrow().is_empty());
    }
}
