//! Connections of nodes, and what is still to be sent to them.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use dsec_sys::seqpacket::{accept, receive, send};

use crate::wire::MESSAGE_BYTES_MAX;

/// Nodes connect one at a time; more than a few are strays.
const CONNECTIONS_MAX: usize = 64;
/// Replies that a connection has not read yet; beyond, it is dropped.
const UNSENT_MAX: usize = 8192;
/// Events that are kept while nobody takes them; beyond, the oldest are lost.
const EVENTS_MAX: usize = 65_536;
/// Requests read from one connection before the others have their turn.
const TURN: usize = 16;

pub struct Connection {
    pub id: u64,
    socket: OwnedFd,
    unsent: VecDeque<Vec<u8>>,
}

impl Connection {
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[derive(Default)]
pub struct Connections {
    open: Vec<Connection>, // the newest last
    events: VecDeque<Vec<u8>>,
    last_id: u64,
    buffer: Vec<u8>,
}

impl Connections {
    pub fn iter(&self) -> impl Iterator<Item = &Connection> {
        self.open.iter()
    }

    /// True when this connection has something that its socket did not take.
    pub fn is_waiting(&self, connection: &Connection) -> bool {
        let newest = self
            .open
            .last()
            .is_some_and(|last| last.id == connection.id);
        !connection.unsent.is_empty() || (newest && !self.events.is_empty())
    }

    /// Takes all that are waiting at the listening socket.
    pub fn accept_all(&mut self, listener: BorrowedFd) {
        while let Ok(socket) = accept(listener) {
            if self.open.len() == CONNECTIONS_MAX {
                self.open.remove(0);
            }
            self.last_id += 1;
            self.open.push(Connection {
                id: self.last_id,
                socket,
                unsent: VecDeque::new(),
            });
        }
    }

    /// The next requests of a connection. One that is closed, or sends what is too long, is dropped.
    pub fn receive(&mut self, id: u64) -> Vec<Vec<u8>> {
        self.buffer.resize(MESSAGE_BYTES_MAX, 0);
        let Some(connection) = self.open.iter().find(|connection| connection.id == id) else {
            return Vec::new();
        };
        let mut requests = Vec::new();
        while requests.len() < TURN {
            match receive(connection.socket.as_fd(), &mut self.buffer) {
                Ok(Some(length)) => requests.push(self.buffer[..length].to_vec()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(None) | Err(_) => {
                    self.drop(id);
                    break;
                }
            }
        }
        requests
    }

    fn drop(&mut self, id: u64) {
        self.open.retain(|connection| connection.id != id);
    }

    /// Sends a reply, now or when the connection can take it; nobody minds if it has gone.
    pub fn reply(&mut self, id: u64, message: Vec<u8>) {
        if let Some(connection) = self.open.iter_mut().find(|connection| connection.id == id) {
            connection.unsent.push_back(message);
        }
        self.flush();
    }

    /// Sends an event to the newest connection, now or when there is one that can take it.
    pub fn event(&mut self, message: Vec<u8>) {
        if self.events.len() == EVENTS_MAX {
            self.events.pop_front();
        }
        self.events.push_back(message);
        self.flush();
    }

    /// Sends what sockets take; drops connections that are gone or never read.
    pub fn flush(&mut self) {
        let newest = self.open.last().map(|connection| connection.id);
        let events = &mut self.events;
        self.open.retain_mut(|connection| {
            let mut good = send_all(&connection.socket, &mut connection.unsent);
            if newest == Some(connection.id) {
                good = good && send_all(&connection.socket, events);
            }
            good && connection.unsent.len() <= UNSENT_MAX
        });
    }
}

/// False when the peer is gone. What was not taken stays.
fn send_all(socket: &OwnedFd, messages: &mut VecDeque<Vec<u8>>) -> bool {
    while let Some(message) = messages.front() {
        match send(socket.as_fd(), message) {
            Ok(()) => drop(messages.pop_front()),
            Err(error) => {
                return matches!(
                    error.raw_os_error(),
                    Some(libc::EAGAIN | libc::ENOBUFS | libc::EINTR)
                )
            }
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use dsec_sys::seqpacket::{listen, Kind};
    use std::os::unix::ffi::OsStrExt;

    #[test]
    fn events_wait_for_a_connection_and_the_oldest_are_lost() {
        let path = std::env::temp_dir().join(format!("dsec-connections-{}", std::process::id()));
        let name = std::ffi::CString::new(path.as_os_str().as_bytes()).unwrap();
        let listener = listen(Kind::Messages, &name, 4).unwrap();
        let mut connections = Connections::default();
        for number in 0..EVENTS_MAX + 10 {
            connections.event(number.to_string().into_bytes());
        }
        assert_eq!(connections.events.len(), EVENTS_MAX);
        assert_eq!(connections.events[0], b"10");

        connections.accept_all(listener.as_fd());
        connections.flush();

        assert_eq!(connections.events.len(), EVENTS_MAX);
        std::fs::remove_file(path).unwrap();
    }
}
