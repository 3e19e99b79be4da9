use std::collections::BTreeMap;
use std::sync::mpsc::{channel, Receiver, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use dsec_sys::seqpacket::{wait_ready, Interest};

use super::*;

const SOON: Duration = Duration::from_secs(60);
const OP_WRITE: u8 = 1;

/// What the kernel does, in memory: requests are put to tags that are wanted, answers are kept.
#[derive(Default)]
struct Kernel {
    wanted: Vec<u16>,
    descriptors: BTreeMap<u16, Descriptor>,
    came: Vec<Came>,
    filled: BTreeMap<u16, Vec<u8>>,
    done: Vec<(u16, i32)>,
    stopped: bool,
    fill_fails: bool,
}

#[derive(Clone)]
pub(crate) struct FakeQueue {
    kernel: Arc<Mutex<Kernel>>,
    bell: Arc<UnixStream>,
    heard: Arc<UnixStream>,
}

impl FakeQueue {
    pub(crate) fn new() -> FakeQueue {
        let (bell, heard) = UnixStream::pair().unwrap();
        heard.set_nonblocking(true).unwrap();
        FakeQueue {
            kernel: Arc::default(),
            bell: Arc::new(bell),
            heard: Arc::new(heard),
        }
    }

    fn kernel(&self) -> std::sync::MutexGuard<'_, Kernel> {
        self.kernel.lock().unwrap()
    }

    fn ring(&self) {
        let _ = (&*self.bell).write(&[0]);
    }

    pub(crate) fn fetched(&self) -> usize {
        self.kernel().wanted.len()
    }

    /// Gives the desk a request, by a tag that is wanted; which.
    pub(crate) fn request(&self, op: u8, start: u64, sectors: u32) -> u16 {
        until(|| self.fetched() > 0);
        let mut kernel = self.kernel();
        let tag = kernel.wanted.remove(0);
        let descriptor = Descriptor { op, sectors, start };
        kernel.descriptors.insert(tag, descriptor);
        let token = u64::from(tag);
        kernel.came.push(Came { token, result: 0 });
        drop(kernel);
        self.ring();
        tag
    }

    fn say(&self, token: u64, result: i32) {
        self.kernel().came.push(Came { token, result });
        self.ring();
    }

    pub(crate) fn answer(&self, tag: u16) -> (i32, Option<Vec<u8>>) {
        let mut found = None;
        until(|| {
            let mut kernel = self.kernel();
            let at = kernel.done.iter().position(|(known, _)| *known == tag);
            if let Some(at) = at {
                let (_, result) = kernel.done.remove(at);
                found = Some((result, kernel.filled.remove(&tag)));
            }
            found.is_some()
        });
        found.unwrap()
    }

    /// As the kernel does when a device is stopped.
    pub(crate) fn stop(&self) {
        let mut kernel = self.kernel();
        kernel.stopped = true;
        for tag in std::mem::take(&mut kernel.wanted) {
            let token = u64::from(tag);
            let result = ABORTED;
            kernel.came.push(Came { token, result });
        }
        drop(kernel);
        self.ring();
    }
}

impl Side for FakeQueue {
    fn fetch(&mut self, tag: u16) -> io::Result<()> {
        let mut kernel = self.kernel();
        if kernel.stopped {
            let token = u64::from(tag);
            let result = ABORTED;
            kernel.came.push(Came { token, result });
            drop(kernel);
            self.ring();
            return Ok(());
        }
        assert!(!kernel.wanted.contains(&tag));
        kernel.wanted.push(tag);
        Ok(())
    }

    fn commit(&mut self, tag: u16, result: i32) -> io::Result<()> {
        self.kernel().done.push((tag, result));
        self.fetch(tag)
    }

    fn wait(&mut self, wake: BorrowedFd) -> io::Result<Vec<Came>> {
        let both = [
            (self.heard.as_fd(), Interest::Readable),
            (wake, Interest::Readable),
        ];
        wait_ready(&both, Some(SOON))?;
        let mut rings = [0; 64];
        while matches!((&*self.heard).read(&mut rings), Ok(1..)) {}
        Ok(std::mem::take(&mut self.kernel().came))
    }

    fn descriptor(&self, tag: u16) -> io::Result<Descriptor> {
        Ok(self.kernel().descriptors[&tag])
    }

    fn fill(&self, tag: u16, bytes: &[u8]) -> io::Result<()> {
        let mut kernel = self.kernel();
        if kernel.fill_fails {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        kernel.filled.insert(tag, bytes.to_vec());
        Ok(())
    }
}

pub(crate) fn until(mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + SOON;
    while !holds() {
        assert!(Instant::now() < deadline, "it does not come to that");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn byte(at: u64) -> u8 {
    (at % 251) as u8
}

fn content(offset: u64, length: usize) -> Vec<u8> {
    (offset..offset + length as u64).map(byte).collect()
}

type Asked = (u64, usize, Read);

/// A desk of a layer of `size` bytes that answers by itself, or gives what is read to the test.
struct Bench {
    queue: FakeQueue,
    tray: Arc<Tray>,
    thread: JoinHandle<io::Result<()>>,
    asked: Receiver<Asked>,
}

fn bench(size: u64, by_itself: bool) -> Bench {
    let queue = FakeQueue::new();
    let (sender, asked): (Sender<Asked>, _) = channel();
    let sender = Mutex::new(sender);
    let reader = move |offset: u64, length: usize, done: Read| {
        assert!(offset + length as u64 <= size && length > 0);
        if by_itself {
            done(Some(content(offset, length)));
        } else {
            sender.lock().unwrap().send((offset, length, done)).unwrap();
        }
    };
    let desk = Desk::new(queue.clone(), size, Arc::new(reader)).unwrap();
    let tray = desk.tray();
    let thread = std::thread::spawn(move || desk.work());
    Bench {
        queue,
        tray,
        thread,
        asked,
    }
}

impl Bench {
    fn next(&self) -> Asked {
        self.asked.recv_timeout(SOON).unwrap()
    }

    fn end(self) {
        self.queue.stop();
        self.thread.join().unwrap().unwrap();
    }
}

#[test]
fn requests_are_answered_with_the_bytes_of_the_layer() {
    let bench = bench(1 << 20, true);

    until(|| bench.queue.fetched() == usize::from(DEPTH));
    for (start, sectors) in [(0, 8), (3, 1), (2040, 8), (0, 512)] {
        let tag = bench.queue.request(OP_READ, start, sectors);
        let length = sectors as usize * 512;
        let expected = Some(content(start * 512, length));
        assert_eq!(bench.queue.answer(tag), (length as i32, expected));
    }
    let flush = bench.queue.request(OP_FLUSH, 0, 0);
    assert_eq!(bench.queue.answer(flush), (0, None));
    bench.end();
}

#[test]
fn answers_come_in_any_order() {
    let bench = bench(1 << 20, false);
    let tags: Vec<u16> = (0..5)
        .map(|at| bench.queue.request(OP_READ, at, 1))
        .collect();
    let mut asked: Vec<Asked> = (0..5).map(|_| bench.next()).collect();

    for _ in 0..5 {
        let (offset, length, done) = asked.pop().unwrap();
        done(Some(content(offset, length)));
        let tag = tags[(offset / 512) as usize];
        assert_eq!(bench.queue.answer(tag), (512, Some(content(offset, 512))));
    }
    bench.end();
}

#[test]
fn what_lies_beyond_the_end_of_the_layer_reads_as_zeros() {
    let bench = bench(1000, true);
    let tag = bench.queue.request(OP_READ, 1, 1);

    let (result, bytes) = bench.queue.answer(tag);

    let mut expected = content(512, 488);
    expected.resize(512, 0);
    assert_eq!((result, bytes), (512, Some(expected)));
    bench.end();
}

#[test]
fn descriptors_that_make_no_sense_get_an_error_and_read_nothing() {
    let bench = bench(1 << 20, true);
    let absurd = [
        (OP_READ, 0, 0),
        (OP_READ, 2048, 1),
        (OP_READ, 2047, 2),
        (OP_READ, u64::MAX, 1),
        (OP_READ, u64::MAX / 512, u32::MAX),
        (OP_READ, 0, 513), // more than one may want
        (OP_READ, 0, u32::MAX),
        (OP_WRITE, 0, 8),
        (3, 0, 8),
        (0xff, 0, 8),
    ];

    for (op, start, sectors) in absurd {
        let tag = bench.queue.request(op, start, sectors);
        assert_eq!(bench.queue.answer(tag), (-libc::EIO, None), "{op} {start}");
    }
    bench.end();
}

#[test]
fn what_cannot_be_had_and_what_cannot_be_given_are_errors() {
    let bench = bench(1 << 20, false);
    let lost = bench.queue.request(OP_READ, 0, 1);
    bench.next().2(None);
    assert_eq!(bench.queue.answer(lost), (-libc::EIO, None));

    bench.queue.kernel().fill_fails = true;
    let refused = bench.queue.request(OP_READ, 0, 1);
    let (offset, length, done) = bench.next();
    done(Some(content(offset, length)));
    assert_eq!(bench.queue.answer(refused), (-libc::EIO, None));
    bench.end();
}

#[test]
fn at_the_end_what_is_being_read_fails_and_what_comes_of_it_later_goes_nowhere() {
    let bench = bench(1 << 20, false);
    let tag = bench.queue.request(OP_READ, 0, 1);
    let (_, length, late) = bench.next();

    bench.tray.end();
    assert_eq!(bench.queue.answer(tag), (-libc::EIO, None));
    // Another request has the tag by now.
    until(|| bench.queue.fetched() == usize::from(DEPTH));
    let others: Vec<u16> = (0..DEPTH)
        .map(|at| bench.queue.request(OP_READ, u64::from(at), 1))
        .collect();
    late(Some(vec![9; length]));
    for other in others {
        assert_eq!(bench.queue.answer(other), (-libc::EIO, None));
    }
    bench.tray.go_on(Arc::new(|offset, length, done: Read| {
        done(Some(content(offset, length)));
    }));
    let tag = bench.queue.request(OP_READ, 5, 1);
    assert_eq!(bench.queue.answer(tag), (512, Some(content(2560, 512))));
    bench.end();
}

#[test]
fn a_device_that_stops_while_something_is_read_ends_once_that_is_answered() {
    let bench = bench(1 << 20, false);
    let tag = bench.queue.request(OP_READ, 7, 1);
    let (offset, length, done) = bench.next();

    bench.queue.stop();
    done(Some(content(offset, length)));

    assert_eq!(bench.queue.answer(tag).0, 512);
    bench.thread.join().unwrap().unwrap();
}

#[test]
fn answers_of_the_kernel_that_nobody_has_asked_for_end_the_desk() {
    for token in [u64::from(DEPTH), u64::MAX] {
        let bench = bench(1 << 20, true);
        until(|| bench.queue.fetched() == usize::from(DEPTH));
        bench.queue.say(token, 0);
        let error = bench.thread.join().unwrap().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }
    let bench = bench(1 << 20, true);
    bench.queue.say(0, -libc::EINVAL);
    let error = bench.thread.join().unwrap().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
}
