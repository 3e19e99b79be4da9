"""Runs inside a container of the call service, as root: an interpreter that is up, forked once for each call, before
the call comes.

`dsec-call` starts it with a socket as descriptor 3 (native/call/src/interpreter.rs has the protocol). It is a file of
its own without imports of dsec, for the environment's Python, whatever version of 3 that is (3.6 or later).

What is in the memory of this process every later call can read in its own: orders are read by the forks alone, and
how they ended goes through a place that is wiped.

    python3 -IB zygote.py MODULE…       the modules are imported before the first call
"""

import array
import atexit
import ctypes
import gc
import importlib
import json
import os
import resource
import signal
import socket
import struct
import sys
import threading
import types
from typing import Any, Dict, List, NoReturn, Optional

_SCORE = b"1000"  # when memory is short, calls go before us
_HEAD = struct.Struct(">I")
_STATUS, _USAGE, _USAGE_BYTES = _HEAD.size, _HEAD.size + 4, 144  # as wait4(2) writes them
_ROOM = 512  # some C libraries have a larger struct rusage, of which the kernel writes no more
_PR_SET_DUMPABLE = 4
_PR_SET_NO_NEW_PRIVS = 38


def main(modules: List[str]) -> None:
    link = socket.socket(fileno=3)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        for module in modules:
            importlib.import_module(module)
    except BaseException as error:
        _send(link, f"cannot import {module}: {error}"[:500].encode("utf-8", "replace"))
        return
    # What is there now is shared with every call as long as nobody writes to it.
    gc.collect()
    if hasattr(gc, "freeze"):
        gc.freeze()
    libc = ctypes.CDLL(None)
    _send(link, b"ready")
    fate = (ctypes.c_char * _ROOM)()
    ctypes.memmove(fate, _HEAD.pack(4 + _USAGE_BYTES), _HEAD.size)
    status, usage = ctypes.byref(fate, _STATUS), ctypes.byref(fate, _USAGE)
    while True:
        pid = os.fork()
        if pid == 0:
            _serve(link, libc)
        _send(link, struct.pack("=i", pid))
        libc.wait4(pid, status, 0, usage)
        link.sendall(memoryview(fate)[: _USAGE + _USAGE_BYTES])
        ctypes.memset(status, 0, 4 + _USAGE_BYTES)


def _send(link: socket.socket, body: bytes) -> None:
    link.sendall(_HEAD.pack(len(body)) + body)


def _serve(link: socket.socket, libc: ctypes.CDLL) -> NoReturn:
    """The fork: gets ready, waits for what it is to do, and does it."""
    try:
        with open("/proc/self/oom_score_adj", "wb", buffering=0) as score:
            score.write(_SCORE)
    except OSError:
        pass
    os.setsid()
    _rehearse(libc)
    passed = _receive(link)
    link.close()
    if passed is None:
        os._exit(0)
    what = _order(passed[3])
    if what["pid"] != os.getpid():  # it was meant for one that has ended
        os._exit(1)
    _become(libc, what, passed[:3])
    _run(what["argv"])


def _rehearse(libc: ctypes.CDLL) -> None:
    """Touches most of what a run does: the kernel gives a fork its pages one by one, at the first use of each."""
    with open("/dev/null", "rb") as file:
        json.loads(file.read().decode("utf-8", "surrogatepass") or '{"a": ["b", 1]}')
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__="main.py", __builtins__=__builtins__, __cached__=None)
    exec(compile("import sys\nprint('', end='')", "main.py", "exec"), main.__dict__)
    for stream in (sys.stdout, sys.stderr):
        stream.write("\n")  # to /dev/null, still
        stream.flush()
    os.environ["PWD"] = os.getcwd()
    resource.setrlimit(resource.RLIMIT_CORE, resource.getrlimit(resource.RLIMIT_CORE))
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    threading.main_thread()
    sys.path[:0] = []


def _receive(link: socket.socket) -> Optional[List[int]]:
    """Three descriptors, and one with what is to be done; None at the end."""
    numbers = array.array("i")
    mark, ancillary, _, _ = link.recvmsg(1, socket.CMSG_SPACE(4 * numbers.itemsize), socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
    return numbers.tolist() if mark else None


def _order(number: int) -> Dict[str, Any]:
    with open(number, "rb") as file:
        found: Dict[str, Any] = json.loads(file.read().decode("utf-8", "surrogatepass"))
    return found


def _become(libc: ctypes.CDLL, what: Dict[str, Any], standard: List[int]) -> None:
    """The call's own user, directory, limits and environment; nothing of ours stays but what is imported."""
    for number, descriptor in enumerate(standard):
        os.dup2(descriptor, number)
    os.closerange(3, max(64, max(standard) + 1))
    for kind, soft, hard in what["limits"]:
        resource.setrlimit(kind, (soft, hard))
    uid = what["uid"]
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    # A change of user makes /proc/self root's, which programs open: proc(5), "dumpable".
    libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    os.chdir(what["directory"])
    os.environ.clear()
    for word in what["env"]:
        name, _, value = word.partition("=")
        os.environ[name] = value
    sys.path[:0] = [os.getcwd()] + [path for path in os.environ.get("PYTHONPATH", "").split(":") if path]
    for name in ("random", "numpy.random"):
        # Python seeds `random` in each fork by itself from 3.7 on.
        module = sys.modules.get(name)
        if module is not None:
            module.seed()


def _run(argv: List[str]) -> NoReturn:
    """As `python3 argv[0] argv[1:]`, to the end of this process."""
    code = 1
    try:
        with open(argv[0], "rb") as file:
            source = file.read()
        sys.argv[:] = argv
        main = types.ModuleType("__main__")
        main.__dict__.update(__file__=argv[0], __builtins__=__builtins__, __cached__=None)
        sys.modules["__main__"] = main
        try:
            exec(compile(source, argv[0], "exec"), main.__dict__)
            code = 0
        except SystemExit as end:
            code = _code_of(end)
        except BaseException as error:
            trace = error.__traceback__
            if trace is not None:  # without our own frame
                error.__traceback__ = trace = trace.tb_next
            sys.excepthook(type(error), error, trace)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except SystemExit as end:
        code = _code_of(end)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except BaseException:
                code = code or 120  # as Python itself
        os._exit(code)


def _code_of(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    print(end.code, file=sys.stderr)
    return 1


if __name__ == "__main__":
    main(sys.argv[1:])
