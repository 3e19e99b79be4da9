//! Where the agent is the first program of a machine: the clock, the randomness and the name, which are its own.

use std::fs::{self, File};
use std::io::Read;
use std::os::fd::AsFd;

use dsec_sys::cards::{cards, HardwareAddress};
use dsec_sys::identity::set_hostname;
use dsec_sys::machine;

use crate::refusal::Refusal;

const SEED_BYTES_MIN: usize = 32;
const HOSTNAME_BYTES_MAX: usize = 63;
const WALL_S_MAX: f64 = 1e11;

pub fn set_clock(wall_s: f64) -> Result<(), Refusal> {
    if !wall_s.is_finite() || !(0.0..=WALL_S_MAX).contains(&wall_s) {
        return Err(Refusal::invalid("wall_s is out of range"));
    }
    machine::set_wall_clock(wall_s).map_err(|e| Refusal::system("clock_failed", "the clock", &e))
}

/// What the kernel gives as random from now on is this machine's alone.
pub fn reseed(seed: &[u8]) -> Result<(), Refusal> {
    if seed.len() < SEED_BYTES_MIN {
        return Err(Refusal::invalid("a seed has at least 32 bytes"));
    }
    File::open("/dev/urandom")
        .and_then(|random| machine::reseed(random.as_fd(), seed))
        .map_err(|e| Refusal::system("reseed_failed", "/dev/urandom", &e))
}

/// Of a template's many clones each has hardware addresses of its own, and no other machine has them. Most machines have no
/// network card.
pub fn readdress() -> Result<(), Refusal> {
    let failed = |e: &std::io::Error| Refusal::system("reseed_failed", "a network card", e);
    for card in cards().map_err(|e| failed(&e))? {
        let address = hardware_address(random()?);
        card.set_hardware_address(address).map_err(|e| failed(&e))?;
    }
    Ok(())
}

/// Of one device, and given by nobody who sells them.
fn hardware_address(mut random: HardwareAddress) -> HardwareAddress {
    random[0] = (random[0] & 0xfc) | 2;
    random
}

/// The machine's name and id: of a template's many clones each has its own.
pub fn name(hostname: &str) -> Result<(), Refusal> {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'.';
    if hostname.len() > HOSTNAME_BYTES_MAX || !hostname.bytes().all(plain) {
        return Err(Refusal::invalid("a strange hostname"));
    }
    let hostname = match hostname {
        "" => "localhost",
        named => named,
    };
    set_hostname(hostname).map_err(|e| Refusal::system("name_failed", "the hostname", &e))?;
    let hosts =
        format!("127.0.0.1\tlocalhost {hostname}\n::1\tlocalhost ip6-localhost ip6-loopback\n");
    for (path, content) in [
        ("/etc/hosts", hosts),
        ("/etc/hostname", format!("{hostname}\n")),
        ("/etc/machine-id", format!("{}\n", new_id()?)),
    ] {
        // An image may have something else there, which stays.
        let _ = fs::write(path, content);
    }
    Ok(())
}

fn new_id() -> Result<String, Refusal> {
    let bytes: [u8; 16] = random()?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

fn random<const COUNT: usize>() -> Result<[u8; COUNT], Refusal> {
    let mut bytes = [0; COUNT];
    File::open("/dev/urandom")
        .and_then(|mut file| file.read_exact(&mut bytes))
        .map_err(|e| Refusal::system("name_failed", "/dev/urandom", &e))?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hardware_address_is_of_one_device_and_locally_given() {
        for first in 0..=u8::MAX {
            let address = hardware_address([first, 1, 2, 3, 4, 5]);

            assert_eq!(address[0] & 3, 2);
            assert_eq!(&address[1..], &[1, 2, 3, 4, 5]);
        }
    }
}
