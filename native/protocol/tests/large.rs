//! Large bodies one after the other, of which each has the memory of the one before.

use dsec_protocol::frames::{encode_data, encode_frame, Data, Decoder, FrameType, CHANNEL_IN};

fn payload(number: usize, size: usize) -> Vec<u8> {
    (0..size)
        .map(|at| (at * 31 + number * 7 + at / 251) as u8)
        .collect()
}

fn stream(sizes: &[usize]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (number, &size) in sizes.iter().enumerate() {
        match size {
            0 => encode_frame(&mut bytes, FrameType::Credit, 1, b"x").unwrap(),
            size => {
                let data = Data {
                    channel: CHANNEL_IN,
                    offset: number as u64,
                    sequence: 0,
                    payload: &payload(number, size),
                };
                encode_data(&mut bytes, 1, data, &[]).unwrap();
            }
        }
    }
    bytes
}

#[test]
fn what_is_decoded_is_what_was_sent_whatever_was_there_before() {
    let sizes = [
        200_000, 70_000, 262_144, 5, 66_000, 0, 262_144, 100_000, 65_600,
    ];
    let bytes = stream(&sizes);
    for step in [1_000, 4_096, 65_536, bytes.len()] {
        let mut decoder = Decoder::default();
        let mut found = 0;
        for piece in bytes.chunks(step) {
            decoder.feed(piece);
            while let Some(frame) = decoder.next_frame().unwrap() {
                let size = sizes[found];
                if size > 0 {
                    assert_eq!(frame.body[17..], payload(found, size), "frame {found}");
                }
                found += 1;
                decoder.recycle(frame);
            }
        }
        assert_eq!(found, sizes.len());
        assert_eq!(decoder.pending_bytes(), 0);
    }
}

#[test]
fn a_large_body_has_the_memory_of_the_one_before_until_something_else_comes() {
    let mut decoder = Decoder::default();
    let bytes = stream(&[100_000, 100_000, 0, 100_000]);
    let mut places = Vec::new();
    for piece in bytes.chunks(10_000) {
        decoder.feed(piece);
        while let Some(frame) = decoder.next_frame().unwrap() {
            places.push((frame.kind, frame.body.as_ptr(), frame.body.capacity()));
            decoder.recycle(frame);
        }
    }

    assert_eq!((places[0].1, places[0].2), (places[1].1, places[1].2));
    assert_eq!(places[2].0, FrameType::Credit);
}
