//! All sandboxes and all nodes, by one thread: nothing in it waits for a network.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound::{Excluded, Unbounded};
use std::os::fd::OwnedFd;
use std::time::Instant;

use dsec_sys::epoll::{Poller, Ready, Source, READ};

use crate::desk::Desk;
use crate::error::{Doing, Error, Result};
use crate::keeper::{Keeper, Process};
use crate::limits::{COUNTS_PAGE, DENIED_EVERY, ENDED_MAX, SANDBOXES_MAX, SANDBOX_NAME_MAX, TICK};
use crate::network::Id;
use crate::policy::Policy;
use crate::sandbox::{Places, Sandbox};
use crate::settings::Settings;
use crate::shared::Shared;
use crate::slab::{read_token, token, Key, Slab};
use crate::wire::{
    args_of, head_of, reply, told, AttachAnswer, AttachArgs, Counts, CountsAnswer, CountsArgs,
    Denied, DetachArgs, HelloAnswer, HelloArgs, Nothing, RulesArgs, EGRESS_VERSION,
};

const LISTENER: u64 = 0;
const SIGNALS: u64 = 1;
const LINK: u64 = 2;
const SANDBOX: u64 = 3;
const PROCESS: u64 = 4;
const KEEPER: u64 = 5;

pub struct Server {
    desk: Desk,
    _signals: Source,
    /// Readable when it has ended.
    _kept: Source,
    keeper: Keeper,
    sandboxes: Slab<Sandbox>,
    by_name: BTreeMap<String, Key>,
    networks: BTreeMap<Id, String>,
    ended: BTreeMap<String, Counts>,
    ended_order: VecDeque<String>,
    shared: Shared,
    next_tick: Instant,
    next_told: Instant,
    stops: bool,
    poller: Poller,
}

impl Server {
    pub fn new(
        listener: OwnedFd,
        signals: OwnedFd,
        keeper: Keeper,
        shared: Shared,
    ) -> Result<Server> {
        let poller = Poller::new().doing("making a poller")?;
        let kept = keeper.as_descriptor().doing("waiting for the keeper")?;
        let mut kept = Source::new(&poller, kept, KEEPER << 60);
        let mut listener = Source::new(&poller, listener, LISTENER << 60);
        let mut signals = Source::new(&poller, signals, SIGNALS << 60);
        listener
            .want(READ)
            .and_then(|()| signals.want(READ))
            .and_then(|()| kept.want(READ))
            .doing("waiting for nodes")?;
        let now = shared.now;
        Ok(Server {
            desk: Desk::new(listener, LINK),
            _signals: signals,
            _kept: kept,
            keeper,
            sandboxes: Slab::default(),
            by_name: BTreeMap::new(),
            networks: BTreeMap::new(),
            ended: BTreeMap::new(),
            ended_order: VecDeque::new(),
            shared,
            next_tick: now + TICK,
            next_told: now,
            stops: false,
            poller,
        })
    }

    pub fn serve(mut self) -> Result<()> {
        let mut ready: Vec<Ready> = Vec::new();
        while !self.stops {
            let time = if self.shared.wants_tick {
                let left = self.next_tick.saturating_duration_since(Instant::now());
                left.as_millis() as i32 + 1
            } else {
                -1
            };
            ready.clear();
            self.poller.wait(&mut ready, time).doing("waiting")?;
            self.shared.now = Instant::now();
            for event in &ready {
                self.take(event);
            }
            if self.shared.wants_tick && self.shared.now >= self.next_tick {
                self.tick();
            }
        }
        Ok(())
    }

    fn take(&mut self, event: &Ready) {
        let (kind, key) = read_token(event.token);
        match kind {
            LISTENER => self.desk.accept_all(&self.poller),
            // Without a keeper no sandbox can be attached: another program of ours has to take over.
            SIGNALS | KEEPER => self.stops = true,
            LINK => {
                for message in self.desk.requests(key) {
                    self.answer(key, &message);
                }
                self.desk.flush(key);
            }
            SANDBOX => {
                if let Some(sandbox) = self.sandboxes.get_mut(key) {
                    sandbox.turn(&mut self.shared);
                }
            }
            PROCESS => self.process_ended(key),
            _ => {}
        }
    }

    fn tick(&mut self) {
        self.next_tick = self.shared.now + TICK;
        self.shared.wants_tick = false;
        let mut busy = false;
        let tells = self.shared.now >= self.next_told;
        if tells {
            self.next_told = self.shared.now + DENIED_EVERY;
        }
        for (name, &key) in &self.by_name {
            let Some(sandbox) = self.sandboxes.get_mut(key) else {
                continue;
            };
            if tells && !sandbox.refusals.is_empty() && self.desk.has_listener() {
                for (refusal, count) in sandbox.refusals.take() {
                    self.desk.tell(told(&Denied {
                        sandbox: name,
                        target: &refusal.target,
                        port: refusal.port,
                        protocol: refusal.protocol,
                        reason: refusal.reason.word(),
                        count,
                    }));
                }
            }
            busy |= sandbox.tick(&mut self.shared);
        }
        self.shared.wants_tick |= busy;
    }

    // ---- requests --------------------------------------------------------------------------------

    fn answer(&mut self, link: Key, message: &[u8]) {
        let Some(head) = head_of(message) else {
            return; // nobody could be answered
        };
        let id = head.id;
        let answer = match head.op.as_str() {
            "hello" => reply(id, &args_of(message).and_then(|args| self.hello(&args))),
            "attach" => reply(id, &args_of(message).and_then(|args| self.attach(args))),
            "rules" => reply(id, &args_of(message).and_then(|args| self.rules(&args))),
            "detach" => reply(id, &args_of(message).map(|args| self.detach(args))),
            "counts" => reply(id, &args_of(message).map(|args| self.counts(&args))),
            "shutdown" => {
                let result = args_of::<Nothing>(message);
                self.stops = result.is_ok();
                reply(id, &result)
            }
            other => reply::<Nothing>(id, &Err(Error::Invalid(format!("no operation {other:?}")))),
        };
        self.desk.reply(link, answer);
    }

    fn hello(&mut self, args: &HelloArgs) -> Result<HelloAnswer> {
        if args.version != EGRESS_VERSION {
            return Err(Error::Invalid(format!(
                "version {} is not {EGRESS_VERSION}",
                args.version
            )));
        }
        self.shared.settings = Settings::parse(args)?;
        for key in self.by_name.values() {
            if let Some(sandbox) = self.sandboxes.get_mut(*key) {
                sandbox.recheck(&mut self.shared);
            }
        }
        Ok(HelloAnswer {
            version: EGRESS_VERSION,
            pid: std::process::id(),
        })
    }

    fn attach(&mut self, args: AttachArgs) -> Result<AttachAnswer> {
        let name = args.sandbox;
        if name.is_empty() || name.len() > SANDBOX_NAME_MAX {
            return Err(Error::Invalid("no name for a sandbox".into()));
        }
        let policy = Policy::parse(args.rules.as_deref())?;
        let most = args.connections as usize;
        let process = (args.pid, args.start);
        let found = self.keeper.find(process)?;
        if self
            .networks
            .get(&found.id)
            .is_some_and(|other| *other != name)
        {
            return Err(Error::Busy("another sandbox has that network".into()));
        }
        let key = self.by_name.get(&name).copied();
        if let Some((key, sandbox)) =
            key.and_then(|key| self.sandboxes.get_mut(key).map(|sandbox| (key, sandbox)))
        {
            if sandbox.id == found.id {
                let process = watch(&self.poller, found.process, key)?;
                let ipv6 = sandbox.has_ipv6();
                sandbox.change(policy, Some(most), Some(process), &mut self.shared);
                return Ok(AttachAnswer { fresh: false, ipv6 });
            }
        }
        let before = self.forget(&name);
        self.add(name, policy, most, (found.id, process), before)
    }

    fn add(
        &mut self,
        name: String,
        policy: Policy,
        most: usize,
        (id, process): (Id, Process),
        before: Option<Counts>,
    ) -> Result<AttachAnswer> {
        let count = self.by_name.len();
        if count >= SANDBOXES_MAX || !self.shared.has_room_for_sandbox(count) {
            return Err(Error::Busy(
                "there are as many sandboxes as there may be".into(),
            ));
        }
        let (found, sockets) = self.keeper.steer(process)?;
        if found.id != id {
            return Err(Error::Busy(
                "the process has just changed its network".into(),
            ));
        }
        let ipv6 = sockets.v6.is_some();
        let counts = Counts {
            sandbox: name.clone(),
            alive: true,
            ..before.unwrap_or_default()
        };
        let own = Poller::new().doing("making a poller")?;
        let descriptor = own.as_descriptor().doing("making a poller")?;
        let (poller, shared) = (&self.poller, &self.shared);
        let key = self.sandboxes.try_insert_with(|key| {
            let mut outer = Source::new(poller, descriptor, token(SANDBOX, key));
            outer.want(READ).doing("waiting for a sandbox")?;
            let process = watch(poller, found.process, key)?;
            let places = Places {
                outer,
                process,
                own,
            };
            Sandbox::new(id, counts, policy, most, sockets, places, shared)
        })?;
        self.networks.insert(id, name.clone());
        self.by_name.insert(name, key);
        Ok(AttachAnswer { fresh: true, ipv6 })
    }

    fn rules(&mut self, args: &RulesArgs) -> Result<Nothing> {
        let policy = Policy::parse(args.rules.as_deref())?;
        let key = self.by_name.get(&args.sandbox).copied();
        let sandbox = key.and_then(|key| self.sandboxes.get_mut(key));
        let sandbox = sandbox.ok_or_else(|| {
            Error::NotFound(format!("sandbox {:?} is not attached", args.sandbox))
        })?;
        sandbox.change(policy, None, None, &mut self.shared);
        Ok(Nothing {})
    }

    fn detach(&mut self, args: DetachArgs) -> Counts {
        self.forget(&args.sandbox).unwrap_or(Counts {
            sandbox: args.sandbox,
            ..Counts::default()
        })
    }

    /// Closes what it has. Its last counts.
    fn forget(&mut self, name: &str) -> Option<Counts> {
        if let Some(counts) = self.ended.remove(name) {
            self.ended_order.retain(|known| known != name);
            return Some(counts);
        }
        let key = self.by_name.remove(name)?;
        let sandbox = self.sandboxes.remove(key)?;
        self.networks.remove(&sandbox.id);
        Some(sandbox.close(&mut self.shared))
    }

    /// Let go of at once: what is ours would keep its network.
    fn process_ended(&mut self, key: Key) {
        let name = self
            .sandboxes
            .get_mut(key)
            .and_then(|sandbox| self.networks.get(&sandbox.id).cloned());
        let Some((name, counts)) =
            name.and_then(|name| self.forget(&name).map(|counts| (name, counts)))
        else {
            return;
        };
        if self.ended_order.len() == ENDED_MAX {
            if let Some(first) = self.ended_order.pop_front() {
                self.ended.remove(&first);
            }
        }
        self.ended_order.push_back(name.clone());
        self.ended.insert(name, counts);
    }

    fn counts(&mut self, args: &CountsArgs) -> CountsAnswer {
        let after = (Excluded(args.after.clone()), Unbounded);
        let mut found: Vec<Counts> = Vec::new();
        for (_, &key) in self.by_name.range(after.clone()).take(COUNTS_PAGE + 1) {
            found.extend(self.sandboxes.get_mut(key).map(|sandbox| sandbox.counts()));
        }
        let ended = self.ended.range(after).take(COUNTS_PAGE + 1);
        found.extend(ended.map(|(_, counts)| counts.clone()));
        found.sort_by(|one, other| one.sandbox.cmp(&other.sandbox));
        let more = found.len() > COUNTS_PAGE;
        found.truncate(COUNTS_PAGE);
        CountsAnswer {
            sandboxes: found,
            more,
        }
    }
}

fn watch(poller: &Poller, process: OwnedFd, key: Key) -> Result<Source> {
    let mut source = Source::new(poller, process, token(PROCESS, key));
    source.want(READ).doing("waiting for a process")?;
    Ok(source)
}
