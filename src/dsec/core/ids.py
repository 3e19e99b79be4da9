"""Ids: every kind has its own type, prefix and shape."""

from __future__ import annotations

import re
import secrets
from typing import NewType

from dsec.core.errors import InvalidArgumentError

NodeId = NewType("NodeId", str)
"""Opaque name of a node, minted when it joins, never reused (ruling 1)."""
SandboxId = NewType("SandboxId", str)
"""`sbx_<node>_<random>`: the id names the node that holds the sandbox."""
SnapshotId = NewType("SnapshotId", str)
"""`snp_<random>`."""
ExecId = NewType("ExecId", str)
"""`exe_<random>`, chosen by the caller: the same id attaches, never runs twice (ruling 7)."""

# Base 32 without 0 and 1: no character that is special in a subject, a path or a shell, and none to misread.
_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"
_NODE = re.compile(r"[a-z2-7]{8}\Z")
_SANDBOX = re.compile(r"sbx_([a-z2-7]{8})_[a-z2-7]{16}\Z")
_EXEC = re.compile(r"exe_[a-z2-7]{16}\Z")
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?\Z")


def _random(length: int) -> str:
    number = int.from_bytes(secrets.token_bytes((length * 5 + 7) // 8))
    return "".join(_ALPHABET[(number >> (5 * i)) & 31] for i in range(length))


def new_node_id() -> NodeId:
    return NodeId(_random(8))


def new_sandbox_id(node: NodeId) -> SandboxId:
    return SandboxId(f"sbx_{node}_{_random(16)}")


def new_exec_id() -> ExecId:
    return ExecId(f"exe_{_random(16)}")


def new_snapshot_id() -> SnapshotId:
    return SnapshotId(f"snp_{_random(16)}")


def main_exec_id(sandbox: str) -> ExecId:
    """The exec "main" of a sandbox that was created with `start=True`: known to whoever knows the sandbox."""
    return ExecId(f"exe_{sandbox[-16:]}")


def parse_node_id(text: str) -> NodeId:
    """`text` as a node id. Raises InvalidArgumentError if it is not of the shape of one."""
    return NodeId(_checked(_NODE, text, "node id", "eight of a-z and 2-7"))


def parse_sandbox_id(text: str) -> SandboxId:
    """`text` as a sandbox id. Raises InvalidArgumentError if it is not of the shape of one."""
    return SandboxId(_checked(_SANDBOX, text, "sandbox id", "sbx_<node>_<random>"))


def parse_exec_id(text: str) -> ExecId:
    """`text` as an exec id. Raises InvalidArgumentError if it is not of the shape of one."""
    return ExecId(_checked(_EXEC, text, "exec id", "exe_ and sixteen of a-z and 2-7"))


def parse_name(text: str, what: str = "name") -> str:
    """`text` as a name a person chose (sandbox, session, environment). Raises InvalidArgumentError."""
    return _checked(
        _NAME, text, what, "1 to 63 of letters, digits, '.', '_' and '-', beginning and ending with a letter or digit"
    )


def node_of(sandbox: SandboxId) -> NodeId:
    """The node that a (parsed) sandbox id names."""
    return NodeId(sandbox[4:12])


def _checked(pattern: re.Pattern[str], text: str, what: str, shape: str) -> str:
    if not isinstance(text, str) or not pattern.match(text):
        shown = repr(text)[:80]
        a = "an" if what[:1] in "aeiou" else "a"
        raise InvalidArgumentError(f"{shown} is not {a} {what}", hint=f"{a} {what} is {shape}")
    return text
