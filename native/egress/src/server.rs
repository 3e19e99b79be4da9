//! All sandboxes and all nodes, by one thread: nothing in it waits for a network.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound::{Excluded, Unbounded};
use std::os::fd::OwnedFd;
use std::time::Instant;

use dsec_sys::epoll::{Poller, Ready, Source, READ};

use crate::desk::Desk;
use crate::error::{Doing, Error, Result};
use crate::keeper::Keeper;
use crate::limits::{COUNTS_PAGE, DENIED_EVERY, ENDED_MAX, TICK};
use crate::network::Id;
use crate::policy::Policy;
use crate::sandbox::Sandbox;
use crate::settings::Settings;
use crate::shared::Shared;
use crate::slab::{read_token, token, Key, Slab};
use crate::wire::{
    args_of, head_of, reply, told, Counts, CountsAnswer, CountsArgs, Denied, DetachArgs,
    HelloAnswer, HelloArgs, Nothing, RulesArgs, EGRESS_VERSION,
};

mod attaching;

use attaching::Attaching;

const LISTENER: u64 = 0;
const SIGNALS: u64 = 1;
const LINK: u64 = 2;
const SANDBOX: u64 = 3;
const PROCESS: u64 = 4;
const KEEPER: u64 = 5;

pub struct Server {
    desk: Desk,
    _signals: Source,
    keeper: Keeper,
    attaching: Attaching,
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
        keeper: OwnedFd,
        shared: Shared,
    ) -> Result<Server> {
        let poller = Poller::new().doing("making a poller")?;
        let mut keeper = Source::new(&poller, keeper, KEEPER << 60);
        let mut listener = Source::new(&poller, listener, LISTENER << 60);
        let mut signals = Source::new(&poller, signals, SIGNALS << 60);
        listener
            .want(READ)
            .and_then(|()| signals.want(READ))
            .and_then(|()| keeper.want(READ))
            .doing("waiting for nodes")?;
        let now = shared.now;
        Ok(Server {
            desk: Desk::new(listener, LINK),
            _signals: signals,
            keeper: Keeper::new(keeper),
            attaching: Attaching::default(),
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
            self.ask_for_resolvers();
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
            SIGNALS => self.stops = true,
            KEEPER => self.hear_keeper(),
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
        if self.shared.memory.wants_look() {
            self.bound_memory();
        }
    }

    /// What all connections hold in the kernel has an end.
    fn bound_memory(&mut self) {
        let mut held = Vec::new();
        for &key in self.by_name.values() {
            if let Some(sandbox) = self.sandboxes.get_mut(key) {
                held.push((key, sandbox.held()));
            }
        }
        let sizes: Vec<Vec<u64>> = held
            .iter()
            .map(|(_, flows)| flows.iter().map(|(_, bytes)| *bytes).collect())
            .collect();
        let plan = self.shared.memory.plan(&sizes);
        for ((key, _), room) in held.iter().zip(plan.rooms) {
            if let Some(sandbox) = self.sandboxes.get_mut(*key) {
                sandbox.give_room(room);
            }
        }
        for (number, flow) in plan.cut {
            let (key, flows) = &held[number];
            if let Some(sandbox) = self.sandboxes.get_mut(*key) {
                sandbox.shed(flows[flow].0, &mut self.shared);
            }
        }
    }

    // ---- requests --------------------------------------------------------------------------------

    fn answer(&mut self, link: Key, message: &[u8]) {
        let Some(head) = head_of(message) else {
            return; // nobody could be answered
        };
        let id = head.id;
        if head.op == "attach" {
            return self.attach(link, id, message);
        }
        let answer = match head.op.as_str() {
            "hello" => reply(id, &args_of(message).and_then(|args| self.hello(&args))),
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
        let settings = Settings::parse(args)?;
        self.shared.settings.replace(settings);
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

    fn rules(&mut self, args: &RulesArgs) -> Result<Nothing> {
        let policy = Policy::parse(args.rules.as_deref())?;
        let mut known = self.attaching.replace(&args.sandbox, &policy);
        let key = self.by_name.get(&args.sandbox).copied();
        if let Some(sandbox) = key.and_then(|key| self.sandboxes.get_mut(key)) {
            sandbox.change(policy, None, None, &mut self.shared);
            known = true;
        }
        match known {
            true => Ok(Nothing {}),
            false => Err(Error::NotFound(format!(
                "sandbox {:?} is not attached",
                args.sandbox
            ))),
        }
    }

    fn detach(&mut self, args: DetachArgs) -> Counts {
        self.attaching.give_up(&args.sandbox);
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
