//! One sandbox: what comes from its network, and what becomes of it. It is served in turns, each bounded, so that none keeps
//! the others waiting.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use dsec_sys::epoll::{Poller, Source, READ, WRITE};
use dsec_sys::inet;
use dsec_sys::sockets::{connect_error, connect_tcp};

use crate::addresses::canonical;
use crate::bindings::Bindings;
use crate::denied::{Refusal, Refusals};
use crate::error::{Doing, Result};
use crate::flow::{Flow, Moved, Stage};
use crate::limits::{
    ACCEPTS_A_TURN, CONNECTIONS, CONNECTS_AT_ONCE, CONNECTS_A_SECOND, FLOWS_WIDE, FLOW_NAMES_MAX,
    FLOW_TURN_BYTES, LOOKS_AT_ONCE, PEEK_BYTES, QUESTIONS_AT_ONCE, QUESTIONS_A_SECOND, TALK_IDLE,
    UNSENT_BYTES,
};
use crate::memory::Room;
use crate::network::{Family, Id, Sockets};
use crate::peek::{look, Seen};
use crate::policy::{Destination, Name, Policy, Reason, Verdict};
use crate::question::Question;
use crate::rate::Bucket;
use crate::shared::{Shared, Way};
use crate::slab::{token, Key, Slab};
use crate::steering::DNS_PORT;
use crate::talk::{Heard, Talk};
use crate::wire::Counts;

mod holding;
pub mod names;
mod turn;

const LISTENER: u64 = 0;
const DATAGRAMS: u64 = 1;
const LISTENER_6: u64 = 2;
const DATAGRAMS_6: u64 = 3;
const FLOW: u64 = 4;
const QUESTION: u64 = 5;
/// The poller of what is served first.
const FIRST: u64 = 6;
/// Ports where those who share an address are told apart by a name in the first bytes.
const NAMED_PORTS: [u16; 2] = [80, 443];

/// Fields are dropped in their order: what is in the poller before it.
pub struct Sandbox {
    pub id: Id,
    pub refusals: Refusals,
    counts: Counts,
    policy: Policy,
    most: usize,
    bindings: Bindings,
    connects: Bucket,
    asks: Bucket,
    flows: Slab<Flow>,
    questions: Slab<Question>,
    v4: Door,
    v6: Option<Door>,
    _link: OwnedFd,
    /// Of its connections, what was ready and had no turn yet: it is served before what is ready then.
    rest: VecDeque<Key>,
    /// How much it may hold in the kernel.
    room: Room,
    /// In the server's poller, for as long as they are here.
    _outer: Source,
    _process: Source,
    /// What comes in and questions, served in each turn however busy connections are; it is in the other one.
    _first: Source,
    first: Poller,
    poller: Poller,
}

/// Who is told of what.
pub struct Places {
    /// The sandbox's own poller, in the server's.
    pub outer: Source,
    /// The process whose end is the sandbox's, in the server's.
    pub process: Source,
    pub own: Poller,
}

/// Where things come from the sandbox by one family.
struct Door {
    listener: Source,
    datagrams: Source,
    packets: OwnedFd,
}

impl Door {
    fn new(family: Family, poller: &Poller, kinds: [u64; 2]) -> io::Result<Door> {
        let mut door = Door {
            listener: Source::new(poller, family.listener, kinds[0] << 60),
            datagrams: Source::new(poller, family.questions, kinds[1] << 60),
            packets: family.packets,
        };
        door.open()?;
        Ok(door)
    }

    fn open(&mut self) -> io::Result<()> {
        self.listener.want(READ)?;
        self.datagrams.want(READ)
    }
}

/// What a flow's event has led to.
enum Next {
    Nothing,
    /// It ends as both sides wanted it.
    Over,
    Cut,
    Deny(Reason, String),
    Dial(Vec<String>),
    Question(Vec<u8>),
    Moved(Moved),
}

impl Sandbox {
    pub fn new(
        id: Id,
        counts: Counts,
        policy: Policy,
        most: usize,
        sockets: Sockets,
        places: Places,
        shared: &Shared,
    ) -> Result<Sandbox> {
        let poller = places.own;
        let first = Poller::new().doing("making a poller")?;
        let descriptor = first.as_descriptor().doing("making a poller")?;
        let mut in_own = Source::new(&poller, descriptor, FIRST << 60);
        in_own.want(READ).doing("waiting for a sandbox")?;
        let door = |family, kinds| Door::new(family, &first, kinds).doing("waiting for a sandbox");
        let v4 = door(sockets.v4, [LISTENER, DATAGRAMS])?;
        let v6 = sockets
            .v6
            .map(|family| door(family, [LISTENER_6, DATAGRAMS_6]))
            .transpose()?;
        Ok(Sandbox {
            id,
            refusals: Refusals::default(),
            counts,
            policy,
            most: if most == 0 { CONNECTIONS } else { most },
            bindings: Bindings::default(),
            connects: Bucket::new(CONNECTS_A_SECOND, CONNECTS_AT_ONCE, shared.now),
            asks: Bucket::new(QUESTIONS_A_SECOND, QUESTIONS_AT_ONCE, shared.now),
            flows: Slab::default(),
            questions: Slab::default(),
            v4,
            v6,
            _link: sockets.link,
            rest: VecDeque::new(),
            room: Room::Wide,
            _outer: places.outer,
            _process: places.process,
            _first: in_own,
            first,
            poller,
        })
    }

    pub fn has_ipv6(&self) -> bool {
        self.v6.is_some()
    }

    pub fn counts(&self) -> Counts {
        Counts {
            open: self.flows.len() as u64,
            ..self.counts.clone()
        }
    }

    /// The last counts. Whatever it has open ends; connections are cut.
    pub fn close(mut self, shared: &mut Shared) -> Counts {
        for key in self.flows.keys() {
            self.cut(key, shared);
        }
        shared.questions -= self.questions.len();
        Counts {
            alive: false,
            ..self.counts
        }
    }

    /// Another process of the same network, other rules: connections that these allow go on.
    pub fn change(
        &mut self,
        policy: Policy,
        most: Option<usize>,
        process: Option<Source>,
        shared: &mut Shared,
    ) {
        self.policy = policy;
        if let Some(most) = most {
            self.most = if most == 0 { CONNECTIONS } else { most };
        }
        if let Some(process) = process {
            self._process = process;
        }
        self.recheck(shared);
    }

    /// Cuts what may not be any more.
    pub fn recheck(&mut self, shared: &mut Shared) {
        for key in self.flows.keys() {
            let Some(flow) = self.flows.get_mut(key) else {
                continue;
            };
            let opened = &shared.settings.opened;
            let stays = matches!(flow.stage, Stage::Asking(_))
                || match self.policy.decide(flow.to, opened, &flow.names) {
                    Verdict::Allowed => true,
                    Verdict::ByName => {
                        !flow.has_named || allows_all(&self.policy, &flow.names, flow.to.port)
                    }
                    Verdict::Denied(_) => false,
                };
            if !stays {
                self.cut(key, shared);
            }
        }
    }

    /// Ends what has taken too long. True while there is something with a time.
    pub fn tick(&mut self, shared: &mut Shared) -> bool {
        for door in [Some(&mut self.v4), self.v6.as_mut()].into_iter().flatten() {
            if let Err(error) = door.open() {
                eprintln!("dsec-egress: waiting for a sandbox: {error}");
            }
        }
        if self.flows.len() > 0 {
            for key in self.flows.keys() {
                self.end_late(key, shared);
            }
        }
        self.ask_again(shared);
        self.bindings.sweep(shared.now);
        self.flows.len() > 0 || self.questions.len() > 0 || !self.refusals.is_empty()
    }

    fn end_late(&mut self, key: Key, shared: &mut Shared) {
        let Some(flow) = self.flows.get_mut(key) else {
            return;
        };
        let is_late = flow.until <= shared.now;
        let next = match flow.stage {
            Stage::Naming { .. } if is_late => {
                Next::Deny(Reason::Unreadable, flow.to.address.to_string())
            }
            Stage::Naming { .. } => {
                let _ = flow.client.want(READ); // it may have come in too many pieces
                Next::Nothing
            }
            Stage::Asking(_) if is_late => Next::Over,
            _ if is_late => Next::Cut,
            Stage::Ending => Next::Over,
            _ => Next::Nothing,
        };
        self.follow(key, next, shared);
    }

    // ---- connections -----------------------------------------------------------------------------

    fn door(&mut self, v6: bool) -> Option<&mut Door> {
        match v6 {
            false => Some(&mut self.v4),
            true => self.v6.as_mut(),
        }
    }

    fn accept(&mut self, v6: bool, shared: &mut Shared) {
        for _ in 0..ACCEPTS_A_TURN {
            let Some(door) = self.door(v6) else {
                return;
            };
            match inet::accept(door.listener.as_fd()) {
                Ok(None) => return,
                Ok(Some(socket)) => {
                    self.begin(socket, shared);
                    if self.connects.take(shared.now) {
                        continue;
                    }
                    self.refuse(String::new(), 0, "tcp", Reason::Rate, shared);
                }
                // There is no descriptor or no memory for it at the moment.
                Err(_) => {}
            }
            // It is opened again in a while; until then they wait.
            shared.wants_tick = true;
            if let Some(door) = self.door(v6) {
                let _ = door.listener.want(0);
            }
            return;
        }
    }

    fn begin(&mut self, socket: OwnedFd, shared: &mut Shared) {
        let Ok(local) = inet::local_address(&socket) else {
            return;
        };
        let (address, port) = (canonical(local.ip()), local.port());
        if let Some(reason) = self.has_too_much(shared) {
            let _ = inet::reset_on_close(&socket, true);
            self.refuse(address.to_string(), port, "tcp", reason, shared);
            return;
        }
        let way = shared.way_to(address);
        let to = Destination {
            address,
            port,
            is_host: way == Way::Host,
        };
        if port == DNS_PORT {
            let talk = Stage::Asking(Talk::default());
            self.add(socket, to, talk, TALK_IDLE, shared);
            return;
        }
        let names = self.bindings.names(address, shared.now);
        let verdict = self.policy.decide(to, &shared.settings.opened, names);
        if let Verdict::Denied(reason) = verdict {
            let _ = inet::reset_on_close(&socket, true);
            self.refuse(address.to_string(), port, "tcp", reason, shared);
            return;
        }
        if way == Way::Nowhere {
            let _ = inet::reset_on_close(&socket, true);
            return;
        }
        let stage = Stage::Naming { seen: 0, looks: 0 };
        let Some(key) = self.add(socket, to, stage, shared.settings.peek, shared) else {
            return;
        };
        // What it is let through for counts when there are other rules.
        let bound = self.bindings.names(address, shared.now);
        let allowed = bound.filter(|name| self.policy.allows_name(name, port));
        let names: Vec<Name> = allowed.take(FLOW_NAMES_MAX).cloned().collect();
        if let Some(flow) = self.flows.get_mut(key) {
            flow.names = names;
        }
        match verdict == Verdict::ByName && NAMED_PORTS.contains(&port) {
            true => drop(self.advance(key, FLOW_TURN_BYTES, shared)),
            false => self.follow(key, Next::Dial(Vec::new()), shared),
        }
    }

    fn add(
        &mut self,
        socket: OwnedFd,
        to: Destination,
        stage: Stage,
        time: Duration,
        shared: &mut Shared,
    ) -> Option<Key> {
        let poller = match stage {
            Stage::Asking(_) => &self.first,
            _ => &self.poller,
        };
        let until = shared.now + time;
        let key = self.flows.insert_with(|key| {
            let client = Source::new(poller, socket, token(FLOW, key));
            Flow::new(client, to, stage, until)
        });
        shared.flows += 1;
        shared.wants_tick = true;
        let waits = self
            .flows
            .get_mut(key)
            .is_some_and(|flow| flow.client.want(READ).is_ok());
        if !waits {
            self.cut(key, shared);
        }
        waits.then_some(key)
    }

    /// Something has happened on it. How many bytes were moved.
    fn advance(&mut self, key: Key, most: usize, shared: &mut Shared) -> usize {
        let Some(flow) = self.flows.get_mut(key) else {
            return 0;
        };
        let next = match step(flow, &self.policy, most.min(FLOW_TURN_BYTES), shared) {
            Ok(next) => next,
            Err(_) => Next::Cut,
        };
        let moved = match &next {
            Next::Moved(moved) => moved.up + moved.down,
            _ => 0,
        };
        self.follow(key, next, shared);
        moved
    }

    fn follow(&mut self, key: Key, next: Next, shared: &mut Shared) {
        match next {
            Next::Nothing => {}
            Next::Over => self.end(key, TALK_IDLE, shared),
            Next::Cut => self.cut(key, shared),
            Next::Deny(reason, target) => {
                let port = self.flows.get_mut(key).map_or(0, |flow| flow.to.port);
                self.refuse(target, port, "tcp", reason, shared);
                self.cut(key, shared);
            }
            Next::Dial(names) => {
                if self.dial(key, &names, shared).is_err() {
                    self.cut(key, shared);
                }
            }
            Next::Question(message) => match self.asks.take(shared.now) {
                true => self.ask(&message, crate::question::Asker::Connection(key), shared),
                false => {
                    self.refuse(String::new(), 0, "dns", Reason::Rate, shared);
                    self.cut(key, shared);
                }
            },
            Next::Moved(moved) => {
                self.counts.up_bytes += moved.up as u64;
                self.counts.down_bytes += moved.down as u64;
                if moved.is_over {
                    self.end(key, shared.settings.idle, shared);
                }
            }
        }
    }

    fn dial(&mut self, key: Key, names: &[String], shared: &Shared) -> io::Result<()> {
        let is_wide = self.flows.len() <= FLOWS_WIDE && self.room == Room::Wide;
        let Some(flow) = self.flows.get_mut(key) else {
            return Ok(());
        };
        if !names.is_empty() {
            flow.names = names.iter().map(|name| Name::from(name.as_str())).collect();
            flow.has_named = true;
        }
        flow.client.want(0)?;
        let socket = connect_tcp(flow.address())?;
        let mut server = Source::new(&self.poller, socket, token(FLOW, key));
        server.want(WRITE)?;
        flow.server = Some(server);
        if !is_wide {
            flow.narrow();
        }
        flow.stage = Stage::Dialing;
        flow.until = shared.now + shared.settings.dial;
        self.counts.connections += 1;
        Ok(())
    }

    /// In order, and once nothing of it is held any more: what the kernel keeps of a connection that is closed is nobody's.
    fn end(&mut self, key: Key, time: Duration, shared: &mut Shared) {
        let Some(flow) = self.flows.get_mut(key) else {
            return;
        };
        match flow.settle() {
            Ok(true) => return self.remove(key, shared),
            Err(_) => return self.cut(key, shared),
            Ok(false) => {}
        }
        if !matches!(flow.stage, Stage::Ending) {
            flow.stage = Stage::Ending;
            flow.until = shared.now + time;
        }
    }

    fn remove(&mut self, key: Key, shared: &mut Shared) {
        if let Some(flow) = self.flows.remove(key) {
            shared.flows -= 1;
            let _ = flow.resets(false);
        }
    }

    fn cut(&mut self, key: Key, shared: &mut Shared) {
        if let Some(flow) = self.flows.remove(key) {
            shared.flows -= 1;
            let _ = flow.resets(true);
        }
    }

    fn refuse(
        &mut self,
        target: String,
        port: u16,
        protocol: &'static str,
        reason: Reason,
        shared: &mut Shared,
    ) {
        self.counts.denied += 1;
        shared.wants_tick = true;
        self.refusals.note(Refusal {
            target,
            port,
            protocol,
            reason,
        });
    }
}

fn step(flow: &mut Flow, policy: &Policy, most: usize, shared: &mut Shared) -> io::Result<Next> {
    match &mut flow.stage {
        Stage::Naming { seen, looks } => {
            let address = flow.to.address;
            let Some(count) = inet::look_ahead(&flow.client, &mut shared.buffer)? else {
                return Ok(Next::Nothing);
            };
            if count == 0 {
                return Ok(Next::Cut); // it has ended and said nothing
            }
            let unreadable = || Ok(Next::Deny(Reason::Unreadable, address.to_string()));
            match look(&shared.buffer[..count], address) {
                Seen::Unreadable => unreadable(),
                // No more comes: it is ready although it was to be so with more bytes only.
                Seen::More if count == PEEK_BYTES || count <= *seen => unreadable(),
                Seen::More => {
                    *seen = count;
                    *looks += 1;
                    inet::wake_at(&flow.client, count + 1)?;
                    if *looks >= LOOKS_AT_ONCE {
                        flow.client.want(0)?; // until the next tick
                    }
                    Ok(Next::Nothing)
                }
                Seen::Nobody => Ok(Next::Dial(Vec::new())),
                Seen::Names(mut names) => {
                    names.truncate(FLOW_NAMES_MAX + 1);
                    let port = flow.to.port;
                    match names.iter().find(|name| !policy.allows_name(name, port)) {
                        Some(other) => Ok(Next::Deny(Reason::OtherName, other.clone())),
                        None if names.len() > FLOW_NAMES_MAX => unreadable(),
                        None => Ok(Next::Dial(names)),
                    }
                }
            }
        }
        Stage::Dialing => {
            let Some(server) = &flow.server else {
                return Ok(Next::Cut);
            };
            connect_error(server)?;
            inet::pass_at_once(server, UNSENT_BYTES)?;
            inet::pass_at_once(&flow.client, UNSENT_BYTES)?;
            inet::wake_at(&flow.client, 1)?;
            flow.resets(true)?;
            flow.stage = Stage::Moving;
            move_on(flow, most, shared)
        }
        Stage::Moving => move_on(flow, most, shared),
        Stage::Ending => Ok(Next::Over),
        Stage::Asking(talk) => {
            flow.until = shared.now + TALK_IDLE;
            match talk.go_on(&mut flow.client)? {
                Heard::Nothing => Ok(Next::Nothing),
                Heard::Question(message) => Ok(Next::Question(message)),
                Heard::End => Ok(Next::Over),
            }
        }
    }
}

fn move_on(flow: &mut Flow, most: usize, shared: &mut Shared) -> io::Result<Next> {
    let moved = flow.pump(&mut shared.pipes, most.max(1))?;
    flow.until = shared.now + shared.settings.idle;
    Ok(Next::Moved(moved))
}

fn allows_all(policy: &Policy, names: &[Name], port: u16) -> bool {
    names.iter().all(|name| policy.allows_name(name, port))
}

#[cfg(test)]
#[path = "sandbox_tests.rs"]
mod tests;
