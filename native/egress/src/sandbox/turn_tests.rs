use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use dsec_sys::epoll::{Poller, Source, READ};
use dsec_sys::inet;
use dsec_sys::seqpacket::{wait_ready, Interest};

use super::super::Places;
use super::*;
use crate::flow::{Flow, Stage};
use crate::network::{Family, Sockets};
use crate::policy::{Destination, Policy};
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
    let mut shared = Shared::new(1024).unwrap();
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
