//! Writing a file from a stream: replaced at the end, or in place.

use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{fchown, FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use dsec_protocol::codec::decode;
use dsec_protocol::exec::StdinEnd;
use dsec_protocol::files::{WriteArgs, Written};
use dsec_protocol::frames::{Data, FrameType, CHANNEL_IN};
use dsec_protocol::opening::{Credit, Empty};
use dsec_sys::rooted::{NOT_BLOCKING, NOT_FOLLOWING};

use super::{make_directory, path_of};
use crate::acting::acting_as;
use crate::agent::Agent;
use crate::dispatch::Answer;
use crate::refusal::Refusal;
use crate::setup::Own;
use crate::streams::{Body, Stream};
use crate::users::Account;

/// What comes is written at once and nothing is kept, so the sender need not wait for each frame.
const WINDOW_BYTES: u64 = 1 << 20;
const MODE_BITS: u32 = 0o7777;
const MODE_NEW: u32 = 0o644;
/// Ends the name of a file that takes the place of another at the end.
const REPLACING: &str = "-again.tmp";

pub struct Writing {
    file: File,
    path: Vec<u8>,
    account: Account,
    place: Place,
    taken: u64,
}

/// Of the file that is replaced.
struct Before {
    uid: u32,
    gid: u32,
    mode: u32,
}

enum Place {
    /// A new file that takes the place of `target` at the end.
    Replacing {
        temporary: PathBuf,
        target: PathBuf,
        before: Option<Before>,
        mode: Option<u32>,
    },
    At(u64),
    Appending,
}

impl Agent {
    pub fn op_write(&mut self, stream: u32, args: &[u8]) -> Result<Answer, Refusal> {
        let args: WriteArgs = decode(args)?;
        let target = path_of(&args.path)?;
        if args.append && args.offset.is_some() {
            return Err(Refusal::invalid("either offset or append"));
        }
        if args
            .offset
            .is_some_and(|offset| i64::try_from(offset).is_err())
        {
            return Err(Refusal::invalid("offset is out of range"));
        }
        let account = self.account(args.user.as_deref())?;
        let unique = format!("{}{stream}", temporary_prefix(&self.boot_id));
        let opened = acting_as(&self.own, &account, || {
            if args.parents {
                make_directory(target.parent().unwrap_or(Path::new("/")), true)?;
            }
            match args.append || args.offset.is_some() {
                true => open_in_place(&target, &args),
                false => open_replacement(&target, &args, &unique),
            }
        });
        let opened = opened.map_err(|e| Refusal::file(&args.path, &e))?;
        let Some((file, place)) = opened else {
            return Err(Refusal::new("not_a_file", "only regular files are written"));
        };
        let writing = Writing {
            file,
            path: args.path,
            account,
            place,
            taken: 0,
        };
        self.send(FrameType::Res, stream, &Empty {});
        let mut opened = Stream::new(Body::Write(writing));
        let bytes = opened.widen(WINDOW_BYTES);
        self.send(FrameType::Credit, stream, &Credit { bytes });
        self.streams.insert(stream, opened);
        Ok(Answer::Opened)
    }

    pub fn write_input(
        &mut self,
        id: u32,
        mut stream: Stream,
        data: &Data<'_>,
    ) -> Result<(), Refusal> {
        let Body::Write(writing) = &mut stream.body else {
            return Ok(());
        };
        let written = match data.channel == CHANNEL_IN && data.offset == writing.taken {
            true => writing
                .write(data.payload)
                .map_err(|e| Refusal::file(&writing.path, &e)),
            false => Err(Refusal::invalid("data out of order")),
        };
        match written {
            Ok(()) => {
                self.streams.insert(id, stream);
                self.grant(id, data.payload.len() as u64);
                Ok(())
            }
            Err(refusal) => {
                self.abandon(id, stream);
                Err(refusal)
            }
        }
    }

    pub fn write_end(&mut self, id: u32, stream: Stream, body: &[u8]) -> Result<(), Refusal> {
        let Body::Write(writing) = stream.body else {
            return Ok(());
        };
        let end: StdinEnd = match decode(body) {
            Ok(end) => end,
            Err(error) => {
                writing.abandon(&self.own);
                return Err(error.into());
            }
        };
        if end.offset != 0 && end.offset != writing.taken {
            writing.abandon(&self.own);
            return Err(Refusal::invalid("bytes before the end are missing"));
        }
        let (bytes, path) = (writing.taken, writing.path.clone());
        writing
            .finish(&self.own)
            .map_err(|e| Refusal::file(&path, &e))?;
        self.send(FrameType::End, id, &Written { bytes, entries: 1 });
        Ok(())
    }
}

impl Writing {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self.place {
            Place::At(offset) => self.file.write_all_at(bytes, offset + self.taken)?,
            Place::Replacing { .. } | Place::Appending => self.file.write_all(bytes)?,
        }
        self.taken += bytes.len() as u64;
        Ok(())
    }

    /// Without a trace, where that was promised.
    pub fn abandon(self, own: &Own) {
        if let Place::Replacing { temporary, .. } = &self.place {
            // It can only be gone already, or be in a directory that the user has lost the right to.
            let _ = acting_as(own, &self.account, || std::fs::remove_file(temporary));
        }
    }

    fn finish(self, own: &Own) -> io::Result<()> {
        let Place::Replacing {
            temporary,
            target,
            before,
            mode,
        } = &self.place
        else {
            return Ok(());
        };
        let placed = acting_as(own, &self.account, || {
            if let Some(before) = before {
                // Keeping the owner is a courtesy that only root can do.
                let _ = fchown(&self.file, Some(before.uid), Some(before.gid));
            }
            let kept = before.as_ref().map(|before| before.mode);
            let mode = mode.map(|mode| mode & MODE_BITS).or(kept);
            self.file
                .set_permissions(Permissions::from_mode(mode.unwrap_or(MODE_NEW)))?;
            std::fs::rename(temporary, target)
        });
        if placed.is_err() {
            self.abandon(own);
        }
        placed
    }
}

/// How names of files begin that this agent writes and that have no name of their own yet.
pub fn temporary_prefix(boot_id: &str) -> String {
    format!(".dsec-{}", &boot_id[..12])
}

/// Whether the file of this name, one of ours, was to take the place of another.
pub fn replaces(temporary: &[u8]) -> bool {
    temporary.ends_with(REPLACING.as_bytes())
}

type Opened = io::Result<Option<(File, Place)>>;

fn open_in_place(target: &Path, args: &WriteArgs) -> Opened {
    let mut options = OpenOptions::new();
    options
        .create(true)
        .mode(args.mode.unwrap_or(MODE_NEW) & MODE_BITS)
        .custom_flags(NOT_BLOCKING);
    let (options, place) = match args.offset {
        Some(offset) => (options.write(true), Place::At(offset)),
        None => (options.append(true), Place::Appending),
    };
    let file = options.open(target)?;
    if !file.metadata()?.is_file() {
        return Ok(None);
    }
    if let Some(mode) = args.mode {
        file.set_permissions(Permissions::from_mode(mode & MODE_BITS))?;
    }
    Ok(Some((file, place)))
}

/// A symlink to a file stays: what it points to is replaced.
fn open_replacement(path: &Path, args: &WriteArgs, unique: &str) -> Opened {
    let target = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
    let before = std::fs::metadata(&target).ok();
    match &before {
        Some(facts) if facts.is_dir() => return Err(io::Error::from_raw_os_error(libc::EISDIR)),
        Some(facts) if !facts.is_file() => return Ok(None),
        _ => {}
    }
    let (Some(name), Some(directory)) = (target.file_name(), target.parent()) else {
        return Err(io::Error::from_raw_os_error(libc::EISDIR));
    };
    if name.as_bytes().len() > 255 {
        return Err(io::Error::from_raw_os_error(libc::ENAMETOOLONG));
    }
    let ending = match before {
        Some(_) => REPLACING,
        None => ".tmp",
    };
    let temporary = directory.join(format!("{unique}{ending}"));
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .custom_flags(NOT_FOLLOWING)
        .open(&temporary)?;
    let place = Place::Replacing {
        temporary,
        target,
        before: before.map(|facts| Before {
            uid: facts.uid(),
            gid: facts.gid(),
            mode: facts.mode() & MODE_BITS,
        }),
        mode: args.mode,
    };
    Ok(Some((file, place)))
}
