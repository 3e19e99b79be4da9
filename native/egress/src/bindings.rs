//! Which names an address was the answer for, and until when.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::time::Instant;

use crate::limits::{BINDINGS_MAX, NAMES_OF_ADDRESS_MAX};
use crate::policy::Name;

/// Looked through only when one may have ended: there may be thousands of sandboxes.
#[derive(Default)]
pub struct Bindings {
    /// None ends before.
    first_end: Option<Instant>,
    of: HashMap<IpAddr, Vec<(Name, Instant)>>,
    /// In the order in which they were first bound; none that is not in `of`.
    order: VecDeque<(IpAddr, Name)>,
}

impl Bindings {
    /// A later end than the one it has counts. Beyond the bounds the oldest go.
    pub fn bind(&mut self, address: IpAddr, name: &Name, until: Instant) {
        self.first_end = Some(self.first_end.map_or(until, |first| first.min(until)));
        if let Some(names) = self.of.get_mut(&address) {
            if let Some((_, end)) = names.iter_mut().find(|(known, _)| known == name) {
                *end = until.max(*end);
                return;
            }
            if names.len() == NAMES_OF_ADDRESS_MAX {
                let (oldest, _) = names[0].clone();
                self.order
                    .retain(|(of, known)| (of, known) != (&address, &oldest));
                self.forget(address, &oldest);
            }
        }
        while self.order.len() >= BINDINGS_MAX {
            match self.order.pop_front() {
                Some((address, name)) => self.forget(address, &name),
                None => break,
            }
        }
        let names = self.of.entry(address).or_default();
        names.push((Name::clone(name), until));
        self.order.push_back((address, Name::clone(name)));
    }

    pub fn names(&self, address: IpAddr, now: Instant) -> impl Iterator<Item = &Name> {
        let names = self.of.get(&address).map_or(&[][..], Vec::as_slice);
        names
            .iter()
            .filter(move |(_, until)| *until > now)
            .map(|(name, _)| name)
    }

    /// Those that have ended go.
    pub fn sweep(&mut self, now: Instant) {
        if self.first_end.map_or(true, |first| first > now) {
            return;
        }
        for names in self.of.values_mut() {
            names.retain(|(_, until)| *until > now);
        }
        self.of.retain(|_, names| !names.is_empty());
        self.first_end = self.of.values().flatten().map(|(_, until)| *until).min();
        let of = &self.of;
        self.order.retain(|(address, name)| {
            of.get(address)
                .is_some_and(|names| names.iter().any(|(known, _)| known == name))
        });
    }

    fn forget(&mut self, address: IpAddr, name: &Name) {
        if let Some(names) = self.of.get_mut(&address) {
            names.retain(|(known, _)| known != name);
            if names.is_empty() {
                self.of.remove(&address);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn names_of(bindings: &Bindings, address: &str, now: Instant) -> Vec<String> {
        bindings
            .names(address.parse().unwrap(), now)
            .map(|name| name.to_string())
            .collect()
    }

    #[test]
    fn an_address_has_its_names_until_their_time_is_over() {
        let mut bindings = Bindings::default();
        let now = Instant::now();
        let later = |seconds| now + Duration::from_secs(seconds);
        let address = "1.1.1.1".parse().unwrap();
        bindings.bind(address, &"a.org".into(), later(10));
        bindings.bind(address, &"b.org".into(), later(20));
        bindings.bind(address, &"a.org".into(), later(5)); // does not shorten

        assert_eq!(names_of(&bindings, "1.1.1.1", now), ["a.org", "b.org"]);
        assert_eq!(names_of(&bindings, "1.1.1.1", later(10)), ["b.org"]);
        assert!(names_of(&bindings, "1.1.1.2", now).is_empty());

        bindings.sweep(later(10));
        assert_eq!(names_of(&bindings, "1.1.1.1", now), ["b.org"]);
        assert_eq!(bindings.first_end, Some(later(20)));
        bindings.sweep(later(20));
        assert!(bindings.of.is_empty() && bindings.order.is_empty());
        assert_eq!(bindings.first_end, None);
    }

    #[test]
    fn there_are_no_more_than_the_bounds_and_the_oldest_go() {
        let mut bindings = Bindings::default();
        let now = Instant::now();
        let until = now + Duration::from_secs(60);
        for number in 0..BINDINGS_MAX as u32 + 100 {
            let address = IpAddr::from((number + (1 << 24)).to_be_bytes());
            bindings.bind(address, &"a.org".into(), until);
        }
        assert_eq!(bindings.order.len(), BINDINGS_MAX);
        assert_eq!(bindings.of.len(), BINDINGS_MAX);
        assert!(names_of(&bindings, "1.0.0.0", now).is_empty());
        assert_eq!(names_of(&bindings, "1.0.0.100", now), ["a.org"]);

        for number in 0..NAMES_OF_ADDRESS_MAX + 3 {
            let name = format!("n{number}.org").into();
            bindings.bind("9.9.9.9".parse().unwrap(), &name, until);
        }
        let names = names_of(&bindings, "9.9.9.9", now);
        assert_eq!(names.len(), NAMES_OF_ADDRESS_MAX);
        assert_eq!(names[0], "n3.org");
        let kept: usize = bindings.of.values().map(Vec::len).sum();
        assert_eq!(kept, bindings.order.len());
    }
}
