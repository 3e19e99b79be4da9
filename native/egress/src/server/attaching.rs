//! Sandboxes on their way to be served, one after the other: the kernel may take its time for a network, and nobody else waits
//! for it.

use std::collections::VecDeque;

use dsec_sys::epoll::{Poller, Source, READ};

use super::{watch, Server, SANDBOX};
use crate::error::{Doing, Error, Result};
use crate::keeper::{Found, Process, Wish};
use crate::limits::{ATTACHING_MAX, SANDBOXES_MAX, SANDBOX_NAME_MAX};
use crate::network::Id;
use crate::policy::Policy;
use crate::sandbox::{Places, Sandbox};
use crate::slab::{token, Key};
use crate::wire::{args_of, reply, AttachAnswer, AttachArgs, Counts};

/// The first one is what the keeper is doing.
#[derive(Default)]
pub struct Attaching {
    queue: VecDeque<Wanted>,
}

struct Wanted {
    /// Who is answered, under which number.
    asker: (Key, u64),
    name: String,
    policy: Policy,
    most: usize,
    process: Process,
    /// The network that is set up, and what was counted of the sandbox before.
    steered: Option<(Id, Counts)>,
    is_given_up: bool,
}

impl Attaching {
    /// Other rules for one that waits. Whether one does.
    pub fn replace(&mut self, name: &str, policy: &Policy) -> bool {
        let waiting = self.queue.iter_mut().filter(|wanted| wanted.name == name);
        waiting.map(|wanted| wanted.policy = policy.clone()).count() > 0
    }

    /// It is not to be served any more, however far it is.
    pub fn give_up(&mut self, name: &str) {
        for wanted in self.queue.iter_mut().filter(|wanted| wanted.name == name) {
            wanted.is_given_up = true;
        }
    }
}

impl Server {
    pub(super) fn attach(&mut self, link: Key, id: u64, message: &[u8]) {
        match args_of(message).and_then(|args| self.wanted((link, id), args)) {
            Ok(wanted) => {
                self.attaching.queue.push_back(wanted);
                if self.attaching.queue.len() == 1 {
                    self.ask_keeper();
                }
            }
            Err(error) => self
                .desk
                .reply(link, reply::<AttachAnswer>(id, &Err(error))),
        }
    }

    fn wanted(&self, asker: (Key, u64), args: AttachArgs) -> Result<Wanted> {
        if args.sandbox.is_empty() || args.sandbox.len() > SANDBOX_NAME_MAX {
            return Err(Error::Invalid("no name for a sandbox".into()));
        }
        if self.attaching.queue.len() >= ATTACHING_MAX {
            return Err(Error::Busy("too many are being attached".into()));
        }
        Ok(Wanted {
            asker,
            policy: Policy::parse(args.rules.as_deref())?,
            name: args.sandbox,
            most: args.connections as usize,
            process: (args.pid, args.start),
            steered: None,
            is_given_up: false,
        })
    }

    /// For the first of the queue. Without a keeper none can be attached: another program of ours has to take over.
    fn ask_keeper(&mut self) {
        if let Some(first) = self.attaching.queue.front() {
            let wish = match first.steered {
                None => Wish::Find,
                Some(_) => Wish::Steer,
            };
            self.stops |= self.keeper.ask(wish, first.process).is_err();
        }
    }

    pub(super) fn hear_keeper(&mut self) {
        let Some((wish, answer)) = self.keeper.hear() else {
            self.stops = true;
            return;
        };
        if wish == Wish::Resolvers {
            let file = answer.map(|found| found.descriptor);
            return self.shared.settings.read_resolvers(file, self.shared.now);
        }
        let Some(mut wanted) = self.attaching.queue.pop_front() else {
            return; // nobody has asked
        };
        let (link, id) = wanted.asker;
        match answer.and_then(|found| self.go_on(&mut wanted, found)) {
            Ok(None) => self.attaching.queue.push_front(wanted),
            Ok(Some(answer)) => self.desk.reply(link, reply(id, &Ok(answer))),
            Err(error) => self
                .desk
                .reply(link, reply::<AttachAnswer>(id, &Err(error))),
        }
        self.ask_keeper();
    }

    /// What the host says of resolvers is read again in time. An answer comes soon; until then those of before are asked.
    pub(super) fn ask_for_resolvers(&mut self) {
        if self.shared.settings.wants_resolvers() && !self.keeper.is_asked(Wish::Resolvers) {
            self.stops |= self.keeper.ask(Wish::Resolvers, (0, 0)).is_err();
        }
    }

    /// None: its network is to be set up now.
    fn go_on(&mut self, wanted: &mut Wanted, found: Found) -> Result<Option<AttachAnswer>> {
        if wanted.is_given_up {
            return Err(Error::NotFound("it has been detached meanwhile".into()));
        }
        if let Some((id, before)) = wanted.steered.take() {
            if found.id != id {
                return Err(Error::Busy(
                    "the process has just changed its network".into(),
                ));
            }
            return self.add(wanted, found, before).map(Some);
        }
        let other = self.networks.get(&found.id);
        if other.is_some_and(|other| *other != wanted.name) {
            return Err(Error::Busy("another sandbox has that network".into()));
        }
        if let Some(&key) = self.by_name.get(&wanted.name) {
            if let Some(sandbox) = self
                .sandboxes
                .get_mut(key)
                .filter(|sandbox| sandbox.id == found.id)
            {
                let process = watch(&self.poller, found.descriptor, key)?;
                let ipv6 = sandbox.has_ipv6();
                let (policy, most) = (wanted.policy.clone(), Some(wanted.most));
                sandbox.change(policy, most, Some(process), &mut self.shared);
                return Ok(Some(AttachAnswer { fresh: false, ipv6 }));
            }
        }
        let before = self.forget(&wanted.name).unwrap_or_default();
        let count = self.by_name.len();
        if count >= SANDBOXES_MAX || !self.shared.has_room_for_sandbox(count) {
            return Err(Error::Busy(
                "there are as many sandboxes as there may be".into(),
            ));
        }
        wanted.steered = Some((found.id, before));
        Ok(None)
    }

    fn add(&mut self, wanted: &Wanted, found: Found, before: Counts) -> Result<AttachAnswer> {
        let Some(sockets) = found.sockets else {
            return Err(Error::Busy("the keeper has given no sockets".into()));
        };
        let ipv6 = sockets.v6.is_some();
        let counts = Counts {
            sandbox: wanted.name.clone(),
            alive: true,
            ..before
        };
        let own = Poller::new().doing("making a poller")?;
        let descriptor = own.as_descriptor().doing("making a poller")?;
        let (poller, shared, id) = (&self.poller, &self.shared, found.id);
        let (policy, most) = (wanted.policy.clone(), wanted.most);
        let key = self.sandboxes.try_insert_with(|key| {
            let mut outer = Source::new(poller, descriptor, token(SANDBOX, key));
            outer.want(READ).doing("waiting for a sandbox")?;
            let process = watch(poller, found.descriptor, key)?;
            let places = Places {
                outer,
                process,
                own,
            };
            Sandbox::new(id, counts, policy, most, sockets, places, shared)
        })?;
        self.networks.insert(id, wanted.name.clone());
        self.by_name.insert(wanted.name.clone(), key);
        Ok(AttachAnswer { fresh: true, ipv6 })
    }
}
