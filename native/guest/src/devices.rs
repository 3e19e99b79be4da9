//! Finding devices by the names that the node gave them.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use dsec_sys::failure::{Doing, Error, Result};

/// Devices show a moment after their driver is there.
const TRIES: u32 = 200;
const BETWEEN: Duration = Duration::from_millis(10);

/// The serial port of this name.
pub fn port(name: &str) -> Result<PathBuf> {
    find(
        "serial port",
        name,
        Path::new("/sys/class/virtio-ports"),
        "name",
    )
}

/// The disk with this serial number, or at this path.
pub fn disk(name: &str) -> Result<PathBuf> {
    match name.starts_with('/') {
        true => wait_for("disk", name, || {
            Some(PathBuf::from(name)).filter(|path| path.exists())
        }),
        false => find("disk", name, Path::new("/sys/block"), "serial"),
    }
}

fn find(kind: &str, wanted: &str, class: &Path, file: &str) -> Result<PathBuf> {
    wait_for(kind, wanted, || look(wanted, class, file))
}

fn wait_for(kind: &str, wanted: &str, look: impl Fn() -> Option<PathBuf>) -> Result<PathBuf> {
    for attempt in 0..TRIES {
        if attempt > 0 {
            sleep(BETWEEN);
        }
        if let Some(device) = look() {
            return Ok(device);
        }
    }
    Err(Error::new(format!("there is no {kind} {wanted:?}")))
}

fn look(wanted: &str, class: &Path, file: &str) -> Option<PathBuf> {
    for entry in fs::read_dir(class).into_iter().flatten().flatten() {
        let found = fs::read_to_string(entry.path().join(file)).unwrap_or_default();
        let device = Path::new("/dev").join(entry.file_name());
        if found.trim() == wanted && device.exists() {
            return Some(device);
        }
    }
    None
}

/// The kernel tells how large a disk is, in sectors of 512 bytes.
pub fn is_empty(disk: &Path) -> Result<bool> {
    let name = disk.file_name().unwrap_or_default();
    let path = Path::new("/sys/block").join(name).join("size");
    let text = fs::read_to_string(&path).doing("read", path.display())?;
    Ok(text.trim() == "0")
}
