//! What the agent is given at its start (protocol section 7), and what it finds out about itself.

use std::ffi::OsStr;
use std::fs::{File, Permissions};
use std::io::{Read, Seek};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::Path;

use dsec_protocol::codec::decode;
use dsec_protocol::opening::AgentConfig;
use dsec_sys::errno::errno_name;
use dsec_sys::identity;
use dsec_sys::pipes::{inherited, O_NONBLOCK};
use dsec_sys::process::{become_subreaper, raise_open_files, set_umask};
use dsec_sys::rights;
use dsec_sys::sockets::listen_vsock;

use crate::cgroup::WorkCgroup;
use crate::refusal::AgentError;
use crate::settle::LeftOut;
use crate::share::Score;

const CONFIG_BYTES_MAX: u64 = 4 << 20;

pub struct Setup {
    pub entrance: Entrance,
    pub work: Option<WorkCgroup>,
    pub config: AgentConfig,
    pub own: Own,
    pub score: Score,
    pub left_out: Option<LeftOut>,
    /// Pid 1 of a sandbox: ends only by `shutdown`.
    pub is_init: bool,
}

/// Where the host comes in.
pub enum Entrance {
    /// A listening socket.
    Socket(OwnedFd),
    /// Of a virtual machine: a listening socket for its host.
    Vsock(OwnedFd),
    /// Of a virtual machine: a serial port for everything, and one for the beginning of each connection (section 8).
    Ports { data: OwnedFd, bell: OwnedFd },
}

/// Facts about this process that do not change.
pub struct Own {
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
    pub permitted: u64,
    pub drop_bounding: u64,
    /// Soft and hard limit of open files that commands get.
    pub nofile: (u64, u64),
}

impl Own {
    pub fn may_switch(&self) -> bool {
        let needed = rights::CAP_SETUID | rights::CAP_SETGID;
        self.permitted & needed == needed
    }
}

pub fn read_setup() -> Result<Setup, AgentError> {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let is_init = std::process::id() == 1;
    // First: of what is opened below, something may get this number. Without it commands stay as likely to be ended for
    // memory as we are.
    let score = is_init.then(|| inherited(6)).flatten().map(File::from);
    let settings = is_init.then(|| inherited(7)).flatten();
    let (entrance, (work, mut config)) = match arguments.as_slice() {
        [flag, path] if flag == "--listen" => {
            (socket(listen(Path::new(path))?)?, (None, stand_alone()))
        }
        [flag] if flag == "--fd" => {
            let listener =
                inherited(3).ok_or(AgentError::Missing("descriptor 3, the listening socket"))?;
            (socket(UnixListener::from(listener))?, handed_over()?)
        }
        [flag, port] if flag == "--vsock" => (vsock(port)?, handed_over()?),
        [flag, data, bell] if flag == "--ports" => {
            (ports(Path::new(data), Path::new(bell))?, handed_over()?)
        }
        _ => return Err(AgentError::Usage),
    };
    if !is_init {
        become_subreaper().map_err(AgentError::at("becoming a subreaper"))?;
    }
    let own = find_own(&config)?;
    if is_init && own.may_switch() {
        // A process whose six ids are all the same can be given other limits by whoever takes that id, and root of a
        // sandbox can take any.
        identity::set_group_ids(None, None, Some(own.gid.wrapping_sub(1)))
            .map_err(AgentError::at("setting the saved group id"))?;
    }
    let left_out = match (config.light.take(), settings) {
        (Some(what), Some(settings)) => Some(LeftOut::new(what, settings)),
        (Some(_), None) => return Err(AgentError::Missing("descriptor 7, the kernel's settings")),
        (None, _) => None,
    };
    Ok(Setup {
        entrance,
        work,
        config,
        own,
        score: Score::new(score),
        left_out,
        is_init,
    })
}

/// Under another name first: whoever sees the path can connect to it.
fn listen(path: &Path) -> Result<UnixListener, AgentError> {
    let mut early = path.as_os_str().to_owned();
    early.push(".new");
    let old = set_umask(0o177);
    let listener = UnixListener::bind(&early).map_err(AgentError::at("binding the socket"));
    set_umask(old);
    let listener = listener?;
    std::fs::set_permissions(&early, Permissions::from_mode(0o600))
        .and_then(|()| std::fs::rename(&early, path))
        .map_err(AgentError::at("placing the socket"))?;
    Ok(listener)
}

/// Stand-alone the agent confines nothing.
fn stand_alone() -> AgentConfig {
    AgentConfig {
        caps_exec: u64::MAX,
        ..AgentConfig::default()
    }
}

fn socket(listener: UnixListener) -> Result<Entrance, AgentError> {
    listener
        .set_nonblocking(true)
        .map_err(AgentError::at("setting the listening socket"))?;
    Ok(Entrance::Socket(listener.into()))
}

fn vsock(port: &OsStr) -> Result<Entrance, AgentError> {
    let port = port.to_str().and_then(|text| text.parse().ok());
    listen_vsock(port.ok_or(AgentError::Usage)?)
        .map(Entrance::Vsock)
        .map_err(AgentError::at("listening to the host"))
}

fn ports(data: &Path, bell: &Path) -> Result<Entrance, AgentError> {
    let open = |path: &Path| {
        File::options()
            .read(true)
            .write(true)
            .custom_flags(O_NONBLOCK)
            .open(path)
            .map(OwnedFd::from)
            .map_err(AgentError::at("opening a serial port"))
    };
    Ok(Entrance::Ports {
        data: open(data)?,
        bell: open(bell)?,
    })
}

type HandedOver = (Option<WorkCgroup>, AgentConfig);

fn handed_over() -> Result<HandedOver, AgentError> {
    let directory: Option<OwnedFd> = inherited(4);
    let config = inherited(5).ok_or(AgentError::Missing("descriptor 5, the configuration"))?;
    let work = directory
        .map(|fd| WorkCgroup::open(&fd))
        .transpose()
        .map_err(AgentError::at("opening work/ of the cgroup"))?;
    Ok((work, read_config(config.into())?))
}

fn read_config(mut file: File) -> Result<AgentConfig, AgentError> {
    let mut bytes = Vec::new();
    file.rewind()
        .and_then(|()| file.take(CONFIG_BYTES_MAX).read_to_end(&mut bytes))
        .map_err(AgentError::at("reading the configuration"))?;
    decode(&bytes).map_err(AgentError::Config)
}

fn find_own(config: &AgentConfig) -> Result<Own, AgentError> {
    let (uid, gid) = rights::own_ids();
    let caps = rights::own_capabilities().map_err(AgentError::at("reading capabilities"))?;
    let groups = rights::own_groups().map_err(AgentError::at("reading groups"))?;
    let (soft, hard) = raise_open_files().map_err(AgentError::at("raising the open-file limit"))?;
    let nofile = match config.nofile {
        Some(wanted) => (wanted.min(hard), wanted.min(hard)),
        None => (soft, hard),
    };
    Ok(Own {
        uid,
        gid,
        groups,
        permitted: caps.permitted,
        drop_bounding: rights::bounding_set() & !config.caps_exec,
        nofile,
    })
}

/// For messages about what cannot be helped.
pub fn note(what: &str, error: &std::io::Error) {
    eprintln!(
        "dsec-agent: {what}: {}",
        errno_name(dsec_sys::errno::errno_of(error))
    );
}
