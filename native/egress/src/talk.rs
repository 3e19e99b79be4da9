//! Questions after names over a connection (RFC 7766): one at a time, each after its length.

use std::io;

use dsec_sys::epoll::{Source, READ, WRITE};

use crate::limits::QUESTION_BYTES_MAX;

#[derive(Default)]
pub struct Talk {
    came: Vec<u8>,
    goes: Vec<u8>,
    /// A question of it is being answered.
    waits: bool,
}

pub enum Heard {
    Nothing,
    Question(Vec<u8>),
    /// It has ended, or says what is no question.
    End,
}

impl Talk {
    /// Sends what is to be sent, and takes the next question once there is one.
    pub fn go_on(&mut self, client: &mut Source) -> io::Result<Heard> {
        while !self.goes.is_empty() {
            match client.write(&self.goes)? {
                Some(count) => drop(self.goes.drain(..count)),
                None => {
                    client.want(WRITE)?;
                    return Ok(Heard::Nothing);
                }
            }
        }
        if self.waits {
            client.want(0)?;
            return Ok(Heard::Nothing);
        }
        loop {
            let wanted = match self.came.first_chunk::<2>() {
                None => 2,
                Some(length) => 2 + usize::from(u16::from_be_bytes(*length)),
            };
            if wanted > 2 + QUESTION_BYTES_MAX {
                return Ok(Heard::End);
            }
            if self.came.len() > 2 && self.came.len() == wanted {
                self.waits = true;
                client.want(0)?;
                return Ok(Heard::Question(self.came.split_off(2)));
            }
            if self.came.len() == 2 && wanted == 2 {
                return Ok(Heard::End); // a question of no length
            }
            let mut buffer = [0; 2 + QUESTION_BYTES_MAX];
            match client.read(&mut buffer[..wanted - self.came.len()])? {
                None => {
                    client.want(READ)?;
                    return Ok(Heard::Nothing);
                }
                Some(0) => return Ok(Heard::End),
                Some(count) => self.came.extend_from_slice(&buffer[..count]),
            }
        }
    }

    /// The answer to the question that was heard.
    pub fn answer(&mut self, message: &[u8]) {
        self.came.clear();
        self.goes.extend((message.len() as u16).to_be_bytes());
        self.goes.extend_from_slice(message);
        self.waits = false;
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use dsec_sys::epoll::Poller;

    use super::*;

    #[test]
    fn questions_come_one_at_a_time_however_they_are_cut() {
        let poller = Poller::new().unwrap();
        let (mut far, near) = UnixStream::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        let mut client = Source::new(&poller, near.into(), 1);
        let mut talk = Talk::default();
        let bytes = b"\0\x03abc\0\x02de";
        let mut heard = Vec::new();
        for byte in bytes {
            far.write_all(&[*byte]).unwrap();
            if let Heard::Question(question) = talk.go_on(&mut client).unwrap() {
                heard.push(question.clone());
                talk.answer(&question);
            }
        }
        assert_eq!(heard, [b"abc".to_vec(), b"de".to_vec()]);
        assert!(matches!(talk.go_on(&mut client).unwrap(), Heard::Nothing));
        let mut answers = [0; 9];
        far.read_exact(&mut answers).unwrap();
        assert_eq!(&answers, bytes);

        far.write_all(&[0xff, 0xff]).unwrap();
        assert!(matches!(talk.go_on(&mut client).unwrap(), Heard::End));
    }
}
