//! `dsec-guest`: the first program of a virtual machine. It makes of block devices what the launcher makes of layers for a
//! container, and becomes the agent (docs/internals/vm.md).

mod devices;
mod network;
mod plan;
mod preload;
mod root;

use std::ffi::{CStr, CString};
use std::fs::{self, File};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use dsec_protocol::codec::encode;
use dsec_protocol::opening::AgentConfig;
use dsec_sys::machine;
use dsec_sys::sealed::{arrange, run_file, sealed_file};
use dsec_sys::seqpacket::loopback_up;

use dsec_sys::failure::{Doing, Error, Result};
use plan::Plan;

/// Of the initramfs, written by the node.
const PLAN: &str = "/dsec.plan";
const MODULES: &str = "/modules.order";
const AGENT: &str = "/dsec-agent";
/// Names of the serial ports, as the node gives them to the machine.
const DATA: &str = "agent";
const BELL: &str = "bell";

fn main() {
    // Only the first program of a machine may do what follows, and it never returns.
    if std::process::id() != 1 {
        eprintln!("dsec-guest is the first program of a virtual machine");
        std::process::exit(2);
    }
    let error = match run() {
        Ok(never) => match never {},
        Err(error) => error,
    };
    // The console is the machine's log; the node reads its end when a machine does not come up.
    eprintln!("dsec-guest: {error}");
    let error = machine::restart();
    eprintln!("dsec-guest: restarting: {error}");
}

enum Never {}

fn run() -> Result<Never> {
    // 1. The kernel's own file systems, and what drives the devices.
    root::mount_kernel()?;
    load_modules()?;
    let plan = Plan::read(Path::new(PLAN))?;
    // 2. What must be at hand once the initramfs is out of reach.
    let agent = fs::read(AGENT).doing("read", AGENT)?;
    let agent = sealed_file(c"dsec-agent", &agent, 0o111).doing("keep", AGENT)?;
    let entrance = entrance(&plan)?;
    // 3. The root of the sandbox.
    root::make(&plan)?;
    root::enter()?;
    let cgroup = root::make_cgroups(plan.pids)?;
    loopback_up().doing("bring up", "the loopback device")?;
    if let Some(wanted) = &plan.network {
        network::set_up(wanted)?;
    }
    // 4. What all machines of the environment begin with.
    preload::run(
        &format!("{}/preload", root::CGROUP),
        &format!("{}/agent", root::CGROUP),
    )?;
    // 5. From here on this process is the agent, which serves nobody before it is told whom.
    Err(become_agent(agent, cgroup, &entrance))
}

/// How the agent is told where the host comes in: its arguments.
fn entrance(plan: &Plan) -> Result<Vec<CString>> {
    let words = match plan.vsock {
        Some(port) => vec!["--vsock".to_owned(), port.to_string()],
        None => {
            let shown = |path: PathBuf| path.display().to_string();
            let ports = [devices::port(DATA)?, devices::port(BELL)?].map(shown);
            [vec!["--ports".to_owned()], ports.to_vec()].concat()
        }
    };
    let word = |text: String| CString::new(text).map_err(|error| Error::new(error.to_string()));
    words.into_iter().map(word).collect()
}

/// In the order of the file: each after those that it needs.
fn load_modules() -> Result<()> {
    let order = fs::read_to_string(MODULES).doing("read", MODULES)?;
    for name in order.split_whitespace() {
        let path = format!("/modules/{name}");
        let file = File::open(&path).doing("open", &path)?;
        machine::load_module(file.as_fd()).doing("load", &path)?;
    }
    Ok(())
}

fn become_agent(agent: OwnedFd, cgroup: OwnedFd, entrance: &[CString]) -> Error {
    match hand_over(agent, cgroup, entrance) {
        Ok(never) => match never {},
        Err(error) => error,
    }
}

fn hand_over(agent: OwnedFd, cgroup: OwnedFd, entrance: &[CString]) -> Result<Never> {
    let config = AgentConfig {
        caps_exec: u64::MAX,
        spare: true,
        ..AgentConfig::default()
    };
    let config = encode(&config).map_err(|error| Error::new(error.to_string()))?;
    let config = sealed_file(c"config", &config, 0o400).doing("keep", "the configuration")?;
    let score = fs::OpenOptions::new()
        .write(true)
        .open("/proc/self/oom_score_adj")
        .doing("open", "the score for memory")?;
    let null = File::open("/dev/null").doing("open", "/dev/null")?;
    let console = fs::OpenOptions::new()
        .write(true)
        .open("/dev/console")
        .doing("open", "/dev/console")?;
    let kept = arrange(
        &[
            Some(null.as_fd()),
            Some(null.as_fd()),
            Some(console.as_fd()),
            None,
            Some(cgroup.as_fd()),
            Some(config.as_fd()),
            Some(score.as_fd()),
        ],
        &[agent.as_fd()],
    )
    .doing("arrange", "descriptors")?;
    let words: Vec<&CStr> = std::iter::once(c"dsec-agent")
        .chain(entrance.iter().map(CString::as_c_str))
        .collect();
    let error = match kept.first() {
        Some(agent) => run_file(agent.as_fd(), &words, &[]),
        None => return Err(Error::new("the agent's file was not kept".to_owned())),
    };
    Err(error).doing("become", "the agent")
}
