//! Frames and records agree with the vectors that the Python side is tested with too (tests/unit/test_protocol_vectors.py).

use std::fmt;
use std::path::Path;

use dsec_protocol::codec::{decode, encode};
use dsec_protocol::frames::{decode_data, encode_data, encode_frame, Data, Decoder, Frame};
use dsec_protocol::raw::split_request;
use dsec_protocol::{exec, files, opening, rest, session};
use serde::de::{DeserializeOwned, Deserializer, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::{json, Map, Value};

#[test]
fn records_decode_and_encode_to_the_same_bytes() {
    for name in ["opening", "exec", "session", "files", "rest"] {
        let vectors = read(name);
        assert!(!vectors.is_empty());
        for vector in vectors {
            check_record(&vector);
        }
    }
}

#[test]
fn data_frames_decode_and_encode_to_the_same_bytes() {
    for vector in read("data") {
        let bytes = unhex(&vector["hex"]);
        let frame = one_frame(&bytes).unwrap();
        let data = decode_data(&frame.body).unwrap();

        assert_eq!(json!(data.channel), vector["body"]["channel"]);
        assert_eq!(json!(data.offset.to_string()), vector["body"]["offset"]);
        assert_eq!(json!(data.sequence.to_string()), vector["body"]["sequence"]);
        assert_eq!(data.payload, unhex(&vector["body"]["payload"]["$bytes"]));
        // Cut in two, as a ring buffer gives it.
        let (head, tail) = data.payload.split_at(data.payload.len() / 2);
        let mut again = Vec::new();
        encode_data(
            &mut again,
            frame.stream,
            Data {
                payload: head,
                ..data
            },
            tail,
        )
        .unwrap();
        assert_eq!(again, bytes);
    }
}

#[test]
fn invalid_frames_are_refused() {
    for vector in read("invalid") {
        let bytes = unhex(&vector["hex"]);
        let refused = match (one_frame(&bytes), vector["record"].as_str()) {
            (None, _) => true,
            (Some(frame), Some("data")) => decode_data(&frame.body).is_err(),
            (Some(frame), Some("Credit")) => decode::<opening::Credit>(&frame.body).is_err(),
            (Some(frame), Some("ExecRef")) => decode::<exec::ExecRef>(&frame.body).is_err(),
            (Some(frame), Some("StdinEnd")) => decode::<exec::StdinEnd>(&frame.body).is_err(),
            (Some(_), other) => panic!("no check for {other:?}"),
        };
        assert!(refused, "{}", vector["why"]);
    }
}

fn check_record(vector: &Value) {
    let bytes = unhex(&vector["hex"]);
    let frame = one_frame(&bytes).unwrap();
    assert_eq!(json!(frame.kind as u8), vector["type"]);
    assert_eq!(json!(frame.stream), vector["stream"]);
    let mut again = Vec::new();
    encode_frame(&mut again, frame.kind, frame.stream, &frame.body).unwrap();
    assert_eq!(again, bytes);
    let Words(words) = decode(&frame.body).unwrap();
    assert_eq!(words, vector["body"]);
    same_bytes(vector["record"].as_str().unwrap(), &frame.body);
}

fn same_bytes(record: &str, body: &[u8]) {
    match record {
        "Request" => {
            let request = split_request(body).unwrap();
            assert!(!request.op.is_empty());
            assert!(body.ends_with(request.args));
        }
        "Hello" => round::<opening::Hello>(body),
        "HelloReply" => round::<opening::HelloReply>(body),
        "AgentError" => round::<opening::Failure>(body),
        "Credit" => round::<opening::Credit>(body),
        "Empty" => round::<opening::Empty>(body),
        "Exec" => round::<exec::Exec>(body),
        "ExecStarted" => round::<exec::ExecStarted>(body),
        "Attach" => round::<exec::Attach>(body),
        "ExecRef" => round::<exec::ExecRef>(body),
        "Ack" => round::<exec::Ack>(body),
        "Signal" => round::<exec::Signal>(body),
        "Resize" => round::<exec::Resize>(body),
        "ExecList" => round::<exec::ExecList>(body),
        "ExecEnded" => round::<exec::ExecEnded>(body),
        "StdinEnd" => round::<exec::StdinEnd>(body),
        "SessionOpen" => round::<session::SessionOpen>(body),
        "SessionRef" => round::<session::SessionRef>(body),
        "SessionState" => round::<session::SessionState>(body),
        "SessionList" => round::<session::SessionList>(body),
        "PathArgs" => round::<files::PathArgs>(body),
        "FileStat" => round::<files::FileStat>(body),
        "ListArgs" => round::<files::ListArgs>(body),
        "ListReply" => round::<files::ListReply>(body),
        "ReadArgs" => round::<files::ReadArgs>(body),
        "WriteArgs" => round::<files::WriteArgs>(body),
        "Written" => round::<files::Written>(body),
        "MkdirArgs" => round::<files::MkdirArgs>(body),
        "MoveArgs" => round::<files::MoveArgs>(body),
        "RemoveArgs" => round::<files::RemoveArgs>(body),
        "ChmodArgs" => round::<files::ChmodArgs>(body),
        "ChownArgs" => round::<files::ChownArgs>(body),
        "SymlinkArgs" => round::<files::SymlinkArgs>(body),
        "ExtractArgs" => round::<files::ExtractArgs>(body),
        "WatchArgs" => round::<files::WatchArgs>(body),
        "WatchEvent" => round::<files::WatchEvent>(body),
        "ConnectArgs" => round::<rest::ConnectArgs>(body),
        "ListenArgs" => round::<rest::ListenArgs>(body),
        "UsageReply" => round::<rest::UsageReply>(body),
        "ClockArgs" => round::<rest::ClockArgs>(body),
        "ReseedArgs" => round::<rest::ReseedArgs>(body),
        "ClaimArgs" => round::<rest::ClaimArgs>(body),
        other => panic!("no record {other}"),
    }
}

fn round<T: DeserializeOwned + Serialize>(body: &[u8]) {
    let record: T = decode(body).unwrap();
    assert_eq!(encode(&record).unwrap(), body);
}

fn one_frame(bytes: &[u8]) -> Option<Frame> {
    let mut decoder = Decoder::default();
    decoder.feed(bytes);
    let frame = decoder.next_frame().ok().flatten()?;
    assert_eq!(decoder.pending_bytes(), 0);
    Some(frame)
}

fn read(name: &str) -> Vec<Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("vectors/{name}.json"));
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn unhex(text: &Value) -> Vec<u8> {
    let text = text.as_str().unwrap();
    (0..text.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap())
        .collect()
}

/// msgpack as the vectors write it in JSON.
struct Words(Value);

impl<'de> Deserialize<'de> for Words {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(WordsVisitor)
    }
}

struct WordsVisitor;

impl<'de> Visitor<'de> for WordsVisitor {
    type Value = Words;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_unit<E>(self) -> Result<Words, E> {
        Ok(Words(Value::Null))
    }

    fn visit_bool<E>(self, value: bool) -> Result<Words, E> {
        Ok(Words(json!(value)))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Words, E> {
        Ok(Words(json!(value)))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Words, E> {
        Ok(Words(json!(value)))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Words, E> {
        Ok(Words(json!(value)))
    }

    fn visit_str<E>(self, value: &str) -> Result<Words, E> {
        Ok(Words(json!(value)))
    }

    fn visit_bytes<E>(self, value: &[u8]) -> Result<Words, E> {
        let hex: String = value.iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(Words(json!({ "$bytes": hex })))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Words, A::Error> {
        let mut list = Vec::new();
        while let Some(Words(value)) = access.next_element()? {
            list.push(value);
        }
        Ok(Words(Value::Array(list)))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Words, A::Error> {
        let mut pairs = Vec::new();
        while let Some((Words(key), Words(value))) = access.next_entry()? {
            pairs.push((key, value));
        }
        if pairs.iter().any(|(key, _)| !key.is_string()) {
            return Ok(Words(json!({ "$map": pairs })));
        }
        let named = |(key, value): (Value, Value)| (key.as_str().unwrap().to_owned(), value);
        Ok(Words(Value::Object(
            pairs.into_iter().map(named).collect::<Map<String, Value>>(),
        )))
    }
}
