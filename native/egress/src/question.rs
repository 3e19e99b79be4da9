//! A question after a name on its way to the operator's resolvers: by UDP, by TCP when the answer does not fit, a few times.

use std::io;
use std::net::SocketAddr;
use std::time::Instant;

use dsec_sys::epoll::{Poller, Source, READ, WRITE};
use dsec_sys::inet::connect_datagrams;
use dsec_sys::sockets::{connect_error, connect_tcp};

use crate::dns::{parse_answer, write_query, Answer, Query, NO_ERROR, NO_SUCH_NAME};
use crate::limits::{ATTEMPTS, RESOLVER_WAIT, TCP_ANSWER_BYTES_MAX, UDP_ANSWER_BYTES};
use crate::slab::Key;

/// Who gets the answer.
#[derive(Clone, Copy)]
pub enum Asker {
    /// From the address that was asked.
    Datagram {
        client: SocketAddr,
        asked: SocketAddr,
    },
    Connection(Key),
}

pub struct Question {
    pub query: Query,
    pub name: String,
    pub asker: Asker,
    /// When this attempt is over.
    pub until: Instant,
    attempt: u32,
    number: u16,
    way: Option<Way>,
}

enum Way {
    Datagrams(Source),
    Stream {
        link: Source,
        goes: Vec<u8>,
        came: Vec<u8>,
    },
}

pub enum Step {
    Waits,
    Answered(Answer),
    /// This attempt has failed.
    Failed,
}

impl Question {
    pub fn new(query: Query, name: String, asker: Asker, now: Instant) -> Question {
        Question {
            query,
            name,
            asker,
            until: now,
            attempt: 0,
            number: 0,
            way: None,
        }
    }

    /// Asks the next resolver, under a new number. False: there have been enough attempts.
    pub fn ask(
        &mut self,
        resolvers: &[SocketAddr],
        number: u16,
        poller: &Poller,
        token: u64,
        now: Instant,
    ) -> bool {
        self.way = None;
        while self.attempt < ATTEMPTS && !resolvers.is_empty() {
            let resolver = resolvers[self.attempt as usize % resolvers.len()];
            self.attempt += 1;
            self.number = number;
            self.until = now + RESOLVER_WAIT;
            if let Ok(link) = self.send(resolver, poller, token) {
                self.way = Some(Way::Datagrams(link));
                return true;
            }
        }
        false
    }

    fn send(&self, resolver: SocketAddr, poller: &Poller, token: u64) -> io::Result<Source> {
        let mut link = Source::new(poller, connect_datagrams(resolver)?, token);
        link.write(&write_query(
            self.number,
            &self.name,
            self.query.kind,
            UDP_ANSWER_BYTES,
        ))?;
        link.want(READ)?;
        Ok(link)
    }

    /// Something has come for it.
    pub fn go_on(&mut self, resolvers: &[SocketAddr], poller: &Poller, token: u64) -> Step {
        match self.try_go_on(resolvers, poller, token) {
            Ok(Step::Answered(answer)) if !matches!(answer.code, NO_ERROR | NO_SUCH_NAME) => {
                Step::Failed // it cannot; another one may
            }
            Ok(step) => step,
            Err(_) => Step::Failed,
        }
    }

    fn try_go_on(
        &mut self,
        resolvers: &[SocketAddr],
        poller: &Poller,
        token: u64,
    ) -> io::Result<Step> {
        let kind = self.query.kind;
        match &mut self.way {
            None => Ok(Step::Failed),
            Some(Way::Datagrams(link)) => {
                let mut buffer = [0; 4096];
                // What is no answer to this question is as if it had not come.
                while let Some(count) = link.read(&mut buffer)? {
                    match parse_answer(&buffer[..count], self.number, &self.name, kind) {
                        Ok(answer) if answer.is_truncated => {
                            self.ask_by_stream(resolvers, poller, token)?;
                            return Ok(Step::Waits);
                        }
                        Ok(answer) => return Ok(Step::Answered(answer)),
                        Err(_) => {}
                    }
                }
                Ok(Step::Waits)
            }
            Some(Way::Stream { link, goes, came }) => {
                let Some(message) = exchange(link, goes, came)? else {
                    return Ok(Step::Waits);
                };
                match parse_answer(&message, self.number, &self.name, kind) {
                    Ok(answer) => Ok(Step::Answered(answer)),
                    Err(_) => Ok(Step::Failed),
                }
            }
        }
    }

    fn ask_by_stream(
        &mut self,
        resolvers: &[SocketAddr],
        poller: &Poller,
        token: u64,
    ) -> io::Result<()> {
        let last = (self.attempt as usize).saturating_sub(1);
        let resolver = resolvers
            .get(last % resolvers.len().max(1))
            .ok_or(io::ErrorKind::NotFound)?;
        let query = write_query(
            self.number,
            &self.name,
            self.query.kind,
            TCP_ANSWER_BYTES_MAX,
        );
        let mut goes = (query.len() as u16).to_be_bytes().to_vec();
        goes.extend(query);
        self.way = None;
        let mut link = Source::new(poller, connect_tcp(*resolver)?, token);
        link.want(WRITE)?;
        self.way = Some(Way::Stream {
            link,
            goes,
            came: Vec::new(),
        });
        Ok(())
    }
}

/// The whole answer once it is there.
fn exchange(
    link: &mut Source,
    goes: &mut Vec<u8>,
    came: &mut Vec<u8>,
) -> io::Result<Option<Vec<u8>>> {
    if !goes.is_empty() {
        connect_error(link)?;
        while !goes.is_empty() {
            match link.write(goes)? {
                Some(count) => drop(goes.drain(..count)),
                None => return Ok(None),
            }
        }
        link.want(READ)?;
    }
    loop {
        let wanted = match came.first_chunk::<2>() {
            None => 2,
            Some(length) => 2 + usize::from(u16::from_be_bytes(*length)),
        };
        if wanted > 2 + TCP_ANSWER_BYTES_MAX {
            return Err(io::ErrorKind::InvalidData.into());
        }
        if came.len() >= 2 && came.len() == wanted {
            return Ok(Some(came.split_off(2)));
        }
        let mut buffer = [0; 4096];
        let room = (wanted - came.len()).min(buffer.len());
        match link.read(&mut buffer[..room])? {
            None => return Ok(None),
            Some(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Some(count) => came.extend_from_slice(&buffer[..count]),
        }
    }
}
