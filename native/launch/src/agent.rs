//! The agent's program: one sealed copy for the whole daemon, and what each agent is told.

use std::ffi::CStr;
use std::os::fd::OwnedFd;
use std::path::Path;

use dsec_protocol::opening::AgentConfig;
use dsec_sys::sealed::sealed_file;
use sha2::{Digest, Sha256};

use crate::error::{Doing, Error, Result};
use crate::steps::light;
use crate::wire::LaunchPlan;

const NAME: &CStr = c"dsec-agent";
/// Anything larger is not the agent, and would be kept in memory.
const AGENT_BYTES_MAX: u64 = 64 << 20;

pub struct Agent {
    /// Owned by the host's root and executable only: a process that runs it can be neither read nor traced from inside,
    /// whatever its rights there (PR_SET_DUMPABLE alone does not achieve that).
    pub file: OwnedFd,
    pub digest: String,
}

impl Agent {
    pub fn load(path: &Path) -> Result<Agent> {
        let length = std::fs::metadata(path).doing_to("look at", path)?.len();
        if length > AGENT_BYTES_MAX {
            return Err(Error::Invalid(format!(
                "{}: {length} bytes, {AGENT_BYTES_MAX} at most",
                path.display()
            )));
        }
        let bytes = std::fs::read(path).doing_to("read", path)?;
        if !bytes.starts_with(b"\x7fELF") {
            return Err(Error::Invalid(format!(
                "{} is not a program",
                path.display()
            )));
        }
        let file = sealed_file(NAME, &bytes, 0o111).doing("make", "the sealed agent")?;
        Ok(Agent {
            file,
            digest: sha256_hex(&bytes),
        })
    }
}

pub fn sha256_hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// What the agent of this plan is told, encoded. `filter_exec` is the compiled filter of its commands.
pub fn config(plan: &LaunchPlan, filter_exec: Vec<u8>) -> Result<Vec<u8>> {
    let config = AgentConfig {
        sandbox: match plan.named.is_empty() {
            true => plan.sandbox.clone(),
            false => plan.named.clone(),
        },
        env: plan.env.clone(),
        user: plan.user.clone(),
        workdir: plan.workdir.as_ref().map(|path| path.to_vec()),
        caps_exec: plan.caps_exec,
        filter_exec,
        no_new_privs: plan.no_new_privs,
        nofile: plan.nofile,
        spare: plan.spare,
        light: plan.light.then(|| light::left_out(plan)),
    };
    crate::wire::encode(&config)
}
