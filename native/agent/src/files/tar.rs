//! A directory (or one file) as a tar stream: ustar headers, pax records for what does not fit them.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, BufWriter, Read, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use dsec_protocol::files::Written;
use dsec_sys::rooted::{is_made_when_read, NOT_BLOCKING, NOT_FOLLOWING};

use super::helper::EntryError;

pub const BLOCK_BYTES: usize = 512;
/// Files whose second name becomes a link entry. Beyond, they are written again: larger, not wrong.
const LINKS_MAX: usize = 65_536;
/// A file of sysfs is a page at most; some binary ones are larger.
const MADE_UP_BYTES_MAX: u64 = 64 << 10;
const OCTAL_ID_MAX: u64 = 0o777_7777;
const OCTAL_SIZE_MAX: u64 = 0o77_777_777_777;

struct Archive {
    out: BufWriter<File>,
    links: BTreeMap<(u64, u64), Vec<u8>>,
    written: Written,
}

/// Of a directory its content, with names below it; of anything else one entry with its own name.
pub fn write_archive(path: &Path, follow: bool, out: File) -> Result<Written, EntryError> {
    let mut archive = Archive {
        out: BufWriter::with_capacity(64 << 10, out),
        links: BTreeMap::new(),
        written: Written::default(),
    };
    let facts = super::facts(path, follow)?;
    let root = match follow {
        true => std::fs::canonicalize(path)?,
        false => path.to_path_buf(),
    };
    if facts.is_dir() {
        archive.add_content(&root)?;
    } else {
        let name = path.file_name().unwrap_or_default().as_bytes();
        archive.add_one(&root, name, &facts)?;
    }
    archive.out.write_all(&[0; BLOCK_BYTES * 2])?;
    archive.out.flush()?;
    Ok(archive.written)
}

impl Archive {
    /// Depth first with a stack of our own: the depth of a tree is the sandbox's choice.
    fn add_content(&mut self, root: &Path) -> Result<(), EntryError> {
        let mut open = vec![sorted_names(root, b"")?];
        while let Some(names) = open.last_mut() {
            let Some(name) = names.pop() else {
                open.pop();
                continue;
            };
            let path = root.join(OsString::from_vec(name.clone()));
            let facts = match std::fs::symlink_metadata(&path) {
                Ok(facts) => facts,
                // Gone since the directory was read.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                // Such as a path that is too long: what is left out must not look whole.
                Err(error) => return Err(EntryError::at(&name)(error)),
            };
            self.add_one(&path, &name, &facts)
                .map_err(|failed| EntryError::at(&name)(failed.error))?;
            if facts.is_dir() {
                let inner = sorted_names(&path, &name).map_err(EntryError::at(&name))?;
                open.push(inner);
            }
        }
        Ok(())
    }

    fn add_one(&mut self, path: &Path, name: &[u8], facts: &Metadata) -> Result<(), EntryError> {
        let kind = facts.file_type();
        if kind.is_dir() {
            let name = [name, b"/"].concat();
            self.header(&name, b'5', facts, 0, b"")?;
        } else if kind.is_symlink() {
            let target = std::fs::read_link(path)?;
            self.header(name, b'2', facts, 0, target.as_os_str().as_bytes())?;
        } else if kind.is_fifo() {
            self.header(name, b'6', facts, 0, b"")?;
        } else if kind.is_file() {
            self.add_file(path, name, facts)?;
        } else {
            // Sockets mean nothing elsewhere, and device nodes are never unpacked.
            return Ok(());
        }
        self.written.entries += 1;
        Ok(())
    }

    fn add_file(&mut self, path: &Path, name: &[u8], facts: &Metadata) -> io::Result<()> {
        let identity = (facts.dev(), facts.ino());
        if facts.nlink() > 1 {
            if let Some(first) = self.links.get(&identity).cloned() {
                return self.header(name, b'1', facts, 0, &first);
            }
        }
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(NOT_FOLLOWING | NOT_BLOCKING)
            .open(path)?;
        let facts = file.metadata()?;
        if !facts.is_file() {
            return Ok(());
        }
        if facts.nlink() > 1 && self.links.len() < LINKS_MAX {
            self.links.insert(identity, name.to_vec());
        }
        if is_made_when_read(&file) {
            return self.add_made_up(file, name, &facts);
        }
        self.header(name, b'0', &facts, facts.len(), b"")?;
        let copied = io::copy(&mut file.take(facts.len()), &mut self.out)?;
        self.written.bytes += copied;
        // A file that shrank meanwhile is filled up: the header has promised its size.
        io::copy(&mut io::repeat(0).take(facts.len() - copied), &mut self.out)?;
        self.pad(facts.len())
    }

    /// Of sysfs and its like: the size is known when it is read, and what cannot be read is empty. As stat says a size of
    /// 0, files of /proc are empty too.
    fn add_made_up(&mut self, file: File, name: &[u8], facts: &Metadata) -> io::Result<()> {
        let mut content = Vec::new();
        let most = facts.len().min(MADE_UP_BYTES_MAX);
        if file.take(most).read_to_end(&mut content).is_err() {
            content.clear();
        }
        let size = content.len() as u64;
        self.header(name, b'0', facts, size, b"")?;
        self.out.write_all(&content)?;
        self.written.bytes += size;
        self.pad(size)
    }

    fn header(
        &mut self,
        name: &[u8],
        kind: u8,
        facts: &Metadata,
        size: u64,
        link: &[u8],
    ) -> io::Result<()> {
        let mut records = Vec::new();
        if name.len() > 100 {
            pax_record(&mut records, "path", name);
        }
        if link.len() > 100 {
            pax_record(&mut records, "linkpath", link);
        }
        if size > OCTAL_SIZE_MAX {
            pax_record(&mut records, "size", size.to_string().as_bytes());
        }
        for (key, id) in [("uid", facts.uid()), ("gid", facts.gid())] {
            if u64::from(id) > OCTAL_ID_MAX {
                pax_record(&mut records, key, id.to_string().as_bytes());
            }
        }
        if facts.mtime_nsec() != 0 && facts.mtime() >= 0 {
            let time = format!("{}.{:09}", facts.mtime(), facts.mtime_nsec());
            pax_record(&mut records, "mtime", time.as_bytes());
        }
        if !records.is_empty() {
            let block = block(b"pax", b'x', facts, records.len() as u64, b"");
            self.out.write_all(&block)?;
            self.out.write_all(&records)?;
            self.pad(records.len() as u64)?;
        }
        self.out.write_all(&block(name, kind, facts, size, link))
    }

    fn pad(&mut self, size: u64) -> io::Result<()> {
        let over = (size % BLOCK_BYTES as u64) as usize;
        match over {
            0 => Ok(()),
            _ => self.out.write_all(&[0; BLOCK_BYTES][over..]),
        }
    }
}

/// Last first, as the caller pops.
fn sorted_names(path: &Path, prefix: &[u8]) -> io::Result<Vec<Vec<u8>>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(path)? {
        let name = entry?.file_name().into_vec();
        names.push(match prefix {
            b"" => name,
            _ => [prefix, b"/", &name].concat(),
        });
    }
    names.sort_unstable_by(|a, b| b.cmp(a));
    Ok(names)
}

/// `<length> <key>=<value>\n`, where the length counts itself.
fn pax_record(records: &mut Vec<u8>, key: &str, value: &[u8]) {
    let rest = key.len() + value.len() + 3;
    let mut length = rest + 1;
    while length != rest + length.to_string().len() {
        length = rest + length.to_string().len();
    }
    records.extend_from_slice(format!("{length} {key}=").as_bytes());
    records.extend_from_slice(value);
    records.push(b'\n');
}

fn block(name: &[u8], kind: u8, facts: &Metadata, size: u64, link: &[u8]) -> [u8; BLOCK_BYTES] {
    let mut block = [0u8; BLOCK_BYTES];
    put(&mut block[0..100], name);
    put_octal(&mut block[100..108], u64::from(facts.mode() & 0o7777));
    put_octal(
        &mut block[108..116],
        u64::from(facts.uid()).min(OCTAL_ID_MAX),
    );
    put_octal(
        &mut block[116..124],
        u64::from(facts.gid()).min(OCTAL_ID_MAX),
    );
    put_octal(&mut block[124..136], size.min(OCTAL_SIZE_MAX));
    let mtime = u64::try_from(facts.mtime()).unwrap_or(0);
    put_octal(&mut block[136..148], mtime.min(OCTAL_SIZE_MAX));
    block[148..156].fill(b' ');
    block[156] = kind;
    put(&mut block[157..257], link);
    block[257..265].copy_from_slice(b"ustar\x0000");
    let sum: u64 = block.iter().map(|byte| u64::from(*byte)).sum();
    put_octal(&mut block[148..155], sum);
    block
}

fn put(field: &mut [u8], text: &[u8]) {
    let count = text.len().min(field.len());
    field[..count].copy_from_slice(&text[..count]);
}

fn put_octal(field: &mut [u8], value: u64) {
    let width = field.len() - 1;
    let text = format!("{value:0width$o}");
    put(&mut field[..width], text.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pax_record_counts_its_own_length() {
        for length in [1, 80, 89, 90, 91, 980, 990, 9_985, 9_990] {
            let mut records = Vec::new();
            pax_record(&mut records, "path", &vec![b'a'; length]);
            let text = String::from_utf8(records.clone()).unwrap();
            let counted: usize = text.split(' ').next().unwrap().parse().unwrap();

            assert_eq!(counted, records.len());
        }
    }
}
