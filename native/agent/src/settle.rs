//! What a light sandbox begins without: network and ipc namespaces of its own, message queues and terminals. An idle one is
//! spared half of its memory by that (docs/internals/density.md).

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;

use dsec_protocol::opening::Light;
use dsec_sys::machine::{mount, NO_DEVICES, NO_EXEC, NO_SUID};
use dsec_sys::namespaces::{unshare, NEW_IPC, NEW_NET};
use dsec_sys::rights::{as_root, give_up, CAP_NET_ADMIN, CAP_SYS_ADMIN};
use dsec_sys::rooted::{c_path, open_in_root, WRITE_ONLY};
use dsec_sys::seqpacket::loopback_up;

use crate::agent::Agent;
use crate::refusal::Refusal;

/// Held for this alone, and by no command.
const RIGHTS: u64 = CAP_NET_ADMIN | CAP_SYS_ADMIN;

type Failure = (&'static str, io::Error);

/// What is still to be made, and /proc/sys as it can be written.
pub struct LeftOut {
    what: Light,
    settings: OwnedFd,
    have_terminals: bool,
}

impl Agent {
    /// Makes all of it before the first operation that could see or use it. What fails here is tried again by the next one.
    pub fn settle(&mut self) -> Result<(), Refusal> {
        let Some(left_out) = &mut self.left_out else {
            return Ok(());
        };
        // As root, who would own what is in there had the launcher made it.
        as_root(|| left_out.make())
            .map_err(doing("becoming root"))
            .and_then(|made| made)
            .map_err(|(doing, error)| Refusal::system("spawn_failed", doing, &error))?;
        if give_up(RIGHTS).is_err() {
            // Nothing may ever run beside an agent that has them.
            std::process::abort();
        }
        self.own.permitted &= !RIGHTS;
        self.left_out = None;
        Ok(())
    }
}

impl LeftOut {
    pub fn new(what: Light, settings: OwnedFd) -> LeftOut {
        LeftOut {
            what,
            settings,
            have_terminals: false,
        }
    }

    /// Namespaces that an earlier attempt has made are left for new ones.
    fn make(&mut self) -> Result<(), Failure> {
        unshare(NEW_NET | NEW_IPC).map_err(doing("making namespaces"))?;
        loopback_up().map_err(doing("bringing up the loopback device"))?;
        self.set()
            .map_err(doing("setting bounds of the ipc namespace"))?;
        // Nothing of the sandbox has run yet: both places are as the launcher has made them.
        if !self.have_terminals {
            let flags = NO_SUID | NO_EXEC;
            put(c"devpts", c"/dev/pts", flags, &self.what.terminals)
                .map_err(doing("mounting /dev/pts"))?;
            self.have_terminals = true;
        }
        // The last one, so that it is not there when there is a next attempt.
        let flags = NO_SUID | NO_DEVICES | NO_EXEC;
        put(c"mqueue", c"/dev/mqueue", flags, "").map_err(doing("mounting /dev/mqueue"))
    }

    fn set(&self) -> io::Result<()> {
        self.what.settings.iter().try_for_each(|(path, value)| {
            let path = c_path(path.as_bytes())?;
            let file = open_in_root(&self.settings, &path, WRITE_ONLY, 0)?;
            File::from(file).write_all(value.as_bytes())
        })
    }
}

fn doing(what: &'static str) -> impl FnOnce(io::Error) -> Failure {
    move |error| (what, error)
}

fn put(kind: &CStr, place: &CStr, flags: u64, options: &str) -> io::Result<()> {
    mount(kind, c"none", place, flags, &CString::new(options)?)
}
