//! `dsec-agent`: runs inside a sandbox and does what the node asks (docs/internals/protocol.md).

// The standard library's own start reads /proc/self/maps and makes a second stack, to put a message to an overflow of the
// first one: for an agent, which starts at each create, only work.
#![cfg_attr(not(test), no_main)]

mod acting;
mod agent;
mod cgroup;
mod connect;
mod dispatch;
mod door;
mod exec;
mod files;
mod link;
mod listen;
mod machine;
mod processes;
mod refusal;
mod session;
mod settle;
mod setup;
mod share;
mod streams;
mod timers;
mod token;
mod users;
mod watch;

use refusal::AgentError;

#[cfg_attr(not(test), no_mangle)]
pub extern "C" fn main() -> i32 {
    match run() {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("dsec-agent: {error}");
            match error {
                AgentError::Usage => 2,
                _ => 1,
            }
        }
    }
}

fn run() -> Result<(), AgentError> {
    // 1. Nothing odd is inherited: dispositions, umask, an allocator that gives memory back.
    dsec_sys::memory::keep_heap_small();
    dsec_sys::signals::default_dispositions();
    dsec_sys::process::set_umask(0o022);
    // 2. What the starter hands over.
    let setup = setup::read_setup()?;
    // 3. Serve until told to shut down.
    agent::Agent::new(setup)?.run()
}
