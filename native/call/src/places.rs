//! Where programs of a call work: a directory and a user each. None is used for another call.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use dsec_sys::paths::{change_mode, change_owner_at, open_at};
use dsec_sys::rooted::{c_path, mkdir_at, open_in_root, DIRECTORY, NEW_FILE};

use crate::baseline::Baseline;
use crate::leftovers;
use crate::wire::{Finish, Finished, NewFile, NewPlace, Placed, Text};

/// Root's own, so that nobody makes anything beside the places; others may only pass through.
const ROOT: &str = "/call";
/// Users of an image are below, 65,534 and the agent's are above.
const UID_FIRST: u32 = 20_000;
const UID_LAST: u32 = 59_999;
const PLACES_MAX: usize = 2;

pub struct Place {
    pub uid: u32,
    pub directory: PathBuf,
    handle: OwnedFd,
}

pub struct Places {
    next_uid: u32,
    open: Vec<Place>,
    baseline: Baseline,
    /// Of an earlier call: nothing more is done here.
    dirty: Option<String>,
}

impl Places {
    pub fn open() -> io::Result<Self> {
        std::fs::create_dir_all(ROOT)?;
        std::fs::set_permissions(ROOT, PermissionsExt::from_mode(0o711))?;
        Ok(Self {
            next_uid: UID_FIRST,
            open: Vec::new(),
            baseline: Baseline::take(),
            dirty: None,
        })
    }

    /// One that could not be made whole is never run in.
    pub fn make(&mut self, new: &NewPlace) -> io::Result<Placed> {
        if let Some(what) = &self.dirty {
            return Err(io::Error::other(format!("an earlier call has left {what}")));
        }
        let placed = self.make_place(new);
        placed.inspect_err(|error| self.spoil(error))
    }

    fn make_place(&mut self, new: &NewPlace) -> io::Result<Placed> {
        if let Some(place) = self.open.get(new.place) {
            return place.renew(&new.files);
        }
        if new.place != self.open.len() || new.place >= PLACES_MAX {
            return Err(io::Error::other("places are made in order"));
        }
        if self.next_uid > UID_LAST {
            return Err(io::Error::other("all users have been used"));
        }
        let uid = self.next_uid;
        self.next_uid += 1;
        let directory = Path::new(ROOT).join(uid.to_string());
        std::fs::create_dir(&directory)?;
        let path = c_path(directory.as_os_str().as_encoded_bytes())?;
        let handle = open_at(None, &path, DIRECTORY, 0)?;
        // Listed before anything can fail: `finish` removes it.
        self.open.push(Place {
            uid,
            directory,
            handle,
        });
        let place = &self.open[new.place];
        for file in &new.files {
            place.write(file)?;
        }
        // Last: until now nobody but us can be in it.
        change_owner_at(None, &path, uid, uid)?;
        change_mode(place.handle.as_fd(), 0o700)?;
        Ok(place.placed())
    }

    /// What is there now is ours, such as what an interpreter has written while it started.
    pub fn settle(&mut self) {
        self.baseline = Baseline::take();
    }

    /// Nothing more is done here: what a call is doing cannot be ended.
    pub fn spoil(&mut self, what: &io::Error) {
        self.dirty.get_or_insert_with(|| what.to_string());
    }

    pub fn get(&self, place: usize) -> io::Result<&Place> {
        if let Some(what) = &self.dirty {
            return Err(io::Error::other(what.clone()));
        }
        self.open
            .get(place)
            .ok_or_else(|| io::Error::other("there is no such place"))
    }

    pub fn finish(&mut self, finish: &Finish) -> Finished {
        let (files, missing) = self.collect(finish);
        let uids: Vec<u32> = self.open.iter().map(|place| place.uid).collect();
        for place in self.open.drain(..) {
            // Its processes have ended with each run.
            if let Err(error) = leftovers::remove_tree(Path::new(ROOT), &place.directory) {
                self.dirty.get_or_insert_with(|| error.to_string());
            }
        }
        if self.dirty.is_none() {
            self.dirty = self.baseline.restore(&uids).err();
        }
        Finished {
            files,
            missing,
            dirty: self.dirty.clone(),
        }
    }

    /// Between calls: nothing is here that does not belong.
    pub fn check(&mut self) -> io::Result<()> {
        if self.dirty.is_none() {
            self.dirty = self.baseline.restore(&[]).err();
        }
        match &self.dirty {
            None => Ok(()),
            Some(what) => Err(io::Error::other(what.clone())),
        }
    }

    fn collect(&self, finish: &Finish) -> (Vec<NewFile>, Vec<Text>) {
        let (mut files, mut missing) = (Vec::new(), Vec::new());
        let mut room = finish.bytes_max;
        for path in &finish.collect {
            match self.open.first().map(|place| place.read(path, room)) {
                Some(Ok(file)) => {
                    room -= file.data.len();
                    files.push(file);
                }
                _ => missing.push(path.clone()),
            }
        }
        (files, missing)
    }
}

impl Place {
    fn placed(&self) -> Placed {
        Placed {
            directory: self.directory.as_os_str().as_encoded_bytes().to_vec(),
        }
    }

    /// Other files for the next run. What was made there meanwhile is gone, whatever it is.
    fn renew(&self, files: &[NewFile]) -> io::Result<Placed> {
        for file in files {
            let path = Path::new(OsStr::from_bytes(&file.path));
            match leftovers::remove_tree(&self.directory, &self.directory.join(path)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => self.write(file)?,
            }
        }
        Ok(self.placed())
    }

    /// Before the directory is the user's: nothing in it is anybody else's.
    fn write(&self, file: &NewFile) -> io::Result<()> {
        let mut at = self.handle.try_clone()?;
        let mut parts: Vec<&[u8]> = file.path.split(|byte| *byte == b'/').collect();
        let name = c_path(parts.pop().unwrap_or_default())?;
        for part in parts {
            let part = c_path(part)?;
            match mkdir_at(&at, &part, 0o755) {
                Ok(()) => change_owner_at(Some(at.as_fd()), &part, self.uid, self.uid)?,
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
            at = open_in_root(&at, &part, DIRECTORY | libc::O_NOFOLLOW, 0)?;
        }
        let opened = open_in_root(&at, &name, NEW_FILE, 0o600)?;
        change_owner_at(Some(at.as_fd()), &name, self.uid, self.uid)?;
        let mut opened = File::from(opened);
        opened.write_all(&file.data)?;
        change_mode(opened.as_fd(), file.mode & 0o777)
    }

    /// All its processes have ended: what is there stands still. Links may lead anywhere but out of the place.
    fn read(&self, path: &[u8], bytes_max: usize) -> io::Result<NewFile> {
        let flags = libc::O_RDONLY | libc::O_NONBLOCK | libc::O_NOCTTY;
        let file = File::from(open_in_root(&self.handle, &c_path(path)?, flags, 0)?);
        let facts = file.metadata()?;
        if !facts.is_file() || facts.file_type().is_fifo() || facts.len() > bytes_max as u64 {
            return Err(io::Error::other("no file, or too large"));
        }
        let mut data = Vec::new();
        file.take(bytes_max as u64).read_to_end(&mut data)?;
        Ok(NewFile {
            path: path.to_vec(),
            data,
            mode: facts.mode() & 0o777,
        })
    }
}
