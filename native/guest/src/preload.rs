//! What an environment wants to be there already when its machines begin: a program of its own, run once before the machine is
//! saved as the template of all others. What it leaves running, and what it has read, each of them begins with.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use dsec_sys::failure::{Doing, Error, Result};

const PROGRAM: &str = "/etc/dsec/preload";
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Where machines are emulated, an interpreter with its modules takes ten seconds.
const WAIT: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// `cgroup` is a directory beside that of commands. An environment without the program is fine.
pub fn run(cgroup: &str, own: &str) -> Result<()> {
    let program = Path::new(PROGRAM);
    match fs::metadata(program) {
        Ok(found) if found.is_file() && found.permissions().mode() & 0o111 != 0 => {}
        _ => return Ok(()),
    }
    fs::create_dir(cgroup).doing("make", cgroup)?;
    enter(cgroup)?;
    let started = start(program);
    enter(own)?;
    let status = wait(started?)?;
    match status.success() {
        true => Ok(()),
        false => Err(Error::new(format!("{PROGRAM} failed: {status}"))),
    }
}

/// What is started next is there from its first moment on.
fn enter(cgroup: &str) -> Result<()> {
    fs::write(format!("{cgroup}/cgroup.procs"), "0").doing("enter", cgroup)
}

fn start(program: &Path) -> Result<Child> {
    Command::new(program)
        .env_clear()
        .env("PATH", PATH)
        .env("HOME", "/root")
        .current_dir("/")
        .stdin(Stdio::null())
        .process_group(0)
        .spawn()
        .doing("start", PROGRAM)
}

fn wait(mut child: Child) -> Result<ExitStatus> {
    let until = Instant::now() + WAIT;
    loop {
        if let Some(status) = child.try_wait().doing("wait for", PROGRAM)? {
            return Ok(status);
        }
        if Instant::now() > until {
            // The machine ends, and all that runs in it.
            return Err(Error::new(format!(
                "{PROGRAM} did not end within {} s",
                WAIT.as_secs()
            )));
        }
        std::thread::sleep(LOOK_EVERY);
    }
}
