//! The process that has rights, and does nothing but find networks, set them up, and hand sockets over. Nothing that a sandbox
//! sends gets here. The server asks it, and each ends when the other has.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use dsec_sys::epoll::Source;
use dsec_sys::passing::{receive_all, send_with};

use crate::error::{Doing, Error, Result};
use crate::network::{self, Family, Id, Sockets};
use crate::settings;

/// Number and start.
pub type Process = (i32, u64);

const FIND: u8 = 1;
const STEER: u8 = 2;
const RESOLVERS: u8 = 3;
const REQUEST_BYTES: usize = 13;
/// What is said of an error is cut at that.
const TEXT_BYTES_MAX: usize = 600;
const ANSWER_BYTES_MAX: usize = 2 * TEXT_BYTES_MAX + 32;
/// How an answer begins: it is done, or the kind of error.
const DONE: u8 = 0;
const HOST: u8 = 1;
const INVALID: u8 = 2;
const NOT_FOUND: u8 = 3;
const BUSY: u8 = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    /// Which network is it in.
    Find,
    /// Set that network up. May be repeated once the sockets of before are closed.
    Steer,
    /// The host's resolv.conf, opened.
    Resolvers,
}

pub struct Found {
    /// Of a process: readable when it has ended. Of resolvers: their file.
    pub descriptor: OwnedFd,
    pub id: Id,
    /// If they were wished for.
    pub sockets: Option<Sockets>,
}

/// The server's end. It answers one wish after the other.
pub struct Keeper {
    link: Source,
    /// What it has not answered yet.
    asked: VecDeque<Wish>,
}

impl Keeper {
    /// `link` is readable when it has answered, or ended.
    pub fn new(link: Source) -> Keeper {
        Keeper {
            link,
            asked: VecDeque::new(),
        }
    }

    pub fn is_asked(&self, wish: Wish) -> bool {
        self.asked.contains(&wish)
    }

    /// Of a process, unless resolvers are wished for.
    pub fn ask(&mut self, wish: Wish, (pid, start): Process) -> Result<()> {
        let mut request = vec![match wish {
            Wish::Find => FIND,
            Wish::Steer => STEER,
            Wish::Resolvers => RESOLVERS,
        }];
        request.extend(pid.to_ne_bytes());
        request.extend(start.to_ne_bytes());
        send_with(&self.link, &request, &[]).doing("asking the keeper")?;
        self.asked.push_back(wish);
        Ok(())
    }

    /// Its answer, and to what; None: it has ended, or is out of step.
    pub fn hear(&mut self) -> Option<(Wish, Result<Found>)> {
        let mut answer = [0; ANSWER_BYTES_MAX];
        let heard = match receive_all(&self.link, &mut answer) {
            Ok((0, _)) => return None,
            Ok((count, descriptors)) => read_answer(&answer[..count])
                .unwrap_or_else(|| Err(incomplete()))
                .and_then(|id| found_of(id, descriptors)),
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return None,
            Err(error) => Err(error).doing("hearing the keeper"),
        };
        self.asked.pop_front().map(|wish| (wish, heard))
    }
}

/// In the order in which `act` gives them.
fn found_of(id: Id, descriptors: Vec<OwnedFd>) -> Result<Found> {
    let count = descriptors.len();
    let mut descriptors = descriptors.into_iter();
    let mut next = || descriptors.next().ok_or_else(incomplete);
    let descriptor = next()?;
    if count == 1 {
        return Ok(Found {
            descriptor,
            id,
            sockets: None,
        });
    }
    let link = next()?;
    let mut family = || {
        Ok(Family {
            listener: next()?,
            questions: next()?,
            packets: next()?,
        })
    };
    let v4 = family()?;
    let v6 = if count > 5 { Some(family()?) } else { None };
    let sockets = Some(Sockets { v4, v6, link });
    Ok(Found {
        descriptor,
        id,
        sockets,
    })
}

fn incomplete() -> Error {
    Error::Busy("the keeper has ended, or descriptors are short".into())
}

/// Does what is asked until the server has ended.
pub fn keep(link: &OwnedFd) -> Result<()> {
    loop {
        let mut request = [0; REQUEST_BYTES];
        let (count, _) = match receive_all(link, &mut request) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(()),
            other => other.doing("hearing the server")?,
        };
        if count == 0 {
            return Ok(());
        }
        let done = match read_request(&request[..count]) {
            Some((what, process)) => act(what, process),
            None => Err(Error::Invalid("no request".into())),
        };
        let (answer, descriptors) = match done {
            Ok((id, descriptors)) => {
                let mut answer = vec![DONE];
                answer.extend(id.0.to_ne_bytes());
                answer.extend(id.1.to_ne_bytes());
                (answer, descriptors)
            }
            Err(error) => (write_error(&error), Vec::new()),
        };
        let borrowed: Vec<BorrowedFd> = descriptors.iter().map(AsFd::as_fd).collect();
        match send_with(link, &answer, &borrowed) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
            other => other.doing("answering the server")?,
        };
    }
}

fn act(what: u8, (pid, start): Process) -> Result<(Id, Vec<OwnedFd>)> {
    if what == RESOLVERS {
        return Ok(((0, 0), vec![settings::open_resolv_conf()?]));
    }
    let found = network::find(pid, start)?;
    let mut descriptors = vec![found.process];
    if what == STEER {
        let sockets = Sockets::make(&found.network)?;
        descriptors.push(sockets.link);
        for family in [Some(sockets.v4), sockets.v6].into_iter().flatten() {
            descriptors.extend([family.listener, family.questions, family.packets]);
        }
    }
    Ok((found.id, descriptors))
}

fn read_request(request: &[u8]) -> Option<(u8, Process)> {
    let request: &[u8; REQUEST_BYTES] = request.try_into().ok()?;
    let [what, pid @ .., _, _, _, _, _, _, _, _] = *request;
    let start = u64::from_ne_bytes(*request.last_chunk()?);
    matches!(what, FIND | STEER | RESOLVERS).then_some((what, (i32::from_ne_bytes(pid), start)))
}

fn write_error(error: &Error) -> Vec<u8> {
    let (kind, number, doing, text) = match error {
        Error::Host { doing, source } => {
            let number = source.raw_os_error().unwrap_or(0);
            (HOST, number, doing.as_str(), source.to_string())
        }
        Error::Invalid(text) => (INVALID, 0, "", text.clone()),
        Error::NotFound(text) => (NOT_FOUND, 0, "", text.clone()),
        Error::Busy(text) => (BUSY, 0, "", text.clone()),
    };
    let doing = &doing.as_bytes()[..doing.len().min(TEXT_BYTES_MAX)];
    let text = &text.as_bytes()[..text.len().min(TEXT_BYTES_MAX)];
    let mut answer = vec![kind];
    answer.extend(number.to_ne_bytes());
    answer.extend((doing.len() as u16).to_ne_bytes());
    answer.extend(doing);
    answer.extend(text);
    answer
}

fn read_answer(answer: &[u8]) -> Option<Result<Id>> {
    let (&kind, rest) = answer.split_first()?;
    if kind == DONE {
        let (first, second) = rest.split_first_chunk()?;
        let second = second.first_chunk()?;
        return Some(Ok((
            u64::from_ne_bytes(*first),
            u64::from_ne_bytes(*second),
        )));
    }
    let (number, rest) = rest.split_first_chunk()?;
    let (length, rest) = rest.split_first_chunk()?;
    let (doing, text) = rest.split_at_checked(u16::from_ne_bytes(*length).into())?;
    let words = |bytes| String::from_utf8_lossy(bytes).into_owned();
    let text = words(text);
    Some(Err(match kind {
        HOST => Error::Host {
            doing: words(doing),
            source: match i32::from_ne_bytes(*number) {
                0 => io::Error::other(text),
                number => io::Error::from_raw_os_error(number),
            },
        },
        INVALID => Error::Invalid(text),
        NOT_FOUND => Error::NotFound(text),
        BUSY => Error::Busy(text),
        _ => return None,
    }))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use dsec_sys::epoll::Poller;
    use dsec_sys::passing::message_pair;

    use super::*;

    #[test]
    fn errors_come_as_they_went() {
        let errors = [
            Error::Host {
                doing: "entering".into(),
                source: io::Error::from_raw_os_error(libc::EPERM),
            },
            Error::Host {
                doing: "loading".into(),
                source: io::Error::other("the verifier says no"),
            },
            Error::Invalid("i".into()),
            Error::NotFound(String::new()),
            Error::Busy("b".into()),
        ];
        for error in errors {
            let read = read_answer(&write_error(&error)).unwrap().unwrap_err();
            assert_eq!(read.to_string(), error.to_string());
            assert_eq!(read.code(), error.code());
        }
        for bytes in [
            &[][..],
            &[0, 1],
            &[1, 0, 0],
            &[9; 40],
            &[1, 0, 0, 0, 0, 9, 0],
        ] {
            assert!(read_answer(bytes).is_none());
        }
    }

    #[test]
    fn it_answers_what_it_is_asked_and_ends_with_the_server() {
        let (ours, theirs) = message_pair().unwrap();
        let thread = std::thread::spawn(move || keep(&ours));
        let poller = Poller::new().unwrap();
        let mut keeper = Keeper::new(Source::new(&poller, theirs, 0));

        let own = std::process::id() as i32;
        keeper.ask(Wish::Find, (own, 0)).unwrap();
        keeper.ask(Wish::Steer, (1, 0)).unwrap();
        let (wish, answer) = keeper.hear().unwrap();
        assert_eq!(wish, Wish::Find);
        assert!(matches!(answer, Err(Error::NotFound(_))));
        let (wish, answer) = keeper.hear().unwrap();
        assert_eq!(wish, Wish::Steer);
        assert!(matches!(answer, Err(Error::Invalid(_))));
        send_with(&keeper.link, b"what", &[]).unwrap();
        assert!(keeper.hear().is_none()); // nobody has asked that
        keeper.ask(Wish::Resolvers, (0, 0)).unwrap();
        assert!(keeper.is_asked(Wish::Resolvers));
        let (wish, answer) = keeper.hear().unwrap();
        assert_eq!(wish, Wish::Resolvers);
        assert!(
            answer.is_ok_and(|found| found.sockets.is_none())
                || !Path::new("/etc/resolv.conf").exists()
        );
        assert!(!keeper.is_asked(Wish::Resolvers));

        drop(keeper);
        thread.join().unwrap().unwrap();
    }
}
