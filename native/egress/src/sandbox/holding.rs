//! What the kernel holds for a sandbox's connections.

use super::Sandbox;
use crate::memory::Room;
use crate::policy::Reason;
use crate::shared::Shared;
use crate::slab::Key;

impl Sandbox {
    /// Why it gets no other connection, if so.
    pub(super) fn has_too_much(&self, shared: &Shared) -> Option<Reason> {
        let count = self.flows.len();
        if count >= self.most || !shared.has_room(count) {
            return Some(Reason::Connections);
        }
        (self.room == Room::None).then_some(Reason::Memory)
    }

    /// Of each connection.
    pub fn held(&mut self) -> Vec<(Key, u64)> {
        let keys = self.flows.keys().into_iter();
        let held = keys.filter_map(|key| Some((key, self.flows.get_mut(key)?.held())));
        held.collect()
    }

    /// Holds also for the connections that it has.
    pub fn give_room(&mut self, room: Room) {
        self.room = room;
        if room != Room::Wide {
            for key in self.flows.keys() {
                if let Some(flow) = self.flows.get_mut(key) {
                    flow.narrow();
                }
            }
        }
    }

    /// Cuts a connection for what it holds.
    pub fn shed(&mut self, key: Key, shared: &mut Shared) {
        if let Some(flow) = self.flows.get_mut(key) {
            let (target, port) = (flow.to.address.to_string(), flow.to.port);
            self.refuse(target, port, "tcp", Reason::Memory, shared);
            self.cut(key, shared);
        }
    }
}
