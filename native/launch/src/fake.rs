//! A system that records instead of acting, and fails on request: for tests of order and of rollback.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use dsec_sys::identity::CapabilitySets;
use dsec_sys::namespaces::{Clone, Origin, Side};
use dsec_sys::processors::ProcessorSet;
use dsec_sys::seccomp::Instruction;
use serde_bytes::ByteBuf;

use crate::steps::{Job, Lobby};
use crate::system::{Access, Entry, MountOption, System};
use crate::view::{Shown, Source};
use crate::wire::{
    BindKind, BindMount, DevicePlan, EtcFile, LaunchPlan, ResourceView, ViewKind, VolumeBind,
};

/// A plan in which every step has something to do.
pub fn plan() -> LaunchPlan {
    let files = |pairs: &[(&str, &str)]| {
        pairs
            .iter()
            .map(|(a, b)| (a.to_string(), b.to_string()))
            .collect()
    };
    LaunchPlan {
        version: 1,
        sandbox: "sbx_aaaaaaaa_bbbbbbbbbbbbbbbb".into(),
        id_base: 0x7000_0000,
        lowers: vec!["base".into()],
        directory: "/state/s".into(),
        upper_tmpfs_bytes: Some(1 << 20),
        upper_device: None,
        socket: "/run/s.sock".into(),
        hostname: "sandbox".into(),
        etc_files: vec![EtcFile {
            path: "/etc/hosts".into(),
            content: ByteBuf::from(*b"x"),
        }],
        binds: vec![
            BindMount {
                path: "/usr/bin/tool".into(),
                kind: BindKind::Readonly,
            },
            BindMount {
                path: "/answers".into(),
                kind: BindKind::Masked,
            },
        ],
        masks: vec!["/proc/kcore".into()],
        readonly_proc: vec!["/proc/sys".into()],
        shm_bytes: 1 << 20,
        cgroup2: Some("/cg2/s".into()),
        cgroup2_files: files(&[("pids.max", "10")]),
        cgroup1: files(&[("cpuset", "/cg1/cpuset/s"), ("memory", "/cg1/memory/s")]),
        cgroup1_from: Default::default(),
        cgroup1_files: [(
            "cpuset".to_string(),
            files(&[("cpuset.mems", "0"), ("cpuset.cpus", "0"), ("a", "1")]),
        )]
        .into(),
        rlimits: [("nofile".to_string(), vec![1, 2])].into(),
        sysctls: files(&[("kernel.shmmni", "1")]),
        caps_agent: 1 << 7,
        caps_exec: 1 << 0,
        filter_agent: Some("f".into()),
        filter_exec: None,
        no_new_privs: true,
        env: Default::default(),
        user: None,
        workdir: None,
        nofile: None,
        spare: false,
        named: String::new(),
        light: false,
        view: Some(ResourceView {
            cpus: 1,
            memory_bytes: 64 << 20,
            live: false,
        }),
        volumes: vec![
            VolumeBind {
                path: "/data/in".into(),
                source: "/sets/in".into(),
                device: None,
                readonly: true,
                inode: 7,
                file: false,
            },
            VolumeBind {
                path: "/work".into(),
                source: "/volumes/work".into(),
                device: Some("/dev/loop7".into()),
                readonly: false,
                inode: 0,
                file: false,
            },
        ],
        devices: vec![DevicePlan {
            path: "/dev/cards/first".into(),
            major: 195,
            minor: 0,
            readonly: false,
        }],
    }
}

pub fn null() -> OwnedFd {
    OwnedFd::from(File::open("/dev/null").unwrap())
}

fn device_of(file: BorrowedFd) -> u64 {
    File::from(file.try_clone_to_owned().unwrap())
        .metadata()
        .unwrap()
        .rdev()
}

/// What a job needs to live somewhere.
pub struct Parts {
    plan: LaunchPlan,
    file: OwnedFd,
    /// Stands for the bare namespace; a null device stands for that of the host.
    bare: OwnedFd,
    filter: Vec<Instruction>,
}

impl Parts {
    pub fn new() -> Parts {
        let filter = vec![Instruction {
            code: 6,
            jump_true: 0,
            jump_false: 0,
            value: 0,
        }];
        Parts {
            plan: plan(),
            file: null(),
            bare: File::open("/dev/zero").unwrap().into(),
            filter,
        }
    }

    /// The same, with a cgroup of one that has ended.
    pub fn with_kept_cgroup() -> Parts {
        let mut parts = Parts::new();
        let kept = ("cpuset".to_string(), "/cg1/cpuset/kept".to_string());
        parts.plan.cgroup1_from = [kept].into();
        parts
    }

    /// The same, on a disk that all share, for which a sandbox can be prepared.
    pub fn plain() -> Parts {
        let mut parts = Parts::new();
        parts.plan.upper_tmpfs_bytes = None;
        parts
    }

    /// The same, of a light sandbox.
    pub fn light() -> Parts {
        let mut parts = Parts::new();
        parts.plan.light = true;
        parts
    }

    pub fn job(&self, fail_step: Option<&str>) -> Job<'_> {
        Job {
            plan: &self.plan,
            host_mounts: &self.file,
            bare_mounts: &self.bare,
            layers_by_name: false,
            agent: &self.file,
            lowers: vec!["/layers/.skeleton/x".into(), "/layers/base".into()],
            filter_agent: Some(&self.filter),
            sysfs: "/layers/.sysfs/trees/1".into(),
            lobby: Lobby {
                network: self.file.as_fd(),
                ipc: self.file.as_fd(),
            },
            processors: ProcessorSet::EMPTY,
            view: Shown {
                sources: vec![Source {
                    path: "/layers/.views/meminfo".into(),
                    target: c"/proc/meminfo".into(),
                }],
                kind: ViewKind::Static,
                server: None,
            },
            config: vec![0],
            fail_step: fail_step.map(String::from),
        }
    }
}

pub struct Fake {
    pub log: RefCell<Vec<String>>,
    /// What exists by now, and would be left behind.
    pub things: RefCell<BTreeSet<String>>,
    /// Bytes that each read of a pipe gives; 0 is its end.
    read_length: usize,
    fail_at: Option<usize>,
    calls: Cell<usize>,
    on_host: Cell<bool>,
    /// What the next message is; empty when the other end has gone.
    pub order: Vec<u8>,
    /// The new process has ended, so that no order is waited for.
    pub child_has_ended: bool,
}

impl Fake {
    pub fn new(fail_at: Option<usize>) -> Fake {
        Fake {
            log: RefCell::default(),
            things: RefCell::default(),
            read_length: 0,
            fail_at,
            calls: Cell::new(0),
            on_host: Cell::new(true),
            order: Vec::new(),
            child_has_ended: false,
        }
    }

    /// One by which an order comes.
    pub fn with_order(order: Vec<u8>, fail_at: Option<usize>) -> Fake {
        Fake {
            order,
            ..Fake::new(fail_at)
        }
    }

    /// One whose pipes have something to say.
    pub fn talking(fail_at: Option<usize>) -> Fake {
        Fake {
            read_length: 1,
            ..Fake::new(fail_at)
        }
    }

    /// True when the call that was to fail has come.
    pub fn has_failed(&self) -> bool {
        self.fail_at.is_some_and(|at| self.calls.get() > at)
    }

    /// Where in the log the first call that begins so is.
    pub fn place(&self, call: &str) -> usize {
        let log = self.log.borrow();
        log.iter()
            .position(|entry| entry.starts_with(call))
            .unwrap_or_else(|| panic!("no {call} in {log:#?}"))
    }

    fn note(&self, call: String) -> io::Result<()> {
        self.log.borrow_mut().push(call);
        let number = self.calls.replace(self.calls.get() + 1);
        match self.fail_at {
            Some(at) if at == number => Err(io::Error::from_raw_os_error(libc::EIO)),
            _ => Ok(()),
        }
    }

    fn file(&self, call: String) -> io::Result<OwnedFd> {
        self.note(call).map(|()| null())
    }

    fn appear(&self, thing: String) {
        self.things.borrow_mut().insert(thing);
    }

    fn vanish(&self, thing: &str) {
        assert!(self.on_host.get(), "{thing} is only in sight on the host");
        self.things.borrow_mut().remove(thing);
    }
}

impl System for Fake {
    fn make_dir(&self, path: &Path, mode: u32) -> io::Result<()> {
        self.note(format!("make_dir {} {mode:o}", path.display()))?;
        self.appear(path.display().to_string());
        Ok(())
    }
    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        self.note(format!("remove_dir {}", path.display()))?;
        self.vanish(&path.display().to_string());
        Ok(())
    }
    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.note(format!("remove_file {}", path.display()))?;
        self.vanish(&path.display().to_string());
        Ok(())
    }
    fn remove_small(&self, path: &Path, _: u64) -> io::Result<bool> {
        self.remove_tree(path).map(|()| true)
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.note(format!("rename {}", from.display()))?;
        // What was there before is none of ours to take back under its old name.
        self.vanish(&from.display().to_string());
        self.appear(to.display().to_string());
        Ok(())
    }
    fn remove_tree(&self, path: &Path) -> io::Result<()> {
        self.note(format!("remove_tree {}", path.display()))?;
        self.vanish(&path.display().to_string());
        Ok(())
    }
    fn directories_in(&self, path: &Path) -> io::Result<Vec<PathBuf>> {
        self.note(format!("directories_in {}", path.display()))?;
        Ok(Vec::new())
    }
    fn write_file(&self, path: &Path, content: &[u8]) -> io::Result<()> {
        self.note(format!(
            "write_file {} {}",
            path.display(),
            String::from_utf8_lossy(content)
        ))
    }
    fn replace_content(&self, _: BorrowedFd, content: &[u8]) -> io::Result<()> {
        self.note(format!(
            "replace_content {}",
            String::from_utf8_lossy(content)
        ))
    }
    fn change_owner(&self, _: BorrowedFd, path: &CStr, id: u32) -> io::Result<()> {
        self.note(format!("change_owner {} {id}", path.to_string_lossy()))
    }
    fn open(&self, path: &Path, access: Access) -> io::Result<OwnedFd> {
        self.file(format!("open {} {access:?}", path.display()))
    }
    fn open_directory_at(&self, _: BorrowedFd, name: &CStr) -> io::Result<OwnedFd> {
        self.file(format!("open_directory_at {name:?}"))
    }
    fn open_namespace(&self, path: &Path) -> io::Result<OwnedFd> {
        let file = self.file(format!("open_namespace {}", path.display()))?;
        // Ours is there, and is not what stands for the host's.
        Ok(File::open(path).map_or(file, OwnedFd::from))
    }
    fn is_directory(&self, _: BorrowedFd) -> io::Result<bool> {
        self.note("is_directory".into()).map(|()| true)
    }
    fn is_directory_at(&self, path: &Path) -> io::Result<bool> {
        self.note(format!("is_directory_at {}", path.display()))
            .map(|()| true)
    }
    fn inode(&self, _: BorrowedFd) -> io::Result<u64> {
        self.note("inode".into()).map(|()| 7)
    }
    fn listen(&self, path: &Path) -> io::Result<OwnedFd> {
        let socket = self.file(format!("listen {}", path.display()))?;
        self.appear(path.display().to_string());
        Ok(socket)
    }
    fn sealed_file(&self, _: &[u8]) -> io::Result<OwnedFd> {
        self.file("sealed_file".into())
    }
    fn pipe(&self) -> io::Result<(OwnedFd, OwnedFd)> {
        self.note("pipe".into()).map(|()| (null(), null()))
    }
    fn pair(&self) -> io::Result<(OwnedFd, OwnedFd)> {
        self.note("pair".into()).map(|()| (null(), null()))
    }
    fn pass(&self, _: BorrowedFd, message: &[u8], files: &[BorrowedFd]) -> io::Result<()> {
        let what = if message == b"p" { "proc" } else { "order" };
        self.note(format!("pass {what} {}", files.len()))
    }
    fn take(&self, _: BorrowedFd) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
        self.note("take".into())?;
        Ok((self.order.clone(), vec![null()]))
    }
    fn write(&self, _: BorrowedFd, bytes: &[u8]) -> io::Result<()> {
        self.note(format!("write {}", String::from_utf8_lossy(bytes)))
    }
    fn read(&self, _: BorrowedFd, _: &mut [u8]) -> io::Result<usize> {
        self.note("read".into()).map(|()| self.read_length)
    }
    fn read_file(&self, path: &Path) -> io::Result<Vec<u8>> {
        self.note(format!("read_file {}", path.display()))?;
        Ok(b"1 (x) S 1 2 3 4 5 0 7 8 9 10 11 12 13 14 15 16 17 18 777 20".to_vec())
    }
    fn put(&self, _: BorrowedFd, name: &CStr, _: Entry) -> io::Result<()> {
        self.note(format!("put {name:?}"))
    }
    fn resolve(&self, _: BorrowedFd, path: &CStr) -> io::Result<OwnedFd> {
        self.file(format!("resolve {path:?}"))
    }
    fn make_mount(&self, kind: &CStr, _: &[MountOption], attributes: u64) -> io::Result<OwnedFd> {
        self.file(format!("make_mount {kind:?} {attributes:#x}"))
    }
    fn clone_mount(&self, path: &CStr) -> io::Result<OwnedFd> {
        self.file(format!("clone_mount {path:?}"))
    }
    fn clone_mount_at(&self, _: BorrowedFd) -> io::Result<OwnedFd> {
        self.file("clone_mount_at".into())
    }
    fn clone_tree(&self, path: &CStr) -> io::Result<OwnedFd> {
        self.file(format!("clone_tree {path:?}"))
    }
    fn set_attributes(&self, _: BorrowedFd, set: u64) -> io::Result<()> {
        self.note(format!("set_attributes {set:#x}"))
    }
    fn map_ids(&self, _: BorrowedFd, _: BorrowedFd) -> io::Result<()> {
        self.note("map_ids".into())
    }
    fn attach(&self, _: BorrowedFd, _: BorrowedFd) -> io::Result<()> {
        self.note("attach".into())
    }
    fn attach_at(&self, _: BorrowedFd, path: &CStr) -> io::Result<()> {
        self.note(format!("attach_at {path:?}"))?;
        if self.on_host.get() {
            self.appear(format!("mount {}", path.to_string_lossy()));
        }
        Ok(())
    }
    fn detach_at(&self, path: &Path) -> io::Result<()> {
        self.note(format!("detach_at {}", path.display()))?;
        let mount = format!("mount {}", path.display());
        // What the host never saw is not there to be seen.
        if self.on_host.get() || self.things.borrow().contains(&mount) {
            self.vanish(&mount);
        }
        Ok(())
    }
    fn change_root(&self) -> io::Result<()> {
        self.note("change_root".into())
    }
    fn make_proc(&self, _: BorrowedFd, attributes: u64) -> io::Result<OwnedFd> {
        self.file(format!("make_proc {attributes:#x}"))
    }
    fn change_directory(&self, _: BorrowedFd) -> io::Result<()> {
        self.note("change_directory".into())
    }
    fn bind(&self, source: &CStr, target: &CStr) -> io::Result<()> {
        self.note(format!("bind {source:?} {target:?}"))
    }
    fn enter_mounts(&self, namespace: BorrowedFd) -> io::Result<()> {
        self.note("enter_mounts".into())?;
        self.on_host
            .set(device_of(namespace) == device_of(null().as_fd()));
        Ok(())
    }
    fn enter_names(&self, _: BorrowedFd) -> io::Result<()> {
        self.note("enter_names".into())
    }
    fn enter(&self, _: BorrowedFd, kind: u64) -> io::Result<()> {
        self.note(format!("enter {kind:#x}"))
    }
    fn unshare(&self, namespaces: u64) -> io::Result<()> {
        self.note(format!("unshare {namespaces:#x}"))
    }
    fn clone(&self, origin: &Origin, how: &Clone, meanwhile: &mut dyn FnMut()) -> io::Result<Side> {
        assert!(how.sibling && how.cgroup.is_some() && origin.cgroup.is_some());
        assert_eq!(origin.tasks.len(), 2);
        self.note("clone".into())?;
        meanwhile();
        self.note("cloned".into())?;
        self.appear("process".into());
        Ok(Side::Parent {
            pid: 4242,
            pidfd: null(),
        })
    }
    fn part_from(&self, process: i32, _: &ProcessorSet) {
        self.log.borrow_mut().push(format!("part_from {process}"));
    }
    fn run_on(&self, _: &ProcessorSet) {
        self.log.borrow_mut().push("run_on".into());
    }
    fn kill(&self, _: BorrowedFd) -> io::Result<()> {
        self.note("kill".into())?;
        self.things.borrow_mut().remove("process");
        Ok(())
    }
    fn wait_readable(&self, _: BorrowedFd, _: Duration) -> io::Result<()> {
        self.note("wait_readable".into())
    }
    fn wait_either(&self, _: BorrowedFd, _: BorrowedFd) -> io::Result<bool> {
        self.note("wait_either".into())
            .map(|()| !self.child_has_ended)
    }
    fn wait_changed(&self, _: BorrowedFd, _: Duration) -> io::Result<()> {
        self.note("wait_changed".into())
    }
    fn act_as(&self, id: u32) -> io::Result<()> {
        self.note(format!("act_as {id}"))
    }
    fn become_user(&self, id: u32, keep: bool) -> io::Result<()> {
        self.note(format!("become_user {id} {keep}"))
    }
    fn bound_capabilities(&self, keep: u64) -> io::Result<()> {
        self.note(format!("bound_capabilities {keep:#x}"))
    }
    fn set_capabilities(&self, sets: CapabilitySets) -> io::Result<()> {
        self.note(format!("set_capabilities {sets:?}"))
    }
    fn raise_ambient(&self, capabilities: u64) -> io::Result<()> {
        self.note(format!("raise_ambient {capabilities:#x}"))
    }
    fn load_filter(&self, _: &[Instruction]) -> io::Result<()> {
        self.note("load_filter".into())
    }
    fn set_limit(&self, resource: u32, soft: u64, hard: u64) -> io::Result<()> {
        self.note(format!("set_limit {resource} {soft} {hard}"))
    }
    fn own_score(&self) -> io::Result<OwnedFd> {
        self.file("own_score".into())
    }
    fn set_hostname(&self, name: &str) -> io::Result<()> {
        self.note(format!("set_hostname {name}"))
    }
    fn loopback_up(&self) -> io::Result<()> {
        self.note("loopback_up".into())
    }
    fn start_afresh(&self) -> io::Result<()> {
        self.note("start_afresh".into())
    }
    fn arrange(&self, _: &[Option<BorrowedFd>], _: &[BorrowedFd]) -> io::Result<Vec<OwnedFd>> {
        self.note("arrange".into()).map(|()| vec![null(), null()])
    }
    fn run(&self, _: BorrowedFd, arguments: &[&CStr]) -> io::Error {
        match self.note(format!("run {arguments:?}")) {
            Ok(()) => io::Error::from_raw_os_error(libc::ENOEXEC),
            Err(error) => error,
        }
    }
}
