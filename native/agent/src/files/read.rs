//! Reading a file as a stream.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};

use dsec_protocol::codec::decode;
use dsec_protocol::files::ReadArgs;
use dsec_protocol::frames::{Data, FrameType, CHANNEL_OUT};
use dsec_protocol::limits::DATA_BYTES_MAX;
use dsec_sys::rooted::{is_made_when_read, NOT_BLOCKING};

use super::{path_of, stat_of};
use crate::agent::Agent;
use crate::dispatch::Answer;
use crate::exec::requests::Pumped;
use crate::refusal::Refusal;
use crate::streams::{Body, Stream};

pub struct Reading {
    file: File,
    path: Vec<u8>,
    offset: u64,
    end: u64,
}

impl Agent {
    pub fn op_read(&mut self, stream: u32, args: &[u8]) -> Result<Answer, Refusal> {
        let args: ReadArgs = decode(args)?;
        let target = path_of(&args.path)?;
        // Non-blocking, for what turns out to be a FIFO.
        let (file, facts) = self.on_path(&args.path, args.user.as_deref(), |path| {
            let file = OpenOptions::new()
                .read(true)
                .custom_flags(NOT_BLOCKING)
                .open(path)?;
            let facts = file.metadata()?;
            Ok((file, facts))
        })?;
        if !facts.is_file() {
            return Err(Refusal::new("not_a_file", "only regular files are read"));
        }
        let mut stat = stat_of(&target, &facts);
        if is_made_when_read(&file) {
            // sysfs says a page whatever there is. With 0 nobody counts on a size.
            stat.size = 0;
        }
        self.send(FrameType::Res, stream, &stat);
        let reading = Reading {
            file,
            path: args.path,
            offset: args.offset,
            end: args.offset.saturating_add(args.length.unwrap_or(u64::MAX)),
        };
        self.streams
            .insert(stream, Stream::new(Body::Read(reading)));
        self.ready.insert(stream);
        Ok(Answer::Opened)
    }

    pub fn pump_read(&mut self, id: u32, stream: &mut Stream) -> Pumped {
        let (Body::Read(reading), Some(link)) = (&mut stream.body, self.link.as_deref_mut()) else {
            return Pumped::Idle;
        };
        let left = reading.end - reading.offset;
        if left > 0 && stream.credit == 0 {
            return Pumped::Idle;
        }
        let most = stream.credit.min(left).min(DATA_BYTES_MAX as u64) as usize;
        let data = Data {
            channel: CHANNEL_OUT,
            offset: reading.offset,
            sequence: 0,
            payload: &[],
        };
        let read = link.send_read(id, data, most, |space| {
            read_at(&reading.file, space, reading.offset)
        });
        let read = match read {
            Ok(0) => {
                link.end(id);
                return Pumped::Over;
            }
            Ok(read) => read,
            Err(error) => {
                link.refuse(id, Refusal::file(&reading.path, &error));
                return Pumped::Over;
            }
        };
        reading.offset += read as u64;
        stream.credit -= read as u64;
        Pumped::More
    }
}

/// An offset that the kernel would not take is behind every file's end.
fn read_at(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    match i64::try_from(offset) {
        Ok(_) => file.read_at(buffer, offset),
        Err(_) => Ok(0),
    }
}
