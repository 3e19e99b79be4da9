//! Step `check`: the plan makes sense by itself. Nothing has been touched yet.

use std::collections::BTreeMap;
use std::path::{Component, Path};

use crate::error::{Error, Result};
use crate::steps::light::CAPS_TO_SETTLE;
use crate::steps::root::is_own_device;
use crate::wire::{LaunchPlan, LAUNCH_VERSION};

pub const IDS_PER_SANDBOX: u32 = 65_536;
const ID_BASE_MIN: u32 = 65_536;
const LOWERS_MAX: usize = 64;
const BINDS_MAX: usize = 256;
const PATHS_MAX: usize = 256;
const ETC_FILES_MAX: usize = 64;
const VOLUMES_MAX: usize = 64;
const DEVICES_MAX: usize = 64;
/// Of major 1: the machine's memory, its ports, what a crashed kernel leaves, the log. Nobody inside may ever have them.
const MEMORY_MAJOR: u32 = 1;
const FORBIDDEN_MINORS: [u32; 5] = [1, 2, 4, 6, 11];
const ETC_BYTES_MAX: usize = 64 * 1024;
const NAME_BYTES_MAX: usize = 128;
/// What the launcher itself mounts there cannot be bound over.
const OWN_DIRECTORIES: [&str; 3] = ["/proc", "/sys", "/dev"];

pub fn check(plan: &LaunchPlan) -> Result<()> {
    require(plan.version == LAUNCH_VERSION, || {
        format!("plan version {}, not {LAUNCH_VERSION}", plan.version)
    })?;
    check_name(&plan.sandbox)?;
    let base = plan.id_base;
    // Not aligned: see STRIDE of the node's `security/idranges.py`.
    require(
        (ID_BASE_MIN..=u32::MAX - IDS_PER_SANDBOX).contains(&base),
        || format!("no {IDS_PER_SANDBOX} ids above the host's own begin at {base}"),
    )?;
    require(plan.lowers.len() <= LOWERS_MAX, || {
        format!("{} layers, {LOWERS_MAX} at most", plan.lowers.len())
    })?;
    require(!plan.light || plan.caps_agent & CAPS_TO_SETTLE == 0, || {
        "the agent of a light sandbox cannot keep what it gives up".into()
    })?;
    check_hostname(&plan.hostname)?;
    check_paths(plan)?;
    check_inside(plan)?;
    check_volumes(plan)?;
    check_devices(plan)?;
    check_limits(plan)
}

/// A name that is also a file name: of a sandbox, or the digest of a layer.
pub fn check_name(name: &str) -> Result<()> {
    let good = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.' | b':');
    let shaped = (1..=NAME_BYTES_MAX).contains(&name.len())
        && name.bytes().all(good)
        && !name.starts_with('.');
    require(shaped, || format!("bad name {name:?}"))
}

pub fn check_hostname(name: &str) -> Result<()> {
    require((1..=64).contains(&name.len()), || {
        "a host name has 1 to 64 bytes".into()
    })
}

/// An absolute path in its shortest form, on the host or in the sandbox.
pub fn check_path(path: &str) -> Result<()> {
    let plain = |part: Component| matches!(part, Component::RootDir | Component::Normal(_));
    let shortest =
        path.len() == 1 || !(path.ends_with('/') || path.contains("//") || path.contains("/./"));
    let good = path.starts_with('/')
        && path.len() < 4096
        && !path.contains('\0')
        && shortest
        && !path.ends_with("/.");
    require(good && Path::new(path).components().all(plain), || {
        format!("not a plain absolute path: {path:?}")
    })
}

fn check_paths(plan: &LaunchPlan) -> Result<()> {
    check_path(&plan.directory)?;
    check_path(&plan.socket)?;
    require(plan.directory.len() > 1, || {
        "the state directory cannot be /".into()
    })?;
    plan.cgroup2
        .iter()
        .chain(plan.cgroup1.values())
        .chain(plan.cgroup1_from.values())
        .try_for_each(|path| check_path(path))?;
    require(
        plan.cgroup2.is_some() || plan.cgroup2_files.is_empty(),
        || "cgroup2_files without cgroup2".into(),
    )?;
    let files = plan
        .cgroup2_files
        .keys()
        .chain(plan.cgroup1_files.values().flat_map(|files| files.keys()));
    files.cloned().try_for_each(|name| check_name(&name))?;
    let unknown = plan
        .cgroup1_files
        .keys()
        .find(|controller| !plan.cgroup1.contains_key(*controller));
    require(unknown.is_none(), || {
        format!("files for controller {unknown:?}, which has no directory")
    })?;
    check_beside(&plan.cgroup1, &plan.cgroup1_from)
}

/// What cgroups are renamed from or to lies beside those of the sandbox: nothing else can be.
pub fn check_beside(
    directories: &BTreeMap<String, String>,
    others: &BTreeMap<String, String>,
) -> Result<()> {
    let lost = others.iter().find(|(controller, other)| {
        let own = directories.get(*controller).map(Path::new);
        let beside = own.is_some_and(|own| own.parent() == Path::new(other).parent());
        !beside || own == Some(Path::new(other))
    });
    require(lost.is_none(), || {
        format!("{lost:?} is not beside a directory of the sandbox")
    })
}

fn check_inside(plan: &LaunchPlan) -> Result<()> {
    require(plan.binds.len() <= BINDS_MAX, || {
        format!("more than {BINDS_MAX} binds")
    })?;
    for bind in &plan.binds {
        check_path(&bind.path)?;
        let path = Path::new(&bind.path);
        require(bind.path.len() > 1, || {
            "the root itself cannot be bound".into()
        })?;
        let own = OWN_DIRECTORIES.iter().find(|own| path.starts_with(own));
        require(own.is_none(), || {
            format!("bind {path:?} lies where the launcher mounts by itself")
        })?;
    }
    require(plan.etc_files.len() <= ETC_FILES_MAX, || {
        format!("more than {ETC_FILES_MAX} files for /etc")
    })?;
    for file in &plan.etc_files {
        check_path(&file.path)?;
        require(file.path.starts_with("/etc/"), || {
            format!("{:?} is not below /etc", file.path)
        })?;
    }
    let bytes: usize = plan.etc_files.iter().map(|file| file.content.len()).sum();
    require(bytes <= ETC_BYTES_MAX, || {
        format!("files for /etc of {bytes} bytes, {ETC_BYTES_MAX} at most")
    })?;
    require(
        plan.masks.len() + plan.readonly_proc.len() <= PATHS_MAX,
        || format!("more than {PATHS_MAX} masks"),
    )?;
    for path in &plan.masks {
        check_path(path)?;
        let kernel = path.starts_with("/proc/") || path.starts_with("/sys/");
        require(kernel, || {
            format!("mask {path:?} is below neither /proc nor /sys")
        })?;
    }
    for path in &plan.readonly_proc {
        check_path(path)?;
        require(path.starts_with("/proc/"), || {
            format!("{path:?} is not below /proc")
        })?;
    }
    Ok(())
}

fn check_volumes(plan: &LaunchPlan) -> Result<()> {
    require(plan.volumes.len() <= VOLUMES_MAX, || {
        format!("more than {VOLUMES_MAX} volumes")
    })?;
    let devices = plan.volumes.iter().filter_map(|bind| bind.device.as_ref());
    for device in devices.chain(&plan.upper_device) {
        check_path(device)?;
        require(device.starts_with("/dev/"), || {
            format!("{device:?} is no device")
        })?;
    }
    for (index, bind) in plan.volumes.iter().enumerate() {
        check_path(&bind.source)?;
        check_path(&bind.path)?;
        let path = Path::new(&bind.path);
        let own = OWN_DIRECTORIES
            .iter()
            .any(|own| path.starts_with(own) || Path::new(own).starts_with(path));
        require(!own && path != Path::new("/etc"), || {
            format!("a volume cannot be at {path:?}")
        })?;
        let nested = plan.volumes[..index].iter().any(|other| {
            let other = Path::new(&other.path);
            path.starts_with(other) || other.starts_with(path)
        });
        require(!nested, || format!("two volumes at or below {path:?}"))?;
    }
    Ok(())
}

fn check_devices(plan: &LaunchPlan) -> Result<()> {
    require(plan.devices.len() <= DEVICES_MAX, || {
        format!("more than {DEVICES_MAX} devices")
    })?;
    for (index, device) in plan.devices.iter().enumerate() {
        check_path(&device.path)?;
        let below = device.path.strip_prefix("/dev/");
        require(below.is_some_and(|name| !is_own_device(name)), || {
            format!("no device can be at {:?}", device.path)
        })?;
        let forbidden = device.major == MEMORY_MAJOR && FORBIDDEN_MINORS.contains(&device.minor);
        require(!forbidden, || {
            format!("device {}:{} is the host's own", device.major, device.minor)
        })?;
        let path = Path::new(&device.path);
        let nested = plan.devices[..index].iter().any(|other| {
            let other = Path::new(&other.path);
            path.starts_with(other) || other.starts_with(path)
        });
        require(!nested, || format!("two devices at or below {path:?}"))?;
    }
    Ok(())
}

fn check_limits(plan: &LaunchPlan) -> Result<()> {
    for (name, values) in &plan.rlimits {
        require(dsec_sys::identity::resource(name).is_some(), || {
            format!("no resource limit {name:?}")
        })?;
        require(values.len() == 2 && values[0] <= values[1], || {
            format!("limit {name} is not [soft, hard]")
        })?;
    }
    for name in plan.sysctls.keys() {
        let good =
            |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.' | b'/');
        let plain = name.bytes().all(good) && !name.starts_with(['.', '/']) && !name.contains("..");
        require(plain && !name.is_empty(), || {
            format!("bad name of a kernel setting: {name:?}")
        })?;
    }
    Ok(())
}

fn require(condition: bool, message: impl FnOnce() -> String) -> Result<()> {
    match condition {
        true => Ok(()),
        false => Err(Error::Invalid(message())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::plan;

    #[test]
    fn a_sane_plan_passes() {
        check(&plan()).unwrap();
    }

    #[test]
    fn nonsense_is_refused() {
        let spoil: Vec<fn(&mut LaunchPlan)> = vec![
            |plan| plan.version = 2,
            |plan| plan.sandbox = "../x".into(),
            |plan| plan.id_base = 0,
            |plan| plan.id_base = 65_535,
            |plan| plan.id_base = u32::MAX - 65_535,
            |plan| plan.lowers = vec!["a".into(); 65],
            |plan| plan.hostname = String::new(),
            |plan| plan.directory = "relative".into(),
            |plan| plan.directory = "/".into(),
            |plan| plan.socket = "/run/../etc/x".into(),
            |plan| plan.socket = "/run/./x".into(),
            |plan| plan.cgroup2 = Some("/sys//x".into()),
            |plan| plan.cgroup2_files = [("../memory.max".to_string(), "1".to_string())].into(),
            |plan| plan.cgroup1_files = [("devices".to_string(), Default::default())].into(),
            |plan| plan.cgroup1_from = [("memory".to_string(), "/cg1/cpuset/k".into())].into(),
            |plan| plan.cgroup1_from = [("memory".to_string(), "/cg1/memory/s".into())].into(),
            |plan| plan.cgroup1_from = [("memory".to_string(), "/cg1/memory/../k".into())].into(),
            |plan| plan.cgroup1_from = [("devices".to_string(), "/cg1/devices/k".into())].into(),
            |plan| plan.binds[0].path = "/proc/1".into(),
            |plan| plan.binds[0].path = "/".into(),
            |plan| plan.etc_files[0].path = "/usr/x".into(),
            |plan| plan.masks = vec!["/etc/passwd".into()],
            |plan| plan.readonly_proc = vec!["/sys/x".into()],
            |plan| plan.volumes[0].path = "/".into(),
            |plan| plan.volumes[0].path = "/etc".into(),
            |plan| plan.volumes[0].path = "/proc/x".into(),
            |plan| plan.volumes[0].path = "/data/../etc".into(),
            |plan| plan.volumes[0].source = "data".into(),
            |plan| plan.volumes[1].device = Some("/state/x".into()),
            |plan| plan.volumes[1].path = "/data/in/it".into(),
            |plan| plan.upper_device = Some("/state/x".into()),
            |plan| plan.devices[0].path = "/x".into(),
            |plan| plan.devices[0].path = "/dev/../x".into(),
            |plan| plan.devices[0].path = "/dev/null".into(),
            |plan| plan.devices[0].path = "/dev/shm/x".into(),
            |plan| plan.devices[0].path = "/dev/pts".into(),
            |plan| (plan.devices[0].major, plan.devices[0].minor) = (1, 1),
            |plan| (plan.devices[0].major, plan.devices[0].minor) = (1, 11),
            |plan| plan.devices.push(plan.devices[0].clone()),
            |plan| plan.devices = vec![plan.devices[0].clone(); 65],
            |plan| plan.rlimits = [("nofiles".to_string(), vec![1, 1])].into(),
            |plan| plan.rlimits = [("nofile".to_string(), vec![2, 1])].into(),
            |plan| plan.sysctls = [("../x".to_string(), "1".to_string())].into(),
            |plan| (plan.light, plan.caps_agent) = (true, 1 << 21),
        ];
        for (index, spoil) in spoil.iter().enumerate() {
            let mut plan = plan();
            spoil(&mut plan);
            assert!(check(&plan).is_err(), "case {index}");
        }
    }
}
