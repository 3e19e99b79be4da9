"""Attempts at the agent by what the kernel lets anybody with its user's id do: signals, ranks, settings, its pidfd."""

# Functions of os say best which system call is tried.
from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import signal
import socket
import struct
from pathlib import Path
from typing import Any, Final

from .kit import REFUSED, BlockedError, become, call, group, probe

_AGENT_USER: Final = 65_535

# With what is written where the file lets itself be opened.
_SETTINGS: Final = {
    "oom_score_adj": "1000",
    "oom_adj": "15",
    "timerslack_ns": "4000000000",
    "coredump_filter": "0xff",
    "autogroup": "19",
    "comm": "owned",
    "task/1/comm": "owned",
    "loginuid": "0",
    "setgroups": "deny",
    "uid_map": "0 0 1",
    "gid_map": "0 0 1",
    "projid_map": "0 0 1",
    "timens_offsets": "monotonic 1000 0",
    "attr/current": "unconfined",
    "attr/exec": "unconfined",
    "attr/keycreate": "x",
    "sched": "0",
    "make-it-fail": "1",
    "fail-nth": "1",
    "mem": "x",
}
_USERS: Final = {"as_root": 0, "as_its_user": _AGENT_USER}


def _by_both(words: Any) -> list[tuple[str, Any]]:
    return [
        (f"{word}_{who}", (uid, value))
        for word, value in (words.items() if isinstance(words, dict) else words)
        for who, uid in _USERS.items()
    ]


@group(
    "agent_setting",
    [(word.replace("/", "_"), value) for word, value in _by_both({name: name for name in _SETTINGS})],
    *REFUSED,
    errno.ENOENT,
    errno.ESRCH,
)
def _(attempt: tuple[int, str]) -> str:
    uid, name = attempt
    become(uid)
    descriptor = os.open(f"/proc/1/{name}", os.O_WRONLY)
    os.write(descriptor, _SETTINGS[name].encode())
    return f"/proc/1/{name} is written"


# (what, number, arguments): each takes the agent's time away from it, and gives it to others.
_RANKS: Final = {
    "priority": (141, (0, 1, 19)),
    "priority_of_group": (141, (1, 1, 19)),
    "priority_of_user": (141, (2, _AGENT_USER, 19)),
    "priority_of_own_user": (141, (2, 0, 19)),
    "disk_priority": (251, (1, 1, 3 << 13)),
    "disk_priority_of_group": (251, (2, 1, 3 << 13)),
    "disk_priority_of_user": (251, (3, _AGENT_USER, 3 << 13)),
    "policy": (144, (1, 5, struct.pack("i", 0))),
    "parameters": (142, (1, struct.pack("i", 0))),
    "attributes": (314, (1, struct.pack("IIQiIQQQ", 48, 5, 0, 0, 0, 0, 0, 0), 0)),
    "affinity": (203, (1, 8, struct.pack("Q", 1))),
}


@group("agent_rank", _by_both(_RANKS), errno.EPERM, errno.EACCES)
def _(attempt: tuple[int, tuple[int, tuple[Any, ...]]]) -> str:
    uid, (number, arguments) = attempt
    become(uid)
    if uid == 0 and number == 141 and arguments[0] == 2 and arguments[1] == 0:
        raise BlockedError("not the agent's user")
    if number == 141 and arguments[:2] == (2, 0) and uid == _AGENT_USER:
        os.nice(1)  # so that the call below is not about nothing
    before = _rank_of_agent()
    call(number, *arguments)
    if number == 141 and arguments[0] == 2 and _rank_of_agent() == before:
        raise BlockedError("others of the user, not the agent")
    return f"the agent was {before} and is {_rank_of_agent()}"


def _rank_of_agent() -> str:
    fields = Path("/proc/1/stat").read_text().rpartition(")")[2].split()
    return f"{fields[15]} {fields[16]} {fields[38]}"  # priority, nice, policy


_STATE_STOPPED: Final = ("T", "t")


def _stopped() -> bool:
    return Path("/proc/1/stat").read_text().rpartition(")")[2].split()[0] in _STATE_STOPPED


@group("stop_agent_by_descriptor", _USERS.items(), errno.EPERM)
def _(uid: int) -> str:
    """The kernel sends the signal then, on behalf of whoever owns the descriptor."""
    become(uid)
    one, other = socket.socketpair()
    fcntl.fcntl(one, fcntl.F_SETSIG, signal.SIGSTOP)
    fcntl.fcntl(one, fcntl.F_SETOWN, 1)
    fcntl.fcntl(one, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    other.send(b"x")
    if not _stopped():
        raise BlockedError("the agent runs on")
    return "the agent is stopped"


@group("forged_signal_to_agent", [("kernel", 0x80), ("timer", -2), ("tkill", -6)], errno.EPERM)
def _(code: int) -> str:
    """As if the kernel itself had sent it: init of a namespace would have to obey."""
    info = struct.pack("iii", signal.SIGSTOP, 0, code) + bytes(116)
    call(129, 1, signal.SIGSTOP, info)
    if not _stopped():
        raise BlockedError("the agent runs on")
    return "the agent is stopped"


@probe(errno.EPERM)
def credentials_of_the_agent() -> str:
    """What a server in the sandbox would believe."""
    one, other = socket.socketpair()
    other.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    forged = struct.pack("iii", 1, _AGENT_USER, _AGENT_USER)
    one.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, forged)])
    return "sent as the agent"


_BY_PIDFD: Final = {
    "namespaces": (308, (0x20000,)),
    "advice": (440, (None, 0, 4, 0)),
    "memory_reclaim": (448, (0,)),
}


@group("pidfd_of_agent", _BY_PIDFD.items(), errno.EPERM)
def _(attempt: tuple[int, tuple[Any, ...]]) -> str:
    number, rest = attempt
    return f"answered {call(number, os.pidfd_open(1), *rest)}"


@group("futexes_of_agent", _USERS.items(), errno.EPERM)
def _(uid: int) -> str:
    """Where its threads keep their robust futexes: an address, and thus a hole in its randomisation."""
    become(uid)
    head, length = ctypes.c_void_p(), ctypes.c_size_t()
    call(274, 1, ctypes.byref(head), ctypes.byref(length))
    return f"at {head.value}"


@probe(errno.EPERM, errno.EACCES)
def trace_whoever_traces_the_agent() -> str:
    """A tracer set as allowed for everybody (Yama) gains nothing on a process that is not ours."""
    call(157, 0x59616D61, -1, 0, 0, 0) if Path("/proc/sys/kernel/yama").exists() else None
    call(101, 0x4206, 1, 0, 0)
    return "traces the agent"
