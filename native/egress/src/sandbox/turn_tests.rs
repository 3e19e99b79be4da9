use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use dsec_sys::epoll::{Poller, Source, READ};
use dsec_sys::inet;
use dsec_sys::seqpacket::{wait_ready, Interest};

use super::super::Places;
use super::*;
use crate::flow::{Flow, Stage};
use crate::memory::Room;
use crate::network::{Family, Sockets};
use crate::policy::{Destination, Policy, Reason};
use crate::slab::token;
use crate::wire::Counts;

const WAIT: Option<Duration> = Some(Duration::from_secs(60));
/// As many as several turns serve.
const FLOWS: usize = 16;

fn anything() -> OwnedFd {
    UdpSocket::bind("127.0.0.1:0").unwrap().into()
}

/// Which may ask after nothing, and reach nothing.
fn sandbox(server: &Poller, shared: &Shared) -> Sandbox {
    let own = Poller::new().unwrap();
    let v4 = Family {
        listener: inet::listen("127.0.0.1:0".parse().unwrap(), 4).unwrap(),
        questions: inet::datagrams("127.0.0.1:0".parse().unwrap()).unwrap(),
        packets: anything(),
    };
    let sockets = Sockets {
        v4,
        v6: None,
        link: anything(),
    };
    let places = Places {
        outer: Source::new(server, own.as_descriptor().unwrap(), 0),
        process: Source::new(server, anything(), 1),
        own,
    };
    let policy = Policy::parse(Some(&[])).unwrap();
    Sandbox::new(
        (0, 0),
        Counts::default(),
        policy,
        0,
        sockets,
        places,
        shared,
    )
    .unwrap()
}

fn pair(listener: &TcpListener) -> (TcpStream, OwnedFd) {
    let far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (near, _) = listener.accept().unwrap();
    for end in [&far, &near] {
        end.set_nonblocking(true).unwrap();
    }
    (far, near.into())
}

/// One connection that is being carried: its client's and its server's far ends.
fn carry(sandbox: &mut Sandbox, listener: &TcpListener, now: Instant) -> (TcpStream, TcpStream) {
    let (client, near_client) = pair(listener);
    let (server, near_server) = pair(listener);
    let to = Destination {
        address: "9.9.9.9".parse().unwrap(),
        port: 80,
        is_host: false,
    };
    let until = now + Duration::from_secs(600);
    let poller = &sandbox.poller;
    let key = sandbox.flows.insert_with(|key| {
        let mut near = Source::new(poller, near_client, token(FLOW, key));
        near.want(READ).unwrap();
        let mut flow = Flow::new(near, to, Stage::Moving, until);
        flow.server = Some(Source::new(poller, near_server, token(FLOW, key)));
        flow
    });
    assert!(sandbox.flows.get_mut(key).is_some());
    (client, server)
}

fn fill(link: &mut TcpStream) {
    let block = [7; 64 << 10];
    loop {
        match link.write(&block) {
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => return,
            Err(error) => panic!("{error}"),
        }
    }
}

fn drain(link: &mut TcpStream) -> usize {
    let mut buffer = vec![0; 1 << 20];
    let mut count = 0;
    loop {
        match link.read(&mut buffer) {
            Ok(0) => panic!("it has ended"),
            Ok(more) => count += more,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return count,
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn connections_that_are_always_ready_keep_neither_each_other_nor_a_question_waiting() {
    let server = Poller::new().unwrap();
    let mut shared = Shared::new(1024, None).unwrap();
    let mut sandbox = sandbox(&server, &shared);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut ends: Vec<_> = (0..FLOWS)
        .map(|_| carry(&mut sandbox, &listener, shared.now))
        .collect();
    let mut came = [0; FLOWS];
    for (client, _) in &mut ends {
        fill(client);
    }
    for key in sandbox.flows.keys() {
        let flow = sandbox.flows.get_mut(key).unwrap();
        let ready = wait_ready(&[(flow.client.as_fd(), Interest::Readable)], WAIT).unwrap();
        assert!(ready[0]);
    }
    let mut one_turn = |sandbox: &mut Sandbox| {
        for (client, _) in &mut ends {
            fill(client);
        }
        sandbox.turn(&mut shared);
        for (count, (_, server)) in came.iter_mut().zip(&mut ends) {
            *count += drain(server);
        }
    };
    one_turn(&mut sandbox);

    let questions = sandbox.v4.datagrams.as_fd();
    let asked = inet::local_address(&questions).unwrap();
    let asker = UdpSocket::bind("127.0.0.1:0").unwrap();
    let question = b"\0\x07\x01\0\0\x01\0\0\0\0\0\0\x01a\x03org\0\0\x01\0\x01";
    asker.send_to(question, asked).unwrap();
    assert!(wait_ready(&[(questions, Interest::Readable)], WAIT).unwrap()[0]);
    one_turn(&mut sandbox);
    assert_eq!(sandbox.counts.denied, 1); // it was heard

    for _ in 0..2 * FLOWS {
        one_turn(&mut sandbox);
    }
    assert!(came.iter().all(|count| *count > 0), "{came:?}");
}

#[test]
fn a_connection_that_is_over_counts_until_all_of_it_has_been_taken() {
    let server = Poller::new().unwrap();
    let mut shared = Shared::new(1024, None).unwrap();
    let mut sandbox = sandbox(&server, &shared);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (mut client, mut far) = carry(&mut sandbox, &listener, shared.now);
    let key = sandbox.flows.keys()[0];
    shared.flows = 1;
    client.shutdown(Shutdown::Write).unwrap();
    far.set_nonblocking(false).unwrap();
    far.write_all(&[7; 256 << 10]).unwrap(); // more than its client's window
    far.shutdown(Shutdown::Write).unwrap();
    let until = Instant::now() + WAIT.unwrap();
    let mut turn_until = |sandbox: &mut Sandbox, done: &dyn Fn(&mut Sandbox) -> bool| {
        while !done(sandbox) {
            assert!(Instant::now() < until);
            server.wait(&mut Vec::new(), 20).unwrap();
            sandbox.turn(&mut shared);
        }
    };

    turn_until(&mut sandbox, &|sandbox| {
        let flow = sandbox.flows.get_mut(key).unwrap();
        matches!(flow.stage, Stage::Ending)
    });
    let flow = sandbox.flows.get_mut(key).unwrap();
    assert!(flow.held() > 100 << 10, "{}", flow.held());
    assert!(!flow.settle().unwrap());

    client.set_nonblocking(false).unwrap();
    let mut came = Vec::new();
    client.read_to_end(&mut came).unwrap();
    assert_eq!(came.len(), 256 << 10);
    turn_until(&mut sandbox, &|sandbox| sandbox.flows.len() == 0);
    assert_eq!(shared.flows, 0);
}

#[test]
fn what_a_connection_may_hold_becomes_less_and_what_holds_too_much_is_cut() {
    let server = Poller::new().unwrap();
    let mut shared = Shared::new(1024, None).unwrap();
    let mut sandbox = sandbox(&server, &shared);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut ends = [0, 1].map(|_| carry(&mut sandbox, &listener, shared.now));
    shared.flows = 2;
    for round in 0..3 {
        fill(&mut ends[0].0);
        sandbox.turn(&mut shared);
        if round == 1 {
            sandbox.give_room(Room::Narrow);
        }
    }
    let held = sandbox.held();
    assert_eq!(held.len(), 2);
    assert!(held[0].1 > held[1].1, "{held:?}");
    assert_eq!(sandbox.has_too_much(&shared), None);
    sandbox.give_room(Room::None);
    assert_eq!(sandbox.has_too_much(&shared), Some(Reason::Memory));

    sandbox.shed(held[0].0, &mut shared);
    assert_eq!((sandbox.flows.len(), shared.flows), (1, 1));
    let (refusal, _) = sandbox.refusals.take().pop_first().unwrap();
    assert_eq!((refusal.reason, refusal.port), (Reason::Memory, 80));
    let error = ends[0].1.set_nonblocking(false).and_then(|()| {
        let mut rest = Vec::new();
        ends[0].1.read_to_end(&mut rest)
    });
    assert_eq!(error.unwrap_err().kind(), ErrorKind::ConnectionReset);
}
