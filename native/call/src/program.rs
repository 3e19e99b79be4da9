//! One program of a call, from its start to the end of the last of its processes.

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicI32;
use std::time::{Duration, Instant};

use dsec_sys::launch_child::{launch, Become, Command};
use dsec_sys::namespaces::open_process;
use dsec_sys::pipes::{new_pipe, set_nonblocking};
use dsec_sys::process::{reap_one, Ended, Reaped};
use dsec_sys::rooted::c_path;
use dsec_sys::sealed::sealed_file;
use dsec_sys::seqpacket::{wait_ready, Interest};
use dsec_sys::signals::KILL;

use crate::interpreter::Interpreter;
use crate::leftovers;
use crate::output::Output;
use crate::places::{Place, Places};
use crate::wire::{Ran, Run, Text, Why};

const SCRATCH_BYTES: usize = 64 << 10;
const OPEN_FILES: u64 = 4_096;
/// Of the processes' own accounts, which are read while a program runs into its limit.
const CPU_STEP: Duration = Duration::from_millis(25);
const TICK_MS: u64 = 10;

/// What is there to wait for, and what ends it.
enum Leader<'a> {
    Own { pid: i32, end: OwnedFd },
    Forked { of: &'a mut Interpreter },
}

/// What is known of the processes by the time they have ended.
#[derive(Default)]
struct Account {
    ended: Option<Ended>,
    cpu_us: u64,
    rss_bytes: u64,
}

pub fn run(places: &Places, interpreter: Option<&mut Interpreter>, run: &Run) -> io::Result<Ran> {
    let place = places.get(run.place)?;
    let known = interpreter.as_ref().map(|it| it.pid());
    let stdin = sealed_file(c"stdin", &run.stdin, 0o444)?;
    let (out, err) = (new_pipe()?, new_pipe()?);
    set_nonblocking(&out.read)?;
    set_nonblocking(&err.read)?;
    let standard = [&stdin, &out.write, &err.write];
    let mut began = Instant::now();
    let started = match (run.warm, interpreter) {
        (true, Some(interpreter)) => interpreter.ready().and_then(|pid| {
            // Until now it was made ready: that is not the call's time.
            began = Instant::now();
            fork(place, run, interpreter, pid, standard)
        }),
        (true, None) => Err(io::Error::other("no interpreter is up")),
        (false, _) => start(place, run, standard),
    };
    drop((out.write, err.write, stdin));
    let mut leader = match started {
        Ok(leader) => leader,
        // Nothing that the code or the environment could help.
        Err(error) if run.warm => return Ok(not_started(Why::Lost, &error)),
        Err(error) => return Ok(not_started(Why::Start, &error)),
    };
    let mut output = [
        Output::new(out.read, run.output_bytes),
        Output::new(err.read, run.output_bytes),
    ];
    let mut why = watch(&leader, &mut output, place.uid, run, began)?;
    let wall_us = began.elapsed().as_micros() as u64;
    let account = end(&mut leader, place.uid, known)?;
    let mut scratch = vec![0; SCRATCH_BYTES];
    for stream in &mut output {
        stream.take(&mut scratch);
    }
    if why == Why::Ended {
        why = verdict(&account, &output, run);
    }
    let [out, err] = output.map(|stream| stream.bytes);
    let (code, signal) = match account.ended {
        Some(Ended::Exited(code)) => (Some(code), None),
        Some(Ended::Signaled(signal)) => (None, Some(signal)),
        None => (None, Some(KILL)),
    };
    Ok(Ran {
        why,
        code,
        signal,
        out,
        err,
        wall_us,
        cpu_us: account.cpu_us,
        rss_bytes: account.rss_bytes,
        detail: String::new(),
    })
}

fn not_started(why: Why, error: &io::Error) -> Ran {
    Ran {
        why,
        code: None,
        signal: None,
        out: Vec::new(),
        err: Vec::new(),
        wall_us: 0,
        cpu_us: 0,
        rss_bytes: 0,
        detail: error.to_string(),
    }
}

fn start<'a>(place: &Place, run: &Run, standard: [&OwnedFd; 3]) -> io::Result<Leader<'a>> {
    let command = Command {
        programs: programs_of(&run.argv, &run.env)?,
        argv: run
            .argv
            .iter()
            .map(|word| c_path(word))
            .collect::<io::Result<_>>()?,
        env: environment(place, run)?,
        directories: vec![c_path(place.directory.as_os_str().as_encoded_bytes())?],
        identity: Some(Become {
            uid: place.uid,
            gid: place.uid,
            groups: Vec::new(),
            capabilities: 0,
            drop_bounding: 0,
        }),
        limits: limits_of(run),
        descriptors: standard
            .iter()
            .zip(0..)
            .map(|(fd, number)| (fd.as_raw_fd(), number))
            .collect(),
        no_new_privs: true,
        ..Command::default()
    };
    let pid = launch(&command, 0, &AtomicI32::new(0)).map_err(|failure| {
        let word = run.argv.first().map_or_else(String::new, |word| {
            String::from_utf8_lossy(word).into_owned()
        });
        io::Error::new(failure.error.kind(), format!("{word}: {}", failure.error))
    })?;
    goes_first(pid);
    let end = open_process(pid)?;
    Ok(Leader::Own { pid, end })
}

/// When memory is short, what calls run goes before what runs them.
fn goes_first(pid: i32) {
    let _ = fs::write(format!("/proc/{pid}/oom_score_adj"), "1000");
}

fn fork<'a>(
    place: &Place,
    run: &Run,
    interpreter: &'a mut Interpreter,
    pid: i32,
    standard: [&OwnedFd; 3],
) -> io::Result<Leader<'a>> {
    let texts = |words: &[Text]| -> String {
        let words: Vec<String> = words.iter().map(|word| json_string(word)).collect();
        format!("[{}]", words.join(","))
    };
    let limits: Vec<String> = limits_of(run)
        .iter()
        .map(|(resource, soft, hard)| format!("[{resource},{soft},{hard}]"))
        .collect();
    let environment: Vec<Text> = environment(place, run)?
        .into_iter()
        .map(|word| Text::from(word.into_bytes()))
        .collect();
    let what = format!(
        r#"{{"pid":{pid},"uid":{},"directory":{},"argv":{},"env":{},"limits":[{}]}}"#,
        place.uid,
        json_string(place.directory.as_os_str().as_encoded_bytes()),
        texts(&run.argv),
        texts(&environment),
        limits.join(","),
    );
    interpreter.run(&what, standard)?;
    Ok(Leader::Forked { of: interpreter })
}

fn environment(place: &Place, run: &Run) -> io::Result<Vec<CString>> {
    let directory = place.directory.as_os_str().as_encoded_bytes();
    let mut words: Vec<CString> = run
        .env
        .iter()
        .map(|word| c_path(word))
        .collect::<io::Result<_>>()?;
    for name in [&b"HOME="[..], b"TMPDIR=", b"PWD="] {
        if !words.iter().any(|word| word.as_bytes().starts_with(name)) {
            words.push(c_path(&[name, directory].concat())?);
        }
    }
    Ok(words)
}

fn limits_of(run: &Run) -> Vec<(u32, u64, u64)> {
    let mut limits = vec![
        (libc::RLIMIT_CORE, 1, 1),
        (libc::RLIMIT_NOFILE, OPEN_FILES, OPEN_FILES),
        (libc::RLIMIT_NPROC, run.pids, run.pids),
        (libc::RLIMIT_FSIZE, run.file_bytes, run.file_bytes),
    ];
    if run.cpu_ms > 0 {
        // A backstop: in whole seconds, of each process for itself.
        let seconds = run.cpu_ms.div_ceil(1000) + 1;
        limits.push((libc::RLIMIT_CPU, seconds, seconds));
    }
    limits
}

/// As execvp: where the program may be.
pub fn programs_of(argv: &[Text], env: &[Text]) -> io::Result<Vec<CString>> {
    let Some(name) = argv.first() else {
        return Err(io::Error::other("a program without a name"));
    };
    if name.contains(&b'/') {
        return Ok(vec![c_path(name)?]);
    }
    let path = env.iter().find_map(|word| word.strip_prefix(b"PATH="));
    path.unwrap_or(b"/usr/local/bin:/usr/bin:/bin")
        .split(|byte| *byte == b':')
        .filter(|directory| !directory.is_empty())
        .map(|directory| c_path(&[directory, b"/", name].concat()))
        .collect()
}

/// Takes output until the leader has ended, or something is over.
fn watch(
    leader: &Leader,
    output: &mut [Output; 2],
    uid: u32,
    run: &Run,
    began: Instant,
) -> io::Result<Why> {
    let wall = Duration::from_millis(run.wall_ms);
    let cpu = (run.cpu_ms > 0).then(|| Duration::from_millis(run.cpu_ms));
    let mut scratch = vec![0; SCRATCH_BYTES];
    loop {
        let spent = began.elapsed();
        let Some(left) = wall.checked_sub(spent).filter(|left| !left.is_zero()) else {
            return Ok(Why::Wall);
        };
        let step = cpu.map_or(left, |_| left.min(CPU_STEP));
        let end: BorrowedFd = match leader {
            Leader::Own { end, .. } => end.as_fd(),
            Leader::Forked { of, .. } => of.source(),
        };
        let mut sources = vec![(end, Interest::Readable)];
        sources.extend(
            output
                .iter()
                .filter_map(Output::source)
                .map(|fd| (fd, Interest::Readable)),
        );
        let ready = match wait_ready(&sources, Some(step)) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            ready => ready?,
        };
        let ended = ready[0];
        for stream in output.iter_mut() {
            stream.take(&mut scratch);
        }
        if output.iter().any(|stream| stream.over) {
            return Ok(Why::Output);
        }
        if ended {
            return Ok(Why::Ended);
        }
        if cpu.is_some_and(|most| spent > most / 64 && cpu_of(uid) > most) {
            return Ok(Why::Cpu);
        }
    }
}

/// Ends what is left, and gathers what the processes have used.
fn end(leader: &mut Leader, uid: u32, known: Option<i32>) -> io::Result<Account> {
    let mut account = Account::default();
    let own = match leader {
        Leader::Own { pid, .. } => Some(*pid),
        Leader::Forked { .. } => None,
    };
    let mut take = |reaped: &Reaped| {
        account.cpu_us += reaped.user_us + reaped.system_us;
        account.rss_bytes = account.rss_bytes.max(reaped.max_rss_bytes);
        if Some(reaped.pid) == own {
            account.ended = Some(reaped.ended);
        }
    };
    // First those that have ended by themselves, so that none is told as killed by us.
    while let Some(reaped) = reap_one() {
        take(&reaped);
    }
    let gone = leftovers::end_processes(uid, known, &mut take)?;
    while let Some(reaped) = reap_one() {
        take(&reaped);
    }
    if !gone {
        return Err(io::Error::other("a process of the call cannot be killed"));
    }
    if let Leader::Forked { of, .. } = leader {
        let fate = of.fate()?;
        account.ended = Some(fate.ended);
        account.cpu_us += fate.cpu_us;
        account.rss_bytes = account.rss_bytes.max(fate.rss_bytes);
    }
    Ok(account)
}

fn verdict(account: &Account, output: &[Output; 2], run: &Run) -> Why {
    let over_cpu = run.cpu_ms > 0 && account.cpu_us > run.cpu_ms * 1000;
    let stopped = matches!(account.ended, Some(Ended::Signaled(libc::SIGXCPU)));
    match () {
        () if output.iter().any(|stream| stream.over) => Why::Output,
        () if over_cpu || stopped => Why::Cpu,
        () => Why::Ended,
    }
}

/// What the user's processes have used so far, those that they have waited for included.
fn cpu_of(uid: u32) -> Duration {
    use std::os::unix::fs::MetadataExt;
    let mut ticks = 0;
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let numeric = entry
            .file_name()
            .as_encoded_bytes()
            .first()
            .is_some_and(u8::is_ascii_digit);
        if !numeric || entry.metadata().map_or(true, |facts| facts.uid() != uid) {
            continue;
        }
        let Ok(stat) = fs::read_to_string(entry.path().join("stat")) else {
            continue;
        };
        // After the name, which may hold anything: proc_pid_stat(5), fields 14 to 17.
        let fields = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
        ticks += fields
            .split(' ')
            .skip(11)
            .take(4)
            .filter_map(|field| field.parse::<u64>().ok())
            .sum::<u64>();
    }
    Duration::from_millis(ticks * TICK_MS)
}

/// Bytes as a JSON string: what is not UTF-8 becomes lone surrogates, as Python's `surrogateescape` reads them.
fn json_string(bytes: &[u8]) -> String {
    let mut text = String::from("\"");
    for chunk in bytes.utf8_chunks() {
        for char in chunk.valid().chars() {
            match char {
                '"' | '\\' => {
                    text.push('\\');
                    text.push(char);
                }
                char if (char as u32) < 0x20 => text.push_str(&format!("\\u{:04x}", char as u32)),
                char => text.push(char),
            }
        }
        for byte in chunk.invalid() {
            text.push_str(&format!("\\udc{byte:02x}"));
        }
    }
    text.push('"');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_that_are_no_text_become_lone_surrogates() {
        assert_eq!(
            json_string(b"a\"\\\n\xff\xc3\xa4"),
            "\"a\\\"\\\\\\u000a\\udcffä\""
        );
    }

    #[test]
    fn a_program_is_looked_for_as_execvp_does() {
        let words = |words: &[&str]| -> Vec<Text> {
            words.iter().map(|w| Text::from(w.as_bytes())).collect()
        };

        let named = programs_of(&words(&["cc"]), &words(&["PATH=/a::/b"])).unwrap();
        let path = programs_of(&words(&["./x"]), &[]).unwrap();

        assert_eq!(named, [c"/a/cc".to_owned(), c"/b/cc".to_owned()]);
        assert_eq!(path, [c"./x".to_owned()]);
    }
}
