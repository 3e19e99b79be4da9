//! dsec-floor: how fast a container can be at all on this machine. The bare system calls of a create and a destroy, with nothing
//! around them: cgroups, overlay, one clone3 with all namespaces, id maps, pivot, execve, a first answer, kill, wait, clean-up.
//! It is as fast as we know how to make it: nothing is moved between cgroups in a way that waits for all processors.
//! `bench/` compares real launches with it.

mod iteration;
mod place;

use std::path::PathBuf;

use crate::iteration::Spent;
use crate::place::Place;

const USAGE: &str = "usage: dsec-floor --rootfs DIRECTORY [-n COUNT] [--state DIRECTORY]

Prints one JSON object: for each iteration the microseconds until the first answer, and those of the destruction.";

struct Args {
    rootfs: PathBuf,
    state: PathBuf,
    count: usize,
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if words == ["--answer"] {
        std::process::exit(iteration::answer().is_err().into());
    }
    let Some(args) = parse(&words) else {
        eprintln!("{USAGE}");
        std::process::exit(2);
    };
    match measure(&args) {
        Ok(spent) => println!("{}", json(&spent)),
        Err(error) => {
            eprintln!("dsec-floor: {error}");
            std::process::exit(1);
        }
    }
}

fn parse(words: &[String]) -> Option<Args> {
    let mut args = Args {
        rootfs: PathBuf::new(),
        state: std::env::temp_dir(),
        count: 100,
    };
    for pair in words.chunks(2) {
        match pair {
            [name, value] if name == "--rootfs" => args.rootfs = value.into(),
            [name, value] if name == "--state" => args.state = value.into(),
            [name, value] if name == "-n" => args.count = value.parse().ok()?,
            _ => return None,
        }
    }
    (!args.rootfs.as_os_str().is_empty()).then_some(args)
}

fn measure(args: &Args) -> std::io::Result<Vec<Spent>> {
    let place = Place::make(&args.rootfs, &args.state)?;
    let result = (0..args.count)
        .map(|number| iteration::run(&place, number))
        .collect();
    place.remove()?;
    result
}

fn json(spent: &[Spent]) -> String {
    let list = |pick: fn(&Spent) -> u128| {
        let texts: Vec<String> = spent.iter().map(|entry| pick(entry).to_string()).collect();
        format!("[{}]", texts.join(","))
    };
    format!(
        "{{\"create_us\":{},\"destroy_us\":{},\"total_us\":{}}}",
        list(|entry| entry.create_us),
        list(|entry| entry.destroy_us),
        list(|entry| entry.create_us + entry.destroy_us),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(String::from).collect()
    }

    #[test]
    fn good_and_bad_command_lines() {
        assert_eq!(parse(&words("--rootfs /r -n 7")).unwrap().count, 7);
        for bad in ["", "-n 7", "--rootfs", "--rootfs /r -n x", "--what 1"] {
            assert!(parse(&words(bad)).is_none(), "{bad}");
        }
    }

    #[test]
    fn the_output_is_json() {
        let spent = [
            Spent {
                create_us: 10,
                destroy_us: 2,
            },
            Spent {
                create_us: 11,
                destroy_us: 3,
            },
        ];

        assert_eq!(
            json(&spent),
            r#"{"create_us":[10,11],"destroy_us":[2,3],"total_us":[12,14]}"#
        );
    }
}
