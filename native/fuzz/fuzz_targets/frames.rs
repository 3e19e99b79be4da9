//! What the agent does with bytes of the host before it acts on them.
#![no_main]

use dsec_protocol::codec::decode;
use dsec_protocol::exec::Exec;
use dsec_protocol::files::WriteArgs;
use dsec_protocol::frames::{decode_data, Decoder};
use dsec_protocol::opening::{AgentConfig, Hello};
use dsec_protocol::raw::split_request;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let mut decoder = Decoder::default();
    for piece in bytes.chunks(7) {
        decoder.feed(piece);
        loop {
            match decoder.next_frame() {
                Ok(Some(frame)) => decode_body(&frame.body),
                Ok(None) => break,
                Err(_) => return,
            }
        }
    }
});

fn decode_body(body: &[u8]) {
    let _ = decode_data(body);
    let _ = decode::<Hello>(body);
    let _ = decode::<AgentConfig>(body);
    if let Ok(request) = split_request(body) {
        let _ = decode::<Exec>(request.args);
        let _ = decode::<WriteArgs>(request.args);
    }
}
