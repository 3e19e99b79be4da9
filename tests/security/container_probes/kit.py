"""How attempts are declared and made."""

# Functions of os say best which system call is tried.
from __future__ import annotations

import ctypes
import errno
import json
import os
import select
import signal
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

Probe = Callable[[], Any]

REFUSED: Final = (errno.EPERM, errno.EACCES, errno.EROFS, errno.ENOSYS)
_PROBE_S: Final = 20.0

FACTS: dict[str, Any] = {}  # of the host, as the test sees it: pids, ports, names


class BlockedError(Exception):
    """Not reached, in a way that no errno tells."""


class Known:
    """One probe, with the ways in which it may be refused."""

    def __init__(self, run: Probe, errnos: tuple[int, ...], signals: tuple[int, ...]) -> None:
        self.run = run
        self.errnos = errnos
        self.signals = signals


PROBES: dict[str, Known] = {}


def probe(*errnos: int, signals: tuple[int, ...] = (), name: str = "") -> Callable[[Probe], Probe]:
    def register(run: Probe) -> Probe:
        PROBES[name or run.__name__] = Known(run, errnos or REFUSED, signals)
        return run

    return register


def group(prefix: str, cases: Iterable[tuple[str, Any]], *errnos: int) -> Callable[[Callable[[Any], Any]], Any]:
    """One probe for each case: `run` is given its value."""

    def register(run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        for word, value in cases:
            PROBES[f"{prefix}_{word}"] = Known(lambda value=value: run(value), errnos or REFUSED, ())
        return run

    return register


_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def call(number: int, *arguments: Any) -> int:
    """Raises OSError. Integers are widened: the upper half of a register would be garbage otherwise."""
    wide = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = _libc.syscall(ctypes.c_long(number), *wide, *[ctypes.c_long(0)] * (6 - len(wide)))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(result)


def mount(source: str, target: str, kind: str | None, flags: int = 0) -> str:
    encoded = None if kind is None else kind.encode()
    call(165, source.encode(), target.encode(), encoded, flags, None)
    return f"mounted {kind or 'again'} at {target}"


def new_directory() -> str:
    path = f"/tmp/probe-{os.getpid()}"
    Path(path).mkdir()
    return path


def nothing_of(found: Iterable[str]) -> str:
    words = list(found)
    if not words:
        raise BlockedError("nothing is there")
    return "; ".join(words[:20])


def become(uid: int, *, keep: bool = True) -> None:
    """`keep`: the capabilities that root has here; some of them the kernel counts as rights over others of the user."""
    call(157, 8, int(keep), 0, 0, 0)  # PR_SET_KEEPCAPS
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def run_as_user(command: list[str]) -> bytes:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writing, 1)
        become(1000, keep=False)
        os.execv(command[0], command)
    os.close(writing)
    with open(reading, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    return data


def run(name: str) -> dict[str, str]:
    known = PROBES[name]
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        FACTS["report"] = writing
        os.write(writing, json.dumps(_attempt(known)).encode()[: select.PIPE_BUF])
        os._exit(0)
    os.close(writing)
    ready, _, _ = select.select([reading], [], [], _PROBE_S)
    data = os.read(reading, 65_536) if ready else b""
    os.close(reading)
    if not ready:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if data:
        verdict: dict[str, str] = json.loads(data)
        return verdict
    if not ready:
        return {"verdict": "broken", "detail": "did not end"}
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in known.signals:
        return {"verdict": "blocked", "detail": f"killed by {signal.Signals(os.WTERMSIG(status)).name}"}
    return {"verdict": "broken", "detail": f"ended with {os.waitstatus_to_exitcode(status)}"}


def _attempt(known: Known) -> dict[str, str]:
    try:
        return {"verdict": "allowed", "detail": str(known.run())[:500]}
    except BlockedError as blocked:
        return {"verdict": "blocked", "detail": str(blocked)}
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, str(error.errno))
        if error.errno in known.errnos:
            return {"verdict": "blocked", "detail": name}
        return {"verdict": "broken", "detail": f"{name}: {error}"}
    except BaseException:
        return {"verdict": "broken", "detail": traceback.format_exc()[-800:]}
