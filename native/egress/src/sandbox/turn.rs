//! A sandbox's turn: how what is ready in it is served, so that none of its own keeps the rest waiting.

use super::{Sandbox, DATAGRAMS, DATAGRAMS_6, FLOW, LISTENER, LISTENER_6, QUESTION};
use crate::limits::{FLOW_TURN_BYTES, TURN_BYTES};
use crate::shared::Shared;
use crate::slab::read_token;

impl Sandbox {
    /// Serves some of what is ready: all sorts of it in each turn, and each connection once before any comes again.
    pub fn turn(&mut self, shared: &mut Shared) {
        self.serve_first(shared);
        if self.rest.is_empty() {
            self.look_at_connections();
        }
        let mut left = TURN_BYTES;
        while left > 0 {
            let Some(key) = self.rest.pop_front() else {
                return;
            };
            left = left.saturating_sub(self.advance(key, left, shared));
        }
    }

    fn serve_first(&mut self, shared: &mut Shared) {
        let mut ready = Vec::new();
        if let Err(error) = self.first.wait(&mut ready, 0) {
            eprintln!("dsec-egress: waiting for a sandbox: {error}");
        }
        for event in ready {
            let (kind, key) = read_token(event.token);
            match kind {
                LISTENER => self.accept(false, shared),
                LISTENER_6 => self.accept(true, shared),
                DATAGRAMS => self.take_questions(false, shared),
                DATAGRAMS_6 => self.take_questions(true, shared),
                QUESTION => self.hear(key, shared),
                FLOW => drop(self.advance(key, FLOW_TURN_BYTES, shared)),
                _ => {}
            }
        }
    }

    fn look_at_connections(&mut self) {
        let mut ready = Vec::new();
        if let Err(error) = self.poller.wait(&mut ready, 0) {
            eprintln!("dsec-egress: waiting for a sandbox: {error}");
        }
        for event in ready {
            let (kind, key) = read_token(event.token);
            // Both ends of one may be ready; it is served as a whole.
            if kind == FLOW && !self.rest.contains(&key) {
                self.rest.push_back(key);
            }
        }
    }
}

#[cfg(test)]
#[path = "turn_tests.rs"]
mod tests;
