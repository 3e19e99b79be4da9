"""What a call may try to reach of others: what serves it, what was there before, and what comes after."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from dsec.sdk.calls import CallResult
from dsec.sdk.client import AsyncClient
from dsec.wire.calls import CallStatus
from dsec.wire.environments import DirectorySource
from tests.system.container_images import make_root
from tests.system.container_place import ENVIRONMENT, private_place, served

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

PATIENT: dict[str, Any] = {"environment": ENVIRONMENT, "run_timeout_s": 60.0, "queue_timeout_s": 120.0}
MARK = "a-secret-of-the-first-call"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(small_store: Path) -> AsyncIterator[AsyncClient]:
    """One place for each task type, so that each call follows another in it."""
    with private_place(small_store) as place:
        place.settings["calls"] = {"place_memory_bytes": "256MiB", "pools": {"each": {"places_max": 1}}}
        async with served(place) as (_, client):
            yield client


async def python(client: AsyncClient, code: str, **options: Any) -> CallResult:
    return await client.call("python", code.replace("MARK", MARK), **{**PATIENT, **options})


REACHING = """
import ctypes, errno, json, os, signal
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.restype = ctypes.c_long
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
class Vector(ctypes.Structure): _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
room = ctypes.create_string_buffer(64)
reached, tried = [], 0
def attempt(name, pid, work):
    global tried
    tried += 1
    try: done = work()
    except OSError: return
    if done is None or done >= 0: reached.append([name, pid])
for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
    if pid == os.getpid(): continue
    for request in (16, 0x4206):  # PTRACE_ATTACH, PTRACE_SEIZE
        attempt("ptrace", pid, lambda: libc.ptrace(request, pid, None, None))
    here, there = Vector(ctypes.addressof(room), 8), Vector(0x400000, 8)
    for call in (libc.process_vm_readv, libc.process_vm_writev):
        attempt("memory", pid, lambda: call(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0))
    for number in (signal.SIGKILL, signal.SIGSTOP, 0):
        attempt("signal", pid, lambda: os.kill(pid, number))
    for file in ("mem", "oom_score_adj", "comm", "clear_refs", "setgroups", "uid_map"):
        attempt(file, pid, lambda: os.close(os.open(f"/proc/{pid}/{file}", os.O_WRONLY)))
    for kind in ("setpriority", "prlimit", "sched"):
        if kind == "setpriority": attempt(kind, pid, lambda: os.setpriority(os.PRIO_PROCESS, pid, 19))
        if kind == "sched": attempt(kind, pid, lambda: os.sched_setaffinity(pid, {0}))
    try: descriptor = os.pidfd_open(pid)
    except (OSError, AttributeError): continue
    attempt("pidfd", pid, lambda: signal.pidfd_send_signal(descriptor, signal.SIGKILL))
    attempt("pidfd_getfd", pid, lambda: libc.syscall(438, descriptor, 0, 0))
for word in open("/proc/net/unix").read().split("\\n")[1:]:
    path = word.split()[-1] if len(word.split()) > 7 else ""
    if path.startswith("@"):
        import socket
        attempt("unix", 0, lambda: socket.socket(socket.AF_UNIX).connect("\\0" + path[1:]))
print(json.dumps([reached, tried]))
"""


async def test_a_call_reaches_no_process_that_serves_it(client: AsyncClient) -> None:
    first = await python(client, REACHING, pids=16)
    second = await python(client, "print('fine')")

    assert first.ok, first.stderr
    reached, tried = json.loads(first.stdout)
    assert tried > 20, "there is somebody to be reached"
    assert reached == []
    assert (second.stdout, second.worker) == ("fine\n", first.worker)


async def test_how_a_call_ended_is_not_in_the_memory_of_the_next(client: AsyncClient) -> None:
    """The interpreter that is up waits for its forks, and each later fork has all that it has had in memory."""
    looking = """
import re, struct, sys
frame, seen = sys._getframe(), []
while frame is not None:
    seen += [value for value in frame.f_locals.values() if isinstance(value, int)]
    frame = frame.f_back
# What the kernel tells of an end comes behind a length: of this call it is not there yet.
# Written so that no pattern finds itself.
wiped, told = re.compile(rb"\\x00{3}\\x94\\x00{148}"), re.compile(rb"\\x00{3}\\x94\\x00M\\x00\\x00")
found = [0, 0]
for line in open("/proc/self/maps"):
    if "r" not in line.split()[1] or "[v" in line: continue
    first, last = (int(end, 16) for end in line.split()[0].split("-"))
    with open("/proc/self/mem", "rb", 0) as memory:
        memory.seek(first)
        try: content = memory.read(last - first)
        except OSError: continue
    found[0] += len(wiped.findall(content))
    found[1] += len(told.findall(content))
print(77 << 8 in seen or 77 in seen, found[0] > 0, found[1])
"""
    first = await python(client, "for n in range(100_000): pass\nraise SystemExit(77)")
    second = await python(client, looking)

    assert first.exit_code == 77
    assert second.stdout == "False True 0\n", second.stderr
    assert second.worker == first.worker


LEAVING = {
    "POSIX objects with names": """
import ctypes
c = ctypes.CDLL(None, use_errno=True)
for name in (b"/MARK",):
    fd = c.shm_open(name, 0o102, 0o666); c.write(fd, b"MARK", 26)
    c.sem_open.restype = ctypes.c_void_p; c.sem_open(name, 0o100, 0o666, 7)
    queue = c.mq_open(name, 0o102, 0o666, None)
    if queue >= 0: c.mq_send(queue, b"MARK", 26, 1)
""",
    "threads that never end": """
import threading, time
for _ in range(8): threading.Thread(target=lambda: time.sleep(1000), daemon=True).start()
""",
    "threads that keep it from ending": """
import threading, time
for _ in range(4): threading.Thread(target=lambda: time.sleep(1000)).start()
raise SystemExit(3)
""",
    "timers, handlers, masks, priorities and limits": """
import os, resource, signal, sys, threading
signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGALRM})
signal.setitimer(signal.ITIMER_REAL, 0.001); os.umask(0o777); os.nice(19); os.chdir("/")
resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16)); sys.setrecursionlimit(50); sys.setswitchinterval(10)
os.environ["MARK"] = "MARK"; sys.path.insert(0, "/tmp"); sys.modules["json"] = None
sys.stdout = None; sys.settrace(lambda *_: None); sys.excepthook = lambda *_: None
import builtins, gc, random; builtins.len = lambda _: 5; gc.disable(); random.seed(1)
""",
    "keys of the kernel": """
import ctypes
c = ctypes.CDLL(None, use_errno=True)
for ring in (-1, -2, -3, -4, -5):
    c.syscall(248, b"user", b"MARK", b"MARK", 26, ring)
""",
    "a process that nobody can see end": """
import os, signal, sys, time
for _ in range(3):
    if os.fork() == 0:
        os.setsid(); signal.signal(signal.SIGHUP, signal.SIG_IGN)
        for fd in range(3): os.close(fd)
        if os.fork() == 0:
            while True: time.sleep(1000)
        os._exit(0)
""",
}

LOOKING = """
import ctypes, gc, json, os, random, resource, signal, sys, threading, time
c = ctypes.CDLL(None, use_errno=True)
c.sem_open.restype = ctypes.c_void_p
def looked(pid):  # (owner, state), (None, None) of one that is gone
    try: return os.stat(f"/proc/{pid}").st_uid, open(f"/proc/{pid}/stat").read().rsplit(") ")[-1][0]
    except OSError: return None, None
for _ in range(1_000):  # who ends is to be waited for by somebody, who has a time of its own
    processes = [looked(pid) for pid in filter(str.isdigit, os.listdir("/proc"))]
    zombies = sum(state == "Z" for _, state in processes)
    if not zombies: break
    time.sleep(0.01)
seen = {
    "shm": c.shm_open(b"/MARK", 0, 0) >= 0, "sem": bool(c.sem_open(b"/MARK", 0)), "queue": c.mq_open(b"/MARK", 0) >= 0,
    "key": c.syscall(249, b"user", b"MARK", None, -4) >= 0,
    "threads": len(os.listdir("/proc/self/task")) + threading.active_count() != 2,
    "int": signal.getsignal(signal.SIGINT) not in (signal.default_int_handler, signal.SIG_DFL),
    "term": signal.getsignal(signal.SIGTERM) != signal.SIG_DFL, "mask": bool(signal.pthread_sigmask(0, [])),
    "timer": signal.getitimer(signal.ITIMER_REAL) != (0, 0), "umask": os.umask(0) != 0o22, "nice": os.nice(0),
    "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 1000, "recursion": sys.getrecursionlimit() != 1000,
    "environment": "MARK" in os.environ, "path": "/tmp" in sys.path, "cwd": os.getcwd() in ("/", "/tmp"),
    "trace": sys.gettrace() is not None, "hook": sys.excepthook is not sys.__excepthook__,
    "len": len([]), "gc": not gc.isenabled(),
    "encoding": sys.stdout.encoding != "utf-8", "random": random.random() == random.Random(1).random(),
    "zombies": zombies, "own": sum(owner == os.getuid() for owner, _ in processes) != 1,
}
print(json.dumps({name: value for name, value in seen.items() if value}))
"""


@pytest.mark.parametrize("what", LEAVING)
async def test_nothing_of_a_call_is_in_the_next(client: AsyncClient, what: str) -> None:
    options: dict[str, Any] = {"run_timeout_s": 1.0} if "keep it" in what else {}
    before = await python(client, LOOKING)
    first = await python(client, LEAVING[what], pids=32, **options)
    second = await python(client, LOOKING)

    assert json.loads(before.stdout).keys() <= {"nice"}, "of whoever runs the tests"
    assert second.stdout == before.stdout, second.stderr
    assert first.status is not CallStatus.PLATFORM_FAILURE, first
    assert second.worker == first.worker, "cleaned up, not thrown away"


async def test_packages_that_everybody_may_change_are_those_of_the_image_for_the_next(
    client: AsyncClient, tmp_path: Path
) -> None:
    """Modules, and what is compiled of them, where an image lets its users write."""
    root = make_root(tmp_path / "root")
    packages = root / "srv/packages"
    (packages / "__pycache__").mkdir(parents=True)
    (packages / "helper.py").write_text("SAYS = 'of the image'\n")
    for path in (packages, packages / "__pycache__", packages / "helper.py"):
        path.chmod(0o777)
    await client.environments.build("shared", DirectorySource(path=str(root)))
    options = {**PATIENT, "environment": "shared", "env": {"PYTHONPATH": "/srv/packages"}}
    use = "import helper, json; print(helper.SAYS, json.__file__)"
    poison = {
        "a module that is changed": "open('/srv/packages/helper.py', 'w').write('SAYS = \"MARK\"')",
        "another in its way": "open('/srv/packages/json.py', 'w').write('')",
        "what is compiled of it": """
import importlib.util, os, py_compile
source = "/srv/packages/helper.py"
times = os.stat(source)
open("/tmp/helper.py", "w").write("SAYS = 'of the first'\\n")
os.utime("/tmp/helper.py", ns=(times.st_atime_ns, times.st_mtime_ns))
py_compile.compile("/tmp/helper.py", cfile=importlib.util.cache_from_source(source), dfile=source, doraise=True)
import helper
assert helper.SAYS == "of the first", "it works, while the place is the call's"
""",
    }

    workers = set()
    for code in poison.values():
        first = await client.call("python", code.replace("MARK", MARK), **options)
        second = await client.call("python", use, **options)
        assert first.ok, first.stderr
        assert second.stdout.startswith("of the image /usr/lib/python3"), second
        assert second.worker != first.worker
        workers |= {first.worker, second.worker}
    assert len(workers) == len(poison) + 1, "the clean one of each is the one that the next changes"
