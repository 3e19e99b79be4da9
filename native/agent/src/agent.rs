//! The agent's state and its loop: one thread, everything that waits is a descriptor or a deadline.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;

use dsec_protocol::frames::FrameType;
use dsec_protocol::frames::{CHANNEL_ERR, CHANNEL_OUT};
use dsec_protocol::opening::{AgentConfig, Credit};
use dsec_sys::epoll::{Poller, Ready, Source, READ};
use dsec_sys::process::{kill, reap_one};
use dsec_sys::signals::{read_signals, signal_descriptor, CHLD, INT, KILL, TERM};
use serde::Serialize;

use crate::cgroup::WorkCgroup;
use crate::door::Door;
use crate::exec::guard::StartGuard;
use crate::exec::requests::Pumped;
use crate::exec::Execs;
use crate::files::list::Kept;
use crate::link::{Link, Opening, Pending};
use crate::listen::Listener;
use crate::processes::ProcessTable;
use crate::refusal::{AgentError, Refusal};
use crate::session::Sessions;
use crate::settle::LeftOut;
use crate::setup::{note, Entrance, Own, Setup};
use crate::share::Score;
use crate::streams::{Body, Stream};
use crate::timers::{Timer, Timers};
use crate::token::Token;
use crate::users::{Account, Database};
use crate::watch::Watches;

const SCRATCH_BYTES: usize = 64 << 10;
const PENDING_MAX: usize = 8;
const PREAMBLE_MS: u64 = 5_000;
const SHUTDOWN_MS: u64 = 2_000;
/// After `freeze_prepare` no deadline fires before `clock` says how long we stood still. The monotonic clock runs on
/// while we are frozen, so the wait for a host that has died is counted in turns of our own.
const CLOCK_TURN_MS: u64 = 1_000;
const CLOCK_TURNS_MAX: u32 = 60;
/// One descriptor does not keep the others waiting.
const FRAMES_PER_TURN: usize = 256;
const PUMPS_PER_TURN: usize = 64;

pub struct Agent {
    pub config: AgentConfig,
    pub own: Own,
    pub score: Score,
    /// Of a light sandbox in which nothing has been done yet.
    pub left_out: Option<LeftOut>,
    pub work: Option<WorkCgroup>,
    pub boot_id: String,
    pub timers: Timers,
    pub scratch: Vec<u8>,
    pub link: Option<Box<Link>>,
    pub streams: BTreeMap<u32, Stream>,
    pub listeners: BTreeMap<u32, Listener>,
    /// Streams that may have something to send.
    pub ready: BTreeSet<u32>,
    pub execs: Execs,
    pub starts: StartGuard,
    /// A spare, or one that is asked to, tries itself out once it has been greeted: then there is time.
    is_untried: bool,
    /// A command has been started in this turn.
    pub has_started: bool,
    pub sessions: Sessions,
    pub watches: Watches,
    pub shutting_down: bool,
    /// A machine of its own, whose clock, randomness and name are ours to set: as its first program, or as one of its services.
    pub has_machine: bool,
    /// Of a directory that is being listed page by page.
    pub names: Option<Kept>,
    is_init: bool,
    door: Door,
    signals: Source,
    pending: Vec<Pending>,
    next_pending: u32,
    /// The last stream that sent, so that all get their turn.
    pumped: u32,
    clock_turns: u32,
    finished: bool,
    // Last: sources leave it when they are dropped.
    pub poller: Poller,
}

impl Agent {
    pub fn new(setup: Setup) -> Result<Self, AgentError> {
        let poller = Poller::new().map_err(AgentError::at("making the poller"))?;
        let signals =
            signal_descriptor(&[CHLD, TERM, INT]).map_err(AgentError::at("taking signals"))?;
        let mut signals = Source::new(&poller, signals, Token::Signals.pack());
        let has_machine = matches!(setup.entrance, Entrance::Ports { .. } | Entrance::Vsock(_));
        signals
            .want(READ)
            .map_err(AgentError::at("waiting for signals"))?;
        let door = Door::new(&poller, setup.entrance)
            .map_err(AgentError::at("waiting for connections"))?;
        let boot_id = new_boot_id();
        // What a machine has in its memory when it is cloned is shared, or loaded: no trial of each.
        let is_untried = setup.config.spare && !has_machine;
        Ok(Self {
            config: setup.config,
            own: setup.own,
            score: setup.score,
            left_out: setup.left_out,
            work: setup.work,
            timers: Timers::new(),
            scratch: vec![0; SCRATCH_BYTES],
            link: None,
            streams: BTreeMap::new(),
            listeners: BTreeMap::new(),
            ready: BTreeSet::new(),
            execs: Execs::default(),
            starts: StartGuard::default(),
            is_untried,
            has_started: false,
            sessions: Sessions::default(),
            watches: Watches::of(&boot_id),
            boot_id,
            shutting_down: false,
            has_machine,
            names: None,
            is_init: setup.is_init,
            door,
            signals,
            pending: Vec::new(),
            next_pending: 0,
            pumped: 0,
            clock_turns: 0,
            finished: false,
            poller,
        })
    }

    /// Until a shutdown is done.
    pub fn run(&mut self) -> Result<(), AgentError> {
        let mut ready = Vec::new();
        let mut more = false;
        while !self.finished {
            let planned = self.timeout_ms(more);
            self.poller
                .wait(&mut ready, planned)
                .map_err(AgentError::at("waiting"))?;
            for event in ready.drain(..) {
                self.dispatch(event);
            }
            self.fire_timers();
            more = self.pump();
            more |= self.walk_watches();
            if self.is_untried && self.link.as_ref().is_some_and(|link| link.greeted) {
                self.is_untried = false;
                self.try_out();
            }
            if let Some(work) = &mut self.work {
                work.sweep_if_due();
            }
        }
        if self.has_machine {
            // The end of a first program is a panic of the kernel, which ends the machine less neatly.
            note("ending", &dsec_sys::machine::restart());
        }
        Ok(())
    }

    pub fn send<T: Serialize>(&mut self, kind: FrameType, stream: u32, record: &T) {
        if let Some(link) = self.link.as_deref_mut() {
            link.send(kind, stream, record);
        }
    }

    /// Ends a stream with ERR.
    pub fn refuse_stream(&mut self, stream: u32, refusal: Refusal) {
        self.streams.remove(&stream);
        self.ready.remove(&stream);
        if let Some(link) = self.link.as_deref_mut() {
            link.refuse(stream, refusal);
        }
    }

    /// Lets the host send as much as was consumed.
    pub fn grant(&mut self, id: u32, consumed: u64) {
        let grant = match self.streams.get_mut(&id) {
            Some(stream) => stream.consumed(consumed),
            None => None,
        };
        if let Some(bytes) = grant {
            self.send(FrameType::Credit, id, &Credit { bytes });
        }
    }

    /// The account that a file operation acts as: root unless told otherwise.
    pub fn account(&self, user: Option<&str>) -> Result<Account, Refusal> {
        match user {
            None if self.own.may_switch() => Ok(Account {
                groups: vec![0],
                ..Account::default()
            }),
            None => Ok(Account {
                uid: self.own.uid,
                gid: self.own.gid,
                ..Account::default()
            }),
            Some(user) => Database::read().find(user),
        }
    }

    /// Undoes what a stream that is out of the table has begun.
    pub fn abandon(&mut self, id: u32, stream: Stream) {
        match stream.body {
            Body::Exec(key) => self.forget_exec_stream(key),
            Body::Helper(helper) => helper.abandon(),
            Body::Watch => self.unwatch(id),
            // Dropping closes them; an unfinished replacement is removed.
            Body::Write(writing) => writing.abandon(&self.own),
            Body::Read(_) | Body::Connect(_) | Body::Accept => {}
        }
    }

    pub fn forget_exec_stream(&mut self, key: u32) {
        if let Some(exec) = self.execs.get_mut(key) {
            exec.stream = None;
        }
    }

    /// Nobody has been served yet: what tells this agent from others is made anew.
    pub fn become_another(&mut self) {
        self.boot_id = new_boot_id();
        self.watches = Watches::of(&self.boot_id);
    }

    /// The host says how long everything stood still.
    pub fn clock_told(&mut self, paused_ms: u64) {
        self.timers.shift(paused_ms);
        self.timers.clear(Timer::Clock);
        self.clock_turns = 0;
    }

    /// The host is about to freeze us: deadlines wait until it has said for how long.
    pub fn hold_timers(&mut self) {
        self.clock_turns = CLOCK_TURNS_MAX;
        self.timers.set_in(Timer::Clock, CLOCK_TURN_MS);
    }

    /// A machine goes on as a whole, with the clock of the moment when it was stopped, and maybe as another one: what
    /// commands have started waits until we have been told.
    pub fn hold_work(&mut self) {
        if let (true, Some(work)) = (self.has_machine, &self.work) {
            // Without the right to it they see the clock jump.
            let _ = work.freeze(true);
        }
    }

    /// A spare has not been told yet whom it serves.
    pub fn let_work_go_on(&mut self) {
        if let (true, false, Some(work)) = (self.has_machine, self.config.spare, &self.work) {
            let _ = work.freeze(false);
        }
    }

    pub fn begin_shutdown(&mut self) {
        if self.shutting_down {
            return;
        }
        self.shutting_down = true;
        self.signal_everything(TERM);
        for key in self.sessions.keys() {
            self.close_session(key);
        }
        self.timers.set_in(Timer::Shutdown, SHUTDOWN_MS);
        self.shutdown_if_done();
    }

    /// Takes in ended children.
    pub fn reap(&mut self) {
        while let Some(reaped) = reap_one() {
            if let Some(key) = self.execs.take_pid(reaped.pid) {
                self.leader_ended(key, &reaped);
            } else if !self.session_reaped(reaped.pid, reaped.ended) {
                self.helper_reaped(reaped.pid);
            }
        }
        if let Some(work) = &mut self.work {
            work.note_reaped();
        }
        self.shutdown_if_done();
    }

    pub fn shutdown_if_done(&mut self) {
        let busy = self.execs.iter().any(|(_, exec)| exec.running) || self.sessions.len() > 0;
        if self.shutting_down && !busy {
            self.finish();
        }
    }

    /// The last act: nothing that we started stays.
    fn finish(&mut self) {
        if let Some(work) = &self.work {
            work.kill_all();
        }
        self.signal_everything(KILL);
        if let Some(link) = self.link.as_deref_mut() {
            // The answer to `shutdown`; a host that does not read does not hold us.
            let _ = link.flush(false);
        }
        self.finished = true;
    }

    /// Every process of the sandbox; outside of one, every descendant, orphans included.
    fn signal_everything(&self, signal: i32) {
        if self.is_init {
            // No process is left to get it: what was wanted.
            let _ = kill(-1, signal);
            return;
        }
        let own = std::process::id() as i32;
        for process in ProcessTable::read().descendants_of(own) {
            let _ = kill(process.pid, signal);
        }
    }

    fn timeout_ms(&self, more: bool) -> i32 {
        if more {
            return 0;
        }
        let Some(next) = self.next_deadline_ms() else {
            return -1;
        };
        let wait = next.saturating_sub(self.timers.now_ms());
        i32::try_from(wait).unwrap_or(i32::MAX)
    }

    fn next_deadline_ms(&self) -> Option<u64> {
        if self.clock_turns > 0 {
            return self.timers.at(Timer::Clock);
        }
        self.timers.next_ms()
    }

    fn dispatch(&mut self, event: Ready) {
        match Token::unpack(event.token) {
            Some(Token::Listener) => self.accept(),
            Some(Token::Bell) => self.answer_bell(),
            Some(Token::Signals) => self.take_signals(),
            Some(Token::Inotify) => self.read_changes(),
            Some(Token::Pending(number)) => self.advance_pending(number),
            Some(Token::Link) => self.read_link(),
            Some(Token::ExecOut(key)) => drop(self.read_output(key, CHANNEL_OUT)),
            Some(Token::ExecErr(key)) => drop(self.read_output(key, CHANNEL_ERR)),
            Some(Token::ExecIn(key)) => self.advance_input(key, 0),
            Some(Token::SessionOut(key)) => self.discard_session_output(key, false),
            Some(Token::SessionErr(key)) => self.discard_session_output(key, true),
            Some(Token::SessionCommand(key)) => self.feed_session(key),
            Some(Token::SessionReport(key)) => self.read_report(key),
            Some(Token::HelperData(id)) => self.helper_data_ready(id),
            Some(Token::HelperReport(id)) => self.helper_report_ready(id),
            Some(Token::Socket(id)) => self.socket_ready(id, event.events),
            Some(Token::Port(number)) => self.listener_ready(number),
            None => {}
        }
    }

    fn take_signals(&mut self) {
        for signal in read_signals(&self.signals) {
            match signal {
                CHLD => self.reap(),
                // Pid 1 of a sandbox ends by `shutdown` only.
                _ if self.is_init => {}
                _ => self.begin_shutdown(),
            }
        }
    }

    fn fire_timers(&mut self) {
        if !self.clock_is_known() {
            return;
        }
        while let Some(timer) = self.timers.pop_due() {
            match timer {
                Timer::Timeout(key) => self.exec_timed_out(key),
                Timer::Grace(key) => self.grace_is_over(key),
                Timer::KillAgain(key) => self.kill_again(key),
                Timer::Quiet(key) | Timer::DrainEnd(key) => self.drain_is_over(key),
                Timer::Preamble(number) => self.pending.retain(|p| p.number != number),
                Timer::ReadAgain(key) => self.read_unwatched(key),
                Timer::Departures => self.departures_are_over(),
                Timer::Names => self.names = None,
                Timer::Shutdown => self.finish(),
                Timer::Clock => {}
            }
        }
    }

    /// One turn of the wait for `clock` is over, when there is one: however long we were frozen, it counts as one.
    fn clock_is_known(&mut self) -> bool {
        if self.clock_turns > 0 && self.timers.is_due(Timer::Clock) {
            self.clock_turns -= 1;
            self.timers.set_in(Timer::Clock, CLOCK_TURN_MS);
            if self.clock_turns == 0 {
                self.timers.clear(Timer::Clock);
                self.let_work_go_on();
            }
        }
        self.clock_turns == 0
    }

    fn accept(&mut self) {
        let Some(socket) = self.door.accept() else {
            return;
        };
        if self.pending.len() >= PENDING_MAX {
            let oldest = self.pending.remove(0);
            self.timers.clear(Timer::Preamble(oldest.number));
        }
        self.next_pending += 1;
        let number = self.next_pending;
        match Pending::new(&self.poller, number, socket) {
            Ok(pending) => {
                self.pending.push(pending);
                self.timers.set_in(Timer::Preamble(number), PREAMBLE_MS);
            }
            Err(error) => note("accepting", &error),
        }
    }

    /// By a port there is one connection at a time: the one of before ends when the next is announced.
    fn answer_bell(&mut self) {
        let Some((port, mark)) = self.door.rung() else {
            return;
        };
        self.end_link();
        self.pending.clear();
        self.next_pending += 1;
        match Pending::by_port(&self.poller, self.next_pending, port, mark) {
            Ok(pending) => self.pending.push(pending),
            Err(error) => note("a serial port", &error),
        }
    }

    fn advance_pending(&mut self, number: u32) {
        let Some(at) = self.pending.iter().position(|p| p.number == number) else {
            return;
        };
        match self.pending.remove(at).advance(&mut self.scratch) {
            Opening::Waiting(pending) => self.pending.push(pending),
            Opening::Gone => self.timers.clear(Timer::Preamble(number)),
            Opening::Ready(link) => {
                self.timers.clear(Timer::Preamble(number));
                self.end_link();
                self.link = Some(link);
            }
        }
    }

    fn read_link(&mut self) {
        let Some(link) = self.link.as_deref_mut() else {
            return;
        };
        match link.read(&mut self.scratch) {
            // `pump` takes the frames.
            Ok(None | Some(true)) => {}
            Ok(Some(false)) | Err(_) => self.drop_link(),
        }
    }

    /// Handles the frames that are here; the rest of them later, so that others get their turn.
    fn take_frames(&mut self) -> bool {
        for _ in 0..FRAMES_PER_TURN {
            let Some(link) = self.link.as_deref_mut() else {
                return false;
            };
            if link.closing || link.is_stalled() {
                return false;
            }
            let frame = match link.decoder().next_frame() {
                Ok(None) => return false,
                Ok(Some(frame)) => frame,
                Err(_) => {
                    self.drop_link();
                    return false;
                }
            };
            match (self.handle(&frame), self.link.as_deref_mut()) {
                (Ok(()), Some(link)) => link.decoder().recycle(frame),
                (Ok(()), None) => {}
                (Err(_), _) => self.drop_link(),
            }
        }
        true
    }

    /// From our side, or because the host has gone.
    fn drop_link(&mut self) {
        self.end_link();
        self.door.left();
    }

    /// Streams end with their connection; execs and sessions do not.
    fn end_link(&mut self) {
        self.link = None;
        self.names = None;
        self.ready.clear();
        self.listeners.clear();
        while let Some((id, stream)) = self.streams.pop_first() {
            self.abandon(id, stream);
        }
    }

    /// Sends what is ready, stream by stream, while the connection has room. Gives whether there is more to do at once.
    fn pump(&mut self) -> bool {
        let mut more = self.take_frames();
        if std::mem::take(&mut self.has_started) {
            self.catch_up();
            // What has been read by that is waited for by nothing else.
            more |= self.take_frames();
        }
        for _ in 0..PUMPS_PER_TURN {
            let has_room = self.link.as_ref().is_some_and(|link| link.has_room());
            let Some(id) = self.next_ready().filter(|_| has_room) else {
                break;
            };
            self.pumped = id;
            self.pump_stream(id);
        }
        self.flush();
        let has_room = self.link.as_ref().is_some_and(|link| link.has_room());
        more |= has_room && !self.ready.is_empty();
        more
    }

    /// A short command may have ended by now, since it had the processor first: then its start, its output and its end are
    /// told in one go, and wake the host once.
    fn catch_up(&mut self) {
        let mut ready = Vec::new();
        // What cannot be looked at now is by the next wait.
        if self.poller.wait(&mut ready, 0).is_ok() {
            for event in ready {
                self.dispatch(event);
            }
        }
    }

    fn next_ready(&self) -> Option<u32> {
        let after = self.ready.range(self.pumped.saturating_add(1)..).next();
        after.or_else(|| self.ready.first()).copied()
    }

    fn pump_stream(&mut self, id: u32) {
        let Some(mut stream) = self.streams.remove(&id) else {
            self.ready.remove(&id);
            return;
        };
        let pumped = match &stream.body {
            Body::Exec(key) => {
                let key = *key;
                self.pump_exec(id, &mut stream, key)
            }
            Body::Read(_) => self.pump_read(id, &mut stream),
            Body::Helper(_) => self.pump_helper(id, &mut stream),
            Body::Connect(_) => self.pump_connect(id, &mut stream),
            Body::Watch => self.pump_watch(id),
            Body::Write(_) | Body::Accept => Pumped::Idle,
        };
        if pumped != Pumped::More {
            self.ready.remove(&id);
        }
        if pumped != Pumped::Over {
            self.streams.insert(id, stream);
        }
    }

    fn flush(&mut self) {
        let Some(link) = self.link.as_deref_mut() else {
            return;
        };
        let mut bodies = self.streams.values().map(|stream| &stream.body);
        let more = bodies.any(|body| matches!(body, Body::Read(_) | Body::Helper(_)));
        let over = match link.flush(more) {
            Ok(()) => link.closing && link.waiting_bytes() == 0,
            Err(_) => true,
        };
        if over {
            self.drop_link();
        }
    }
}

/// Another value at each start. Without /dev/urandom the clock and the pid have to do.
fn new_boot_id() -> String {
    let mut bytes = [0u8; 16];
    let random = std::fs::File::open("/dev/urandom").and_then(|mut f| f.read_exact(&mut bytes));
    if random.is_err() {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        bytes = now.map_or(0, |d| d.as_nanos()).to_be_bytes();
        bytes[..4].copy_from_slice(&std::process::id().to_be_bytes());
    }
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
