//! The names of one large directory, sorted, in a file in memory: the first page's child leaves them there, so that those of
//! the next pages need not go through the whole directory again. Ours may be the content, but whoever is the user may have
//! been at it: it is believed as far as it fits.
//!
//!     u64 number | u64 bytes of all names | u32 × (number + 1) where each begins, and the end | names

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// More are listed page by page as they come: this is held in memory, at the sandbox's expense.
const NUMBER_MAX: usize = 200_000;
const BYTES_MAX: usize = 8 << 20;
const HEAD_BYTES: u64 = 16;

/// All names of the directory, sorted; `None` when there are too many.
pub fn all_of(path: &Path) -> io::Result<Option<Vec<Vec<u8>>>> {
    use std::os::unix::ffi::OsStringExt;
    let mut names = Vec::new();
    let mut bytes = 0;
    for entry in std::fs::read_dir(path)? {
        let name = entry?.file_name().into_vec();
        bytes += name.len();
        if names.len() == NUMBER_MAX || bytes > BYTES_MAX {
            return Ok(None);
        }
        names.push(name);
    }
    names.sort_unstable();
    Ok(Some(names))
}

/// The head comes last: without it there is nothing.
pub fn write(file: &File, names: &[Vec<u8>]) -> io::Result<()> {
    let mut body = Vec::new();
    let mut end = 0_u32;
    body.extend_from_slice(&end.to_ne_bytes());
    for name in names {
        end += name.len() as u32;
        body.extend_from_slice(&end.to_ne_bytes());
    }
    names.iter().for_each(|name| body.extend_from_slice(name));
    file.write_all_at(&body, HEAD_BYTES)?;
    let mut head = (names.len() as u64).to_ne_bytes().to_vec();
    head.extend_from_slice(&u64::from(end).to_ne_bytes());
    file.write_all_at(&head, 0)
}

/// At most `most` names behind `after`, in order; `None` when there are none on file.
pub fn following(file: &File, after: &[u8], most: usize) -> io::Result<Option<Vec<Vec<u8>>>> {
    let Some(list) = List::of(file)? else {
        return Ok(None);
    };
    let (mut low, mut high) = (0, list.number);
    while low < high {
        let middle = low + (high - low) / 2;
        match list.names(middle, 1)?.first() {
            None => return Ok(None),
            Some(name) if name.as_slice() <= after => low = middle + 1,
            Some(_) => high = middle,
        }
    }
    let wanted = most.min(list.number - low);
    let found = list.names(low, wanted)?;
    let whole = found.len() == wanted && found.iter().all(|name| is_name(name));
    Ok(whole.then_some(found))
}

fn is_name(name: &[u8]) -> bool {
    !name.is_empty() && !name.contains(&b'/') && !name.contains(&0) && name != b"." && name != b".."
}

struct List<'a> {
    file: &'a File,
    number: usize,
}

impl List<'_> {
    fn of(file: &File) -> io::Result<Option<List<'_>>> {
        let size = file.metadata()?.len();
        let mut head = [0; HEAD_BYTES as usize];
        if size < HEAD_BYTES {
            return Ok(None);
        }
        file.read_exact_at(&mut head, 0)?;
        let (number, bytes) = head.split_at(8);
        let number = u64::from_ne_bytes(number.try_into().unwrap_or_default());
        let bytes = u64::from_ne_bytes(bytes.try_into().unwrap_or_default());
        if number == 0 || number > NUMBER_MAX as u64 || bytes > BYTES_MAX as u64 {
            return Ok(None);
        }
        let number = number as usize;
        let fits = size == HEAD_BYTES + 4 * (number as u64 + 1) + bytes;
        Ok(fits.then_some(List { file, number }))
    }

    /// Fewer, when the places do not fit.
    fn names(&self, first: usize, count: usize) -> io::Result<Vec<Vec<u8>>> {
        let mut places = vec![0; 4 * (count + 1)];
        self.file
            .read_exact_at(&mut places, HEAD_BYTES + 4 * first as u64)?;
        let places: Vec<u32> = places
            .chunks_exact(4)
            .map(|place| u32::from_ne_bytes(place.try_into().unwrap_or_default()))
            .collect();
        let (begin, end) = (places[0], places[count]);
        if places.windows(2).any(|pair| pair[0] > pair[1]) || end as usize > BYTES_MAX {
            return Ok(Vec::new());
        }
        let mut bytes = vec![0; (end - begin) as usize];
        let at = HEAD_BYTES + 4 * (self.number as u64 + 1) + u64::from(begin);
        self.file.read_exact_at(&mut bytes, at)?;
        let name =
            |pair: &[u32]| bytes[(pair[0] - begin) as usize..(pair[1] - begin) as usize].to_vec();
        Ok(places.windows(2).map(name).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dsec_sys::sealed::memory_file;

    fn file() -> File {
        File::from(memory_file(c"names").unwrap())
    }

    fn names(count: usize) -> Vec<Vec<u8>> {
        let mut names: Vec<_> = (0..count)
            .map(|n| format!("{}", n * 7919 % 100_003).into_bytes())
            .collect();
        names.sort_unstable();
        names
    }

    #[test]
    fn pages_follow_each_other_whatever_is_asked_for() {
        let (file, all) = (file(), names(2_500));
        write(&file, &all).unwrap();

        for after in [&b""[..], b"0", b"55", b"5500000", b"zzz", &all[1_000]] {
            let expected: Vec<_> = all
                .iter()
                .filter(|name| name.as_slice() > after)
                .take(101)
                .cloned()
                .collect();
            assert_eq!(following(&file, after, 101).unwrap(), Some(expected));
        }
    }

    #[test]
    fn nothing_that_does_not_fit_is_believed() {
        let empty = file();
        assert_eq!(following(&empty, b"", 10).unwrap(), None);

        let all = names(50);
        for (at, bytes) in [
            (0, &[0xff; 8][..]),
            (0, &[49, 0, 0, 0, 0, 0, 0, 0]),
            (8, &[0xff; 8]),
            (16, &[0xff; 4]),
            (40, &[0xff; 4]),
            (16 + 51 * 4, b"/"),
        ] {
            let file = file();
            write(&file, &all).unwrap();
            file.write_all_at(bytes, at).unwrap();

            assert_eq!(following(&file, b"", 100).unwrap(), None, "{at}");
        }
    }
}
