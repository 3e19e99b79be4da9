//! What the newest node has said of all sandboxes.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use crate::addresses::Range;
use crate::error::{Error, Result};
use crate::limits::{PRIVATE_MAX, RESOLVERS_MAX, RESOLV_CONF_AGE};
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

    /// Whom to ask, the best one first.
    pub fn resolvers(&mut self, now: Instant) -> &[SocketAddr] {
        if !self.resolvers.is_empty() {
            return &self.resolvers;
        }
        let fresh = |read: Instant| now.saturating_duration_since(read) < RESOLV_CONF_AGE;
        if !self.host_read.is_some_and(fresh) {
            // One that cannot be read has none: names are not found then.
            self.host = resolvers_in(&std::fs::read_to_string(RESOLV_CONF).unwrap_or_default());
            self.host_read = Some(now);
        }
        &self.host
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
