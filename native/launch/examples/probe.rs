//! A stand-in for the agent in tests of the launcher: takes shell commands at its socket, runs them as root of the sandbox,
//! and answers with their output. One command a connection: the command up to end-of-file, then output, then `exit <code>`.

use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

fn main() {
    let Ok(socket) = dsec_sys::sealed::inherited(3) else {
        return;
    };
    let listener = UnixListener::from(socket);
    for connection in listener.incoming() {
        let Ok(mut connection) = connection else {
            continue;
        };
        let mut command = String::new();
        if connection.read_to_string(&mut command).is_err() {
            continue;
        }
        match command.strip_prefix('!') {
            Some(own) => connection
                .write_all(about_itself(own.trim()).as_bytes())
                .unwrap_or_default(),
            None => run(&mut connection, &command),
        }
    }
}

fn run(connection: &mut (impl Write + std::os::fd::AsFd), command: &str) {
    let output = Command::new("/bin/sh")
        .args(["-c", command])
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .current_dir("/")
        .stdin(Stdio::null())
        .uid(0)
        .gid(0)
        .output();
    let answer = match output {
        Ok(output) => [
            output.stdout,
            output.stderr,
            format!("exit {}", output.status).into_bytes(),
        ]
        .concat(),
        Err(error) => format!("exit failed: {error}").into_bytes(),
    };
    connection.write_all(&answer).unwrap_or_default();
}

/// Facts of the probe itself, which code inside cannot see.
fn about_itself(what: &str) -> String {
    match what {
        "status" => std::fs::read_to_string("/proc/self/status").unwrap_or_default(),
        "exit" => std::process::exit(7),
        "fds" => (0..64)
            .filter_map(|fd| {
                std::fs::read_link(format!("/proc/self/fd/{fd}"))
                    .ok()
                    .map(|to| format!("{fd} {}\n", to.display()))
            })
            .collect(),
        other => std::fs::read_to_string(other).unwrap_or_else(|error| error.to_string()),
    }
}
