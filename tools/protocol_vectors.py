"""Writes native/protocol/vectors: frames as bytes and in words, which the Python and the Rust tests both hold to.

Run `python tools/protocol_vectors.py` after a change of src/dsec/wire/agent.py. Existing vectors change only with a new
generation: a changed line in a diff of these files is a break of the protocol.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from dsec.wire import agent
from dsec.wire.frames import FrameType, encode_data, encode_frame

DIRECTORY = Path(__file__).resolve().parent.parent / "native" / "protocol" / "vectors"

_FULL_EXEC = agent.Exec(
    id="exe_aaaaaaaaaaaaaaaa",
    argv=[b"/bin/cat", b"\xff\xfe"],
    cwd=b"/tmp",
    env={b"A": b"1", b"B\xff": b""},
    user="ann:staff",
    stdin=True,
    tty=agent.Tty(cols=80, rows=24),
    timeout_s=1.5,
    grace_s=0.25,
    output_bytes_max=1 << 40,
    merge_stderr=True,
    rlimits={"core": 0, "nofile": 1024},
    session=None,
)
_END = agent.ExecEnd(
    status="signaled",
    signal=9,
    cause="timed_out",
    out_bytes=70_000,
    err_bytes=3,
    usage=agent.ExecUsage(wall_us=1_000_000, user_us=255, system_us=256, max_rss_bytes=1 << 33),
    session_ended=True,
)
_STATE = agent.ExecState(id="e1", pid=7, out=127, err=128, stdin=65_536, end=_END, session="main")

RECORDS: dict[str, list[tuple[FrameType, int, msgspec.Struct]]] = {
    "opening": [
        (FrameType.HELLO, 0, agent.Hello(generation_min=1, generation_max=1, sandbox="sbx_aaaaaaaa_bbbbbbbbbbbbbbbb")),
        (FrameType.HELLO, 0, agent.HelloReply(1, "0.1.0", "00ff", execs=[_STATE], features=["watch"])),
        (FrameType.REQ, 1, agent.Request("execs")),
        (FrameType.REQ, 3, agent.Request("exec", {"id": "e1", "argv": [b"true"]})),
        (FrameType.ERR, 4_294_967_295, agent.AgentError("file", "/x: no such file", "ENOENT")),
        (FrameType.ERR, 1, agent.AgentError("superseded", "")),
        (FrameType.CREDIT, 5, agent.Credit(262_144)),
        (FrameType.RES, 5, agent.Empty()),
    ],
    "exec": [
        (FrameType.REQ, 1, _FULL_EXEC),
        (FrameType.REQ, 1, agent.Exec(id="e2", shell=b"echo hi")),
        (FrameType.RES, 1, agent.ExecStarted("e1", pid=1234, existing=True, stdin=1, out=2, err=3)),
        (FrameType.REQ, 1, agent.Attach("e1", out=1 << 32, err=0)),
        (FrameType.REQ, 1, agent.ExecRef("e1")),
        (FrameType.REQ, 1, agent.Ack("e1", 2**63, 1)),
        (FrameType.REQ, 1, agent.Signal("e1", 15, tree=True)),
        (FrameType.REQ, 1, agent.Resize("e1", 200, 50)),
        (FrameType.RES, 1, agent.ExecList([_STATE, agent.ExecState(id="e2")])),
        (FrameType.END, 1, agent.ExecEnded(_END)),
        (FrameType.END, 1, agent.ExecEnded(agent.ExecEnd(status="exited", code=-1))),
        (FrameType.END, 1, agent.StdinEnd(offset=12)),
    ],
    "session": [
        (
            FrameType.REQ,
            1,
            agent.SessionOpen(name="main", shell=b"/bin/sh", cwd=b"/", env={b"X": b"y"}, user="1000:1000"),
        ),
        (FrameType.REQ, 1, agent.SessionRef("main")),
        (FrameType.RES, 1, agent.SessionState(name="main", pid=9, busy="e1", existing=True)),
        (FrameType.RES, 1, agent.SessionList([agent.SessionState(name="a")])),
    ],
    "files": [
        (FrameType.REQ, 1, agent.PathArgs(path=b"/a\xff", follow=False, user="ann")),
        (
            FrameType.RES,
            1,
            agent.FileStat(
                name=b"a",
                kind="symlink",
                size=1 << 45,
                mode=0o7777,
                uid=65_535,
                gid=1,
                mtime_ns=-1,
                target=b"/b",
                nlink=2,
            ),
        ),
        (FrameType.REQ, 1, agent.ListArgs(path=b"/", after=b"m", limit=10)),
        (FrameType.RES, 1, agent.ListReply([agent.FileStat(name=b"x", kind="file")], more=True)),
        (FrameType.REQ, 1, agent.ReadArgs(path=b"/x", offset=5, length=6)),
        (FrameType.REQ, 1, agent.WriteArgs(path=b"/x", offset=0, mode=0o600, parents=False)),
        (FrameType.END, 1, agent.Written(bytes=10, entries=2)),
        (FrameType.REQ, 1, agent.MkdirArgs(path=b"/d")),
        (FrameType.REQ, 1, agent.MoveArgs(source=b"/a", target=b"/b", replace=False)),
        (FrameType.REQ, 1, agent.RemoveArgs(path=b"/a", recursive=True, missing_ok=True)),
        (FrameType.REQ, 1, agent.ChmodArgs(path=b"/a", mode=0o755)),
        (FrameType.REQ, 1, agent.ChownArgs(path=b"/a", owner="ann", group="7", follow=False)),
        (FrameType.REQ, 1, agent.SymlinkArgs(path=b"/a", target=b"../b")),
        (FrameType.REQ, 1, agent.ExtractArgs(path=b"/a")),
        (FrameType.REQ, 1, agent.WatchArgs(path=b"/a", recursive=True)),
        (FrameType.EVENT, 1, agent.WatchEvent(kind="moved", path=b"b", source=b"a", directory=True)),
    ],
    "rest": [
        (FrameType.REQ, 1, agent.ConnectArgs(host="::1", port=65_535)),
        (FrameType.REQ, 1, agent.ConnectArgs(path=b"/run/x.sock")),
        (FrameType.REQ, 1, agent.ListenArgs(host="127.77.0.1", port=5_432)),
        (FrameType.RES, 1, agent.UsageReply(processes=3, execs=1, agent_rss_bytes=400_000, disk_total_bytes=1 << 50)),
        (FrameType.REQ, 1, agent.ClockArgs(paused_s=0.5, wall_s=1.7e9)),
        (FrameType.REQ, 1, agent.ReseedArgs(seed=bytes(range(32)))),
        (FrameType.REQ, 1, agent.ReseedArgs(seed=bytes(range(32)), another=True)),
        (
            FrameType.REQ,
            1,
            agent.ClaimArgs(sandbox="sbx_n_1", env={b"A": b"\xff"}, user="user:staff", workdir=b"/w"),
        ),
        (FrameType.REQ, 1, agent.ClaimArgs(sandbox="sbx_n_2")),
        (FrameType.REQ, 1, agent.ClaimArgs(sandbox="sbx_n_3", hostname="a-b.c")),
    ],
}

DATA = [(1, 0, 0, 0, b"\x00"), (2_147_483_649, 1, 2**40, 2**33, b"hello"), (7, 2, 1, 2, bytes(300))]

# What a decoder of frames, or of the record named, must refuse.
INVALID = [
    ("a length below the header", None, "000000040100000000"),
    ("a length above one MiB", None, "001000010100000000"),
    ("a type below the first", None, "000000050000000000"),
    ("a type above the last", None, "000000050900000000"),
    ("an array instead of a map", "Credit", "0000000706000000019101"),
    ("a map followed by more", "Credit", "0000000e060000000181a5627974657301c0"),
    ("a field that is not known", "Credit", "00000010060000000182a5627974657301a17801"),
    ("a field that is missing", "Credit", "00000006060000000180"),
    ("a number where text belongs", "ExecRef", "0000000a020000000181a2696401"),
    ("nothing at all", "StdinEnd", "000000050700000001"),
    ("a DATA body without its head", "data", "0000000605000000010b"),
    ("a DATA body for channel 3", "data", "000000170500000001030000000000000000000000000000000061"),
]


def in_words(value: Any) -> Any:
    """msgpack as JSON: bytes are {"$bytes": hex}, maps with keys that are bytes {"$map": pairs}."""
    if isinstance(value, bytes):
        return {"$bytes": value.hex()}
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: in_words(inner) for key, inner in value.items()}
        return {"$map": [[in_words(key), in_words(inner)] for key, inner in value.items()]}
    if isinstance(value, list):
        return [in_words(inner) for inner in value]
    return value


def record_vector(kind: FrameType, stream: int, record: msgspec.Struct) -> dict[str, Any]:
    body = msgspec.msgpack.encode(record)
    return {
        "record": type(record).__name__,
        "type": int(kind),
        "stream": stream,
        "body": in_words(msgspec.msgpack.decode(body)),
        "hex": encode_frame(kind, stream, body).hex(),
    }


def data_vector(stream: int, channel: int, offset: int, sequence: int, payload: bytes) -> dict[str, Any]:
    return {
        "record": "data",
        "type": int(FrameType.DATA),
        "stream": stream,
        # As text: numbers above 2^53 do not survive every JSON reader.
        "body": {
            "channel": channel,
            "offset": str(offset),
            "sequence": str(sequence),
            "payload": {"$bytes": payload.hex()},
        },
        "hex": encode_data(stream, channel, offset, sequence, payload).hex(),
    }


def all_vectors() -> dict[str, list[dict[str, Any]]]:
    vectors = {name: [record_vector(*entry) for entry in entries] for name, entries in RECORDS.items()}
    vectors["data"] = [data_vector(*entry) for entry in DATA]
    vectors["invalid"] = [{"why": why, "record": record, "hex": text} for why, record, text in INVALID]
    return vectors


def rendered(entries: list[dict[str, Any]]) -> str:
    """One vector a line, so that a diff shows which one changed."""
    return "[\n" + ",\n".join(json.dumps(entry, ensure_ascii=True) for entry in entries) + "\n]\n"


def main() -> None:
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    for name, entries in all_vectors().items():
        (DIRECTORY / f"{name}.json").write_text(rendered(entries), encoding="ascii")


if __name__ == "__main__":
    main()
