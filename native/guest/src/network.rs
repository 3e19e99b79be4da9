//! The one network card of a machine that has any. Whether anything answers behind it is the node's to say.

use std::fs;
use std::thread::sleep;
use std::time::Duration;

use dsec_sys::cards::{cards, set_default_route, Card};
use dsec_sys::failure::{Doing, Error, Result};

use crate::plan::Network;

const RESOLVER: &str = "/etc/resolv.conf";
/// A card shows a moment after its driver is there.
const TRIES: u32 = 200;
const BETWEEN: Duration = Duration::from_millis(10);

/// The root is the sandbox's already.
pub fn set_up(wanted: &Network) -> Result<()> {
    card()?
        .set_up(wanted.address, wanted.prefix)
        .doing("set up", "the network card")?;
    set_default_route(wanted.gateway).doing("set", "the default route")?;
    // What an image has instead, a link to what a service of its own would write, helps nobody here.
    match fs::symlink_metadata(RESOLVER) {
        Ok(found) if found.is_file() => {}
        Ok(found) if found.is_dir() => return Ok(()),
        Ok(_) => fs::remove_file(RESOLVER).doing("remove", RESOLVER)?,
        Err(_) => {}
    }
    fs::write(RESOLVER, format!("nameserver {}\n", wanted.resolver)).doing("write", RESOLVER)
}

fn card() -> Result<Card> {
    for attempt in 0..TRIES {
        if attempt > 0 {
            sleep(BETWEEN);
        }
        let found = cards().doing("look for", "network cards")?;
        if let Some(card) = found.into_iter().next() {
            return Ok(card);
        }
    }
    Err(Error::new("there is no network card".to_owned()))
}
