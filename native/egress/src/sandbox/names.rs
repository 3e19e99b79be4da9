//! A sandbox's questions after names.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::time::Duration;

use dsec_sys::epoll::WRITE;
use dsec_sys::inet;

use super::{Sandbox, QUESTION};
use crate::addresses::{canonical, is_public};
use crate::dns::{
    parse_query, write_answer, write_blocked, write_wrong, Answer, Wrong, A, AAAA, NO_ERROR,
    NO_SUCH_NAME, SERVER_FAILURE,
};
use crate::flow::Stage;
use crate::limits::{DATAGRAMS_A_TURN, QUESTIONS_MAX, QUESTION_BYTES_MAX};
use crate::packet::datagram;
use crate::policy::{Name, Reason};
use crate::question::{Asker, Question, Step};
use crate::shared::{Shared, Way};
use crate::slab::{token, Key};
use crate::steering::DNS_PORT;

impl Sandbox {
    pub(super) fn take_questions(&mut self, v6: bool, shared: &mut Shared) {
        for _ in 0..DATAGRAMS_A_TURN {
            let Some(door) = self.door(v6) else {
                return;
            };
            // One byte more than a question has: what is longer is seen to be.
            let mut buffer = [0; QUESTION_BYTES_MAX + 1];
            let Ok(Some(came)) = inet::receive_datagram(door.datagrams.as_fd(), &mut buffer) else {
                return;
            };
            if !self.asks.take(shared.now) {
                self.refuse(String::new(), 0, "dns", Reason::Rate, shared);
                // It is opened again in a while; until then the kernel keeps some, and drops the rest.
                if let Some(door) = self.door(v6) {
                    let _ = door.datagrams.want(0);
                }
                return;
            }
            let asker = Asker::Datagram {
                client: came.from,
                asked: SocketAddr::new(came.to, DNS_PORT),
            };
            self.ask(&buffer[..came.length.min(buffer.len())], asker, shared);
        }
    }

    pub(super) fn ask(&mut self, message: &[u8], asker: Asker, shared: &mut Shared) {
        let query = match parse_query(message) {
            Ok(query) => query,
            Err(Wrong::Answer(id, code)) => return self.reply(asker, &write_wrong(id, code)),
            Err(Wrong::Silence) => {
                if let Asker::Connection(key) = asker {
                    self.remove(key, shared);
                }
                return;
            }
        };
        let Some(name) = query.name.clone().filter(|name| self.policy.may_ask(name)) else {
            let target = query.name.clone().unwrap_or_default();
            self.refuse(target, 0, "dns", Reason::Rules, shared);
            return self.reply(asker, &write_blocked(&query));
        };
        if !matches!(query.kind, A | AAAA) {
            return self.reply(asker, &write_answer(&query, NO_ERROR, &[]));
        }
        if self.questions.len() >= QUESTIONS_MAX || !shared.has_room_for_question() {
            self.refuse(name, 0, "dns", Reason::Rate, shared);
            return self.reply(asker, &write_answer(&query, SERVER_FAILURE, &[]));
        }
        self.counts.questions += 1;
        shared.questions += 1;
        shared.wants_tick = true;
        let now = shared.now;
        let key = self
            .questions
            .insert_with(|_| Question::new(query, name, asker, now));
        self.try_next(key, shared);
    }

    /// Something has come from a resolver.
    pub(super) fn hear(&mut self, key: Key, shared: &mut Shared) {
        let resolvers = shared.settings.resolvers(shared.now);
        let Some(question) = self.questions.get_mut(key) else {
            return;
        };
        match question.go_on(resolvers, &self.first, token(QUESTION, key)) {
            Step::Waits => {}
            Step::Answered(answer) => self.answered(key, &answer, shared),
            Step::Failed => self.try_next(key, shared),
        }
    }

    /// Those whose answer has not come in time.
    pub(super) fn ask_again(&mut self, shared: &mut Shared) {
        if self.questions.len() == 0 {
            return;
        }
        for key in self.questions.keys() {
            let question = self.questions.get_mut(key);
            if question.is_some_and(|question| question.until <= shared.now) {
                self.try_next(key, shared);
            }
        }
    }

    fn try_next(&mut self, key: Key, shared: &mut Shared) {
        let asked = match (self.questions.get_mut(key), shared.random.number()) {
            (None, _) => return,
            (Some(_), Err(_)) => false,
            (Some(question), Ok(number)) => {
                let now = shared.now;
                let resolvers = shared.settings.resolvers(now);
                question.ask(resolvers, number, &self.first, token(QUESTION, key), now)
            }
        };
        if !asked {
            self.finish(key, SERVER_FAILURE, &[], shared);
        }
    }

    /// What may be reached of the answer is bound to the name, and given on.
    fn answered(&mut self, key: Key, answer: &Answer, shared: &mut Shared) {
        let Some(question) = self.questions.get_mut(key) else {
            return;
        };
        let name = question.name.clone();
        // Rules may have changed meanwhile.
        if !self.policy.may_ask(&name) {
            return self.finish(key, NO_SUCH_NAME, &[], shared);
        }
        let bound = Name::from(name.as_str());
        let mut addresses = Vec::new();
        let mut is_private = false;
        for &(address, seconds) in &answer.addresses {
            match self.learn(address, shared) {
                Learned::Nothing => continue,
                Learned::Private => is_private = true,
                Learned::Open => addresses.push((address, seconds)),
                Learned::Public => {
                    let binding = shared.settings.binding;
                    let holds = Duration::from_secs(seconds.into()).max(binding);
                    self.bindings
                        .bind(address, &bound, shared.now + holds + binding);
                    addresses.push((address, seconds));
                }
            }
        }
        if is_private {
            self.refuse(name, 0, "dns", Reason::Private, shared);
        }
        self.finish(key, answer.code, &addresses, shared);
    }

    fn learn(&self, address: IpAddr, shared: &mut Shared) -> Learned {
        if canonical(address) != address {
            return Learned::Private; // one of IPv4 in the clothes of IPv6
        }
        let way = shared.way_to(address);
        let is_host = way == Way::Host;
        match self
            .policy
            .may_learn(address, is_host, &shared.settings.opened)
        {
            false => Learned::Private,
            true if way == Way::Nowhere => Learned::Nothing,
            true if is_host || !is_public(address) => Learned::Open,
            true => Learned::Public,
        }
    }

    fn finish(&mut self, key: Key, code: u8, addresses: &[(IpAddr, u32)], shared: &mut Shared) {
        let Some(question) = self.questions.remove(key) else {
            return;
        };
        shared.questions -= 1;
        let Question { query, asker, .. } = question;
        self.reply(asker, &write_answer(&query, code, addresses));
    }

    /// What cannot be sent is lost: whoever asked asks again.
    fn reply(&mut self, asker: Asker, message: &[u8]) {
        match asker {
            Asker::Datagram { client, asked } => {
                let Some(packet) = datagram(asked, client, message) else {
                    return;
                };
                if let Some(door) = self.door(asked.is_ipv6()) {
                    let packets = door.packets.as_fd();
                    let _ = inet::send_packet(packets, &packet, client.ip());
                }
            }
            Asker::Connection(key) => {
                if let Some(flow) = self.flows.get_mut(key) {
                    if let Stage::Asking(talk) = &mut flow.stage {
                        talk.answer(message);
                        // It goes out when the connection has its turn: never from here, which may be such a turn.
                        let _ = flow.client.want(WRITE);
                    }
                }
            }
        }
    }
}

enum Learned {
    /// Nobody could reach it.
    Nothing,
    Private,
    /// By operator and rules, whatever its name.
    Open,
    Public,
}
