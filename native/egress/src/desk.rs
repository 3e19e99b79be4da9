//! Connections of nodes: requests come in, replies and refusals go out.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;

use dsec_sys::epoll::{Poller, Source, READ, WRITE};
use dsec_sys::seqpacket::{accept, receive, send};

use crate::limits::{DESK_CONNECTIONS_MAX, UNSENT_MAX};
use crate::slab::{token, Key, Slab};
use crate::wire::MESSAGE_BYTES_MAX;

/// Requests read from one connection before the others have their turn.
const TURN: usize = 16;

struct Link {
    source: Source,
    unsent: VecDeque<Vec<u8>>,
}

pub struct Desk {
    links: Slab<Link>,
    /// The newest last.
    order: Vec<Key>,
    listener: Source,
    kind: u64,
    buffer: Vec<u8>,
}

impl Desk {
    /// Connections are of `kind` in the poller.
    pub fn new(listener: Source, kind: u64) -> Desk {
        Desk {
            links: Slab::default(),
            order: Vec::new(),
            listener,
            kind,
            buffer: vec![0; MESSAGE_BYTES_MAX],
        }
    }

    /// Takes all that wait; beyond the bound the oldest goes.
    pub fn accept_all(&mut self, poller: &Poller) {
        while let Ok(socket) = accept(self.listener.as_fd()) {
            if self.order.len() == DESK_CONNECTIONS_MAX {
                self.drop(self.order[0]);
            }
            let kind = self.kind;
            let key = self.links.insert_with(|key| Link {
                source: Source::new(poller, socket, token(kind, key)),
                unsent: VecDeque::new(),
            });
            self.order.push(key);
            self.flush(key);
        }
    }

    /// The next requests of a connection. One that is closed, or sends what is too long, is dropped.
    pub fn requests(&mut self, key: Key) -> Vec<Vec<u8>> {
        let mut requests = Vec::new();
        while requests.len() < TURN {
            let Some(link) = self.links.get_mut(key) else {
                break;
            };
            match receive(link.source.as_fd(), &mut self.buffer) {
                Ok(Some(length)) => requests.push(self.buffer[..length].to_vec()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(None) | Err(_) => self.drop(key),
            }
        }
        requests
    }

    /// Sends a reply, now or when the connection takes it. One that reads none is dropped.
    pub fn reply(&mut self, key: Key, message: Vec<u8>) {
        let Some(link) = self.links.get_mut(key) else {
            return;
        };
        if link.unsent.len() >= UNSENT_MAX {
            return self.drop(key);
        }
        link.unsent.push_back(message);
        self.flush(key);
    }

    /// Whether the newest connection takes something that nobody asked for.
    pub fn has_listener(&mut self) -> bool {
        let newest = self.order.last().copied();
        newest
            .and_then(|key| self.links.get_mut(key))
            .is_some_and(|link| link.unsent.len() < UNSENT_MAX / 2)
    }

    /// To the newest connection.
    pub fn tell(&mut self, message: Vec<u8>) {
        if let Some(&key) = self.order.last() {
            self.reply(key, message);
        }
    }

    pub fn flush(&mut self, key: Key) {
        let Some(link) = self.links.get_mut(key) else {
            return;
        };
        let good = link.send_all().and_then(|()| {
            let writes = if link.unsent.is_empty() { 0 } else { WRITE };
            link.source.want(READ | writes)
        });
        if good.is_err() {
            self.drop(key);
        }
    }

    fn drop(&mut self, key: Key) {
        self.links.remove(key);
        self.order.retain(|known| *known != key);
    }
}

impl Link {
    fn send_all(&mut self) -> io::Result<()> {
        while let Some(message) = self.unsent.front() {
            match send(self.source.as_fd(), message) {
                Ok(()) => drop(self.unsent.pop_front()),
                Err(error) => {
                    return match error.raw_os_error() {
                        Some(libc::EAGAIN | libc::ENOBUFS | libc::EINTR) => Ok(()),
                        _ => Err(error),
                    }
                }
            }
        }
        Ok(())
    }
}
