//! Connections from the host to a port or socket inside the sandbox.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;

use dsec_protocol::codec::decode;
use dsec_protocol::frames::{Data, FrameType, CHANNEL_IN, CHANNEL_OUT};
use dsec_protocol::limits::PATH_BYTES_MAX;
use dsec_protocol::opening::Empty;
use dsec_protocol::rest::ConnectArgs;
use dsec_sys::epoll::{Source, HANGUP, READ, WRITE};
use dsec_sys::sockets::{connect_error, connect_tcp, connect_unix, reset_on_close, shutdown_write};

use crate::agent::Agent;
use crate::dispatch::Answer;
use crate::exec::requests::Pumped;
use crate::refusal::Refusal;
use crate::streams::{Body, Stream};
use crate::token::Token;

const CHUNK_BYTES: usize = 64 << 10;

pub struct Connection {
    socket: Source,
    /// Addresses to try after the present one.
    others: Vec<SocketAddr>,
    connected: bool,
    to_socket: VecDeque<u8>,
    taken: u64,
    /// The host has sent its last byte.
    host_ended: bool,
    write_closed: bool,
    from_socket: Vec<u8>,
    offset: u64,
    read_ended: bool,
    end_sent: bool,
    /// One that came: whoever made it is to see whether it was cut.
    came: bool,
}

impl Agent {
    pub fn op_connect(&mut self, stream: u32, args: &[u8]) -> Result<Answer, Refusal> {
        let args: ConnectArgs = decode(args)?;
        let mut others = Vec::new();
        let fd = match (&args.path, args.port) {
            (Some(path), None) if path.len() <= PATH_BYTES_MAX => {
                let account = self.account(Some("0"))?;
                crate::acting::acting_as(&self.own, &account, || connect_unix(path))
            }
            (None, Some(port)) => {
                others = addresses(&args.host, port)?;
                next_connection(&mut others)
            }
            _ => return Err(Refusal::invalid("exactly one of port and path")),
        };
        let fd = fd.map_err(|e| refuse_connect(&e))?;
        let mut socket = Source::new(&self.poller, fd, Token::Socket(stream).pack());
        socket.want(WRITE).map_err(|e| refuse_connect(&e))?;
        let connection = Connection {
            others,
            ..Connection::of(socket)
        };
        self.streams
            .insert(stream, Stream::new(Body::Connect(connection)));
        Ok(Answer::Opened)
    }

    pub fn socket_ready(&mut self, id: u32, events: u32) {
        let Some(mut stream) = self.streams.remove(&id) else {
            return;
        };
        let Body::Connect(connection) = &mut stream.body else {
            self.streams.insert(id, stream);
            return;
        };
        if !connection.connected {
            match self.connect_progress(id, connection) {
                Ok(()) => drop(self.streams.insert(id, stream)),
                Err(error) => self.refuse_stream(id, refuse_connect(&error)),
            }
            return;
        }
        let mut result = Ok(0);
        if events & (WRITE | HANGUP) != 0 {
            result = connection.write_on();
        }
        if events & (READ | HANGUP) != 0 {
            result = result.and_then(|written| {
                connection.read_on(&mut self.scratch)?;
                Ok(written)
            });
        }
        self.keep_connection(id, stream, result);
    }

    pub fn connect_input(
        &mut self,
        id: u32,
        mut stream: Stream,
        data: &Data<'_>,
    ) -> Result<(), Refusal> {
        if let Body::Connect(connection) = &mut stream.body {
            let fits = connection.connected && !connection.host_ended;
            if data.channel != CHANNEL_IN || data.offset != connection.taken || !fits {
                return Err(Refusal::invalid("data out of order"));
            }
            connection.taken += data.payload.len() as u64;
            connection.to_socket.extend(data.payload);
            let result = connection.write_on();
            self.keep_connection(id, stream, result);
        }
        Ok(())
    }

    pub fn connect_input_end(&mut self, id: u32, mut stream: Stream) {
        if let Body::Connect(connection) = &mut stream.body {
            connection.host_ended = true;
            let result = connection.write_on();
            self.keep_connection(id, stream, result);
        }
    }

    pub fn pump_connect(&mut self, id: u32, stream: &mut Stream) -> Pumped {
        let Body::Connect(connection) = &mut stream.body else {
            return Pumped::Idle;
        };
        let Some(link) = self.link.as_deref_mut() else {
            return Pumped::Over;
        };
        let count = connection.from_socket.len().min(stream.credit as usize);
        if count > 0 {
            let data = Data {
                channel: CHANNEL_OUT,
                offset: connection.offset,
                sequence: 0,
                payload: &connection.from_socket[..count],
            };
            if link.send_data(id, data, &[]).is_err() {
                return Pumped::Idle;
            }
            connection.from_socket.drain(..count);
            connection.offset += count as u64;
            stream.credit -= count as u64;
        }
        if connection.from_socket.is_empty() {
            connection.from_socket = Vec::new();
            if connection.read_ended && !connection.end_sent {
                connection.end_sent = true;
                link.end(id);
            }
        }
        if connection.is_over() {
            if connection.came {
                // Of one that the other side has reset already it does not matter.
                let _ = reset_on_close(&connection.socket, false);
            }
            return Pumped::Over;
        }
        match connection.set_interest() {
            Ok(()) => Pumped::Idle,
            Err(error) => {
                link.refuse(id, refuse_connect(&error));
                Pumped::Over
            }
        }
    }

    fn connect_progress(&mut self, id: u32, connection: &mut Connection) -> io::Result<()> {
        match connect_error(&connection.socket) {
            Ok(()) => {
                connection.connected = true;
                connection.set_interest()?;
                self.send(FrameType::Res, id, &Empty {});
                Ok(())
            }
            Err(error) if connection.others.is_empty() => Err(error),
            Err(_) => {
                let fd = next_connection(&mut connection.others)?;
                connection.socket = Source::new(&self.poller, fd, Token::Socket(id).pack());
                connection.socket.want(WRITE)
            }
        }
    }

    /// After something moved: grants, sends, or ends the stream.
    fn keep_connection(&mut self, id: u32, stream: Stream, result: io::Result<u64>) {
        match result {
            Ok(written) => {
                self.streams.insert(id, stream);
                self.grant(id, written);
                self.ready.insert(id);
            }
            Err(error) => self.refuse_stream(id, refuse_connect(&error)),
        }
    }
}

impl Connection {
    fn of(socket: Source) -> Self {
        Self {
            socket,
            others: Vec::new(),
            connected: false,
            to_socket: VecDeque::new(),
            taken: 0,
            host_ended: false,
            write_closed: false,
            from_socket: Vec::new(),
            offset: 0,
            read_ended: false,
            end_sent: false,
            came: false,
        }
    }

    /// Closing it is a reset until both sides have ended.
    pub fn accepted(socket: Source) -> io::Result<Self> {
        reset_on_close(&socket, true)?;
        let mut connection = Self {
            connected: true,
            came: true,
            ..Self::of(socket)
        };
        connection.set_interest()?;
        Ok(connection)
    }

    fn write_on(&mut self) -> io::Result<u64> {
        let mut written = 0;
        while !self.to_socket.is_empty() {
            match self.socket.write(self.to_socket.as_slices().0)? {
                Some(count) => {
                    self.to_socket.drain(..count);
                    written += count as u64;
                }
                None => break,
            }
        }
        if self.to_socket.is_empty() {
            self.to_socket = VecDeque::new();
            if self.host_ended && !self.write_closed {
                shutdown_write(&self.socket)?;
                self.write_closed = true;
            }
        }
        Ok(written)
    }

    fn read_on(&mut self, scratch: &mut [u8]) -> io::Result<()> {
        if self.from_socket.is_empty() && !self.read_ended {
            let room = scratch.len().min(CHUNK_BYTES);
            match self.socket.read(&mut scratch[..room])? {
                Some(0) => self.read_ended = true,
                Some(count) => self.from_socket.extend_from_slice(&scratch[..count]),
                None => {}
            }
        }
        Ok(())
    }

    fn set_interest(&mut self) -> io::Result<()> {
        let mut interest = 0;
        if self.from_socket.is_empty() && !self.read_ended {
            interest |= READ;
        }
        if !self.to_socket.is_empty() {
            interest |= WRITE;
        }
        self.socket.want(interest)
    }

    fn is_over(&self) -> bool {
        self.end_sent && self.write_closed
    }
}

pub fn refuse_connect(error: &io::Error) -> Refusal {
    Refusal::system("connect_failed", "connecting", error)
}

fn addresses(host: &str, port: u16) -> Result<Vec<SocketAddr>, Refusal> {
    let list = match host {
        "localhost" => vec![
            IpAddr::V4(Ipv4Addr::LOCALHOST),
            IpAddr::V6(Ipv6Addr::LOCALHOST),
        ],
        _ => vec![host
            .parse()
            .map_err(|_| Refusal::invalid("host is neither an address nor localhost"))?],
    };
    Ok(list
        .into_iter()
        .map(|ip| SocketAddr::new(ip, port))
        .collect())
}

/// The first address that does not fail at once.
fn next_connection(others: &mut Vec<SocketAddr>) -> io::Result<OwnedFd> {
    loop {
        let address = others.remove(0);
        match connect_tcp(address) {
            Err(_) if !others.is_empty() => {}
            result => return result,
        }
    }
}
