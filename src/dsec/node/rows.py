"""Stored records: what a node must know again after a restart. They ignore fields of newer versions."""

from __future__ import annotations

import msgspec

from dsec.core.spec import SandboxSpec
from dsec.wire.agent import ExecEnd
from dsec.wire.records import Gap, Sandbox

ROW_VERSION = 1


class ImageRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the image of a sandbox said when it was created: a snapshot of it starts as it did."""

    env: dict[str, str] = {}
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()


class SandboxRow(msgspec.Struct, frozen=True, kw_only=True):
    """One sandbox that has not ended."""

    version: int = ROW_VERSION
    id: str
    project: str
    principal: str
    spec: SandboxSpec
    state: str  # SandboxState, as of the last move
    boot_id: str  # of the host: with another one nothing of the sandbox runs any more
    created_at: float
    record: bytes = b""  # the backend's, for adopt and discard
    layers: tuple[str, ...] = ()  # digests that it holds
    agent_boot_id: str = ""
    key: str | None = None  # idempotency key of its create
    user: str | None = None
    workdir: str | None = None
    ttl_running_s: float | None = None
    ttl_idle_s: float | None = None
    running_until: float | None = None  # monotonic, good for this boot; None while paused or without a time to live
    running_left_s: float | None = None  # while paused
    paused_at: float | None = None
    asleep: bool = False  # while paused: it is on the disk alone, and survives a reboot
    slept_bytes: int = 0  # what it had in memory before
    resting: bool = False  # while paused: nobody asked for that, it was idle
    paused_monotonic_s: float | None = None  # good for this boot
    frozen_s: float = 0.0
    memory_gib_s: float = 0.0
    create_ms: float | None = None
    incarnation: int = 1
    end_cause: str | None = None  # while it is being destroyed: what its tombstone will say
    end_detail: str | None = None
    image: ImageRow = ImageRow()
    snapshot: str | None = None  # id of the one that it was made from, or rolled back to
    fork: str | None = None  # of the fork that is not complete yet: it goes if its node ends before
    base: tuple[str, ...] = ()  # digests of the environment, where snapshots lie above it
    forked: bool = False  # on a layer that no snapshot names: it goes with the last one that has it
    leftover: bytes = b""  # record of the instance before a rollback, until it is removed
    main_due_at: float | None = None  # it was rolled back then, and its program is to be started again


class SpareRow(msgspec.Struct, frozen=True, kw_only=True):
    """An instance that is nobody's yet."""

    version: int = ROW_VERSION
    id: str
    substrate: str
    boot_id: str
    record: bytes


class KeyRow(msgspec.Struct, frozen=True, kw_only=True):
    """An idempotency key, and the sandbox that its request gave."""

    project: str
    key: str
    request_hash: bytes
    sandbox: str
    at: float


class Tombstone(msgspec.Struct, frozen=True, kw_only=True):
    """An ended sandbox as its owner sees it for a day."""

    version: int = ROW_VERSION
    sandbox: Sandbox
    principal: str = ""  # who made it


class ExecStartEntry(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """Written before the agent is asked. Holds no environment: that may be secret."""

    version: int = ROW_VERSION
    id: str
    command: str
    request_hash: bytes
    started_at: float
    session: str | None = None
    tty: bool = False
    one_channel: bool = False  # a terminal, or stderr merged into stdout
    stdin: bool = False
    record_bytes_max: int = 0


class ExecEndEntry(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """Written before the agent may forget the exec. Small output is kept in it, large output in the record file."""

    id: str
    ended_at: float
    end: ExecEnd
    out_bytes: int = 0  # as recorded by us; the agent's own count is its claim
    err_bytes: int = 0
    kept_bytes: int = 0
    gaps: list[Gap] = []
    runs: list[tuple[int, int, int]] = []  # (channel, offset, sequence): the order of the two channels
    file: bool = False
    out: bytes = b""
    err: bytes = b""


class ExecDropEntry(msgspec.Struct, frozen=True, kw_only=True, tag="drop"):
    """The exec never started, or its record has been dropped."""

    id: str


ExecEntry = ExecStartEntry | ExecEndEntry | ExecDropEntry
