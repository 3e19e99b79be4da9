//! Watches of directories: one inotify instance for all of them, names kept by the agent.
//!
//! A watch begins with a walk over what is there, a little in each turn of the loop, and is answered when that is done.
//! A directory that appears later is walked too, and what is found in it is told. The kernel says names and not what
//! they stood for when it said them, so names are brought up to date before each step of a walk, and a name that turns
//! out to have meant something else is put right and told as `overflow`.

mod changes;
mod walk;

use std::collections::{BTreeMap, VecDeque};
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use dsec_protocol::codec::decode;
use dsec_protocol::files::{WatchArgs, WatchEvent};
use dsec_protocol::frames::FrameType;
use dsec_protocol::limits::{WATCHES_MAX, WATCH_EVENTS_QUEUED_MAX};
use dsec_protocol::opening::Empty;
use dsec_sys::epoll::{Poller, Source, READ};
use dsec_sys::inotify;

use crate::acting::acting_as;
use crate::agent::Agent;
use crate::dispatch::Answer;
use crate::exec::requests::Pumped;
use crate::files::path_of;
use crate::files::write::temporary_prefix;
use crate::refusal::Refusal;
use crate::streams::{Body, Stream};
use crate::timers::Timer;
use crate::token::Token;
use changes::Departure;
use walk::Walk;

/// Names are long at most a path each; with the count this bounds the memory of a queue.
const QUEUE_BYTES_MAX: usize = 4 << 20;
const EVENTS_PER_PUMP: usize = 256;
/// The kernel tells the two halves of a move one right after the other; a reader may come between them.
const MOVE_MS: u64 = 20;

#[derive(Default)]
pub struct Watches {
    instance: Option<Source>,
    by_stream: BTreeMap<u32, Watch>,
    /// What each inotify watch stands for: by stream, the directory relative to that stream's root.
    labels: BTreeMap<i32, Vec<Label>>,
    departures: Vec<Departure>,
    /// Bytes of changes taken so far: points in their order.
    taken: u64,
    /// How names of files begin that are being uploaded: nobody is told of them.
    hidden: Vec<u8>,
    /// The upload that gets its name: the cookie of that, and whether it takes the place of a file.
    placing: Option<(u32, bool)>,
}

struct Watch {
    root: PathBuf,
    recursive: bool,
    walk: Walk,
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

impl Watch {
    fn new(root: PathBuf, recursive: bool) -> Self {
        Self {
            root,
            recursive,
            walk: Walk::opening(),
            queue: VecDeque::new(),
            queue_bytes: 0,
            overflowed: false,
        }
    }
}

impl Agent {
    pub fn op_watch(&mut self, stream: u32, args: &[u8]) -> Result<Answer, Refusal> {
        let args: WatchArgs = decode(args)?;
        let root = path_of(&args.path)?;
        if self.watches.by_stream.len() >= WATCHES_MAX {
            return Err(Refusal::new("too_many_watches", "too many watches"));
        }
        self.watches
            .open(&self.poller)
            .map_err(|e| Refusal::file(&args.path, &e))?;
        let watch = Watch::new(root, args.recursive);
        self.watches.by_stream.insert(stream, watch);
        self.streams.insert(stream, Stream::new(Body::Watch));
        // Answered when all that is there is watched.
        Ok(Answer::Opened)
    }

    pub fn unwatch(&mut self, stream: u32) {
        self.watches.by_stream.remove(&stream);
        self.watches.departures.retain(|d| d.stream != stream);
        self.watches.unlabel(stream, b"");
        self.watches.close_if_unused();
    }

    pub fn read_changes(&mut self) {
        let (watches, scratch) = (&mut self.watches, &mut self.scratch);
        watches.take_changes(scratch);
        if watches.departures.is_empty() {
            self.timers.clear(Timer::Departures);
        } else if !self.timers.is_set(Timer::Departures) {
            self.timers.set_in(Timer::Departures, MOVE_MS);
        }
        self.ready.extend(self.watches.by_stream.keys());
    }

    /// What left and did not arrive has gone out of the tree.
    pub fn departures_are_over(&mut self) {
        self.read_changes();
        self.timers.clear(Timer::Departures);
        self.watches.depart_all();
        self.ready.extend(self.watches.by_stream.keys());
    }

    /// Goes on with the walks. Gives whether there was something to do: then there may be more, or an answer to send.
    pub fn walk_watches(&mut self) -> bool {
        if !self.watches.by_stream.values().any(Watch::is_walking) {
            return false;
        }
        // Names as they are by now, not as they were when they were put down.
        self.read_changes();
        let failed = match self.account(None) {
            Ok(account) => {
                let watches = &mut self.watches;
                let walked = acting_as(&self.own, &account, || Ok(watches.walk()));
                walked.unwrap_or_default()
            }
            Err(_) => Vec::new(),
        };
        for (stream, path, error) in failed {
            self.unwatch(stream);
            self.refuse_stream(stream, Refusal::file(&path, &error));
        }
        for stream in self.watches.settle() {
            self.send(FrameType::Res, stream, &Empty {});
        }
        self.ready.extend(self.watches.by_stream.keys());
        true
    }

    pub fn pump_watch(&mut self, id: u32) -> Pumped {
        let (Some(watch), Some(link)) = (
            self.watches.by_stream.get_mut(&id),
            self.link.as_deref_mut(),
        ) else {
            return Pumped::Idle;
        };
        if watch.is_opening() {
            return Pumped::Idle;
        }
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
    pub fn of(boot_id: &str) -> Self {
        Self {
            hidden: temporary_prefix(boot_id).into_bytes(),
            ..Self::default()
        }
    }

    fn is_hidden(&self, name: &[u8]) -> bool {
        !self.hidden.is_empty() && name.starts_with(&self.hidden)
    }

    fn open(&mut self, poller: &Poller) -> io::Result<()> {
        if self.instance.is_none() {
            let mut source = Source::new(poller, inotify::new_instance()?, Token::Inotify.pack());
            source.want(READ)?;
            self.instance = Some(source);
            self.taken = 0;
        }
        Ok(())
    }

    fn close_if_unused(&mut self) {
        if self.by_stream.is_empty() {
            self.instance = None;
            self.labels.clear();
        }
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
        if let Some(watch) = self.by_stream.get_mut(&stream) {
            watch.walk.forget(below);
        }
    }

    fn relabel(&mut self, stream: u32, from: &[u8], to: &[u8]) {
        for labels in self.labels.values_mut() {
            for label in labels.iter_mut() {
                if label.stream == stream && is_below(&label.below, from) {
                    label.below = moved(&label.below, from, to);
                }
            }
        }
        for departure in &mut self.departures {
            if departure.stream == stream && is_below(&departure.path, from) {
                departure.path = moved(&departure.path, from, to);
            }
        }
        if let Some(watch) = self.by_stream.get_mut(&stream) {
            watch.walk.rename(from, to);
        }
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

/// What `path`, which is `from` or below it, is called when that is called `to`.
fn moved(path: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    [to, &path[from.len()..]].concat()
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
        watches
            .by_stream
            .insert(1, Watch::new(PathBuf::from("/"), false));
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
