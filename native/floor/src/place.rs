//! What all iterations share: cgroups to work in, mounts to build on, and a mount namespace with next to nothing in it.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::iteration::remove_when_free;
use dsec_sys::{mounts, namespaces, paths, sealed};

const CONTROLLERS: [&str; 4] = ["memory", "pids", "cpu", "cpuset"];

pub struct Place {
    pub cgroup2: Option<OwnedFd>,
    pub cgroup1: Vec<OwnedFd>,
    /// Values that a cpuset needs before anything can join it, if there is that controller here.
    pub cpuset: Option<(usize, [Vec<u8>; 2])>,
    pub rootfs: OwnedFd,
    pub state: OwnedFd,
    pub program: OwnedFd,
    host: OwnedFd,
    made: Vec<PathBuf>,
}

pub fn c_path(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(|_| io::ErrorKind::InvalidInput.into())
}

pub fn directory(path: &Path) -> io::Result<OwnedFd> {
    paths::open_at(None, &c_path(path)?, libc::O_RDONLY | libc::O_DIRECTORY, 0)
}

impl Place {
    pub fn make(rootfs: &Path, state: &Path) -> io::Result<Place> {
        paths::set_file_mask(0);
        let name = format!("dsec-floor-{}", std::process::id());
        let program = sealed::sealed_file(c"dsec-floor", &std::fs::read("/proc/self/exe")?, 0o111)?;
        let mut made = Vec::new();
        let mut make = |above: &Path| {
            let path = above.join(&name);
            std::fs::create_dir(&path)?;
            made.push(path.clone());
            Ok::<_, io::Error>(path)
        };
        let top = Path::new("/sys/fs/cgroup");
        let v2 = [top.join("unified"), top.to_path_buf()];
        let v2 = v2
            .iter()
            .find(|path| path.join("cgroup.subtree_control").exists());
        let cgroup2 = v2
            .map(|above| make(above).and_then(|path| directory(&path)))
            .transpose()?;
        let (mut cgroup1, mut cpuset) = (Vec::new(), None);
        for controller in CONTROLLERS
            .iter()
            .filter(|name| top.join(name).join("cgroup.procs").exists())
        {
            let above = top.join(controller);
            let path = make(&above)?;
            if *controller == "cpuset" {
                let values =
                    ["cpuset.cpus", "cpuset.mems"].map(|file| std::fs::read(above.join(file)));
                let [cpus, mems] = values;
                let values = [cpus?, mems?];
                std::fs::write(path.join("cpuset.cpus"), &values[0])?;
                std::fs::write(path.join("cpuset.mems"), &values[1])?;
                cpuset = Some((cgroup1.len(), values));
            }
            cgroup1.push(directory(&path)?);
        }
        let state = make(state)?;
        let copy = |path: &Path| mounts::clone_tree(None, &c_path(path)?, false);
        let (rootfs, state) = (
            copy(&rootfs.canonicalize()?)?,
            copy(&state.canonicalize()?)?,
        );
        let host = OwnedFd::from(std::fs::File::open("/proc/self/ns/mnt")?);
        enter_bare()?;
        Ok(Place {
            cgroup2,
            cgroup1,
            cpuset,
            rootfs,
            state,
            program,
            host,
            made,
        })
    }

    /// Back to the host's mounts, and everything away.
    pub fn remove(self) -> io::Result<()> {
        namespaces::enter(self.host.as_fd(), namespaces::NEW_MOUNT)?;
        drop((self.cgroup1, self.cgroup2, self.state));
        let (state, cgroups) = self.made.split_last().ok_or(io::ErrorKind::NotFound)?;
        std::fs::remove_dir_all(state)?;
        cgroups.iter().try_for_each(|path| {
            // Of an iteration that failed.
            for entry in std::fs::read_dir(path)? {
                let entry = entry?;
                if entry.file_type()?.is_dir() {
                    remove_when_free(None, &c_path(&entry.path())?)?;
                }
            }
            remove_when_free(None, &c_path(path)?)
        })
    }
}

fn enter_bare() -> io::Result<()> {
    namespaces::unshare(namespaces::NEW_MOUNT)?;
    mounts::set_propagation(c"/", mounts::Propagation::Private)?;
    let mount = |kind: &CStr| mounts::Context::open(kind)?.create(0);
    let tree = mount(c"tmpfs")?;
    for name in [c"proc", c"root"] {
        paths::make_dir_at(Some(tree.as_fd()), name, 0o755)?;
    }
    mounts::attach_at(tree.as_fd(), c"/proc")?;
    paths::change_directory(tree.as_fd())?;
    mounts::attach_at(mount(c"proc")?.as_fd(), c"proc")?;
    mounts::pivot_here()
}
