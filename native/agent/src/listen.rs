//! Ports of the sandbox's loopback on which the agent listens for the host. The host takes each connection by a stream
//! of its own: without one that waits, connections wait in the kernel.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::OwnedFd;

use dsec_protocol::codec::decode;
use dsec_protocol::limits::LISTENERS_MAX;
use dsec_protocol::opening::Empty;
use dsec_protocol::rest::ListenArgs;
use dsec_sys::epoll::{Source, READ};

use crate::agent::Agent;
use crate::connect::{refuse_connect, Connection};
use crate::dispatch::{reply, Answer};
use crate::refusal::Refusal;
use crate::streams::{Body, Stream};
use crate::token::Token;

pub struct Listener {
    address: SocketAddr,
    socket: TcpListener,
    source: Source,
    /// Streams of `accept`, the first to come first; some may have been given up.
    waiting: VecDeque<u32>,
}

impl Agent {
    /// Until the host's connection ends. The same again is success.
    pub fn op_listen(&mut self, args: &[u8]) -> Result<Answer, Refusal> {
        let address = address_of(args)?;
        if self.listeners.values().all(|one| one.address != address) {
            let number = self
                .listeners
                .last_key_value()
                .map_or(0, |(last, _)| last + 1);
            if self.listeners.len() >= LISTENERS_MAX {
                return Err(Refusal::new("too_many_listeners", "too many listeners"));
            }
            let listener = self
                .listen_at(address, number)
                .map_err(|e| refuse_connect(&e))?;
            self.listeners.insert(number, listener);
        }
        reply(&Empty {})
    }

    /// The next connection to a port that was listened on before.
    pub fn op_accept(&mut self, stream: u32, args: &[u8]) -> Result<Answer, Refusal> {
        let address = address_of(args)?;
        let streams = &self.streams;
        let listener = self
            .listeners
            .values_mut()
            .find(|one| one.address == address);
        let Some(listener) = listener else {
            return Err(Refusal::invalid("nothing listens there"));
        };
        listener.waiting.retain(|id| is_waiting(streams.get(id)));
        listener.waiting.push_back(stream);
        listener.source.want(READ).map_err(|e| refuse_connect(&e))?;
        self.streams.insert(stream, Stream::new(Body::Accept));
        Ok(Answer::Opened)
    }

    pub fn listener_ready(&mut self, number: u32) {
        let Some(mut listener) = self.listeners.remove(&number) else {
            return;
        };
        while let Some(&id) = listener.waiting.front() {
            if is_waiting(self.streams.get(&id)) {
                match listener.socket.accept() {
                    Ok((socket, _)) => {
                        if let Err(error) = self.take_connection(id, socket) {
                            self.refuse_accept(id, &error);
                        }
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    // Who connected has gone again, or a signal came.
                    Err(error) if is_passing(&error) => continue,
                    Err(error) => self.refuse_accept(id, &error),
                }
            }
            listener.waiting.pop_front();
        }
        let interest = if listener.waiting.is_empty() { 0 } else { READ };
        // What cannot be waited for any more is begun anew by the host, whose streams end here.
        match listener.source.want(interest) {
            Ok(()) => drop(self.listeners.insert(number, listener)),
            Err(error) => {
                for id in listener.waiting {
                    self.refuse_accept(id, &error);
                }
            }
        }
    }

    fn listen_at(&self, address: SocketAddr, number: u32) -> io::Result<Listener> {
        let socket = TcpListener::bind(address)?;
        socket.set_nonblocking(true)?;
        let fd = OwnedFd::from(socket.try_clone()?);
        let source = Source::new(&self.poller, fd, Token::Port(number).pack());
        Ok(Listener {
            address,
            socket,
            source,
            waiting: VecDeque::new(),
        })
    }

    fn take_connection(&mut self, id: u32, socket: std::net::TcpStream) -> io::Result<()> {
        socket.set_nonblocking(true)?;
        socket.set_nodelay(true)?;
        let source = Source::new(
            &self.poller,
            OwnedFd::from(socket),
            Token::Socket(id).pack(),
        );
        let connection = Connection::accepted(source)?;
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.body = Body::Connect(connection);
        }
        self.send(dsec_protocol::frames::FrameType::Res, id, &Empty {});
        Ok(())
    }

    fn refuse_accept(&mut self, id: u32, error: &io::Error) {
        if self.streams.remove(&id).is_some() {
            self.refuse_stream(id, refuse_connect(error));
        }
    }
}

fn is_waiting(stream: Option<&Stream>) -> bool {
    stream.is_some_and(|stream| matches!(stream.body, Body::Accept))
}

fn is_passing(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted
    )
}

/// The loopback alone: what listens elsewhere is reached from outside.
fn address_of(args: &[u8]) -> Result<SocketAddr, Refusal> {
    let args: ListenArgs = decode(args)?;
    match args.host.parse::<IpAddr>() {
        Ok(ip) if ip.is_loopback() && args.port != 0 => Ok(SocketAddr::new(ip, args.port)),
        _ => Err(Refusal::invalid("an address of the loopback, and a port")),
    }
}
