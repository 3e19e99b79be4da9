//! Unpacking a tar stream below a directory. The archive is hostile: no entry gets out, whatever names and links say.

use std::ffi::CString;
use std::fs::{File, Permissions};
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use dsec_protocol::files::Written;
use dsec_sys::rooted::{
    c_path, chown_at, link_at, mkdir_at, mkfifo_at, open_in_root, rmdir_at, set_mtime_at,
    symlink_at, unlink_at, DIRECTORY, NEW_FILE, PATH_ONLY_DIRECTORY,
};

use super::helper::EntryError;
use super::tar::BLOCK_BYTES;

/// Of a header's extension: names are at most a path long, and there are a few of them.
const EXTENSION_BYTES_MAX: u64 = 1 << 20;
const PATH_BYTES_MAX: usize = 4_095;
/// What is looked at for zeroes, and written, at a time.
const HOLE_BYTES: usize = 64 << 10;

/// One entry, with everything that extension headers said before it.
#[derive(Debug, Default)]
struct Entry {
    name: Vec<u8>,
    link: Vec<u8>,
    kind: u8,
    mode: u32,
    uid: u32,
    gid: u32,
    size: u64,
    mtime: i64,
    mtime_ns: i64,
}

#[derive(Default)]
struct Extension {
    name: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    uid: Option<u32>,
    gid: Option<u32>,
    mtime: Option<(i64, i64)>,
}

struct Target {
    base: OwnedFd,
    keep_owners: bool,
    /// The directory of the entry before: archives go directory by directory.
    parent: Option<(Vec<u8>, OwnedFd)>,
    /// Modes and times of directories are set last: entries inside would change the times, and might not be allowed.
    directories: Vec<(Vec<u8>, Entry)>,
}

pub fn extract_archive(path: &Path, keep_owners: bool, data: File) -> Result<Written, EntryError> {
    super::make_directory(path, true)?;
    let base: OwnedFd = File::open(path)?.into();
    let mut target = Target {
        base,
        keep_owners,
        parent: None,
        directories: Vec::new(),
    };
    let mut input = BufReader::with_capacity(64 << 10, data);
    let mut written = Written::default();
    while let Some(entry) = next_entry(&mut input)? {
        let name = entry.name.clone();
        let taken = target
            .unpack(entry, &mut input)
            .map_err(EntryError::at(&name))?;
        written.bytes += taken;
        written.entries += 1;
    }
    target.finish_directories()?;
    // Padding after the end marker is the sender's business, but it must be able to send it.
    io::copy(&mut input, &mut io::sink())?;
    Ok(written)
}

impl Target {
    /// Makes the entry and takes its content from the input. Gives the bytes of content.
    fn unpack(&mut self, entry: Entry, input: &mut impl Read) -> io::Result<u64> {
        let path = clean_path(&entry.name)?;
        let size = match entry.kind {
            b'0' | b'7' | 0 => entry.size,
            _ => 0,
        };
        if path.is_empty() {
            // The directory itself: its owner and mode are the caller's.
            skip(input, entry.size)?;
            return Ok(0);
        }
        let (above, name) = split(&path);
        let name = c_path(name)?;
        match entry.kind {
            b'0' | b'7' | 0 => self.make_file(above, &name, &entry, input)?,
            b'5' => self.make_directory(&path, entry)?,
            kind => {
                self.make_special(above, &name, kind, &entry)?;
                skip(input, entry.size)?;
            }
        }
        Ok(size)
    }

    fn make_file(
        &mut self,
        above: &[u8],
        name: &CString,
        entry: &Entry,
        input: &mut impl Read,
    ) -> io::Result<()> {
        self.clear(above, name)?;
        let parent = self.parent(above)?;
        let mut file = File::from(open_in_root(parent, name, NEW_FILE, 0o600)?);
        copy_with_holes(input, &mut file, entry.size)?;
        skip(input, padding(entry.size))?;
        self.own(above, name, entry)?;
        file.set_permissions(Permissions::from_mode(entry.mode & 0o7777))?;
        set_mtime_at(self.parent(above)?, name, entry.mtime, entry.mtime_ns)
    }

    fn make_directory(&mut self, path: &[u8], entry: Entry) -> io::Result<()> {
        let (above, name) = split(path);
        let name = c_path(name)?;
        if open_in_root(&self.base, &c_path(path)?, PATH_ONLY_DIRECTORY, 0).is_err() {
            self.clear(above, &name)?;
            mkdir_at(self.parent(above)?, &name, 0o700)?;
            self.own(above, &name, &entry)?;
        }
        self.directories.push((path.to_vec(), entry));
        Ok(())
    }

    fn make_special(
        &mut self,
        above: &[u8],
        name: &CString,
        kind: u8,
        entry: &Entry,
    ) -> io::Result<()> {
        match kind {
            b'1' => {
                let source = clean_path(&entry.link)?;
                let (source_above, source_name) = split(&source);
                let source_name = c_path(source_name)?;
                let from = open_in_root(&self.base, &directory(source_above)?, DIRECTORY, 0)?;
                let same = source.as_slice() == [above, b"/", name.as_bytes()].concat();
                if !same {
                    self.clear(above, name)?;
                    link_at(&from, &source_name, self.parent(above)?, name)?;
                }
                Ok(())
            }
            b'2' => {
                self.clear(above, name)?;
                symlink_at(&c_path(&entry.link)?, self.parent(above)?, name)?;
                self.own(above, name, entry)?;
                set_mtime_at(self.parent(above)?, name, entry.mtime, entry.mtime_ns)
            }
            b'6' => {
                self.clear(above, name)?;
                mkfifo_at(self.parent(above)?, name, entry.mode & 0o777)?;
                self.own(above, name, entry)
            }
            // Device nodes are never made.
            b'3' | b'4' => Ok(()),
            _ => Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP)),
        }
    }

    /// Whatever had the name gives way, a directory only when it is empty.
    fn clear(&mut self, above: &[u8], name: &CString) -> io::Result<()> {
        let parent = self.parent(above)?;
        match unlink_at(parent, name) {
            Err(error) if error.raw_os_error() == Some(libc::EISDIR) => rmdir_at(parent, name),
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    fn own(&mut self, above: &[u8], name: &CString, entry: &Entry) -> io::Result<()> {
        if !self.keep_owners {
            return Ok(());
        }
        let parent = self.parent(above)?;
        match chown_at(parent, name, entry.uid, entry.gid) {
            // An id that does not exist in this sandbox, or a right that we lack: the file stays root's.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EPERM)) => {
                Ok(())
            }
            result => result,
        }
    }

    /// The directory `path` below the base, made where it is missing.
    fn parent(&mut self, path: &[u8]) -> io::Result<&OwnedFd> {
        let known = matches!(&self.parent, Some((known, _)) if known == path);
        if !known {
            let fd = self.open_parent(path)?;
            self.parent = Some((path.to_vec(), fd));
        }
        match &self.parent {
            Some((_, fd)) => Ok(fd),
            None => Ok(&self.base),
        }
    }

    fn open_parent(&self, path: &[u8]) -> io::Result<OwnedFd> {
        let missing = match open_in_root(&self.base, &directory(path)?, DIRECTORY, 0) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => path,
            result => return result,
        };
        let (above, name) = split(missing);
        let parent = self.open_parent(above)?;
        match mkdir_at(&parent, &c_path(name)?, 0o755) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        open_in_root(&self.base, &directory(path)?, DIRECTORY, 0)
    }

    fn finish_directories(&mut self) -> Result<(), EntryError> {
        while let Some((path, entry)) = self.directories.pop() {
            self.finish_directory(&path, &entry)
                .map_err(EntryError::at(&path))?;
        }
        Ok(())
    }

    fn finish_directory(&self, path: &[u8], entry: &Entry) -> io::Result<()> {
        let fd = match open_in_root(&self.base, &directory(path)?, DIRECTORY, 0) {
            // A later entry of the archive has taken its place.
            Err(error) if error.raw_os_error() == Some(libc::ENOTDIR) => return Ok(()),
            result => File::from(result?),
        };
        fd.set_permissions(Permissions::from_mode(entry.mode & 0o7777))?;
        set_mtime_at(&fd.as_raw_fd(), c".", entry.mtime, entry.mtime_ns)
    }
}

/// Pieces of zeroes become holes: a tar stream has none, and a large empty file would fill the disk.
fn copy_with_holes(input: &mut impl Read, file: &mut File, size: u64) -> io::Result<()> {
    let mut piece = vec![0u8; HOLE_BYTES.min(size as usize)];
    let mut left = size;
    let mut hole = false;
    while left > 0 {
        let count = (piece.len() as u64).min(left) as usize;
        input.read_exact(&mut piece[..count])?;
        hole = piece[..count].iter().all(|byte| *byte == 0);
        match hole {
            true => drop(file.seek(SeekFrom::Current(count as i64))?),
            false => file.write_all(&piece[..count])?,
        }
        left -= count as u64;
    }
    match hole {
        true => file.set_len(size),
        false => Ok(()),
    }
}

/// Without leading slashes and dots. `..` is refused rather than guessed at.
fn clean_path(name: &[u8]) -> io::Result<Vec<u8>> {
    let mut path: Vec<u8> = Vec::with_capacity(name.len());
    for part in name.split(|b| *b == b'/') {
        match part {
            b"" | b"." => {}
            b".." => return Err(io::Error::from_raw_os_error(libc::EINVAL)),
            _ => {
                if !path.is_empty() {
                    path.push(b'/');
                }
                path.extend_from_slice(part);
            }
        }
    }
    match path.len() <= PATH_BYTES_MAX {
        true => Ok(path),
        false => Err(io::Error::from_raw_os_error(libc::ENAMETOOLONG)),
    }
}

fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|b| *b == b'/') {
        Some(at) => (&path[..at], &path[at + 1..]),
        None => (b"", path),
    }
}

fn directory(path: &[u8]) -> io::Result<CString> {
    match path {
        b"" => c_path(b"."),
        _ => c_path(path),
    }
}

/// The next entry that is one; `None` at the end of the archive.
fn next_entry(input: &mut impl Read) -> io::Result<Option<Entry>> {
    let mut extension = Extension::default();
    loop {
        let Some(block) = read_block(input)? else {
            return Ok(None);
        };
        let mut entry = parse_header(&block)?;
        match entry.kind {
            b'x' => parse_pax(&read_extension(input, &entry)?, &mut extension),
            b'g' => drop(read_extension(input, &entry)?),
            b'L' => extension.name = Some(c_text(&read_extension(input, &entry)?)),
            b'K' => extension.link = Some(c_text(&read_extension(input, &entry)?)),
            _ => {
                extension.apply(&mut entry);
                return Ok(Some(entry));
            }
        }
    }
}

impl Extension {
    fn apply(self, entry: &mut Entry) {
        entry.name = self.name.unwrap_or(std::mem::take(&mut entry.name));
        entry.link = self.link.unwrap_or(std::mem::take(&mut entry.link));
        entry.size = self.size.unwrap_or(entry.size);
        entry.uid = self.uid.unwrap_or(entry.uid);
        entry.gid = self.gid.unwrap_or(entry.gid);
        if let Some((seconds, nanoseconds)) = self.mtime {
            entry.mtime = seconds;
            entry.mtime_ns = nanoseconds;
        }
        // Links and directories may state a size; nothing follows them.
        if matches!(entry.kind, b'1' | b'2' | b'5' | b'6') {
            entry.size = 0;
        }
        // Before POSIX a directory was a file whose name ends with a slash.
        if matches!(entry.kind, 0 | b'0') && entry.name.ends_with(b"/") {
            entry.kind = b'5';
        }
    }
}

/// `None` at the end marker, and at an end without one.
fn read_block(input: &mut impl Read) -> io::Result<Option<[u8; BLOCK_BYTES]>> {
    let mut block = [0u8; BLOCK_BYTES];
    let mut filled = 0;
    while filled < BLOCK_BYTES {
        match input.read(&mut block[filled..])? {
            0 if filled == 0 => return Ok(None),
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            count => filled += count,
        }
    }
    Ok(block.iter().any(|byte| *byte != 0).then_some(block))
}

fn parse_header(block: &[u8; BLOCK_BYTES]) -> io::Result<Entry> {
    let invalid = || io::Error::from_raw_os_error(libc::EINVAL);
    let unsigned: u64 = block.iter().map(|byte| u64::from(*byte)).sum();
    let field: u64 = block[148..156].iter().map(|byte| u64::from(*byte)).sum();
    if number(&block[148..156]) != Some(unsigned - field + 8 * u64::from(b' ')) {
        return Err(invalid());
    }
    let mut name = c_text(&block[0..100]);
    if &block[257..263] == b"ustar\0" && block[345] != 0 {
        let mut whole = c_text(&block[345..500]);
        whole.push(b'/');
        whole.append(&mut name);
        name = whole;
    }
    let id = |bytes| number(bytes).and_then(|value| u32::try_from(value).ok());
    Ok(Entry {
        name,
        link: c_text(&block[157..257]),
        kind: block[156],
        mode: number(&block[100..108]).ok_or_else(invalid)? as u32,
        uid: id(&block[108..116]).unwrap_or(0),
        gid: id(&block[116..124]).unwrap_or(0),
        size: number(&block[124..136]).ok_or_else(invalid)?,
        mtime: number(&block[136..148])
            .and_then(|value| i64::try_from(value).ok())
            .unwrap_or(0),
        mtime_ns: 0,
    })
}

/// Octal text, or the binary form that GNU tar uses for large values. `None` for anything else, negative included.
fn number(field: &[u8]) -> Option<u64> {
    if field[0] & 0x80 != 0 {
        let rest = &field[1..];
        let (high, low) = rest.split_at(rest.len().saturating_sub(8));
        if field[0] != 0x80 || high.iter().any(|byte| *byte != 0) {
            return None;
        }
        return Some(
            low.iter()
                .fold(0, |sum, byte| (sum << 8) | u64::from(*byte)),
        );
    }
    let text = std::str::from_utf8(field).ok()?;
    let digits = text.trim_matches(|c| c == ' ' || c == '\0');
    match digits {
        "" => Some(0),
        _ => u64::from_str_radix(digits, 8).ok(),
    }
}

fn c_text(field: &[u8]) -> Vec<u8> {
    let length = field.iter().position(|b| *b == 0).unwrap_or(field.len());
    field[..length].to_vec()
}

fn read_extension(input: &mut impl Read, entry: &Entry) -> io::Result<Vec<u8>> {
    if entry.size > EXTENSION_BYTES_MAX {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    let mut bytes = vec![0; entry.size as usize];
    input.read_exact(&mut bytes)?;
    skip(input, padding(entry.size))?;
    Ok(bytes)
}

fn parse_pax(mut records: &[u8], extension: &mut Extension) {
    while let Some(space) = records.iter().position(|b| *b == b' ') {
        let length = std::str::from_utf8(&records[..space])
            .ok()
            .and_then(|text| text.parse::<usize>().ok());
        let Some(length) = length.filter(|l| *l > space + 1 && *l <= records.len()) else {
            return;
        };
        let record = &records[space + 1..length - 1];
        if let Some(equals) = record.iter().position(|b| *b == b'=') {
            take_record(&record[..equals], &record[equals + 1..], extension);
        }
        records = &records[length..];
    }
}

fn take_record(key: &[u8], value: &[u8], extension: &mut Extension) {
    let text = std::str::from_utf8(value).unwrap_or_default();
    match key {
        b"path" => extension.name = Some(value.to_vec()),
        b"linkpath" => extension.link = Some(value.to_vec()),
        b"size" => extension.size = text.parse().ok(),
        b"uid" => extension.uid = text.parse().ok(),
        b"gid" => extension.gid = text.parse().ok(),
        b"mtime" => extension.mtime = parse_time(text),
        _ => {}
    }
}

fn parse_time(text: &str) -> Option<(i64, i64)> {
    let (seconds, fraction) = text.split_once('.').unwrap_or((text, ""));
    let digits: String = fraction
        .chars()
        .chain("000000000".chars())
        .take(9)
        .collect();
    Some((seconds.parse().ok()?, digits.parse().ok()?))
}

fn padding(size: u64) -> u64 {
    let block = BLOCK_BYTES as u64;
    (block - size % block) % block
}

/// Passes over bytes that must be there.
fn skip(input: &mut impl Read, count: u64) -> io::Result<()> {
    let skipped = io::copy(&mut input.by_ref().take(count), &mut io::sink())?;
    match skipped == count {
        true => Ok(()),
        false => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_climb() {
        assert_eq!(clean_path(b"/a//./b/").unwrap(), b"a/b");
        assert_eq!(clean_path(b"./").unwrap(), b"");
        assert!(clean_path(b"a/../../b").is_err());
    }

    #[test]
    fn numbers_are_octal_or_binary() {
        assert_eq!(number(b"0000644\0"), Some(0o644));
        assert_eq!(number(b"        "), Some(0));
        assert_eq!(number(b"-1     \0"), None);
        assert_eq!(
            number(&[0x80, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0]),
            Some(1 << 32)
        );
        assert_eq!(number(&[0xff; 12]), None);
    }

    #[test]
    fn broken_pax_records_end_quietly() {
        for bytes in [
            &b"5 a=b\n99 path=x\n"[..],
            b"0 =\n",
            b"x y",
            b"18446744073709551615 a=b\n",
        ] {
            parse_pax(bytes, &mut Extension::default());
        }
        let mut extension = Extension::default();
        parse_pax(b"12 path=a/b\n11 size=33\n", &mut extension);
        assert_eq!(extension.name.as_deref(), Some(&b"a/b"[..]));
        assert_eq!(extension.size, Some(33));
    }
}
