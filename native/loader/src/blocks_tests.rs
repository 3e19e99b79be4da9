use dsec_sys::ublk::{STATE_LIVE, STATE_QUIESCED};

use super::*;
use crate::desk::tests::{until, FakeQueue};
use crate::shelf::Read;

const DIGEST: &str = "abababababababababababababababababababababababababababababababab";
const OTHER: &str = "cdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcd";
const SIZE: u64 = 4096;

/// A driver in memory, which fails at the step that it is told to.
#[derive(Default)]
struct Fake {
    devices: BTreeMap<u32, Info>,
    queues: BTreeMap<u32, FakeQueue>,
    sectors: u64,
    calls: Vec<&'static str>,
    fails: Option<(&'static str, i32)>,
    busy: usize,
    taken: usize,
    used: bool,
}

impl Fake {
    fn step(&mut self, name: &'static str) -> io::Result<()> {
        self.calls.push(name);
        match self.fails {
            Some((step, errno)) if step == name => Err(io::Error::from_raw_os_error(errno)),
            _ => Ok(()),
        }
    }

    fn only(&self) -> u32 {
        assert_eq!(self.devices.len(), 1);
        *self.devices.keys().next().unwrap()
    }

    /// As when a worker is killed.
    fn kill_server(&mut self) {
        let id = self.only();
        self.devices.get_mut(&id).unwrap().state = STATE_QUIESCED;
    }
}

impl Driver for Fake {
    type Queue = FakeQueue;

    fn add(&mut self, id: u32, mark: u64) -> io::Result<()> {
        self.step("add")?;
        if self.taken > 0 {
            self.taken -= 1;
            return Err(io::Error::from_raw_os_error(libc::EEXIST));
        }
        let info = Info {
            id,
            mark,
            ..Info::default()
        };
        assert!(self.devices.insert(id, info).is_none());
        Ok(())
    }

    fn info(&mut self, id: u32) -> io::Result<Info> {
        let none = || io::Error::from_raw_os_error(libc::ENODEV);
        self.devices.get(&id).copied().ok_or_else(none)
    }

    fn set_size(&mut self, _id: u32, sectors: u64) -> io::Result<()> {
        self.step("size")?;
        self.sectors = sectors;
        Ok(())
    }

    fn queue(&mut self, id: u32) -> io::Result<FakeQueue> {
        self.step("queue")?;
        let queue = FakeQueue::new();
        self.queues.insert(id, queue.clone());
        Ok(queue)
    }

    fn start(&mut self, id: u32) -> io::Result<()> {
        self.step("start")?;
        until(|| self.queues[&id].fetched() == 64);
        self.devices.get_mut(&id).unwrap().state = STATE_LIVE;
        Ok(())
    }

    fn stop(&mut self, id: u32) -> io::Result<()> {
        self.step("stop")?;
        if let Some(queue) = self.queues.get(&id) {
            queue.stop();
        }
        Ok(())
    }

    fn delete(&mut self, id: u32) -> io::Result<()> {
        self.step("delete")?;
        let none = || io::Error::from_raw_os_error(libc::ENODEV);
        self.devices.remove(&id).map(drop).ok_or_else(none)
    }

    fn is_used(&mut self, _id: u32) -> bool {
        self.used
    }

    fn begin_recovery(&mut self, id: u32) -> io::Result<()> {
        self.step("begin")?;
        assert_ne!(self.devices[&id].state, STATE_DEAD);
        if self.busy > 0 {
            self.busy -= 1;
            return Err(io::Error::from_raw_os_error(libc::EBUSY));
        }
        Ok(())
    }

    fn end_recovery(&mut self, id: u32) -> io::Result<()> {
        self.step("end")?;
        until(|| self.queues[&id].fetched() == 64);
        self.devices.get_mut(&id).unwrap().state = STATE_LIVE;
        Ok(())
    }
}

/// A directory of devices; goes with the record.
struct Site(PathBuf);

impl Site {
    fn new() -> Site {
        static NUMBER: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("dsec-blocks-{}-{number}", std::process::id());
        Site(std::env::temp_dir().join(name))
    }

    /// Of a worker.
    fn blocks(&self) -> Blocks {
        let mut blocks = Blocks::new(self.0.clone());
        blocks.lost = || ();
        blocks
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

const CONTENT: Content = Content {
    size: SIZE + 1,
    hash: [1; 32],
};

fn reader() -> Reader {
    Arc::new(|_, length, done: Read| done(Some(vec![7; length])))
}

fn attach(blocks: &Blocks, fake: &mut Fake) -> Result<PathBuf> {
    blocks.attach(fake, DIGEST, CONTENT, &reader)
}

#[test]
fn a_layer_becomes_a_device_once_and_goes_again() {
    let (site, mut fake) = (Site::new(), Fake::default());
    let blocks = site.blocks();

    let path = attach(&blocks, &mut fake).unwrap();
    let id = fake.only();

    assert_eq!(path, PathBuf::from(format!("/dev/ublkb{id}")));
    assert_eq!(fake.sectors, 9);
    assert_eq!(attach(&blocks, &mut fake).unwrap(), path);
    assert_eq!(fake.calls, ["add", "size", "queue", "start"]);
    assert_eq!(recorded(&site.0), [DIGEST]);
    let queue = fake.queues[&id].clone();
    let tag = queue.request(0, 1, 1);
    assert_eq!(queue.answer(tag), (512, Some(vec![7; 512])));

    blocks.detach(&mut fake, DIGEST);
    blocks.detach(&mut fake, DIGEST);

    assert!(fake.devices.is_empty() && recorded(&site.0).is_empty());
    assert!(!blocks.has(DIGEST));
    assert_eq!(fake.calls[4..], ["stop", "delete"]);
}

#[test]
fn whatever_step_fails_no_device_is_left_and_the_next_try_succeeds() {
    for step in ["add", "size", "queue", "start"] {
        let (site, mut fake) = (Site::new(), Fake::default());
        let blocks = site.blocks();
        fake.fails = Some((step, libc::ENOMEM));

        let error = attach(&blocks, &mut fake).unwrap_err();

        assert_eq!(error.code(), "host", "{step}");
        assert!(fake.devices.is_empty(), "{step}");
        assert!(
            recorded(&site.0).is_empty() && !blocks.has(DIGEST),
            "{step}"
        );
        fake.fails = None;
        attach(&blocks, &mut fake).unwrap();
        blocks.detach_all(&mut fake);
        assert!(fake.devices.is_empty(), "{step}");
    }
}

#[test]
fn numbers_of_others_are_passed_by() {
    let (site, mut fake) = (Site::new(), Fake::default());
    fake.taken = 3;

    attach(&site.blocks(), &mut fake).unwrap();

    assert_eq!(fake.calls[..5], ["add", "add", "add", "add", "size"]);
    let id = fake.only();
    assert!(NUMBERS.contains(&id));
    let text = std::fs::read_to_string(site.0.join(DIGEST)).unwrap();
    assert!(text.starts_with(&format!("{id} ")));
}

#[test]
fn numbers_that_are_all_taken_are_an_error_in_the_end() {
    let (site, mut fake) = (Site::new(), Fake::default());
    fake.taken = 1000;

    assert!(attach(&site.blocks(), &mut fake).is_err());

    assert_eq!(fake.calls.len(), TRIES as usize);
    assert!(recorded(&site.0).is_empty());
}

#[test]
fn the_device_of_a_worker_that_was_killed_is_taken_over() {
    let (site, mut fake) = (Site::new(), Fake::default());
    let path = attach(&site.blocks(), &mut fake).unwrap();
    fake.kill_server();
    fake.busy = 3; // the kernel sees it later
    fake.calls.clear();

    let next = site.blocks();
    assert_eq!(attach(&next, &mut fake).unwrap(), path);

    assert_eq!(
        fake.calls,
        ["begin", "begin", "begin", "begin", "queue", "end"]
    );
    let queue = fake.queues[&fake.only()].clone();
    let tag = queue.request(0, 0, 8);
    assert_eq!(queue.answer(tag).0, 4096);
    next.detach_all(&mut fake);
}

#[test]
fn a_device_that_cannot_be_taken_over_goes_and_another_takes_its_place() {
    for step in ["begin", "end"] {
        let (site, mut fake) = (Site::new(), Fake::default());
        let path = attach(&site.blocks(), &mut fake).unwrap();
        fake.kill_server();
        fake.fails = Some((step, libc::EINVAL));

        let other = attach(&site.blocks(), &mut fake).unwrap();

        assert_ne!(other, path, "{step}");
        assert_eq!(path_of(fake.only()), other, "{step}");
    }
}

#[test]
fn one_that_never_started_is_not_recovered() {
    let (site, mut fake) = (Site::new(), Fake::default());
    attach(&site.blocks(), &mut fake).unwrap();
    let id = fake.only();
    fake.devices.get_mut(&id).unwrap().state = STATE_DEAD;

    attach(&site.blocks(), &mut fake).unwrap();

    assert_ne!(fake.only(), id);
    assert!(!fake.calls.contains(&"begin"));
}

#[test]
fn devices_of_others_are_left_alone() {
    let (site, mut fake) = (Site::new(), Fake::default());
    attach(&site.blocks(), &mut fake).unwrap();
    let id = fake.only();
    fake.devices.get_mut(&id).unwrap().mark ^= 1; // ours has gone, and somebody else has its number
    fake.calls.clear();

    let blocks = site.blocks();
    blocks.sweep(&mut fake);
    assert!(recorded(&site.0).is_empty());
    assert!(fake.devices.contains_key(&id) && fake.calls.is_empty());

    attach(&blocks, &mut fake).unwrap();
    assert_eq!(fake.devices.len(), 2);
}

#[test]
fn what_nobody_serves_any_more_is_swept_and_what_is_served_stays() {
    let (site, mut fake) = (Site::new(), Fake::default());
    attach(&site.blocks(), &mut fake).unwrap();
    let old = fake.only();
    let next = site.blocks();
    next.attach(&mut fake, OTHER, CONTENT, &reader).unwrap();
    std::fs::write(site.0.join("e".repeat(64)), "damaged").unwrap();

    next.sweep(&mut fake);

    assert!(!fake.devices.contains_key(&old));
    assert_eq!(recorded(&site.0), [OTHER]);
    assert!(next.has(OTHER));
}

#[test]
fn one_that_cannot_be_taken_away_is_kept_in_mind() {
    let (site, mut fake) = (Site::new(), Fake::default());
    let blocks = site.blocks();
    attach(&blocks, &mut fake).unwrap();
    fake.fails = Some(("delete", libc::EBUSY));

    blocks.detach(&mut fake, DIGEST);
    assert_eq!(recorded(&site.0), [DIGEST]);

    fake.fails = None;
    blocks.sweep(&mut fake);
    assert!(recorded(&site.0).is_empty() && fake.devices.is_empty());
}

#[test]
fn one_that_somebody_has_open_gives_errors_and_goes_once_nobody_has() {
    let (site, mut fake) = (Site::new(), Fake::default());
    let blocks = site.blocks();
    attach(&blocks, &mut fake).unwrap();
    let queue = fake.queues[&fake.only()].clone();
    fake.used = true;

    blocks.detach(&mut fake, DIGEST);

    assert!(!blocks.has(DIGEST));
    assert!(!fake.calls.contains(&"stop"));
    let tag = queue.request(0, 0, 1);
    assert_eq!(queue.answer(tag), (-libc::EIO, None));
    blocks.sweep(&mut fake);
    assert_eq!(recorded(&site.0), [DIGEST]);
    assert!(blocks.has_ended());
    fake.used = false;
    blocks.reap_all(&mut fake);
    assert!(!blocks.has_ended() && fake.devices.is_empty());
    assert!(recorded(&site.0).is_empty());
}

#[test]
fn one_that_is_open_goes_on_when_its_layer_is_served_again_and_shows_nothing_else() {
    let (site, mut fake) = (Site::new(), Fake::default());
    let blocks = site.blocks();
    let path = attach(&blocks, &mut fake).unwrap();
    let queue = fake.queues[&fake.only()].clone();
    fake.used = true;
    blocks.detach(&mut fake, DIGEST);
    let another = Content {
        hash: [2; 32],
        ..CONTENT
    };

    let refused = blocks.attach(&mut fake, DIGEST, another, &reader);
    assert_eq!(refused.unwrap_err().code(), "busy");
    assert_eq!(attach(&blocks, &mut fake).unwrap(), path);

    let tag = queue.request(0, 0, 1);
    assert_eq!(queue.answer(tag).0, 512);
    assert!(blocks.has(DIGEST));
}

#[test]
fn one_of_a_worker_before_that_is_open_is_left_waiting_for_who_can_serve_it() {
    let (site, mut fake) = (Site::new(), Fake::default());
    attach(&site.blocks(), &mut fake).unwrap();
    fake.kill_server();
    fake.used = true;
    fake.fails = Some(("begin", libc::EINVAL));

    let next = site.blocks();
    assert!(attach(&next, &mut fake).is_err());
    next.sweep(&mut fake);

    assert_eq!(fake.devices.len(), 1);
    fake.fails = None;
    attach(&next, &mut fake).unwrap();
    assert_eq!(fake.devices.len(), 1);
}

#[test]
fn a_device_that_a_process_has_open_is_seen_to_be() {
    assert!(!is_open(Path::new("/dev/none")));
    let loops = std::fs::read_dir("/dev").unwrap().flatten();
    let Some(device) = loops
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_block_device()))
        .find(|entry| !is_open(&entry.path()))
    else {
        return; // a machine without any, or none that is not in use
    };
    let Ok(file) = File::open(device.path()) else {
        return;
    };
    assert!(is_open(&device.path()));
    drop(file);
}

#[test]
fn what_is_no_digest_or_has_no_bytes_becomes_no_device() {
    let (site, mut fake) = (Site::new(), Fake::default());
    let blocks = site.blocks();

    assert!(blocks.attach(&mut fake, "../x", CONTENT, &reader).is_err());
    assert!(blocks
        .attach(&mut fake, DIGEST, Content { size: 0, ..CONTENT }, &reader)
        .is_err());

    assert!(fake.calls.is_empty());
}

#[test]
fn the_thread_that_serves_may_not_administer_and_others_still_may() {
    let before = own_capabilities().unwrap();

    let within = std::thread::spawn(|| {
        distrusted().unwrap();
        own_capabilities().unwrap()
    });

    assert_eq!(within.join().unwrap().permitted & CAP_SYS_ADMIN, 0);
    assert_eq!(own_capabilities().unwrap(), before);
}
