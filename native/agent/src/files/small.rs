//! Operations that are over in one or two system calls.

use std::fs::{set_permissions, Permissions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{chown, lchown, symlink, PermissionsExt};
use std::path::Path;

use dsec_protocol::codec::decode;
use dsec_protocol::files::{
    ChmodArgs, ChownArgs, MkdirArgs, MoveArgs, PathArgs, RemoveArgs, SymlinkArgs,
};
use dsec_protocol::opening::Empty;
use dsec_sys::rooted::{c_path, rename_path};

use super::{facts, make_directory, path_of, stat_of};
use crate::agent::Agent;
use crate::dispatch::{reply, Answer};
use crate::refusal::Refusal;
use crate::users::Database;

type Answered = Result<Answer, Refusal>;

const MODE_BITS: u32 = 0o7777;

impl Agent {
    pub fn op_stat(&mut self, args: &[u8]) -> Answered {
        let args: PathArgs = decode(args)?;
        let stat = self.on_path(&args.path, args.user.as_deref(), |path| {
            Ok(stat_of(path, &facts(path, args.follow)?))
        })?;
        reply(&stat)
    }

    pub fn op_mkdir(&mut self, args: &[u8]) -> Answered {
        let args: MkdirArgs = decode(args)?;
        self.on_path(&args.path, args.user.as_deref(), |path| {
            if make_directory(path, args.parents)? {
                set_permissions(path, Permissions::from_mode(args.mode & MODE_BITS))?;
            }
            Ok(())
        })?;
        reply(&Empty {})
    }

    pub fn op_move(&mut self, args: &[u8]) -> Answered {
        let args: MoveArgs = decode(args)?;
        path_of(&args.target)?;
        self.on_path(&args.source, args.user.as_deref(), |_| {
            rename_path(&c_path(&args.source)?, &c_path(&args.target)?, args.replace)
        })?;
        reply(&Empty {})
    }

    pub fn op_remove(&mut self, stream: u32, args: &[u8]) -> Answered {
        let args: RemoveArgs = decode(args)?;
        let account = self.account(args.user.as_deref())?;
        let missing_ok = args.missing_ok;
        let left = self.on_path_as(&args.path, &account, |path| {
            remove_one(path, args.recursive, missing_ok)
        })?;
        match left {
            Removal::Done => reply(&Empty {}),
            // A tree may be large: not in this thread.
            Removal::Tree => self.remove_tree(stream, &args.path, &account),
        }
    }

    pub fn op_chmod(&mut self, args: &[u8]) -> Answered {
        let args: ChmodArgs = decode(args)?;
        self.on_path(&args.path, args.user.as_deref(), |path| {
            set_permissions(path, Permissions::from_mode(args.mode & MODE_BITS))
        })?;
        reply(&Empty {})
    }

    pub fn op_chown(&mut self, args: &[u8]) -> Answered {
        let args: ChownArgs = decode(args)?;
        let database = Database::read();
        let uid = match &args.owner {
            Some(owner) => Some(database.find(owner)?.uid),
            None => None,
        };
        let gid = match &args.group {
            Some(group) => Some(database.find_group(group)?),
            None => None,
        };
        self.on_path(&args.path, None, |path| match args.follow {
            true => chown(path, uid, gid),
            false => lchown(path, uid, gid),
        })?;
        reply(&Empty {})
    }

    pub fn op_symlink(&mut self, args: &[u8]) -> Answered {
        let args: SymlinkArgs = decode(args)?;
        self.on_path(&args.path, args.user.as_deref(), |path| {
            symlink(std::ffi::OsStr::from_bytes(&args.target), path)
        })?;
        reply(&Empty {})
    }
}

enum Removal {
    Done,
    Tree,
}

fn remove_one(path: &Path, recursive: bool, missing_ok: bool) -> io::Result<Removal> {
    let facts = match std::fs::symlink_metadata(path) {
        Err(error) if missing_ok && error.kind() == io::ErrorKind::NotFound => {
            return Ok(Removal::Done)
        }
        other => other?,
    };
    if !facts.is_dir() {
        std::fs::remove_file(path)?;
        return Ok(Removal::Done);
    }
    match std::fs::remove_dir(path) {
        Ok(()) => Ok(Removal::Done),
        Err(error) if recursive && error.raw_os_error() == Some(libc::ENOTEMPTY) => {
            Ok(Removal::Tree)
        }
        Err(error) => Err(error),
    }
}
