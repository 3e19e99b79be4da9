//! Directories, page by page.

use std::collections::BinaryHeap;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use dsec_protocol::codec::{decode, encode};
use dsec_protocol::files::{ListArgs, ListReply, Written};
use dsec_protocol::limits::LIST_ENTRIES_MAX;
use dsec_sys::sealed::memory_file;

use super::helper::Job;
use super::{names, path_of, stat_of};
use crate::agent::Agent;
use crate::dispatch::{reply, Answer};
use crate::refusal::Refusal;
use crate::timers::Timer;
use crate::users::Account;

/// Names and targets of a page: an answer is one frame.
const PAGE_BYTES_MAX: usize = 512 << 10;
/// Directories up to this are listed at once; larger ones in a child, as the loop has others to serve.
const INLINE_ENTRIES_MAX: usize = 256;
/// Longer than any tick by which the kernel tells when something was changed.
const TICK_NS: i128 = 20_000_000;
/// For so long the names of a directory wait for who asks for its next page.
const KEPT_MS: u64 = 10_000;

/// The names of a directory, as one user saw them, while it stays as it was.
pub struct Kept {
    key: Key,
    file: File,
}

#[derive(PartialEq, Eq)]
struct Key {
    path: Vec<u8>,
    uid: u32,
    gid: u32,
    groups: Vec<u32>,
    device: u64,
    inode: u64,
    changed: (i64, i64),
}

/// Where the child of a page finds names, or leaves them.
enum Names {
    Nowhere,
    Found(File),
    Wanted(File),
}

impl Agent {
    pub fn op_list(&mut self, stream: u32, args: &[u8]) -> Result<Answer, Refusal> {
        let args: ListArgs = decode(args)?;
        if args.limit == 0 {
            return Err(Refusal::invalid("limit is at least 1"));
        }
        let limit = args.limit.min(LIST_ENTRIES_MAX as u64) as usize;
        let after = args.after.unwrap_or_default();
        let account = self.account(args.user.as_deref())?;
        let small =
            self.on_path_as(&args.path, &account, |path| small_page(path, &after, limit))?;
        match small {
            Some(page) => reply(&page),
            None => self.list_large(stream, &args.path, &account, after, limit),
        }
    }

    fn list_large(
        &mut self,
        stream: u32,
        path: &[u8],
        account: &Account,
        after: Vec<u8>,
        limit: usize,
    ) -> Result<Answer, Refusal> {
        let target = path_of(path)?;
        let names = self.names_of(path, account, &after);
        let kept = match &names {
            Names::Nowhere => None,
            Names::Found(file) | Names::Wanted(file) => Some(file.as_raw_fd()),
        };
        self.start_helper(stream, Job::List, path, account, kept, move |mut out| {
            let page = large_page(&target, &after, limit, &names)?;
            let body = encode(&page).map_err(io::Error::other)?;
            out.write_all(&body)?;
            Ok(Written::default())
        })?;
        Ok(Answer::Opened)
    }

    /// A first page sees the directory anew; the next ones go on with what that saw.
    fn names_of(&mut self, path: &[u8], account: &Account, after: &[u8]) -> Names {
        let Ok(facts) = self.on_path_as(path, account, |path| std::fs::metadata(path)) else {
            return Names::Nowhere;
        };
        if is_recent(facts.ctime(), facts.ctime_nsec()) {
            return Names::Nowhere; // another change might not show
        }
        let key = Key {
            path: path.to_vec(),
            uid: account.uid,
            gid: account.gid,
            groups: account.groups.clone(),
            device: facts.dev(),
            inode: facts.ino(),
            changed: (facts.ctime(), facts.ctime_nsec()),
        };
        let known = self.names.as_ref().filter(|kept| kept.key == key);
        let found = known.filter(|_| !after.is_empty());
        let names = match found.map(|kept| kept.file.try_clone()) {
            Some(Ok(file)) => Names::Found(file),
            Some(Err(_)) => Names::Nowhere,
            None => self.names_for(key),
        };
        self.timers.set_in(Timer::Names, KEPT_MS);
        names
    }

    fn names_for(&mut self, key: Key) -> Names {
        let Ok(file) = memory_file(c"names").map(File::from) else {
            return Names::Nowhere;
        };
        match file.try_clone() {
            Ok(copy) => {
                self.names = Some(Kept { key, file });
                Names::Wanted(copy)
            }
            Err(_) => Names::Nowhere,
        }
    }
}

/// Whether a change of this moment may be in the same tick of the kernel's clock as one that is still to come.
fn is_recent(seconds: i64, nanoseconds: i64) -> bool {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.map_or(0, |now| now.as_nanos() as i128);
    now - (i128::from(seconds) * 1_000_000_000 + i128::from(nanoseconds)) < TICK_NS
}

/// `None` when the directory is too large for this.
fn small_page(path: &Path, after: &[u8], limit: usize) -> io::Result<Option<ListReply>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(path)? {
        names.push(entry?.file_name().into_vec());
        if names.len() > INLINE_ENTRIES_MAX {
            return Ok(None);
        }
    }
    names.retain(|name| name.as_slice() > after);
    names.sort_unstable();
    page_of(path, names, limit).map(Some)
}

fn large_page(path: &Path, after: &[u8], limit: usize, names: &Names) -> io::Result<ListReply> {
    match names {
        Names::Found(file) => {
            if let Ok(Some(found)) = names::following(file, after, limit + 1) {
                return page_of(path, found, limit);
            }
        }
        Names::Wanted(file) => {
            if let Some(mut all) = names::all_of(path)? {
                // Without them the next page is slower, that is all.
                let _ = names::write(file, &all);
                all.retain(|name| name.as_slice() > after);
                all.truncate(limit + 1);
                return page_of(path, all, limit);
            }
        }
        Names::Nowhere => {}
    }
    huge_page(path, after, limit)
}

/// However large the directory is, only one page of names is held.
fn huge_page(path: &Path, after: &[u8], limit: usize) -> io::Result<ListReply> {
    let mut first: BinaryHeap<Vec<u8>> = BinaryHeap::new();
    for entry in std::fs::read_dir(path)? {
        let name = entry?.file_name().into_vec();
        if name.as_slice() <= after || (first.len() > limit && first.peek() < Some(&name)) {
            continue;
        }
        first.push(name);
        if first.len() > limit + 1 {
            first.pop();
        }
    }
    page_of(path, first.into_sorted_vec(), limit)
}

/// The first `limit` of the sorted names, with what is known of each.
fn page_of(path: &Path, mut names: Vec<Vec<u8>>, limit: usize) -> io::Result<ListReply> {
    let mut more = names.len() > limit;
    names.truncate(limit);
    let mut entries = Vec::with_capacity(names.len());
    let mut bytes = 0;
    for name in names {
        let file = path.join(OsString::from_vec(name));
        let facts = match std::fs::symlink_metadata(&file) {
            Ok(facts) => facts,
            // Gone in the meantime: not an entry any more.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            // Such as a path that is too long: what is left out must not look whole.
            Err(error) => return Err(error),
        };
        let stat = stat_of(&file, &facts);
        bytes += file.as_os_str().as_bytes().len() + 256 + stat.target.as_ref().map_or(0, Vec::len);
        if bytes > PAGE_BYTES_MAX && !entries.is_empty() {
            more = true;
            break;
        }
        entries.push(stat);
    }
    Ok(ListReply { entries, more })
}
