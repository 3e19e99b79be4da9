//! What the first command of a sandbox would wait for is done once in a spare, before it is anybody's.

use std::collections::BTreeMap;
use std::os::fd::AsRawFd;
use std::sync::atomic::AtomicI32;

use dsec_sys::launch_child::launch;
use dsec_sys::process::kill;
use dsec_sys::signals::KILL;
use serde_bytes::ByteBuf;

use super::plan::{plan_command, Context, Program};
use crate::agent::Agent;
use crate::share::processors_of_command;

const NAME: &str = "trial";
/// No program, whatever the image has: a start of it comes as far as a start can, and runs nothing.
const DIRECTORY: &[u8] = b"/";
/// Nearly every program begins with some of these; who looks them up first in a new tree waits for it.
const OFTEN: [&str; 5] = [
    "/bin/sh",
    "/usr/bin/env",
    "/etc/ld.so.cache",
    "/lib64/ld-linux-x86-64.so.2",
    "/lib/x86_64-linux-gnu/libc.so.6",
];

impl Agent {
    /// Starts what cannot be started. Whatever else fails here fails again for whoever gets the spare, and they are told.
    pub fn try_out(&mut self) {
        for path in OFTEN {
            let _ = std::fs::metadata(path);
        }
        let context = Context {
            user: None,
            cwd: None,
            env: &BTreeMap::new(),
            terminal: false,
        };
        let argv = [ByteBuf::from(DIRECTORY)];
        let program = Program::Argv(&argv);
        let Ok(mut command) = plan_command(&self.config, &self.own, &context, &program) else {
            return;
        };
        command.processors = processors_of_command();
        command.score = self.score.descriptor();
        let made = self.work.as_mut().map(|work| work.create(NAME)).transpose();
        let Ok(made) = made else {
            return;
        };
        command.cgroup = made.as_ref().map(|(_, directory)| directory.as_raw_fd());
        let pid = AtomicI32::new(0);
        let started = self
            .score
            .around(|| launch(&command, self.own.permitted, &pid));
        if let Ok(pid) = started {
            let _ = kill(pid, KILL);
        }
        if let (Some(work), Some((cgroup, _))) = (&mut self.work, made) {
            work.remove(cgroup);
        }
    }
}
