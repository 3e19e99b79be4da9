//! The steps of a launch, by name, and what each needs.

pub mod cgroups;
pub mod check;
pub mod inside;
pub mod light;
pub mod root;
pub mod state;
pub mod view;
pub mod volumes;

use std::collections::BTreeMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::Instant;

use dsec_sys::namespaces::exit_now;
use dsec_sys::processors::ProcessorSet;
use dsec_sys::seccomp::Instruction;

use crate::error::{Error, Result};
use crate::view::Shown;
use crate::wire::LaunchPlan;

/// One step. The names are those of `LaunchFailure.step` and `steps_us`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Step {
    Check,
    Cgroups,
    Directories,
    Socket,
    Clone,
    CgroupsV1,
    Maps,
    Overlay,
    Volumes,
    Binds,
    Etc,
    Proc,
    Masks,
    Ids,
    CgroupNs,
    Network,
    Mounts,
    Sysctls,
    View,
    Root,
    Rlimits,
    Capabilities,
    Seccomp,
    Agent,
}

const STEPS: [(Step, &str); 24] = [
    (Step::Check, "check"),
    (Step::Cgroups, "cgroups"),
    (Step::Directories, "directories"),
    (Step::Socket, "socket"),
    (Step::Clone, "clone"),
    (Step::CgroupsV1, "cgroups_v1"),
    (Step::Maps, "maps"),
    (Step::Overlay, "overlay"),
    (Step::Volumes, "volumes"),
    (Step::Binds, "binds"),
    (Step::Etc, "etc"),
    (Step::Proc, "proc"),
    (Step::Masks, "masks"),
    (Step::Ids, "ids"),
    (Step::CgroupNs, "cgroupns"),
    (Step::Network, "network"),
    (Step::Mounts, "mounts"),
    (Step::Sysctls, "sysctls"),
    (Step::View, "view"),
    (Step::Root, "root"),
    (Step::Rlimits, "rlimits"),
    (Step::Capabilities, "capabilities"),
    (Step::Seccomp, "seccomp"),
    (Step::Agent, "agent"),
];

impl Step {
    pub fn name(self) -> &'static str {
        STEPS[self as usize].1
    }

    pub fn from_number(number: u8) -> Option<Step> {
        STEPS.get(usize::from(number)).map(|entry| entry.0)
    }
}

/// What a launch needs besides its plan: made once for the whole daemon, or looked up for this plan.
pub struct Job<'a> {
    pub plan: &'a LaunchPlan,
    /// The namespace with the host's tree and the layers, in which the launch begins.
    pub host_mounts: &'a OwnedFd,
    /// The namespace with next to nothing, from which the sandbox's is copied.
    pub bare_mounts: &'a OwnedFd,
    /// The kernel wants layers by name: see `root::takes_detached_layers`.
    pub layers_by_name: bool,
    /// The sealed agent.
    pub agent: &'a OwnedFd,
    /// Mount points of the layers, the lowest first, the skeleton before all.
    pub lowers: Vec<PathBuf>,
    pub filter_agent: Option<&'a [Instruction]>,
    /// Where the sysfs of all sandboxes is mounted, with this plan's masks.
    pub sysfs: PathBuf,
    /// Where a light sandbox begins.
    pub lobby: Lobby<'a>,
    /// Where processes of ours may run, once they are not kept apart.
    pub processors: ProcessorSet,
    /// What is bound over the kernel's files that tell of the machine.
    pub view: Shown,
    /// The agent's configuration, encoded.
    pub config: Vec<u8>,
    /// The test hook: this step fails.
    pub fail_step: Option<String>,
}

/// Namespaces that hold nothing, of all sandboxes that have none of their own yet.
#[derive(Clone, Copy)]
pub struct Lobby<'a> {
    pub network: BorrowedFd<'a>,
    pub ipc: BorrowedFd<'a>,
}

/// Which step is going on, since when, and how long those before took.
pub struct Clock {
    step: Step,
    since: Instant,
    pub spent_us: BTreeMap<&'static str, u64>,
    fail_step: Option<String>,
}

impl Clock {
    pub fn start(fail_step: Option<String>) -> Clock {
        Clock {
            step: Step::Check,
            since: Instant::now(),
            spent_us: BTreeMap::new(),
            fail_step,
        }
    }

    /// The step that is going on.
    pub fn step(&self) -> Step {
        self.step
    }

    /// Begins `step`, ending the one before. An error when the test hook wants it to fail, the end
    /// of this process when it wants that (`die:<step>`).
    pub fn begin(&mut self, step: Step) -> Result<()> {
        self.end();
        self.step = step;
        match &self.fail_step {
            Some(name) if name == step.name() => Err(Error::Hook),
            Some(name) if name.strip_prefix("die:") == Some(step.name()) => exit_now(1),
            _ => Ok(()),
        }
    }

    pub fn end(&mut self) {
        let now = Instant::now();
        *self.spent_us.entry(self.step.name()).or_default() +=
            (now - self.since).as_micros() as u64;
        self.since = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_step_has_its_name_at_its_place() {
        for (index, (step, name)) in STEPS.iter().enumerate() {
            assert_eq!(*step as usize, index);
            assert_eq!(step.name(), *name);
            assert_eq!(Step::from_number(index as u8), Some(*step));
        }
        assert_eq!(Step::from_number(STEPS.len() as u8), None);
    }
}
