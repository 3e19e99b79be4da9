//! Directories, page by page.

use std::collections::BinaryHeap;
use std::ffi::OsString;
use std::io::{self, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

use dsec_protocol::codec::{decode, encode};
use dsec_protocol::files::{ListArgs, ListReply, Written};
use dsec_protocol::limits::LIST_ENTRIES_MAX;

use super::helper::Job;
use super::{path_of, stat_of};
use crate::agent::Agent;
use crate::dispatch::{reply, Answer};
use crate::refusal::Refusal;
use crate::users::Account;

/// Names and targets of a page: an answer is one frame.
const PAGE_BYTES_MAX: usize = 512 << 10;
/// Directories up to this are listed at once; larger ones in a child, as the loop has others to serve.
const INLINE_ENTRIES_MAX: usize = 256;

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
        self.start_helper(stream, Job::List, path, account, move |mut out| {
            let page = large_page(&target, &after, limit)?;
            let body = encode(&page).map_err(io::Error::other)?;
            out.write_all(&body)?;
            Ok(Written::default())
        })?;
        Ok(Answer::Opened)
    }
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

/// However large the directory is, only one page of names is held.
fn large_page(path: &Path, after: &[u8], limit: usize) -> io::Result<ListReply> {
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
