//! What a sandbox may reach. Nothing here asks anybody: facts come in, a verdict goes out.

use std::net::IpAddr;
use std::rc::Rc;

use crate::addresses::{is_public, Range};
use crate::error::{Error, Result};
use crate::limits::{LABELS_MAX, PORT_RANGES_MAX, RULES_MAX};
use crate::wire::RuleArgs;

/// A name as it is compared: lower case, no final dot. Labels of letters, digits, `-` and `_`.
pub type Name = Rc<str>;

#[derive(Clone, Debug)]
enum Host {
    Name(String),
    /// With its first dot: ".example.org".
    Suffix(String),
    AnyName,
    Addresses(Range),
}

#[derive(Clone, Debug)]
struct Rule {
    host: Host,
    ports: Vec<(u16, u16)>,
}

#[derive(Clone, Debug)]
pub struct Policy {
    /// None: everything that is public.
    rules: Option<Vec<Rule>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    Rules,
    Private,
    OtherName,
    Unreadable,
    Connections,
    Memory,
    Rate,
    More,
}

impl Reason {
    pub fn word(self) -> &'static str {
        match self {
            Reason::Rules => "rules",
            Reason::Private => "private",
            Reason::OtherName => "other_name",
            Reason::Unreadable => "unreadable",
            Reason::Connections => "connections",
            Reason::Memory => "memory",
            Reason::Rate => "rate",
            Reason::More => "more",
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
pub enum Verdict {
    Allowed,
    /// By a name that it is bound to only: somebody else may have the same address.
    ByName,
    Denied(Reason),
}

/// Where a connection goes.
#[derive(Clone, Copy, Debug)]
pub struct Destination {
    /// Not a mapped one.
    pub address: IpAddr,
    pub port: u16,
    /// The host itself answers there.
    pub is_host: bool,
}

impl Policy {
    pub fn parse(rules: Option<&[RuleArgs]>) -> Result<Policy> {
        let Some(rules) = rules else {
            return Ok(Policy { rules: None });
        };
        if rules.len() > RULES_MAX {
            return Err(Error::Invalid(format!("more than {RULES_MAX} rules")));
        }
        let rules = rules.iter().map(rule_of).collect::<Result<_>>()?;
        Ok(Policy { rules: Some(rules) })
    }

    /// Whether resolvers are asked after it.
    pub fn may_ask(&self, name: &str) -> bool {
        match &self.rules {
            None => true,
            Some(rules) => rules.iter().any(|rule| rule.host.is_named(name)),
        }
    }

    pub fn allows_name(&self, name: &str, port: u16) -> bool {
        match &self.rules {
            None => true,
            Some(rules) => rules
                .iter()
                .any(|rule| rule.has_port(port) && rule.host.is_named(name)),
        }
    }

    fn allows_address(&self, address: IpAddr, port: Option<u16>) -> bool {
        self.rules.iter().flatten().any(|rule| {
            let holds = matches!(&rule.host, Host::Addresses(range) if range.contains(address));
            holds && port.map_or(true, |port| rule.has_port(port))
        })
    }

    /// `bound` are the names of which the address was the answer; `opened` is what the operator opened.
    pub fn decide<'a>(
        &self,
        to: Destination,
        opened: &[Range],
        bound: impl IntoIterator<Item = &'a Name>,
    ) -> Verdict {
        if to.is_host || !is_public(to.address) {
            let open = opened.iter().any(|range| range.contains(to.address));
            return match open && self.allows_address(to.address, Some(to.port)) {
                true => Verdict::Allowed,
                false => Verdict::Denied(Reason::Private),
            };
        }
        if self.rules.is_none() || self.allows_address(to.address, Some(to.port)) {
            return Verdict::Allowed;
        }
        match bound
            .into_iter()
            .any(|name| self.allows_name(name, to.port))
        {
            true => Verdict::ByName,
            false => Verdict::Denied(Reason::Rules),
        }
    }

    /// Whether an answer may have this address, which then is no binding if it is not public.
    pub fn may_learn(&self, address: IpAddr, is_host: bool, opened: &[Range]) -> bool {
        if !is_host && is_public(address) {
            return true;
        }
        opened.iter().any(|range| range.contains(address)) && self.allows_address(address, None)
    }
}

impl Rule {
    fn has_port(&self, port: u16) -> bool {
        self.ports
            .iter()
            .any(|(first, last)| (*first..=*last).contains(&port))
    }
}

impl Host {
    fn is_named(&self, name: &str) -> bool {
        match self {
            Host::Name(own) => own == name,
            Host::Suffix(suffix) => name.len() > suffix.len() && name.ends_with(suffix.as_str()),
            Host::AnyName => true,
            Host::Addresses(_) => false,
        }
    }
}

fn rule_of(args: &RuleArgs) -> Result<Rule> {
    let wrong = |what: &str| Error::Invalid(format!("rule for {:?}: {what}", args.host));
    if args.ports.is_empty() || args.ports.len() > PORT_RANGES_MAX {
        return Err(wrong("it has no ports, or too many"));
    }
    if args
        .ports
        .iter()
        .any(|(first, last)| *first == 0 || first > last)
    {
        return Err(wrong("ports are 1 to 65535, the first before the last"));
    }
    let host = if args.host == "*" {
        Host::AnyName
    } else if let Some(suffix) = args.host.strip_prefix("*.") {
        let suffix = host_name(suffix).ok_or_else(|| wrong("it is no name"))?;
        Host::Suffix(format!(".{suffix}"))
    } else if let Ok(range) = args.host.parse() {
        Host::Addresses(range)
    } else {
        Host::Name(host_name(&args.host).ok_or_else(|| wrong("neither name nor address"))?)
    };
    Ok(Rule {
        host,
        ports: args.ports.clone(),
    })
}

/// The name in the form that is compared; None for what is none. An address is no name.
pub fn host_name(text: &str) -> Option<String> {
    let text = text.strip_suffix('.').unwrap_or(text);
    let is_label = |label: &str| {
        (1..=63).contains(&label.len())
            && label
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
    };
    let last = text.rsplit('.').next()?;
    let good = text.len() <= 253
        && text.split('.').count() <= LABELS_MAX
        && text.split('.').all(is_label)
        // 10.1, 0x7f.1: what some would read as an address.
        && !last.as_bytes()[0].is_ascii_digit();
    good.then(|| text.to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(rules: &[(&str, &[(u16, u16)])]) -> Policy {
        let rules: Vec<RuleArgs> = rules
            .iter()
            .map(|(host, ports)| RuleArgs {
                host: (*host).to_owned(),
                ports: ports.to_vec(),
            })
            .collect();
        Policy::parse(Some(&rules)).unwrap()
    }

    fn to(address: &str, port: u16) -> Destination {
        Destination {
            address: address.parse().unwrap(),
            port,
            is_host: false,
        }
    }

    fn decide(policy: &Policy, to: Destination, names: &[&str]) -> Verdict {
        let opened: Vec<Range> = ["10.1.0.0/16", "127.0.0.1", "fd00::/16"]
            .iter()
            .map(|text| text.parse().unwrap())
            .collect();
        let names: Vec<Name> = names.iter().map(|name| Name::from(*name)).collect();
        policy.decide(to, &opened, &names)
    }

    const WEB: &[(u16, u16)] = &[(80, 80), (443, 443)];

    #[test]
    fn an_address_passes_by_its_rule_or_by_a_name_that_a_rule_has() {
        let policy = policy(&[
            ("index.example", WEB),
            ("*.mirror.example", &[(80, 80)]),
            ("8.8.8.0/24", &[(53, 53), (800, 900)]),
        ]);
        let cases = [
            (to("1.1.1.1", 443), &["index.example"][..], Verdict::ByName),
            (
                to("1.1.1.1", 22),
                &["index.example"],
                Verdict::Denied(Reason::Rules),
            ),
            (to("1.1.1.1", 443), &[], Verdict::Denied(Reason::Rules)),
            (
                to("1.1.1.1", 443),
                &["other.org"],
                Verdict::Denied(Reason::Rules),
            ),
            (
                to("1.1.1.1", 443),
                &["other.org", "index.example"],
                Verdict::ByName,
            ),
            (
                to("1.1.1.1", 443),
                &["files.index.example"],
                Verdict::Denied(Reason::Rules),
            ),
            (to("1.1.1.1", 80), &["deb.mirror.example"], Verdict::ByName),
            (to("1.1.1.1", 80), &["a.b.mirror.example"], Verdict::ByName),
            (
                to("1.1.1.1", 80),
                &["mirror.example"],
                Verdict::Denied(Reason::Rules),
            ),
            (
                to("1.1.1.1", 80),
                &["evilmirror.example"],
                Verdict::Denied(Reason::Rules),
            ),
            (
                to("1.1.1.1", 443),
                &["deb.mirror.example"],
                Verdict::Denied(Reason::Rules),
            ),
            (to("8.8.8.8", 53), &[], Verdict::Allowed),
            (to("8.8.8.8", 850), &[], Verdict::Allowed),
            (to("8.8.8.8", 901), &[], Verdict::Denied(Reason::Rules)),
            (to("8.8.9.8", 53), &[], Verdict::Denied(Reason::Rules)),
        ];
        for (to, names, verdict) in cases {
            assert_eq!(decide(&policy, to, names), verdict, "{to:?} {names:?}");
        }
    }

    #[test]
    fn what_is_not_public_needs_both_operator_and_an_address_rule() {
        let all: &[(u16, u16)] = &[(1, 65535)];
        let wide = policy(&[("0.0.0.0/0", all), ("::/0", all), ("*", all)]);
        let named = policy(&[("db.internal", all)]);
        for policy in [&wide, &Policy { rules: None }, &named] {
            for address in [
                "10.2.0.1",
                "169.254.169.254",
                "::1",
                "fe80::1",
                "198.18.0.1",
                "192.168.1.1",
            ] {
                let verdict = decide(policy, to(address, 80), &["db.internal"]);
                assert_eq!(verdict, Verdict::Denied(Reason::Private), "{address}");
            }
        }
        assert_eq!(decide(&wide, to("10.1.2.3", 5432), &[]), Verdict::Allowed);
        assert_eq!(decide(&wide, to("fd00::5", 5432), &[]), Verdict::Allowed);
        // A name opens nothing, whoever answers for it.
        let verdict = decide(&named, to("10.1.2.3", 5432), &["db.internal"]);
        assert_eq!(verdict, Verdict::Denied(Reason::Private));
        let everything = Policy { rules: None };
        let verdict = decide(&everything, to("10.1.2.3", 5432), &[]);
        assert_eq!(verdict, Verdict::Denied(Reason::Private));
    }

    #[test]
    fn the_host_itself_is_private_whatever_its_address() {
        let everything = Policy { rules: None };
        let host = Destination {
            is_host: true,
            ..to("8.8.8.8", 22)
        };

        assert_eq!(
            decide(&everything, host, &[]),
            Verdict::Denied(Reason::Private)
        );
        assert!(!everything.may_learn(host.address, true, &[]));
    }

    #[test]
    fn everything_is_what_is_public_and_nothing_is_nothing() {
        let everything = Policy { rules: None };
        let nothing = policy(&[]);

        assert_eq!(
            decide(&everything, to("1.1.1.1", 22), &[]),
            Verdict::Allowed
        );
        assert_eq!(
            decide(&nothing, to("1.1.1.1", 22), &["a.org"]),
            Verdict::Denied(Reason::Rules)
        );
        assert!(everything.may_ask("a.org") && !nothing.may_ask("a.org"));
    }

    #[test]
    fn answers_have_what_may_be_reached() {
        let opened = ["10.0.0.0/8".parse().unwrap()];
        let policy = policy(&[("10.1.0.0/16", WEB), ("a.org", WEB)]);
        let learn = |address: &str| policy.may_learn(address.parse().unwrap(), false, &opened);

        assert!(learn("1.1.1.1") && learn("10.1.0.1"));
        assert!(!learn("10.2.0.1") && !learn("127.0.0.1") && !learn("169.254.169.254"));
    }

    #[test]
    fn rules_that_are_none_are_refused() {
        let cases: &[(&str, &[(u16, u16)])] = &[
            ("", WEB),
            ("*.", WEB),
            ("a..b", WEB),
            ("*.*.org", WEB),
            ("a b", WEB),
            ("10.1", WEB),
            ("0x7f.1", WEB),
            ("10.0.0.1/8", WEB),
            ("-ä.org", WEB),
            ("a.org", &[]),
            ("a.org", &[(0, 1)]),
            ("a.org", &[(2, 1)]),
        ];
        for (host, ports) in cases {
            let args = [RuleArgs {
                host: (*host).to_owned(),
                ports: ports.to_vec(),
            }];
            assert!(Policy::parse(Some(&args)).is_err(), "{host} {ports:?}");
        }
    }

    #[test]
    fn names_are_compared_in_one_form() {
        assert_eq!(
            host_name("Index.example.").as_deref(),
            Some("index.example")
        );
        assert_eq!(host_name("localhost").as_deref(), Some("localhost"));
        for text in ["", ".", "a..b", "1.2.3.4", "a.org..", "[::1]", "::1"] {
            assert_eq!(host_name(text), None, "{text}");
        }
        assert_eq!(host_name(&"a.".repeat(40)), None);
        assert_eq!(host_name(&"a".repeat(64)), None);
    }
}
