//! `dsec-jail`: confines a virtual machine monitor and becomes it. The plan comes by standard input (docs/internals/vm.md).
//!
//! A monitor is the wall between a guest and the host, and it is large: what a guest that has broken through it finds is a user id of
//! its own without a right, a network namespace with nothing in it, a handful of files, and the limits of its sandbox.

mod place;
mod plan;

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::Read;
use std::os::fd::AsFd;
use std::process::ExitCode;

use dsec_protocol::codec::decode;
use dsec_sys::identity::{
    bound_capabilities, clear_groups, last_capability, no_new_privileges, resource, set_group_ids,
    set_limit, set_user_ids,
};
use dsec_sys::namespaces::{new_session, unshare, NEW_IPC, NEW_MOUNT, NEW_NET, NEW_UTS};
use dsec_sys::process::set_umask;
use dsec_sys::sealed::{arrange, run_file};
use dsec_sys::taps::make_tap;

use dsec_sys::failure::{Doing, Error, Result};
use plan::Plan;

const PLAN_BYTES_MAX: u64 = 1 << 20;

fn main() -> ExitCode {
    let error = match run() {
        Ok(never) => match never {},
        Err(error) => error,
    };
    eprintln!("dsec-jail: {error}");
    ExitCode::FAILURE
}

enum Never {}

fn run() -> Result<Never> {
    let plan = read_plan()?;
    // What is made here is for another user to look at.
    set_umask(0o022);
    // 1. Before anything else is used: who pays for it.
    for file in &plan.cgroups {
        std::fs::write(file, "0").doing("enter", file)?;
    }
    // A monitor that was started from a terminal would end with it. One that leads a group already is a service's.
    let _ = new_session();
    // 2. What it can see.
    let null = File::open("/dev/null").doing("open", "/dev/null")?;
    unshare(NEW_MOUNT | NEW_NET | NEW_IPC | NEW_UTS).doing("make", "namespaces")?;
    if let Some(tap) = &plan.tap {
        let (address, peer) = tap
            .addresses()
            .ok_or_else(|| Error::new("the device of the plan has strange addresses".into()))?;
        make_tap(&tap.name, plan.uid, (address, tap.prefix), peer)
            .doing("make the network device", &tap.name)?;
    }
    place::make(&plan)?;
    // 3. Who it is.
    for (name, limit) in &plan.limits {
        let number = resource(name).ok_or_else(|| Error::new(format!("no limit {name:?}")))?;
        set_limit(number, *limit, *limit).doing("set the limit", name)?;
    }
    bound_capabilities(0, last_capability()).doing("give up", "capabilities")?;
    clear_groups().doing("leave", "groups")?;
    set_group_ids(Some(plan.gid), Some(plan.gid), Some(plan.gid)).doing("become", "the group")?;
    set_user_ids(Some(plan.uid), Some(plan.uid), Some(plan.uid)).doing("become", "the user")?;
    no_new_privileges().doing("give up", "new privileges")?;
    // 4. From here on it is the monitor.
    become_program(&plan, &null)
}

fn read_plan() -> Result<Plan> {
    let mut bytes = Vec::new();
    std::io::stdin()
        .lock()
        .take(PLAN_BYTES_MAX)
        .read_to_end(&mut bytes)
        .doing("read", "the plan")?;
    let plan: Plan = decode(&bytes).map_err(|error| Error::new(error.to_string()))?;
    match plan.uid > 0 && plan.gid > 0 && !plan.argv.is_empty() {
        true => Ok(plan),
        false => Err(Error::new("the plan names root, or no program".into())),
    }
}

fn become_program(plan: &Plan, null: &File) -> Result<Never> {
    let words = |list: &[serde_bytes::ByteBuf]| -> Result<Vec<CString>> {
        list.iter()
            .map(|word| CString::new(word.to_vec()).map_err(|e| Error::new(e.to_string())))
            .collect()
    };
    let (argv, env) = (words(&plan.argv)?, words(&plan.env)?);
    let argv: Vec<&CStr> = argv.iter().map(CString::as_c_str).collect();
    let env: Vec<&CStr> = env.iter().map(CString::as_c_str).collect();
    let path = argv.first().map(|path| path.to_string_lossy().into_owned());
    let path = path.unwrap_or_default();
    let program = File::open(&path).doing("open", &path)?;
    let (out, err) = (std::io::stdout(), std::io::stderr());
    let kept = arrange(
        &[Some(null.as_fd()), Some(out.as_fd()), Some(err.as_fd())],
        &[program.as_fd()],
    )
    .doing("arrange", "descriptors")?;
    let program = kept
        .first()
        .ok_or_else(|| Error::new("the program's file was not kept".into()))?;
    Err(run_file(program.as_fd(), &argv, &env)).doing("become", &path)
}
