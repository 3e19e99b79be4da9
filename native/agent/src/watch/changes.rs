//! What the kernel tells becomes what the host is told.

use dsec_protocol::files::WatchEvent;
use dsec_sys::inotify::{self, Change};

use super::walk::Known;
use super::{is_below, join, Label, Watches};
use crate::files::write::replaces;

const READS_PER_TURN: usize = 16;

/// The first half of a move, until the second comes.
pub struct Departure {
    pub stream: u32,
    cookie: u32,
    pub path: Vec<u8>,
    directory: bool,
    /// The host was told of it before.
    told: bool,
}

impl Watches {
    pub fn take_changes(&mut self, scratch: &mut [u8]) {
        for _ in 0..READS_PER_TURN {
            let count = match self.instance.as_ref().map(|source| source.read(scratch)) {
                Some(Ok(Some(count))) if count > 0 => count,
                _ => break,
            };
            for change in inotify::parse_changes(&scratch[..count]) {
                self.take_change(&change);
                self.taken += change.size as u64;
            }
        }
    }

    pub fn depart_all(&mut self) {
        for departure in std::mem::take(&mut self.departures) {
            self.depart(departure);
        }
    }

    fn take_change(&mut self, change: &Change) {
        if change.mask & inotify::OVERFLOW != 0 {
            let streams: Vec<u32> = self.by_stream.keys().copied().collect();
            for stream in streams {
                self.walk_anew(stream);
            }
            return;
        }
        if change.mask & inotify::IGNORED != 0 {
            self.labels.remove(&change.watch);
            for watch in self.by_stream.values_mut() {
                watch.walk.ignored(change.watch);
            }
            return;
        }
        if self.is_hidden(&change.name) {
            if change.mask & inotify::MOVED_FROM != 0 {
                self.placing = Some((change.cookie, replaces(&change.name)));
            }
            return;
        }
        for label in self.labels.get(&change.watch).cloned().unwrap_or_default() {
            if change.name.is_empty() && !label.below.is_empty() {
                // The directory's own change: its parent's watch tells it.
                continue;
            }
            self.take_for(change, &label);
        }
    }

    fn take_for(&mut self, change: &Change, label: &Label) {
        let stream = label.stream;
        let path = join(&label.below, &change.name);
        let directory = change.mask & inotify::IS_DIRECTORY != 0;
        let known = self.known(stream, change);
        let event = |kind: &str| WatchEvent {
            kind: kind.to_owned(),
            path: path.clone(),
            source: None,
            directory,
        };
        if change.mask & inotify::MOVED_FROM != 0 {
            self.unlearn(stream, change);
            self.departures.push(Departure {
                stream,
                cookie: change.cookie,
                path,
                directory,
                told: known != Known::NotTold,
            });
        } else if change.mask & inotify::MOVED_TO != 0 {
            self.arrive(change, stream, known, event("moved"));
        } else if change.mask & inotify::CREATE != 0 {
            self.depart_from(stream, &path);
            self.created(change, stream, known, event("created"));
        } else if change.mask & (inotify::DELETE | inotify::DELETE_SELF) != 0 {
            self.unlearn(stream, change);
            self.tell(stream, known, event("deleted"));
        } else if change.mask & inotify::MODIFY != 0 {
            self.tell(stream, known, event("modified"));
        } else if change.mask & inotify::ATTRIB != 0 {
            self.tell(stream, known, event("attributes"));
        }
    }

    fn arrive(&mut self, change: &Change, stream: u32, known: Known, event: WatchEvent) {
        let from = self
            .departures
            .iter()
            .position(|d| d.stream == stream && d.cookie == change.cookie);
        let from = from.map(|at| self.departures.remove(at));
        self.depart_from(stream, &event.path);
        if self.placing == Some((change.cookie, true)) {
            self.learn(stream, change);
            let kind = "modified".to_owned();
            self.tell(stream, known, WatchEvent { kind, ..event });
            return;
        }
        match from {
            Some(from) if from.told => {
                self.learn(stream, change);
                self.relabel(stream, &from.path, &event.path);
                self.walk_if_new(stream, &event);
                let source = Some(from.path);
                self.tell(stream, Known::Settled, WatchEvent { source, ..event });
            }
            _ => {
                let kind = "created".to_owned();
                self.created(change, stream, known, WatchEvent { kind, ..event });
            }
        }
    }

    /// A new directory may have content before it is watched: the walk over it tells that.
    fn created(&mut self, change: &Change, stream: u32, known: Known, event: WatchEvent) {
        if known == Known::Told {
            return;
        }
        self.learn(stream, change);
        self.walk_if_new(stream, &event);
        self.tell(stream, Known::Settled, event);
    }

    fn walk_if_new(&mut self, stream: u32, event: &WatchEvent) {
        if let Some(watch) = self.by_stream.get_mut(&stream) {
            if event.directory && watch.recursive {
                watch.walk.add(event.path.clone());
            }
        }
    }

    /// A new thing has the name of one that is on its way, or of a directory that one left: that one is gone first.
    fn depart_from(&mut self, stream: u32, path: &[u8]) {
        while let Some(at) = self.departures.iter().position(|d| {
            d.stream == stream && (is_below(path, &d.path) || is_below(&d.path, path))
        }) {
            let departure = self.departures.remove(at);
            self.depart(departure);
        }
    }

    fn depart(&mut self, departure: Departure) {
        if departure.directory {
            self.unlabel(departure.stream, &departure.path);
        }
        let known = match departure.told {
            true => Known::Settled,
            false => Known::NotTold,
        };
        let event = WatchEvent {
            kind: "deleted".to_owned(),
            path: departure.path,
            source: None,
            directory: departure.directory,
        };
        self.tell(departure.stream, known, event);
    }

    /// Nothing is told of what the host has not heard of, nor before all that is there is watched; the end of the
    /// root always is.
    fn tell(&mut self, stream: u32, known: Known, event: WatchEvent) {
        let telling = self
            .by_stream
            .get(&stream)
            .is_some_and(|watch| watch.walk.is_telling());
        if event.path.is_empty() || (telling && known != Known::NotTold) {
            self.queue(stream, event);
        }
    }

    fn known(&mut self, stream: u32, change: &Change) -> Known {
        let taken = self.taken;
        match self.by_stream.get_mut(&stream) {
            Some(watch) => watch.walk.known(change.watch, &change.name, taken),
            None => Known::Settled,
        }
    }

    fn learn(&mut self, stream: u32, change: &Change) {
        if let Some(watch) = self.by_stream.get_mut(&stream) {
            watch.walk.learn(change.watch, &change.name);
        }
    }

    fn unlearn(&mut self, stream: u32, change: &Change) {
        if let Some(watch) = self.by_stream.get_mut(&stream) {
            watch.walk.unlearn(change.watch, &change.name);
        }
    }
}
