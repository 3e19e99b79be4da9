//! From an exec's record to a command with every decision made. Pure but for reading the image's accounts.

use std::collections::BTreeMap;
use std::ffi::CString;

use dsec_protocol::exec::Exec as ExecArgs;
use dsec_protocol::limits::{
    ARGV_BYTES_MAX, ARGV_ITEMS_MAX, ENV_ITEMS_MAX, EXEC_GRACE_S_MAX, EXEC_TIMEOUT_S_MAX,
    PATH_BYTES_MAX,
};
use dsec_sys::launch_child::{limit_number, Become, Command, LaunchFailure, Step};
use serde_bytes::ByteBuf;

use crate::refusal::Refusal;
use crate::setup::Own;
use crate::users::{Account, Database};
use dsec_protocol::opening::AgentConfig;

const PATH_DEFAULT: &[u8] = b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
const NAME_BYTES_MAX: usize = 64;

type Env = BTreeMap<ByteBuf, ByteBuf>;

/// What a command runs as and in: shared by execs and sessions.
pub struct Context<'a> {
    pub user: Option<&'a str>,
    pub cwd: Option<&'a [u8]>,
    pub env: &'a Env,
    pub terminal: bool,
}

pub enum Program<'a> {
    Argv(&'a [ByteBuf]),
    Shell(&'a [u8]),
}

/// Ids of execs and names of sessions become names of cgroups.
pub fn check_name(name: &str) -> Result<(), Refusal> {
    let fits = name.len() <= NAME_BYTES_MAX
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b));
    match fits {
        true => Ok(()),
        false => Err(Refusal::invalid(
            "a name is 1 to 64 of letters, digits, '.', '_' and '-', beginning with a letter or digit",
        )),
    }
}

pub fn check_exec(args: &ExecArgs) -> Result<(), Refusal> {
    check_name(&args.id)?;
    if args.argv.is_some() == args.shell.is_some() {
        return Err(Refusal::invalid("exactly one of argv and shell"));
    }
    let within = |value: f64, max: f64| value.is_finite() && (0.0..=max).contains(&value);
    if args
        .timeout_s
        .is_some_and(|t| !within(t, EXEC_TIMEOUT_S_MAX))
    {
        return Err(Refusal::invalid("timeout_s is out of range"));
    }
    if !within(args.grace_s, EXEC_GRACE_S_MAX) {
        return Err(Refusal::invalid("grace_s is out of range"));
    }
    if args.env.len() > ENV_ITEMS_MAX
        || args.argv.as_ref().map_or(0, Vec::len) > ARGV_ITEMS_MAX
        || argument_bytes(args) > ARGV_BYTES_MAX
    {
        return Err(Refusal::new(
            "argument_too_long",
            "argv and env are over their bounds",
        ));
    }
    match args.session {
        Some(_) => check_session_exec(args),
        None => Ok(()),
    }
}

/// A session has its own user, environment, directory and limits; only the text is the exec's.
fn check_session_exec(args: &ExecArgs) -> Result<(), Refusal> {
    let plain = args.shell.is_some()
        && args.cwd.is_none()
        && args.env.is_empty()
        && args.user.is_none()
        && !args.stdin
        && args.tty.is_none()
        && args.rlimits.is_empty();
    match plain {
        true => Ok(()),
        false => Err(Refusal::invalid(
            "an exec in a session has shell text only: no argv, cwd, env, user, stdin, tty or rlimits",
        )),
    }
}

fn argument_bytes(args: &ExecArgs) -> usize {
    let env: usize = args.env.iter().map(|(k, v)| k.len() + v.len() + 2).sum();
    let argv: usize = args.argv.iter().flatten().map(|a| a.len() + 1).sum();
    env + argv + args.shell.as_ref().map_or(0, Vec::len)
}

/// Of a program or directory in an error.
const SHOWN_CHARS_MAX: usize = 200;

/// The account a command runs as: asked for, configured, root, or who we are where we cannot be anybody else.
pub fn find_account(
    config: &AgentConfig,
    own: &Own,
    asked: Option<&str>,
) -> Result<Account, Refusal> {
    let own_number = own.uid.to_string();
    let fallback = match own.may_switch() {
        true => "root",
        false => own_number.as_str(),
    };
    let spec = asked.or(config.user.as_deref()).unwrap_or(fallback);
    let account = Database::read().find(spec)?;
    // Commands with the agent's own id could reach into it.
    if own.may_switch() && own.uid != 0 && account.uid == own.uid {
        return Err(Refusal::new("user_not_found", "this id is reserved"));
    }
    Ok(account)
}

pub fn plan_command(
    config: &AgentConfig,
    own: &Own,
    context: &Context<'_>,
    program: &Program<'_>,
) -> Result<Command, Refusal> {
    let account = find_account(config, own, context.user)?;
    let env = full_env(config, context, &account);
    let argv = match program {
        Program::Argv(argv) => argv.iter().map(|a| a.to_vec()).collect(),
        Program::Shell(text) => vec![shell_path(), b"-c".to_vec(), text.to_vec()],
    };
    let name = match argv.first() {
        Some(name) if !name.is_empty() => name.clone(),
        _ => return Err(Refusal::invalid("argv names no program")),
    };
    Ok(Command {
        programs: c_strings(candidates(&name, &env), "argv")?,
        argv: c_strings(argv, "argv")?,
        env: c_strings(env_strings(&env)?, "env")?,
        directories: c_strings(directories(config, context, &account)?, "cwd")?,
        identity: become_account(config, own, &account),
        limits: vec![(
            limit_number("nofile").unwrap_or_default(),
            own.nofile.0,
            own.nofile.1,
        )],
        terminal: context.terminal,
        no_new_privs: config.no_new_privs,
        filter: config.filter_exec.clone(),
        ..Command::default()
    })
}

pub fn add_limits(command: &mut Command, limits: &BTreeMap<String, u64>) -> Result<(), Refusal> {
    for (name, value) in limits {
        let number = limit_number(name)
            .ok_or_else(|| Refusal::invalid(format!("there is no limit {name:?}")))?;
        // No core file, and at 1 alone no crash handler of the host: a limit of 0 keeps nothing from a pipe (core(5)).
        let value = match number {
            libc::RLIMIT_CORE => (*value).max(1),
            _ => *value,
        };
        command.limits.retain(|(known, _, _)| *known != number);
        command.limits.push((number, value, value));
    }
    Ok(())
}

/// The shell of `shell` execs and of sessions.
pub fn shell_path() -> Vec<u8> {
    match std::fs::metadata("/bin/bash") {
        Ok(facts) if facts.is_file() => b"/bin/bash".to_vec(),
        _ => b"/bin/sh".to_vec(),
    }
}

/// What a start that failed is called on the wire.
pub fn refuse_launch(failure: &LaunchFailure, command: &Command) -> Refusal {
    let error = &failure.error;
    let number = error.raw_os_error().unwrap_or(0);
    let code = match (failure.step, number) {
        (Step::Execute, libc::ENOENT | libc::ENOTDIR | libc::ENAMETOOLONG) => "command_not_found",
        (Step::Execute, libc::E2BIG) => "argument_too_long",
        (Step::Execute, libc::EACCES | libc::ENOEXEC | libc::EISDIR | libc::ELOOP) => {
            "not_executable"
        }
        (Step::Directory, _) => "cwd_not_found",
        (Step::Limits, _) => "rlimit_refused",
        _ => "spawn_failed",
    };
    let shown = |what: Option<&CString>| {
        let text = String::from_utf8_lossy(what.map_or(b"", |text| text.to_bytes())).into_owned();
        text.chars().take(SHOWN_CHARS_MAX).collect::<String>()
    };
    let what = match failure.step {
        Step::Execute => format!("cannot run {:?}", shown(command.argv.first())),
        Step::Directory => format!("cannot enter {:?}", shown(command.directories.first())),
        Step::Limits => "cannot set the limits asked for".to_owned(),
        step => format!("cannot start a process: step {step:?}"),
    };
    Refusal::system(code, what, error)
}

fn become_account(config: &AgentConfig, own: &Own, account: &Account) -> Option<Become> {
    if !own.may_switch() && account.uid == own.uid {
        return None;
    }
    Some(Become {
        uid: account.uid,
        gid: account.gid,
        groups: account.groups.clone(),
        capabilities: match account.uid {
            0 => config.caps_exec,
            _ => 0,
        },
        drop_bounding: own.drop_bounding,
    })
}

fn full_env(config: &AgentConfig, context: &Context<'_>, account: &Account) -> Env {
    let mut env = config.env.clone();
    let mut default = |key: &str, value: &[u8]| {
        let key = ByteBuf::from(key.as_bytes());
        env.entry(key).or_insert_with(|| ByteBuf::from(value));
    };
    let number = account.uid.to_string();
    let name = match account.uid {
        0 => account.name.as_deref().unwrap_or(b"root"),
        _ => account.name.as_deref().unwrap_or(number.as_bytes()),
    };
    default("HOME", account.home.as_deref().unwrap_or(b"/"));
    default("USER", name);
    default("LOGNAME", name);
    default("SHELL", account.shell.as_deref().unwrap_or(b"/bin/sh"));
    default("PATH", PATH_DEFAULT);
    if context.terminal {
        default("TERM", b"xterm-256color");
    }
    env.extend(context.env.iter().map(|(k, v)| (k.clone(), v.clone())));
    env
}

fn env_strings(env: &Env) -> Result<Vec<Vec<u8>>, Refusal> {
    env.iter()
        .map(|(key, value)| {
            if key.is_empty() || key.contains(&b'=') {
                return Err(Refusal::invalid("a variable's name is empty or holds '='"));
            }
            Ok([key.as_slice(), b"=", value.as_slice()].concat())
        })
        .collect()
}

/// As execvp: a name with a slash is a path, any other is looked for in PATH.
fn candidates(name: &[u8], env: &Env) -> Vec<Vec<u8>> {
    if name.contains(&b'/') {
        return vec![name.to_vec()];
    }
    let path = env
        .get(serde_bytes::Bytes::new(b"PATH"))
        .map_or(PATH_DEFAULT, |path| path.as_slice());
    path.split(|b| *b == b':')
        .map(|directory| match directory {
            b"" => [b"./", name].concat(),
            _ => [directory, b"/", name].concat(),
        })
        .collect()
}

fn directories(
    config: &AgentConfig,
    context: &Context<'_>,
    account: &Account,
) -> Result<Vec<Vec<u8>>, Refusal> {
    if let Some(cwd) = context.cwd {
        if !cwd.starts_with(b"/") || cwd.len() > PATH_BYTES_MAX {
            return Err(Refusal::invalid("cwd is not an absolute path"));
        }
        return Ok(vec![cwd.to_vec()]);
    }
    if let Some(workdir) = &config.workdir {
        return Ok(vec![workdir.clone()]);
    }
    let mut list: Vec<Vec<u8>> = account.home.iter().cloned().collect();
    list.push(b"/".to_vec());
    Ok(list)
}

fn c_strings(list: Vec<Vec<u8>>, what: &str) -> Result<Vec<CString>, Refusal> {
    list.into_iter()
        .map(CString::new)
        .collect::<Result<_, _>>()
        .map_err(|_| Refusal::invalid(format!("{what} holds a zero byte")))
}
