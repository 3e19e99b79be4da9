//! `dsec-agent`: runs inside a sandbox and does what the node asks (docs/internals/protocol.md).

mod acting;
mod agent;
mod cgroup;
mod connect;
mod dispatch;
mod door;
mod exec;
mod files;
mod link;
mod machine;
mod processes;
mod refusal;
mod session;
mod setup;
mod share;
mod streams;
mod timers;
mod token;
mod users;
mod watch;

use std::process::ExitCode;

use refusal::AgentError;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("dsec-agent: {error}");
            match error {
                AgentError::Usage => ExitCode::from(2),
                _ => ExitCode::FAILURE,
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
