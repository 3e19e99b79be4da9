//! Directories, page by page.

use std::collections::BinaryHeap;
use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

use dsec_protocol::codec::decode;
use dsec_protocol::files::{ListArgs, ListReply};
use dsec_protocol::limits::LIST_ENTRIES_MAX;

use super::stat_of;
use crate::agent::Agent;
use crate::dispatch::{reply, Answer};
use crate::refusal::Refusal;

/// Names and targets of a page: an answer is one frame.
const PAGE_BYTES_MAX: usize = 512 << 10;

impl Agent {
    pub fn op_list(&mut self, args: &[u8]) -> Result<Answer, Refusal> {
        let args: ListArgs = decode(args)?;
        if args.limit == 0 {
            return Err(Refusal::invalid("limit is at least 1"));
        }
        let limit = args.limit.min(LIST_ENTRIES_MAX as u64) as usize;
        let after = args.after.as_deref().unwrap_or_default();
        let page = self.on_path(&args.path, args.user.as_deref(), |path| {
            list_page(path, after, limit)
        })?;
        reply(&page)
    }
}

/// The first `limit` names after `after`. However large the directory is, only one page of names is held.
fn list_page(path: &Path, after: &[u8], limit: usize) -> io::Result<ListReply> {
    let mut first: BinaryHeap<Vec<u8>> = BinaryHeap::new();
    for entry in std::fs::read_dir(path)? {
        let name = entry?.file_name().into_vec();
        if name.as_slice() <= after {
            continue;
        }
        first.push(name);
        if first.len() > limit + 1 {
            first.pop();
        }
    }
    let mut names = first.into_sorted_vec();
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
