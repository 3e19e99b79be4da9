//! Watches on directories: one inotify instance for all of them, because instances are few per user.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use dsec_protocol::codec::decode;
use dsec_protocol::files::{WatchArgs, WatchEvent};
use dsec_protocol::frames::FrameType;
use dsec_protocol::limits::{WATCHES_MAX, WATCH_DIRECTORIES_MAX, WATCH_EVENTS_QUEUED_MAX};
use dsec_protocol::opening::Empty;
use dsec_sys::epoll::{Poller, Source, READ};
use dsec_sys::inotify::{self, Change};
use dsec_sys::rooted::c_path;

use crate::acting::acting_as;
use crate::agent::Agent;
use crate::dispatch::Answer;
use crate::exec::requests::Pumped;
use crate::files::path_of;
use crate::refusal::Refusal;
use crate::streams::{Body, Stream};
use crate::token::Token;

/// Names are long at most a path each; with the count this bounds the memory of a queue.
const QUEUE_BYTES_MAX: usize = 4 << 20;
const READS_PER_TURN: usize = 16;
const EVENTS_PER_PUMP: usize = 256;

#[derive(Default)]
pub struct Watches {
    instance: Option<Source>,
    by_stream: BTreeMap<u32, Watch>,
    /// What each inotify watch stands for: by stream, the directory relative to that stream's root.
    labels: BTreeMap<i32, Vec<Label>>,
}

struct Watch {
    root: PathBuf,
    recursive: bool,
    queue: VecDeque<WatchEvent>,
    queue_bytes: usize,
    /// An overflow is said; nothing more is queued until the host has taken what is there.
    overflowed: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Label {
    stream: u32,
    below: Vec<u8>,
}

/// The first half of a move, until the second comes.
struct Departure {
    stream: u32,
    cookie: u32,
    path: Vec<u8>,
    directory: bool,
}

impl Agent {
    pub fn op_watch(&mut self, stream: u32, args: &[u8]) -> Result<Answer, Refusal> {
        let args: WatchArgs = decode(args)?;
        let root = path_of(&args.path)?;
        let account = self.account(None)?;
        if self.watches.by_stream.len() >= WATCHES_MAX {
            return Err(Refusal::new("too_many_watches", "too many watches"));
        }
        let watch = Watch {
            root,
            recursive: args.recursive,
            queue: VecDeque::new(),
            queue_bytes: 0,
            overflowed: false,
        };
        self.watches.by_stream.insert(stream, watch);
        let watches = &mut self.watches;
        let poller = &self.poller;
        let added = acting_as(&self.own, &account, || {
            watches.open(poller)?;
            watches.add(stream, b"", &mut Vec::new())
        });
        if let Err(error) = added {
            self.unwatch(stream);
            return Err(Refusal::file(&args.path, &error));
        }
        self.streams.insert(stream, Stream::new(Body::Watch));
        self.send(FrameType::Res, stream, &Empty {});
        Ok(Answer::Opened)
    }

    pub fn unwatch(&mut self, stream: u32) {
        self.watches.by_stream.remove(&stream);
        self.watches.unlabel(stream, b"");
        if self.watches.by_stream.is_empty() {
            self.watches.instance = None;
            self.watches.labels.clear();
        }
    }

    pub fn read_changes(&mut self) {
        let Ok(account) = self.account(None) else {
            return;
        };
        let (watches, scratch) = (&mut self.watches, &mut self.scratch);
        let result = acting_as(&self.own, &account, || {
            watches.take_changes(scratch);
            Ok(())
        });
        if result.is_err() {
            self.watches.overflow_all();
        }
        self.ready.extend(self.watches.by_stream.keys());
    }

    pub fn pump_watch(&mut self, id: u32) -> Pumped {
        let (Some(watch), Some(link)) = (
            self.watches.by_stream.get_mut(&id),
            self.link.as_deref_mut(),
        ) else {
            return Pumped::Idle;
        };
        for _ in 0..EVENTS_PER_PUMP {
            if !link.has_room() {
                return Pumped::More;
            }
            let Some(event) = watch.queue.pop_front() else {
                watch.queue = VecDeque::new();
                watch.queue_bytes = 0;
                watch.overflowed = false;
                return Pumped::Idle;
            };
            link.send(FrameType::Event, id, &event);
        }
        Pumped::More
    }
}

impl Watches {
    fn open(&mut self, poller: &Poller) -> io::Result<()> {
        if self.instance.is_none() {
            let mut source = Source::new(poller, inotify::new_instance()?, Token::Inotify.pack());
            source.want(READ)?;
            self.instance = Some(source);
        }
        Ok(())
    }

    /// Watches a directory of a stream, and those below it if it is recursive. `found` gets what is in them.
    fn add(
        &mut self,
        stream: u32,
        below: &[u8],
        found: &mut Vec<(Vec<u8>, bool)>,
    ) -> io::Result<()> {
        let Some(watch) = self.by_stream.get(&stream) else {
            return Ok(());
        };
        let (root, recursive) = (watch.root.clone(), watch.recursive);
        let mut open = vec![below.to_vec()];
        while let Some(below) = open.pop() {
            let path = joined(&root, &below);
            match self.add_one(stream, &path, &below) {
                // Below the root: gone, or replaced by something else, since it was seen.
                Err(error) if !below.is_empty() && is_gone(&error) => continue,
                result => result?,
            }
            if !recursive {
                continue;
            }
            for entry in std::fs::read_dir(&path).into_iter().flatten().flatten() {
                let inner = join(&below, entry.file_name().as_bytes());
                let directory = entry.file_type().is_ok_and(|kind| kind.is_dir());
                found.push((inner.clone(), directory));
                found.truncate(WATCH_EVENTS_QUEUED_MAX + 1);
                if directory {
                    open.push(inner);
                }
            }
        }
        Ok(())
    }

    fn add_one(&mut self, stream: u32, path: &Path, below: &[u8]) -> io::Result<()> {
        let Some(instance) = &self.instance else {
            return Ok(());
        };
        if self.labels.len() >= WATCH_DIRECTORIES_MAX {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        let path = c_path(path.as_os_str().as_bytes())?;
        let number = inotify::add_watch(instance, &path, below.is_empty())?;
        let label = Label {
            stream,
            below: below.to_vec(),
        };
        let labels = self.labels.entry(number).or_default();
        if !labels.contains(&label) {
            labels.push(label);
        }
        Ok(())
    }

    /// A directory of a stream, and all below it, is not watched any more.
    fn unlabel(&mut self, stream: u32, below: &[u8]) {
        let instance = &self.instance;
        self.labels.retain(|number, labels| {
            labels.retain(|label| label.stream != stream || !is_below(&label.below, below));
            if labels.is_empty() {
                if let Some(instance) = instance {
                    inotify::remove_watch(instance, *number);
                }
            }
            !labels.is_empty()
        });
    }

    fn relabel(&mut self, stream: u32, from: &[u8], to: &[u8]) {
        for label in self.labels.values_mut().flatten() {
            if label.stream == stream && is_below(&label.below, from) {
                label.below = [to, &label.below[from.len()..]].concat();
            }
        }
    }

    fn take_changes(&mut self, scratch: &mut [u8]) {
        let mut departures = Vec::new();
        for _ in 0..READS_PER_TURN {
            let count = match self.instance.as_ref().map(|source| source.read(scratch)) {
                Some(Ok(Some(count))) if count > 0 => count,
                _ => break,
            };
            for change in inotify::parse_changes(&scratch[..count]) {
                self.take_change(&change, &mut departures);
            }
        }
        // What left and did not arrive has gone out of the tree.
        for departure in departures {
            self.depart(departure);
        }
    }

    fn take_change(&mut self, change: &Change, departures: &mut Vec<Departure>) {
        if change.mask & inotify::OVERFLOW != 0 {
            self.overflow_all();
            return;
        }
        if change.mask & inotify::IGNORED != 0 {
            self.labels.remove(&change.watch);
            return;
        }
        for label in self.labels.get(&change.watch).cloned().unwrap_or_default() {
            if change.name.is_empty() && !label.below.is_empty() {
                // The directory's own change: its parent's watch tells it.
                continue;
            }
            self.tell(change, &label, departures);
        }
    }

    fn tell(&mut self, change: &Change, label: &Label, departures: &mut Vec<Departure>) {
        let stream = label.stream;
        let path = join(&label.below, &change.name);
        let directory = change.mask & inotify::IS_DIRECTORY != 0;
        let event = |kind: &str| WatchEvent {
            kind: kind.to_owned(),
            path: path.clone(),
            source: None,
            directory,
        };
        if change.mask & inotify::MOVED_FROM != 0 {
            departures.push(Departure {
                stream,
                cookie: change.cookie,
                path,
                directory,
            });
        } else if change.mask & inotify::MOVED_TO != 0 {
            let from = departures
                .iter()
                .position(|d| d.stream == stream && d.cookie == change.cookie);
            match from.map(|at| departures.remove(at)) {
                Some(from) => {
                    self.relabel(stream, &from.path, &path);
                    let source = Some(from.path);
                    self.queue(
                        stream,
                        WatchEvent {
                            source,
                            ..event("moved")
                        },
                    );
                }
                None => self.created(stream, event("created")),
            }
        } else if change.mask & inotify::CREATE != 0 {
            self.created(stream, event("created"));
        } else if change.mask & (inotify::DELETE | inotify::DELETE_SELF) != 0 {
            self.queue(stream, event("deleted"));
        } else if change.mask & inotify::MODIFY != 0 {
            self.queue(stream, event("modified"));
        } else if change.mask & inotify::ATTRIB != 0 {
            self.queue(stream, event("attributes"));
        }
    }

    /// A new directory may have content before it is watched: that is told as created too.
    fn created(&mut self, stream: u32, event: WatchEvent) {
        let (path, directory) = (event.path.clone(), event.directory);
        self.queue(stream, event);
        let recursive = self.by_stream.get(&stream).is_some_and(|w| w.recursive);
        if !directory || !recursive {
            return;
        }
        let mut found = Vec::new();
        if self.add(stream, &path, &mut found).is_err() {
            self.overflow(stream);
            return;
        }
        for (path, directory) in found {
            let event = WatchEvent {
                kind: "created".to_owned(),
                path,
                source: None,
                directory,
            };
            self.queue(stream, event);
        }
    }

    fn depart(&mut self, departure: Departure) {
        if departure.directory {
            self.unlabel(departure.stream, &departure.path);
        }
        let event = WatchEvent {
            kind: "deleted".to_owned(),
            path: departure.path,
            source: None,
            directory: departure.directory,
        };
        self.queue(departure.stream, event);
    }

    fn queue(&mut self, stream: u32, event: WatchEvent) {
        let Some(watch) = self.by_stream.get_mut(&stream) else {
            return;
        };
        if watch.overflowed {
            return;
        }
        let bytes = event.path.len() + event.source.as_ref().map_or(0, Vec::len) + 64;
        if watch.queue.len() >= WATCH_EVENTS_QUEUED_MAX
            || watch.queue_bytes + bytes > QUEUE_BYTES_MAX
        {
            self.overflow(stream);
            return;
        }
        // A file that is written in small pieces is one change until the host has heard of it.
        if event.kind == "modified" && watch.queue.back() == Some(&event) {
            return;
        }
        watch.queue_bytes += bytes;
        watch.queue.push_back(event);
    }

    fn overflow(&mut self, stream: u32) {
        if let Some(watch) = self.by_stream.get_mut(&stream) {
            if !watch.overflowed {
                watch.overflowed = true;
                watch.queue.push_back(WatchEvent {
                    kind: "overflow".to_owned(),
                    ..WatchEvent::default()
                });
            }
        }
    }

    fn overflow_all(&mut self) {
        let streams: Vec<u32> = self.by_stream.keys().copied().collect();
        for stream in streams {
            self.overflow(stream);
        }
    }
}

fn join(below: &[u8], name: &[u8]) -> Vec<u8> {
    match (below, name) {
        (b"", name) => name.to_vec(),
        (below, b"") => below.to_vec(),
        (below, name) => [below, b"/", name].concat(),
    }
}

fn joined(root: &Path, below: &[u8]) -> PathBuf {
    match below {
        b"" => root.to_path_buf(),
        _ => root.join(OsStr::from_bytes(below)),
    }
}

fn is_below(path: &[u8], above: &[u8]) -> bool {
    above.is_empty()
        || path == above
        || (path.starts_with(above) && path.get(above.len()) == Some(&b'/'))
}

fn is_gone(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::ENOENT | libc::ENOTDIR | libc::ELOOP | libc::EACCES)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_begins_alike_is_not_below() {
        assert!(is_below(b"a/b", b"a"));
        assert!(is_below(b"a", b"a"));
        assert!(is_below(b"a", b""));
        assert!(!is_below(b"ab", b"a"));
    }

    #[test]
    fn a_full_queue_says_so_once() {
        let mut watches = Watches::default();
        let watch = Watch {
            root: PathBuf::from("/"),
            recursive: false,
            queue: VecDeque::new(),
            queue_bytes: 0,
            overflowed: false,
        };
        watches.by_stream.insert(1, watch);
        for number in 0..WATCH_EVENTS_QUEUED_MAX + 10 {
            let event = WatchEvent {
                kind: "created".to_owned(),
                path: number.to_string().into_bytes(),
                ..WatchEvent::default()
            };
            watches.queue(1, event);
        }

        let queue = &watches.by_stream[&1].queue;

        assert_eq!(queue.len(), WATCH_EVENTS_QUEUED_MAX + 1);
        assert_eq!(queue.back().unwrap().kind, "overflow");
    }
}
