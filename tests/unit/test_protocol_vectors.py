"""Frames and records agree with the vectors that the Rust side holds to as well (native/protocol/tests/vectors.rs)."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from dsec.core.errors import ProtocolError
from dsec.wire import agent
from dsec.wire.codec import unpack
from dsec.wire.frames import FrameDecoder, FrameType, decode_data

ROOT = Path(__file__).resolve().parent.parent.parent
VECTORS = ROOT / "native" / "protocol" / "vectors"


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("protocol_vectors", ROOT / "tools" / "protocol_vectors.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def vectors_of(*names: str) -> list[Any]:
    entries = [
        pytest.param(entry, id=f"{name}-{number}-{entry['record']}")
        for name in names
        for number, entry in enumerate(json.loads((VECTORS / f"{name}.json").read_text(encoding="ascii")))
    ]
    assert entries
    return entries


def test_the_stored_vectors_are_what_the_code_makes() -> None:
    tool = load_tool()
    made = {name: tool.rendered(entries) for name, entries in tool.all_vectors().items()}

    stored = {path.stem: path.read_text(encoding="ascii") for path in VECTORS.glob("*.json")}

    assert stored == made


def test_every_record_of_the_protocol_has_a_vector() -> None:
    records = {
        name for name, kind in vars(agent).items() if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    }
    inner = {"Struct", "Tty", "ExecUsage", "ExecEnd", "ExecState"}

    named = {entry["record"] for path in VECTORS.glob("*.json") for entry in json.loads(path.read_text())}

    assert records - inner - named == set()


@pytest.mark.parametrize("vector", vectors_of("opening", "exec", "session", "files", "rest"))
def test_a_record_decodes_and_encodes_to_the_same_bytes(vector: dict[str, Any]) -> None:
    (frame,) = FrameDecoder().feed(bytes.fromhex(vector["hex"]))

    record = unpack(frame.body, getattr(agent, vector["record"]))

    assert (frame.type, frame.stream) == (vector["type"], vector["stream"])
    assert msgspec.msgpack.encode(record) == frame.body


@pytest.mark.parametrize("vector", vectors_of("data"))
def test_a_data_frame_decodes_to_its_parts(vector: dict[str, Any]) -> None:
    (frame,) = FrameDecoder().feed(bytes.fromhex(vector["hex"]))

    data = decode_data(frame.body)

    body = vector["body"]
    assert (frame.type, frame.stream) == (FrameType.DATA, vector["stream"])
    assert (data.channel, str(data.offset), str(data.sequence)) == (body["channel"], body["offset"], body["sequence"])
    assert data.payload == bytes.fromhex(body["payload"]["$bytes"])


@pytest.mark.parametrize("vector", vectors_of("invalid"))
def test_an_invalid_frame_is_refused(vector: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        decode(vector)


def decode(vector: dict[str, Any]) -> None:
    (frame,) = FrameDecoder().feed(bytes.fromhex(vector["hex"]))
    if vector["record"] == "data":
        decode_data(frame.body)
    else:
        unpack(frame.body, getattr(agent, vector["record"]))
