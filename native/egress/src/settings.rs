//! What the newest node has said of all sandboxes.

use std::fs::File;
use std::io::Read;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::time::{Duration, Instant};

use crate::addresses::Range;
use crate::error::{Doing, Error, Result};
use crate::limits::{PRIVATE_MAX, RESOLVERS_MAX, RESOLV_CONF_AGE, RESOLV_CONF_BYTES_MAX};
use crate::wire::HelloArgs;

const RESOLV_CONF: &str = "/etc/resolv.conf";
const DNS: u16 = 53;
/// Times that make sense; also keeps sums of them from overflowing.
const SECONDS_MAX: f64 = 7.0 * 86_400.0;

pub struct Settings {
    /// Empty: those of the host.
    resolvers: Vec<SocketAddr>,
    pub opened: Vec<Range>,
    pub binding: Duration,
    pub peek: Duration,
    pub dial: Duration,
    pub idle: Duration,
    host: Vec<SocketAddr>,
    host_read: Option<Instant>,
    /// Those of the host are to be read again.
    is_stale: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            resolvers: Vec::new(),
            opened: Vec::new(),
            binding: Duration::from_secs(30),
            peek: Duration::from_secs(10),
            dial: Duration::from_secs(15),
            idle: Duration::from_secs(3600),
            host: Vec::new(),
            host_read: None,
            is_stale: true,
        }
    }
}

impl Settings {
    pub fn parse(args: &HelloArgs) -> Result<Settings> {
        if args.resolvers.len() > RESOLVERS_MAX || args.private.len() > PRIVATE_MAX {
            return Err(Error::Invalid(format!(
                "at most {RESOLVERS_MAX} resolvers and {PRIVATE_MAX} private ranges"
            )));
        }
        let resolver = |text: &String| {
            resolver_of(text)
                .ok_or_else(|| Error::Invalid(format!("resolver {text:?}: no address")))
        };
        let range = |text: &String| {
            text.parse()
                .map_err(|why| Error::Invalid(format!("private range {text:?}: {why}")))
        };
        Ok(Settings {
            resolvers: args.resolvers.iter().map(resolver).collect::<Result<_>>()?,
            opened: args.private.iter().map(range).collect::<Result<_>>()?,
            binding: seconds(args.binding_s)?,
            peek: seconds(args.peek_s)?,
            dial: seconds(args.dial_s)?,
            idle: seconds(args.idle_s)?,
            ..Settings::default()
        })
    }

    /// Others, but for what is known of the host.
    pub fn replace(&mut self, other: Settings) {
        let (host, host_read) = (std::mem::take(&mut self.host), self.host_read);
        *self = Settings {
            host,
            host_read,
            ..other
        };
    }

    /// Whom to ask, the best one first.
    pub fn resolvers(&mut self, now: Instant) -> &[SocketAddr] {
        if !self.resolvers.is_empty() {
            return &self.resolvers;
        }
        let fresh = |read: Instant| now.saturating_duration_since(read) < RESOLV_CONF_AGE;
        self.is_stale |= !self.host_read.is_some_and(fresh);
        &self.host
    }

    pub fn wants_resolvers(&self) -> bool {
        self.is_stale && self.resolvers.is_empty()
    }

    /// A file that cannot be read has none: names are not found then.
    pub fn read_resolvers(&mut self, file: Result<OwnedFd>, now: Instant) {
        let mut text = Vec::new();
        if let Ok(file) = file {
            let _ = File::from(file)
                .take(RESOLV_CONF_BYTES_MAX)
                .read_to_end(&mut text);
        }
        self.host = resolvers_in(&String::from_utf8_lossy(&text));
        self.host_read = Some(now);
        self.is_stale = false;
    }
}

/// Of a file alone: nothing that would keep its reader waiting.
pub fn open_resolv_conf() -> Result<OwnedFd> {
    let doing = || format!("opening {RESOLV_CONF}");
    let mut options = File::options();
    let options = options.read(true).custom_flags(libc::O_NONBLOCK);
    let file = options.open(RESOLV_CONF).doing(doing())?;
    match file.metadata().doing(doing())?.is_file() {
        true => Ok(file.into()),
        false => Err(Error::NotFound(format!("{RESOLV_CONF} is no file"))),
    }
}

fn seconds(value: f64) -> Result<Duration> {
    match (0.0..=SECONDS_MAX).contains(&value) {
        true => Ok(Duration::from_secs_f64(value)),
        false => Err(Error::Invalid(format!("{value} is no time in seconds"))),
    }
}

fn resolver_of(text: &str) -> Option<SocketAddr> {
    let address = |text: &str| text.parse::<IpAddr>().ok();
    address(text)
        .map(|address| SocketAddr::new(address, DNS))
        .or_else(|| text.parse().ok())
}

fn resolvers_in(text: &str) -> Vec<SocketAddr> {
    text.lines()
        .filter_map(|line| {
            let mut words = line.split_ascii_whitespace();
            (words.next()? == "nameserver").then(|| words.next())?
        })
        .filter_map(|word| word.parse::<IpAddr>().ok()) // those with a zone are left out
        .map(|address| SocketAddr::new(address, DNS))
        .take(RESOLVERS_MAX)
        .collect()
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn resolvers_are_those_of_the_file_in_its_order() {
        let text = "# nameserver 9.9.9.9\nsearch a.org\nnameserver  1.1.1.1 \nnameserver fe80::1%eth0\n nameserver ::1\n\
                    nameserver\nnameserver 3.3.3.3\nnameserver 4.4.4.4\nnameserver 5.5.5.5\n";
        let found: Vec<String> = resolvers_in(text)
            .iter()
            .map(SocketAddr::to_string)
            .collect();
        assert_eq!(
            found,
            ["1.1.1.1:53", "[::1]:53", "3.3.3.3:53", "4.4.4.4:53"]
        );
    }

    #[test]
    fn those_of_the_host_are_kept_until_they_are_read_again() {
        let now = Instant::now();
        let later = now + RESOLV_CONF_AGE;
        let mut settings = Settings::default();
        assert!(settings.wants_resolvers() && settings.resolvers(now).is_empty());

        let pipe = dsec_sys::pipes::new_pipe().unwrap();
        let mut write = File::from(pipe.write);
        write.write_all(b"nameserver 1.1.1.1\n").unwrap();
        drop(write);
        settings.read_resolvers(Ok(pipe.read), now);
        assert_eq!(settings.resolvers(now).len(), 1);
        assert!(!settings.wants_resolvers());
        assert_eq!(settings.resolvers(later).len(), 1);
        assert!(settings.wants_resolvers());

        settings.replace(Settings::default());
        assert_eq!(settings.resolvers(now).len(), 1);
        settings.read_resolvers(Err(Error::NotFound("none".into())), later);
        assert!(settings.resolvers(later).is_empty() && !settings.wants_resolvers());
        settings.replace(Settings {
            resolvers: vec!["9.9.9.9:53".parse().unwrap()],
            ..Settings::default()
        });
        assert!(!settings.wants_resolvers());
    }

    #[test]
    fn a_resolver_has_a_port_or_that_of_dns() {
        for (text, found) in [
            ("1.1.1.1", Some("1.1.1.1:53")),
            ("1.1.1.1:5353", Some("1.1.1.1:5353")),
            ("::1", Some("[::1]:53")),
            ("[::1]:99", Some("[::1]:99")),
            ("resolver.org", None),
            ("", None),
        ] {
            let expected: Option<SocketAddr> = found.map(|text| text.parse().unwrap());
            assert_eq!(resolver_of(text), expected, "{text}");
        }
        assert!(seconds(f64::NAN).is_err() && seconds(-1.0).is_err() && seconds(1e300).is_err());
    }
}
