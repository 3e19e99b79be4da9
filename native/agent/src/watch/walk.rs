//! Walks: directories get their inotify watches, a bounded number in each turn.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::ReadDir;
use std::io;
use std::os::unix::ffi::OsStrExt;

use dsec_protocol::files::WatchEvent;
use dsec_protocol::limits::{WATCH_DIRECTORIES_MAX, WATCH_EVENTS_QUEUED_MAX};
use dsec_sys::inotify;
use dsec_sys::rooted::c_path;

use super::{is_below, join, joined, moved, Label, Watch, Watches};

/// Of all walks in one turn: entries looked at, a directory counted as several. Half a millisecond.
const STEPS_PER_TURN: usize = 512;
const STEPS_OF_A_DIRECTORY: usize = 8;

/// What of a stream's tree is still to be watched, and what may be told of it meanwhile.
pub struct Walk {
    phase: Phase,
    open: Vec<Place>,
    /// A large directory that is being looked through. Only of what is not told.
    reading: Option<(Vec<u8>, ReadDir)>,
    /// By inotify watch, directories that were looked through so late that changes told of them may be older.
    fresh: BTreeMap<i32, Fresh>,
}

struct Place {
    below: Vec<u8>,
    /// It comes from a name that meant something else: a second time is not followed, for directories with two names.
    again: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Everything there is gets watched, and nothing is told: before the answer, or before an overflow is said.
    Walking {
        first: bool,
    },
    /// The same, until changes from before the end of the walk are taken.
    Waiting {
        first: bool,
        until: u64,
    },
    Telling,
}

/// Names that the host knows of in a directory, until all changes older than our look at it are taken.
struct Fresh {
    names: BTreeSet<Vec<u8>>,
    until: u64,
}

/// What the host knows of a name in a directory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Known {
    /// The changes say it all.
    Settled,
    Told,
    NotTold,
}

impl Walk {
    pub fn opening() -> Self {
        Self::new(true)
    }

    fn new(first: bool) -> Self {
        Self {
            phase: Phase::Walking { first },
            open: vec![Place::new(Vec::new())],
            reading: None,
            fresh: BTreeMap::new(),
        }
    }

    fn is_walking(&self) -> bool {
        !self.open.is_empty() || self.reading.is_some() || self.phase != Phase::Telling
    }

    pub fn is_telling(&self) -> bool {
        self.phase == Phase::Telling
    }

    pub fn add(&mut self, below: Vec<u8>) {
        self.open.push(Place::new(below));
    }

    /// What is at `below` and under it need not be walked any more.
    pub fn forget(&mut self, below: &[u8]) {
        self.open.retain(|place| !is_below(&place.below, below));
        if let Some((reading, _)) = &self.reading {
            if is_below(reading, below) {
                self.reading = None;
            }
        }
    }

    pub fn rename(&mut self, from: &[u8], to: &[u8]) {
        let reading = self.reading.iter_mut().map(|(below, _)| below);
        let open = self.open.iter_mut().map(|place| &mut place.below);
        for below in open.chain(reading) {
            if is_below(below, from) {
                *below = moved(below, from, to);
            }
        }
    }

    pub fn known(&mut self, watch: i32, name: &[u8], taken: u64) -> Known {
        match self.fresh.get(&watch) {
            None => Known::Settled,
            Some(fresh) if taken >= fresh.until => {
                self.fresh.remove(&watch);
                Known::Settled
            }
            Some(fresh) if fresh.names.contains(name) => Known::Told,
            Some(_) => Known::NotTold,
        }
    }

    pub fn learn(&mut self, watch: i32, name: &[u8]) {
        if let Some(fresh) = self.fresh.get_mut(&watch) {
            fresh.names.insert(name.to_vec());
        }
    }

    pub fn unlearn(&mut self, watch: i32, name: &[u8]) {
        if let Some(fresh) = self.fresh.get_mut(&watch) {
            fresh.names.remove(name);
        }
    }

    pub fn ignored(&mut self, watch: i32) {
        self.fresh.remove(&watch);
    }
}

impl Place {
    fn new(below: Vec<u8>) -> Self {
        Self {
            below,
            again: false,
        }
    }
}

impl Watch {
    pub fn is_walking(&self) -> bool {
        self.walk.is_walking()
    }

    /// The request is not answered yet.
    pub fn is_opening(&self) -> bool {
        matches!(
            self.walk.phase,
            Phase::Walking { first: true } | Phase::Waiting { first: true, .. }
        )
    }
}

impl Watches {
    /// One turn of all walks. Gives the streams that cannot be kept up, and why.
    pub fn walk(&mut self) -> Vec<(u32, Vec<u8>, io::Error)> {
        let mut failed = Vec::new();
        let mut steps = STEPS_PER_TURN;
        let streams: Vec<u32> = self.by_stream.keys().copied().collect();
        for stream in streams {
            while steps > 0 {
                match self.step(stream, &mut steps) {
                    Ok(true) => {}
                    Ok(false) => break,
                    Err(error) => {
                        if let Some(watch) = self.by_stream.get(&stream) {
                            let path = watch.root.as_os_str().as_bytes().to_vec();
                            failed.push((stream, path, error));
                        }
                        break;
                    }
                }
            }
        }
        failed
    }

    /// Streams that have their answer now; an overflow is told to those that had one already.
    pub fn settle(&mut self) -> Vec<u32> {
        let waiting = self.instance.as_ref().map_or(0, inotify::waiting_bytes);
        let mut answered = Vec::new();
        let mut overflowed = Vec::new();
        for (stream, watch) in &mut self.by_stream {
            let walk = &mut watch.walk;
            let walked = walk.open.is_empty() && walk.reading.is_none();
            match walk.phase {
                Phase::Walking { first } if walked => {
                    let until = self.taken + waiting;
                    walk.phase = Phase::Waiting { first, until };
                }
                // Nothing waiting is as good as having come so far.
                Phase::Waiting { first, until }
                    if walked && (waiting == 0 || self.taken >= until) =>
                {
                    walk.phase = Phase::Telling;
                    match first {
                        true => answered.push(*stream),
                        false => overflowed.push(*stream),
                    }
                }
                _ => {}
            }
        }
        for stream in overflowed {
            self.overflow(stream);
        }
        answered
    }

    /// Begins anew: which names stand for what is not known any more. An overflow is told at the end.
    pub fn walk_anew(&mut self, stream: u32) {
        self.unlabel(stream, b"");
        self.departures.retain(|d| d.stream != stream);
        if let Some(watch) = self.by_stream.get_mut(&stream) {
            watch.walk = Walk::new(watch.is_opening());
        }
    }

    /// Gives whether there is more to do for this stream.
    fn step(&mut self, stream: u32, steps: &mut usize) -> io::Result<bool> {
        let Some(watch) = self.by_stream.get_mut(&stream) else {
            return Ok(false);
        };
        if let Some((below, directory)) = watch.walk.reading.take() {
            return self.read_on(stream, below, directory, steps).map(|()| true);
        }
        let Some(place) = watch.walk.open.pop() else {
            return Ok(false);
        };
        *steps = steps.saturating_sub(STEPS_OF_A_DIRECTORY);
        self.enter(stream, &place, steps)?;
        Ok(true)
    }

    fn enter(&mut self, stream: u32, place: &Place, steps: &mut usize) -> io::Result<()> {
        let below = &place.below;
        let Some(watch) = self.by_stream.get(&stream) else {
            return Ok(());
        };
        let path = joined(&watch.root, below);
        let (recursive, telling) = (watch.recursive, watch.walk.is_telling());
        let (number, before) = match self.label(stream, below) {
            // Below the root: gone, or replaced by something else, since it was seen.
            Err(error) if !below.is_empty() && is_gone(&error) => return Ok(()),
            result => result?,
        };
        if !recursive {
            return Ok(());
        }
        let directory = match std::fs::read_dir(&path) {
            Ok(directory) => directory,
            Err(error) if is_gone(&error) => return Ok(()),
            Err(error) => return Err(error),
        };
        match before {
            None if telling => self.discover(stream, below, number, directory, steps),
            Some(other) if telling && other != *below => {
                self.mistaken(stream, other, place.again);
                self.read_on(stream, below.clone(), directory, steps)
            }
            _ => self.read_on(stream, below.clone(), directory, steps),
        }
    }

    /// Watches a directory of a stream. Gives the number of its watch, and what the stream called it before.
    fn label(&mut self, stream: u32, below: &[u8]) -> io::Result<(i32, Option<Vec<u8>>)> {
        let (Some(instance), Some(watch)) = (&self.instance, self.by_stream.get(&stream)) else {
            return Err(io::Error::from_raw_os_error(libc::ENOENT));
        };
        let too_many = || io::Error::from_raw_os_error(libc::ENOSPC);
        if watch.walk.open.len() >= WATCH_DIRECTORIES_MAX {
            return Err(too_many());
        }
        let path = c_path(joined(&watch.root, below).as_os_str().as_bytes())?;
        let number = inotify::add_watch(instance, &path, below.is_empty())?;
        if self.labels.len() >= WATCH_DIRECTORIES_MAX && !self.labels.contains_key(&number) {
            inotify::remove_watch(instance, number);
            return Err(too_many());
        }
        let labels = self.labels.entry(number).or_default();
        let before = match labels.iter_mut().find(|label| label.stream == stream) {
            Some(label) => Some(std::mem::replace(&mut label.below, below.to_vec())),
            None => {
                labels.push(Label {
                    stream,
                    below: below.to_vec(),
                });
                None
            }
        };
        Ok((number, before))
    }

    /// Looks for directories below; tells nothing.
    fn read_on(
        &mut self,
        stream: u32,
        below: Vec<u8>,
        directory: ReadDir,
        steps: &mut usize,
    ) -> io::Result<()> {
        let Some(watch) = self.by_stream.get_mut(&stream) else {
            return Ok(());
        };
        let mut directory = directory;
        while *steps > 0 {
            let Some(entry) = directory.next() else {
                return Ok(());
            };
            *steps -= 1;
            let entry = entry?;
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                watch.walk.add(join(&below, entry.file_name().as_bytes()));
            }
        }
        watch.walk.reading = Some((below, directory));
        Ok(())
    }

    /// A directory that is new to the host: all that is in it is told, at once, so that it is one point in time.
    fn discover(
        &mut self,
        stream: u32,
        below: &[u8],
        number: i32,
        directory: ReadDir,
        steps: &mut usize,
    ) -> io::Result<()> {
        let mut found = BTreeMap::new();
        for entry in directory {
            let entry = entry?;
            if self.is_hidden(entry.file_name().as_bytes()) {
                continue;
            }
            let is_directory = entry.file_type().is_ok_and(|kind| kind.is_dir());
            found.insert(entry.file_name().as_bytes().to_vec(), is_directory);
            if found.len() > WATCH_EVENTS_QUEUED_MAX {
                self.walk_anew(stream);
                return Ok(());
            }
        }
        *steps = steps.saturating_sub(found.len());
        for (name, is_directory) in &found {
            let path = join(below, name);
            if let (true, Some(watch)) = (*is_directory, self.by_stream.get_mut(&stream)) {
                watch.walk.add(path.clone());
            }
            let event = WatchEvent {
                kind: "created".to_owned(),
                path,
                source: None,
                directory: *is_directory,
            };
            self.queue(stream, event);
        }
        let until = self.taken + self.instance.as_ref().map_or(0, inotify::waiting_bytes);
        let taken = self.taken;
        if let Some(watch) = self.by_stream.get_mut(&stream) {
            let fresh = &mut watch.walk.fresh;
            fresh.retain(|_, fresh| taken < fresh.until);
            let names = found.into_keys().collect();
            fresh.insert(number, Fresh { names, until });
            let held: usize = fresh.values().map(|fresh| fresh.names.len()).sum();
            if held > 2 * WATCH_EVENTS_QUEUED_MAX {
                self.walk_anew(stream);
            }
        }
        Ok(())
    }

    /// What is at a name was known by `other`: changes since may have been told of the wrong one.
    fn mistaken(&mut self, stream: u32, other: Vec<u8>, again: bool) {
        if let (Some(watch), false) = (self.by_stream.get_mut(&stream), again) {
            watch.walk.open.push(Place {
                below: other,
                again: true,
            });
        }
        self.overflow(stream);
    }
}

fn is_gone(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::ENOENT | libc::ENOTDIR | libc::ELOOP | libc::EACCES)
    )
}
