//! What all sandboxes share: settings, the host's routes, and what there is only so much of.

use std::net::IpAddr;
use std::time::Instant;

use dsec_sys::netlink::{Netlink, UNICAST};

use crate::error::{Doing, Result};
use crate::flow::Pipes;
use crate::limits::{
    ALL_QUESTIONS_MAX, FLOWS_MAX, FLOWS_SURE, FLOW_DESCRIPTORS, OTHER_DESCRIPTORS, PEEK_BYTES,
    SANDBOX_DESCRIPTORS,
};
use crate::memory::Memory;
use crate::random::Random;
use crate::settings::Settings;

/// Where a connection of the host would go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    Nowhere,
    /// To the host itself, or to all of a network.
    Host,
    Out,
}

pub struct Shared {
    pub settings: Settings,
    pub random: Random,
    pub pipes: Pipes,
    pub now: Instant,
    /// For first bytes, while they are looked at.
    pub buffer: Vec<u8>,
    pub flows: usize,
    pub questions: usize,
    pub memory: Memory,
    /// Something has a time that will be over, or is to be told.
    pub wants_tick: bool,
    netlink: Netlink,
    descriptors: u64,
}

impl Shared {
    /// `descriptors` is how many this process may have; `held` what all may hold in the kernel, unless a part of the machine's.
    pub fn new(descriptors: u64, held: Option<u64>) -> Result<Shared> {
        Ok(Shared {
            settings: Settings::default(),
            random: Random::open().doing("opening /dev/urandom")?,
            pipes: Pipes::default(),
            now: Instant::now(),
            buffer: vec![0; PEEK_BYTES],
            flows: 0,
            questions: 0,
            memory: Memory::open(held)?,
            wants_tick: false,
            netlink: Netlink::open().doing("asking for routes")?,
            descriptors,
        })
    }

    pub fn way_to(&mut self, address: IpAddr) -> Way {
        match self.netlink.route_kind(address) {
            Ok(None) => Way::Nowhere,
            Ok(Some(UNICAST)) => Way::Out,
            // What cannot be known is not let through.
            Ok(Some(_)) | Err(_) => Way::Host,
        }
    }

    /// Whether a sandbox with so many connections may have another one.
    pub fn has_room(&self, own: usize) -> bool {
        let all = self.descriptors.saturating_sub(OTHER_DESCRIPTORS) / 4 * 3 / FLOW_DESCRIPTORS;
        let all = FLOWS_MAX.min(all as usize);
        let most = if own < FLOWS_SURE { all } else { all / 4 * 3 };
        self.flows < most
    }

    pub fn has_room_for_question(&self) -> bool {
        self.questions < ALL_QUESTIONS_MAX.min(self.descriptors as usize / 16)
    }

    /// Whether another sandbox's sockets find their descriptors, however many connections there are.
    pub fn has_room_for_sandbox(&self, sandboxes: usize) -> bool {
        let own = (sandboxes as u64 + 1) * SANDBOX_DESCRIPTORS;
        own <= self.descriptors.saturating_sub(OTHER_DESCRIPTORS) / 5
    }
}
