//! What a light sandbox begins without, and what its agent needs to make it later: see the agent's `settle`.

use std::ffi::CStr;

use dsec_protocol::opening::Light;

use crate::wire::LaunchPlan;

const CAP_NET_ADMIN: u64 = 1 << 12;
const CAP_SYS_ADMIN: u64 = 1 << 21;
/// With these the agent of a light sandbox makes the rest, and then gives them up for good.
pub const CAPS_TO_SETTLE: u64 = CAP_NET_ADMIN | CAP_SYS_ADMIN;
/// Kernel settings that each ipc namespace has begin so.
const OF_IPC: [&str; 4] = ["kernel.shm", "kernel.msg", "kernel.sem", "fs.mqueue."];
/// Of devpts.
pub const TERMINALS: [(&CStr, &str); 4] = [
    (c"ptmxmode", "0666"),
    (c"mode", "0620"),
    (c"gid", "5"),
    // Of one sandbox. The host has 4,096 for everybody, of which it keeps 1,024 to itself.
    (c"max", "256"),
];

/// What the agent of a light sandbox is told to make.
pub fn left_out(plan: &LaunchPlan) -> Light {
    let terminals = TERMINALS.map(|(key, value)| format!("{}={value}", key.to_string_lossy()));
    let settings = plan.sysctls.iter().filter(|(name, _)| is_of_ipc(name));
    Light {
        terminals: terminals.join(","),
        settings: settings
            .map(|(name, value)| (name.replace('.', "/"), value.clone()))
            .collect(),
    }
}

pub fn is_of_ipc(name: &str) -> bool {
    OF_IPC.iter().any(|start| name.starts_with(start))
}

/// What execve leaves to the agent.
pub fn caps_agent(plan: &LaunchPlan) -> u64 {
    match plan.light {
        true => plan.caps_agent | CAPS_TO_SETTLE,
        false => plan.caps_agent,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_out_is_told_to_the_agent() {
        let mut plan = crate::fake::plan();
        let other = ("user.max_user_namespaces".to_string(), "0".to_string());
        plan.sysctls.extend([other]);

        let light = left_out(&plan);

        assert_eq!(light.terminals, "ptmxmode=0666,mode=0620,gid=5,max=256");
        let settings: Vec<_> = light.settings.into_iter().collect();
        assert_eq!(settings, [("kernel/shmmni".into(), "1".into())]);
    }
}
