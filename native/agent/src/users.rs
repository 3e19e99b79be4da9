//! Users of the image, read from its own /etc/passwd and /etc/group: hostile text, no library of the image involved.

use std::fs::File;
use std::io::Read;

use dsec_sys::rooted::{open_in_root, READ_NONBLOCKING};

use crate::refusal::Refusal;

const FILE_BYTES_MAX: u64 = 1 << 20;
const GROUPS_MAX: usize = 1024;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Account {
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
    pub name: Option<Vec<u8>>,
    pub home: Option<Vec<u8>>,
    pub shell: Option<Vec<u8>>,
}

/// The two files, empty where they are missing, too large or not regular.
pub struct Database {
    passwd: Vec<u8>,
    group: Vec<u8>,
}

impl Database {
    pub fn read() -> Self {
        Self {
            passwd: read_file(c"etc/passwd").unwrap_or_default(),
            group: read_file(c"etc/group").unwrap_or_default(),
        }
    }

    /// `name`, `uid`, `name:group` or `uid:gid`.
    pub fn find(&self, spec: &str) -> Result<Account, Refusal> {
        let (user, group) = match spec.split_once(':') {
            Some((user, group)) => (user, Some(group)),
            None => (spec, None),
        };
        let mut account = self.find_user(user)?;
        if let Some(group) = group {
            account.gid = self.find_group(group)?;
            account.groups = vec![account.gid];
        }
        Ok(account)
    }

    fn find_user(&self, user: &str) -> Result<Account, Refusal> {
        let number = parse_id(user.as_bytes());
        let matches = |account: &Account| match number {
            Some(uid) => account.uid == uid,
            None => account.name.as_deref() == Some(user.as_bytes()),
        };
        if let Some(mut account) = lines(&self.passwd).filter_map(parse_account).find(matches) {
            account.groups = self.groups_of(&account);
            return Ok(account);
        }
        match (number, user) {
            // An image without accounts still has its root; a number needs no name.
            (None, "root") => Ok(bare_account(0)),
            (Some(uid), _) => Ok(bare_account(uid)),
            _ => Err(not_found(format!("no user {user:?} in /etc/passwd"))),
        }
    }

    pub fn find_group(&self, group: &str) -> Result<u32, Refusal> {
        if let Some(gid) = parse_id(group.as_bytes()) {
            return Ok(gid);
        }
        lines(&self.group)
            .filter_map(parse_group)
            .find(|entry| entry.name == group.as_bytes())
            .map(|entry| entry.gid)
            .ok_or_else(|| not_found(format!("no group {group:?} in /etc/group")))
    }

    fn groups_of(&self, account: &Account) -> Vec<u32> {
        let name = account.name.as_deref().unwrap_or_default();
        let mut groups = vec![account.gid];
        for entry in lines(&self.group).filter_map(parse_group) {
            let is_member = entry.members.split(|b| *b == b',').any(|m| m == name);
            if is_member && groups.len() < GROUPS_MAX && !groups.contains(&entry.gid) {
                groups.push(entry.gid);
            }
        }
        groups
    }
}

/// Group 0 as container runtimes give it to a number without an account.
fn bare_account(uid: u32) -> Account {
    Account {
        uid,
        gid: 0,
        groups: vec![0],
        ..Account::default()
    }
}

fn not_found(message: String) -> Refusal {
    Refusal::new("user_not_found", message)
}

fn read_file(path: &std::ffi::CStr) -> Option<Vec<u8>> {
    let root = File::open("/").ok()?;
    // Non-blocking: the image may have put a FIFO there.
    let file = File::from(open_in_root(&root, path, READ_NONBLOCKING, 0).ok()?);
    let facts = file.metadata().ok()?;
    if !facts.is_file() {
        return None;
    }
    // Room for all of it at once, and for seeing its end: this is read for each command.
    let mut bytes = Vec::with_capacity(facts.len().min(FILE_BYTES_MAX) as usize + 1);
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).ok()?;
    (bytes.len() as u64 <= FILE_BYTES_MAX).then_some(bytes)
}

fn lines(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    text.split(|b| *b == b'\n')
}

fn parse_account(line: &[u8]) -> Option<Account> {
    let fields: Vec<&[u8]> = line.split(|b| *b == b':').collect();
    let [name, _, uid, gid, _, home, shell] = fields.as_slice() else {
        return None;
    };
    let path = |field: &[u8]| {
        (field.starts_with(b"/") && !field.contains(&0) && field.len() < 4096)
            .then(|| field.to_vec())
    };
    if name.is_empty() || name.len() > 256 || name.contains(&0) {
        return None;
    }
    Some(Account {
        uid: parse_id(uid)?,
        gid: parse_id(gid)?,
        groups: Vec::new(),
        name: Some(name.to_vec()),
        home: path(home),
        shell: path(shell),
    })
}

struct GroupLine<'a> {
    name: &'a [u8],
    gid: u32,
    members: &'a [u8],
}

fn parse_group(line: &[u8]) -> Option<GroupLine<'_>> {
    let fields: Vec<&[u8]> = line.split(|b| *b == b':').collect();
    let [name, _, gid, members] = fields.as_slice() else {
        return None;
    };
    Some(GroupLine {
        name,
        gid: parse_id(gid)?,
        members,
    })
}

/// Plain decimal digits; the highest number means "no id" to the kernel.
fn parse_id(text: &[u8]) -> Option<u32> {
    if text.is_empty() || text.len() > 10 || !text.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let number: u32 = std::str::from_utf8(text).ok()?.parse().ok()?;
    (number != u32::MAX).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn database(passwd: &str, group: &str) -> Database {
        Database {
            passwd: passwd.as_bytes().to_vec(),
            group: group.as_bytes().to_vec(),
        }
    }

    #[test]
    fn a_name_brings_its_groups_and_home() {
        let db = database(
            "root:x:0:0::/root:/bin/sh\nann:x:1000:1001:Ann:/home/ann:/bin/zsh\n",
            "a:x:5:bob,ann\nb:x:6:annx\nc:x:7:ann\n",
        );

        let ann = db.find("ann").unwrap();

        assert_eq!(
            (ann.uid, ann.gid, ann.groups),
            (1000, 1001, vec![1001, 5, 7])
        );
        assert_eq!(ann.home.as_deref(), Some(&b"/home/ann"[..]));
    }

    #[test]
    fn a_group_in_the_request_replaces_the_groups() {
        let db = database("ann:x:1000:1000::/:/bin/sh\n", "a:x:5:ann\nb:x:6:\n");

        assert_eq!(db.find("ann:b").unwrap().groups, vec![6]);
        assert_eq!(db.find("7:8").unwrap().gid, 8);
    }

    #[test]
    fn numbers_need_no_files_but_names_do() {
        let db = database("", "");

        assert_eq!(db.find("1234").unwrap().uid, 1234);
        assert_eq!(db.find("root").unwrap().uid, 0);
        assert_eq!(db.find("ann").unwrap_err().code, "user_not_found");
        assert_eq!(db.find("0:wheel").unwrap_err().code, "user_not_found");
    }

    #[test]
    fn hostile_lines_are_passed_over() {
        let db = database(
            "ann:x:4294967295:0::/:\nann:x:-1:0::/:\nann:x:0x0:0::/:\nann:x:+0:0::/:\nann\n::::::::\n\
             ann:x:99999999999:0::/:\nann:x:7:7::relative:also\n",
            "",
        );

        let ann = db.find("ann").unwrap();

        assert_eq!((ann.uid, ann.gid), (7, 7));
        assert_eq!((ann.home, ann.shell), (None, None));
        assert_eq!(db.find("").unwrap_err().code, "user_not_found");
    }
}
