//! What was refused, kept together until it is told.

use std::collections::BTreeMap;

use crate::limits::DENIED_KINDS;
use crate::policy::Reason;

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Refusal {
    /// A name in the form that is compared, or an address; or nothing.
    pub target: String,
    pub port: u16,
    pub protocol: &'static str,
    pub reason: Reason,
}

#[derive(Default)]
pub struct Refusals {
    counts: BTreeMap<Refusal, u64>,
}

impl Refusals {
    pub fn note(&mut self, refusal: Refusal) {
        if let Some(count) = self.counts.get_mut(&refusal) {
            *count += 1;
            return;
        }
        let refusal = if self.counts.len() < DENIED_KINDS {
            refusal
        } else {
            Refusal {
                target: String::new(),
                port: 0,
                protocol: refusal.protocol,
                reason: Reason::More,
            }
        };
        *self.counts.entry(refusal).or_default() += 1;
    }

    pub fn is_empty(&self) -> bool {
        self.counts.is_empty()
    }

    pub fn take(&mut self) -> BTreeMap<Refusal, u64> {
        std::mem::take(&mut self.counts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_ones_are_one_and_too_many_are_a_number() {
        let mut refusals = Refusals::default();
        for round in 0..3 {
            for port in 1..=DENIED_KINDS as u16 + 10 {
                refusals.note(Refusal {
                    target: "1.2.3.4".into(),
                    port,
                    protocol: if round == 2 { "dns" } else { "tcp" },
                    reason: Reason::Rules,
                });
            }
        }

        let taken = refusals.take();
        assert!(refusals.is_empty());
        assert_eq!(taken.len(), DENIED_KINDS + 2);
        assert_eq!(taken.values().sum::<u64>(), 3 * (DENIED_KINDS as u64 + 10));
        let more: Vec<u64> = taken
            .iter()
            .filter(|(refusal, _)| refusal.reason == Reason::More)
            .map(|(_, count)| *count)
            .collect();
        assert_eq!(more, [DENIED_KINDS as u64 + 10, 20]);
    }
}
