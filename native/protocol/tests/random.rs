//! Decoders on random and on damaged input: never a panic, never more held than a frame, the same frames however cut.

use dsec_protocol::codec::decode;
use dsec_protocol::exec::Exec;
use dsec_protocol::frames::{decode_data, encode_frame, Decoder, Frame, FrameType};
use dsec_protocol::limits::FRAME_BYTES_MAX;
use dsec_protocol::raw::{is_one_map, split_request};

const ROUNDS: u64 = 2_000;
const KINDS: [FrameType; 4] = [
    FrameType::Req,
    FrameType::Data,
    FrameType::End,
    FrameType::Event,
];

/// xorshift64*: the seed is in the assertion's message, so a failure can be run again.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    fn bytes(&mut self, bound: usize) -> Vec<u8> {
        let length = self.below(bound);
        (0..length).map(|_| self.next() as u8).collect()
    }
}

#[test]
fn frames_come_out_as_they_went_in_however_the_bytes_are_cut() {
    for seed in 1..ROUNDS {
        let mut random = Random(seed);
        let frames: Vec<Frame> = (0..random.below(6))
            .map(|_| Frame {
                kind: KINDS[random.below(KINDS.len())],
                stream: random.next() as u32,
                body: random.bytes(400),
            })
            .collect();
        let mut bytes = Vec::new();
        for frame in &frames {
            encode_frame(&mut bytes, frame.kind, frame.stream, &frame.body).unwrap();
        }

        let mut decoder = Decoder::default();
        let mut decoded = Vec::new();
        let mut rest = bytes.as_slice();
        while !rest.is_empty() {
            let (piece, after) = rest.split_at(1 + random.below(rest.len()));
            decoder.feed(piece);
            rest = after;
            while let Some(frame) = decoder.next_frame().unwrap() {
                decoded.push(frame);
            }
        }

        assert_eq!(decoded, frames, "seed {seed}");
        assert_eq!(decoder.pending_bytes(), 0, "seed {seed}");
    }
}

#[test]
fn random_bytes_are_refused_or_waited_for() {
    for seed in 1..ROUNDS {
        let mut random = Random(seed);
        let mut decoder = Decoder::default();
        let mut broken = false;
        for _ in 0..20 {
            let mut piece = random.bytes(64);
            if random.below(2) == 0 {
                // A plausible length, so that bodies are reached as well.
                let length = (5 + random.below(40)) as u32;
                piece.splice(0..0, length.to_be_bytes());
            }
            decoder.feed(&piece);
            while let Ok(Some(frame)) = decoder.next_frame() {
                assert!(frame.body.len() <= FRAME_BYTES_MAX - 5, "seed {seed}");
                let _ = decode_data(&frame.body);
                let _ = split_request(&frame.body);
                let _ = decode::<Exec>(&frame.body);
            }
            broken |= decoder.next_frame().is_err();
            if broken {
                break;
            }
        }
    }
}

#[test]
fn damaged_records_are_refused_or_decode_to_a_record() {
    let whole = b"\x85\xa2id\xa2e1\xa4argv\x92\xc4\x01a\xc4\x00\xa3env\x81\xc4\x01A\xc4\x01b\xa5stdin\xc3\xa7grace_s\xcb\x3f\xf0\0\0\0\0\0\0";
    assert!(decode::<Exec>(whole).is_ok());
    for seed in 1..ROUNDS {
        let mut random = Random(seed);
        let mut bytes = whole.to_vec();
        for _ in 0..=random.below(3) {
            let at = random.below(bytes.len());
            match random.below(3) {
                0 => bytes[at] = random.next() as u8,
                1 => drop(bytes.remove(at)),
                _ => bytes.insert(at, random.next() as u8),
            }
        }
        if decode::<Exec>(&bytes).is_ok() {
            assert!(is_one_map(&bytes), "seed {seed}");
        }
    }
}

#[test]
fn deep_nesting_and_huge_counts_are_refused() {
    let deep = [[0x81, 0xa1, b'a'].repeat(200_000), vec![0xc0]].concat();
    assert!(!is_one_map(&deep));
    assert!(split_request(&deep).is_err());
    for bytes in [
        &b"\xdf\xff\xff\xff\xff"[..],
        b"\x81\xa1a\xdd\xff\xff\xff\xff",
        b"\x81\xa1a\xc6\xff\xff\xff\xff",
    ] {
        assert!(!is_one_map(bytes));
        assert!(decode::<Exec>(bytes).is_err());
    }
}
