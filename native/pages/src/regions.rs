//! What the monitor says of its memory: a JSON array of flat objects of numbers, such as
//! `[{"base_host_virt_addr":140000000000000,"size":134217728,"offset":0,"page_size":4096,"page_size_kib":4096}]`.

use dsec_sys::userfault::PAGE_BYTES;

use dsec_sys::failure::{Error, Result};

const REGIONS_MAX: usize = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// In the monitor.
    pub address: u64,
    pub length: u64,
    /// In the file.
    pub offset: u64,
}

pub fn parse(message: &[u8]) -> Result<Vec<Region>> {
    let strange = |what: &str| Error::new(format!("the monitor's message {what}"));
    let text = std::str::from_utf8(message).map_err(|_| strange("is no text"))?;
    let objects = text
        .trim()
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'))
        .ok_or_else(|| strange("is no array"))?;
    let regions = objects
        .split_inclusive('}')
        .map(|object| region(object.trim_start_matches([',', ' '])))
        .collect::<Option<Vec<_>>>()
        .ok_or_else(|| strange("holds what is no region of 4 KiB pages"))?;
    match (1..=REGIONS_MAX).contains(&regions.len()) {
        true => Ok(regions),
        false => Err(strange("has no region, or too many")),
    }
}

fn region(object: &str) -> Option<Region> {
    let fields = object.trim().strip_prefix('{')?.strip_suffix('}')?;
    let number = |name: &str| {
        fields.split(',').find_map(|field| {
            let (key, value) = field.split_once(':')?;
            match key.trim().trim_matches('"') == name {
                true => value.trim().parse::<u64>().ok(),
                false => None,
            }
        })
    };
    let page = PAGE_BYTES as u64;
    let found = Region {
        address: number("base_host_virt_addr")?,
        length: number("size")?,
        offset: number("offset")?,
    };
    let whole = [found.address, found.length, found.offset]
        .iter()
        .all(|value| value % page == 0);
    // Before 1.10 the size of a page was not told, and was this one.
    let plain = number("page_size").unwrap_or(page) == page;
    let fits = found.address.checked_add(found.length)? > found.address
        && found.offset.checked_add(found.length).is_some();
    (whole && plain && fits).then_some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_are_read_as_firecracker_writes_them() {
        let message = br#"[{"base_host_virt_addr":139637976727552,"size":134217728,"offset":0,"page_size":4096,"page_size_kib":4096},{"base_host_virt_addr":4096, "size": 8192, "offset":134217728}]"#;

        let found = parse(message).unwrap();

        assert_eq!(
            found,
            [
                Region {
                    address: 139_637_976_727_552,
                    length: 134_217_728,
                    offset: 0
                },
                Region {
                    address: 4096,
                    length: 8192,
                    offset: 134_217_728
                },
            ]
        );
    }

    #[test]
    fn what_is_strange_is_refused() {
        for text in [
            "",
            "[]",
            "{}",
            "[{}]",
            r#"[{"base_host_virt_addr":1,"size":4096,"offset":0}]"#,
            r#"[{"base_host_virt_addr":4096,"size":0,"offset":0}]"#,
            r#"[{"base_host_virt_addr":4096,"size":4096,"offset":-1}]"#,
            r#"[{"base_host_virt_addr":4096,"size":4096,"offset":0,"page_size":2097152}]"#,
            r#"[{"base_host_virt_addr":18446744073709547520,"size":8192,"offset":0}]"#,
        ] {
            assert!(parse(text.as_bytes()).is_err(), "{text}");
        }
    }
}
