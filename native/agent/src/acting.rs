//! Acting on files with a user's rights, for the moment of one small operation.

use std::io;

use dsec_sys::rights::{
    own_capabilities, set_fs_ids, set_groups, set_own_capabilities, CapSets, CAPS_OF_FILES,
};

use crate::setup::Own;
use crate::users::Account;

/// Runs `work` with the file rights of `account`: its file-system ids and groups, and capabilities over files only
/// for root. Our own identity is back afterwards; if it cannot be brought back the process ends, as it would go on with
/// wrong rights.
pub fn acting_as<T>(
    own: &Own,
    account: &Account,
    work: impl FnOnce() -> io::Result<T>,
) -> io::Result<T> {
    if !own.may_switch() {
        return match account.uid == own.uid {
            true => work(),
            false => Err(io::Error::from_raw_os_error(libc::EPERM)),
        };
    }
    let before = own_capabilities()?;
    let result = put_on(account, before).and_then(|()| work());
    if take_off(own, before).is_err() {
        std::process::abort();
    }
    result
}

fn put_on(account: &Account, before: CapSets) -> io::Result<()> {
    set_groups(&account.groups)?;
    set_fs_ids(account.uid, account.gid)?;
    let effective = match account.uid {
        0 => before.permitted,
        _ => before.effective & !CAPS_OF_FILES,
    };
    set_own_capabilities(CapSets {
        effective,
        ..before
    })
}

fn take_off(own: &Own, before: CapSets) -> io::Result<()> {
    set_fs_ids(own.uid, own.gid)?;
    set_groups(&own.groups)?;
    set_own_capabilities(before)
}
