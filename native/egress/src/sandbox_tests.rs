use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::time::Instant;

use super::*;

#[test]
fn first_bytes_in_many_pieces_are_looked_at_with_each_tick_only() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    far.set_nodelay(true).unwrap();
    let (near, _) = listener.accept().unwrap();
    near.set_nonblocking(true).unwrap();
    let poller = Poller::new().unwrap();
    let mut client = Source::new(&poller, OwnedFd::from(near), 1);
    client.want(READ).unwrap();
    let to = Destination {
        address: "9.9.9.9".parse().unwrap(),
        port: 80,
        is_host: false,
    };
    let stage = Stage::Naming { seen: 0, looks: 0 };
    let mut flow = Flow::new(client, to, stage, Instant::now());
    let policy = Policy::parse(None).unwrap();
    let mut shared = Shared::new(1024, None).unwrap();

    for look in 1..=LOOKS_AT_ONCE {
        far.write_all(b"G").unwrap();
        let mut ready = Vec::new();
        poller.wait(&mut ready, 60_000).unwrap();
        assert_eq!(ready.len(), 1);
        let next = step(&mut flow, &policy, 1, &mut shared).unwrap();
        assert!(matches!(next, Next::Nothing));
        assert_eq!(flow.client.interest() == 0, look == LOOKS_AT_ONCE);
    }

    far.write_all(b"ET /\r\n").unwrap();
    flow.client.want(READ).unwrap(); // as a tick does
    poller.wait(&mut Vec::new(), 60_000).unwrap();
    let next = step(&mut flow, &policy, 1, &mut shared).unwrap();
    assert!(matches!(next, Next::Deny(Reason::Unreadable, _)));
}
