//! The command line.

use std::path::PathBuf;

pub const USAGE: &str = "usage: dsec-launch --run DIRECTORY --agent PROGRAM [--foreground] [--layers-by-name] [--lxcfs PROGRAM] [--test-hooks]
       dsec-launch --run DIRECTORY --unpin

Serves one node at DIRECTORY/launch.sock. --layers-by-name builds trees as it does on kernels before 6.15. --lxcfs runs that program for sandboxes that want a live view of their resources. --unpin lets go of the mount namespace with the layers, once no launcher runs.";

#[derive(Debug, Default, PartialEq, Eq)]
pub struct Args {
    pub run: PathBuf,
    pub agent: PathBuf,
    pub foreground: bool,
    pub layers_by_name: bool,
    pub lxcfs: Option<PathBuf>,
    pub test_hooks: bool,
    pub unpin: bool,
}

/// The arguments, or what is wrong with them.
pub fn parse(words: impl Iterator<Item = String>) -> Result<Args, String> {
    let mut args = Args::default();
    let mut words = words;
    while let Some(word) = words.next() {
        let mut path = || {
            words
                .next()
                .map(PathBuf::from)
                .ok_or(format!("{word} needs a value"))
        };
        match word.as_str() {
            "--run" => args.run = path()?,
            "--agent" => args.agent = path()?,
            "--foreground" => args.foreground = true,
            "--layers-by-name" => args.layers_by_name = true,
            "--lxcfs" => args.lxcfs = Some(path()?),
            "--test-hooks" => args.test_hooks = true,
            "--unpin" => args.unpin = true,
            _ => return Err(format!("unknown argument {word:?}")),
        }
    }
    if args.run.as_os_str().is_empty() || (args.agent.as_os_str().is_empty() && !args.unpin) {
        return Err("--run and --agent are needed".into());
    }
    Ok(args)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> impl Iterator<Item = String> + '_ {
        text.split_whitespace().map(String::from)
    }

    #[test]
    fn good_and_bad_command_lines() {
        let args = parse(words("--run /r --agent /a --foreground")).unwrap();
        assert_eq!(
            args,
            Args {
                run: "/r".into(),
                agent: "/a".into(),
                foreground: true,
                ..Args::default()
            }
        );
        assert!(parse(words("--run /r --unpin")).unwrap().unpin);
        for bad in [
            "",
            "--run",
            "--run /r",
            "--agent /a",
            "--run /r --agent /a --what",
        ] {
            assert!(parse(words(bad)).is_err(), "{bad}");
        }
    }
}
