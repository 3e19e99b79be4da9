"""Calls in real containers: what comes of code, its limits, and that nothing of a call stays for the next."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from dsec.core import limits
from dsec.core.errors import (
    CapacityError,
    EnvironmentNotFoundError,
    InvalidArgumentError,
    UnsupportedError,
)
from dsec.sdk.calls import CallResult, make_call
from dsec.sdk.client import AsyncClient
from dsec.testing.processes import command_line
from dsec.testing.waiting import eventually
from dsec.wire.calls import CallCase, CallPool, CallStatus, Checker, PhaseLimits
from dsec.wire.environments import DirectorySource
from tests.system.container_images import make_root
from tests.system.container_place import ENVIRONMENT, Place, private_place, served

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

# Never a test of speed: a limit that is not the test's own is out of reach.
PATIENT: dict[str, Any] = {"environment": ENVIRONMENT, "run_timeout_s": 60.0, "queue_timeout_s": 120.0}
MARK = "a-secret-of-the-first-call"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def place(small_store: Path) -> AsyncIterator[tuple[Place, AsyncClient]]:
    """One container for each task type, so that each call follows another in the same place."""
    with private_place(small_store) as place:
        own = {"source": "main.sh", "compile": ["sh", "main.sh", "compile"], "run": ["./main"]}
        place.settings["calls"] = {
            "places_max": 2,
            "place_memory_bytes": "256MiB",
            "types": {"own": own},
            "pools": {"each": {"places_max": 1}},
        }
        async with served(place) as (_, client):
            yield place, client


@pytest.fixture(scope="module")
def client(place: tuple[Place, AsyncClient]) -> AsyncClient:
    return place[1]


async def pool_is(client: AsyncClient, right: Callable[[CallPool], bool]) -> None:
    async with asyncio.timeout(60):
        while not right(await python_pool(client)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def at_rest(client: AsyncClient) -> None:
    """The place is clean again, and nobody has it: who called before had their answer earlier than that."""
    await pool_is(client, lambda pool: (pool.busy, pool.starting, pool.queued) == (0, 0, 0))


async def python_pool(client: AsyncClient) -> CallPool:
    found = [pool for pool in await client.call_pools() if (pool.environment, pool.type) == (ENVIRONMENT, "python")]
    return found[0]


async def python(client: AsyncClient, code: str, **options: Any) -> CallResult:
    return await client.call("python", code, **{**PATIENT, **options})


async def test_code_runs_with_its_input_arguments_environment_and_files(client: AsyncClient) -> None:
    code = """
import os, sys
print(sys.stdin.read(), sys.argv, os.environ["WHO"], open("data/in.txt").read(), __name__, __file__)
print("told", file=sys.stderr)
open("out.bin", "wb").write(bytes(range(256)))
sys.exit(7)
"""
    result = await python(
        client,
        code,
        stdin="some input",
        args=["a", "b c"],
        env={"WHO": "me"},
        files={"data/in.txt": "content"},
        collect=["out.bin", "none", "data"],
    )

    assert result.status is CallStatus.ERROR
    assert result.stdout == "some input ['main.py', 'a', 'b c'] me content __main__ main.py\n"
    assert (result.stderr, result.exit_code) == ("told\n", 7)
    assert (result.files, result.missing) == ({"out.bin": bytes(range(256))}, ["none", "data"])
    assert result.run is not None
    assert result.run.cpu_s > 0


async def test_a_warm_interpreter_behaves_as_a_fresh_one(client: AsyncClient) -> None:
    """Random numbers, a traceback, exit handlers, a thread that outlives main, and what is imported."""
    code = """
import atexit, os, random, sys, threading, time
print(random.random())
atexit.register(print, "at the end")
threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
print(sys.path[0] == os.getcwd())
"""
    first, second = await python(client, code), await python(client, code)
    failed = await python(client, "def f():\n    raise ValueError('no')\nf()")

    assert first.stdout.split("\n")[1:] == ["True", "thread", "at the end", ""]
    assert first.stdout.split("\n")[0] != second.stdout.split("\n")[0]
    assert (failed.exit_code, failed.stdout) == (1, "")
    assert failed.stderr.splitlines()[:2] == [
        "Traceback (most recent call last):",
        '  File "main.py", line 3, in <module>',
    ]
    assert "zygote" not in failed.stderr


@pytest.mark.parametrize(
    ("code", "options", "status"),
    [
        ("while True: pass", {"run_timeout_s": 0.3}, CallStatus.TIME_LIMIT),
        ("while True: pass", {"cpu_s": 0.2}, CallStatus.TIME_LIMIT),
        ("import os\nfor _ in range(3): os.fork()\nwhile True: pass", {"cpu_s": 0.2}, CallStatus.TIME_LIMIT),
        ("x = bytearray(200 << 20)", {"memory": "32MiB"}, CallStatus.MEMORY_LIMIT),
        ("open('f', 'wb').write(bytes(100 << 20))", {"memory": "32MiB", "file_bytes": "1GiB"}, CallStatus.MEMORY_LIMIT),
        ("print('x' * 100_000)", {"output_bytes": 1_000}, CallStatus.OUTPUT_LIMIT),
        ("import sys\nwhile True: sys.stderr.write('x' * 1000)", {"output_bytes": 1_000}, CallStatus.OUTPUT_LIMIT),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", {}, CallStatus.KILLED),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", {}, CallStatus.ERROR),
        ("open('f', 'wb').write(bytes(1 << 20))", {"file_bytes": 1_000}, CallStatus.ERROR),
        ("import os\nfor _ in range(200): os.fork() or os._exit(0)", {"pids": 4}, CallStatus.ERROR),
        ("1/0", {}, CallStatus.ERROR),
        ("", {}, CallStatus.FINISHED),
    ],
)
async def test_each_limit_is_told_as_what_it_is_and_the_place_goes_on(
    client: AsyncClient, code: str, options: dict[str, Any], status: CallStatus
) -> None:
    result = await python(client, code, **options)
    after = await python(client, "print('fine')")

    assert result.status is status, result
    assert (after.stdout, after.ok) == ("fine\n", True)
    if options.get("output_bytes"):
        assert result.run is not None
        assert max(len(result.run.stdout), len(result.run.stderr)) == options["output_bytes"]


LEAVING = {
    "files where everybody may write": """
import os
for d in ("/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue"):
    try:
        os.makedirs(d + "/x/y/z", exist_ok=True); open(d + "/x/y/z/f", "w").write("MARK"); os.chmod(d + "/x", 0)
    except OSError: pass
    try: open(d + "/MARK", "w").write("MARK")
    except OSError: pass
    try: os.symlink("/etc/passwd", d + "/link")
    except OSError: pass
""",
    "a daemon in a session of its own": """
import os, time, signal
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True: time.sleep(0.01); open("/tmp/MARK", "w").write("MARK")
    os._exit(0)
""",
    "processes that fork without end": """
import os
for _ in range(20):
    if os.fork() == 0:
        while True:
            if os.fork(): os._exit(0)
""",
    "processes that stop and kill all that they may": """
import os, signal
for _ in range(4):
    if os.fork() == 0:
        signal.signal(signal.SIGCONT, signal.SIG_IGN)
        while True:
            for number in (signal.SIGSTOP, signal.SIGCONT, signal.SIGKILL):
                try: os.kill(-1, number) if os.fork() == 0 else None
                except OSError: pass
""",
    "a server on localhost, and one without a file": """
import os, socket, time
if os.fork() == 0:
    tcp = socket.socket(); tcp.bind(("127.0.0.1", 4321)); tcp.listen()
    unix = socket.socket(socket.AF_UNIX); unix.bind("\\0MARK"); unix.listen()
    open("/tmp/MARK", "w").write("up")
    time.sleep(1000)
while not os.path.exists("/tmp/MARK"): time.sleep(0.01)
""",
    "System V shared memory": """
import ctypes
libc = ctypes.CDLL(None, use_errno=True); libc.shmat.restype = ctypes.c_void_p
id = libc.shmget(4321, 4096, 0o1666); p = libc.shmat(id, None, 0)
ctypes.memmove(p, b"MARK", 4); print(id)
libc.semget(4321, 1, 0o1666); libc.msgget(4321, 0o1666)
""",
    "a standard library that lies": """
import sys, os, json, builtins
json.loads = lambda *_: "MARK"; builtins.print = lambda *_: None; sys.modules["os"] = None
for where in (json.__file__, os.__file__, "/usr/lib/python3/dist-packages/sitecustomize.py"):
    for path in (where, where + "c"):
        try: open(path, "w").write("MARK")
        except OSError: pass
for d in sys.path:
    try: os.makedirs(d + "/__pycache__", exist_ok=True); open(d + "/MARK.py", "w").write("MARK")
    except (OSError, AttributeError): pass
""",
    "directories too deep to be named": """
import os
for _ in range(400):
    os.mkdir("d"); os.chdir("d")
""",
}

LOOKING = """
import os, socket, ctypes, json
seen = []
for d in ("/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue", "/call", "."):
    try: names = os.listdir(d)
    except OSError: names = []
    seen += [d + "/" + name for name in names if name != "main.py"]
    if d == "/call" and names: seen.append("the names of places")
me = os.getuid()
for pid in filter(str.isdigit, os.listdir("/proc")):
    for what in ("mem", "environ", "maps", "cwd", "root", "exe", "fd"):
        path = f"/proc/{pid}/{what}"
        if int(pid) == os.getpid(): continue
        read = {"fd": os.listdir, "cwd": os.readlink, "root": os.readlink, "exe": os.readlink}
        try: read.get(what, lambda name: open(name, "rb").read(1))(path)
        except OSError: continue
        seen.append(path)
    try: owner = os.stat(f"/proc/{pid}").st_uid
    except FileNotFoundError: continue
    if owner == me and int(pid) != os.getpid(): seen.append("process " + pid)
for address in (("127.0.0.1", 4321), "\\0MARK"):
    s = socket.socket(socket.AF_INET if isinstance(address, tuple) else socket.AF_UNIX)
    try: s.connect(address); seen.append(str(address))
    except OSError: pass
    s.close()
libc = ctypes.CDLL(None)
for call in (libc.shmget(4321, 0, 0), libc.semget(4321, 0, 0), libc.msgget(4321, 0)):
    if call != -1: seen.append("System V")
print(json.dumps(seen), json.loads("1"), "MARK" in os.environ.values(), len(os.listdir("/proc/self/fd")))
"""


@pytest.mark.parametrize("what", LEAVING)
async def test_nothing_of_a_call_is_there_for_the_next(client: AsyncClient, what: str) -> None:
    first = await python(client, LEAVING[what].replace("MARK", MARK), stdin=MARK, env={"HIDDEN": MARK}, pids=64)
    second = await python(client, LOOKING.replace("MARK", MARK))

    assert first.status is not CallStatus.PLATFORM_FAILURE, first
    assert (second.stderr, second.exit_code) == ("", 0)
    seen, rest = second.stdout.rsplit("]", 1)
    assert json.loads(seen + "]") == []
    assert rest.split() == ["1", "False", "4"]
    assert MARK not in second.stdout
    assert second.worker == first.worker, "cleaned up, not thrown away"


async def test_what_others_asked_for_is_not_in_the_memory_of_a_call(client: AsyncClient) -> None:
    """A call is a fork of an interpreter that has served others: what that has had in memory, all forks have."""
    looking = """
import re
found, wanted = 0, re.compile(b"PATTERN")  # which does not find itself
for line in open("/proc/self/maps"):
    first, last = (int(end, 16) for end in line.split()[0].split("-"))
    with open("/proc/self/mem", "rb", 0) as memory:
        try:
            memory.seek(first)
            found += len(wanted.findall(memory.read(last - first))) if "r" in line.split()[1] else 0
        except (OSError, ValueError, OverflowError): pass
print(found)
""".replace("PATTERN", MARK.replace("-", "[-]"))
    given: dict[str, Any] = {"env": {"HIDDEN": MARK}, "args": [MARK], "stdin": MARK, "files": {"file": MARK}}
    first = await python(client, f"print('{MARK}')", **given)
    second = await python(client, looking)

    assert first.ok
    assert (second.stdout, second.stderr) == ("0\n", "")
    assert second.worker == first.worker


async def test_ports_that_a_call_has_used_are_free_for_the_next(client: AsyncClient) -> None:
    """The end of a connection that closed first keeps its port for a minute, whoever has made it."""
    talking = """
import socket
listener = socket.create_server(("127.0.0.1", 4322)); client = socket.create_connection(("127.0.0.1", 4322))
served, _ = listener.accept(); served.close(); client.close(); listener.close()
"""
    first = await python(client, talking)
    second = await python(client, "import socket; socket.socket().bind(('127.0.0.1', 4322))")

    assert first.ok
    assert second.ok, second
    assert second.worker != first.worker


async def test_files_in_each_others_way_cost_no_place(client: AsyncClient) -> None:
    before = await python(client, "")
    for files in ({"a": "", "a/b": ""}, {"main.py/a": ""}, {"main.py": ""}):
        with pytest.raises(InvalidArgumentError):
            await python(client, "", files=files)

    assert (await python(client, "")).worker == before.worker


async def test_a_place_in_which_something_stays_is_given_up(client: AsyncClient, tmp_path: Path) -> None:
    """Where an image lets everybody write and nobody would look: a new file, one that is changed, one that is gone."""
    root = make_root(tmp_path / "root", python=False)
    (root / "open/below").mkdir(parents=True)
    for directory in ("open", "open/below"):
        (root / directory).chmod(0o777)
    (root / "open/below/file").write_text("of the image")
    (root / "open/below/file").chmod(0o666)
    (root / "tmp").mkdir(exist_ok=True)
    (root / "tmp").chmod(0o777)
    await client.environments.build("open", DirectorySource(path=str(root)))
    options = {**PATIENT, "environment": "open"}

    workers = []
    for code in ("echo x > /open/new", "echo x >> /open/below/file", "rm /open/below/file", "true", "true"):
        result = await client.call("bash", code, **options)
        assert result.ok, result
        workers.append(result.worker)
    looked = await client.call("bash", "ls /open /open/below; cat /open/below/file", **options)

    assert len(set(workers)) == 4
    assert workers[3] == workers[4]
    # Without that everybody could leave attributes of it to the next.
    assert (await client.call("bash", "test -k /tmp", **options)).ok
    assert looked.stdout == "/open:\nbelow\n\n/open/below:\nfile\nof the image"


async def test_code_is_compiled_once_and_run_for_each_case(client: AsyncClient) -> None:
    cases = [CallCase(stdin=b"1", expected=b"2"), ("2", "4"), ("3", "7"), ("4", "8")]
    code = "print(int(input()) * 2)"

    early = await python(client, code, cases=cases)
    whole = await python(client, code, cases=cases, stop_early=False)

    right, wrong = CallStatus.FINISHED, CallStatus.WRONG_ANSWER
    assert (early.status, [case.status for case in early.cases]) == (wrong, [right, right, wrong])
    assert [case.status for case in whole.cases] == [right, right, wrong, right]
    assert whole.cases[2].run.stdout == b"6\n"


async def test_a_checker_judges_what_has_many_answers(client: AsyncClient) -> None:
    checker = """
import os, sys
a, b, c = (open(name).read() for name in ("input", "output", "expected"))
try: os.listdir("/call/20000"); sys.exit(9)
except OSError: pass
print("seen", a, b, c)
sys.exit(0 if sorted(b.split()) == sorted(c.split()) else 1)
"""
    code = "print(*reversed(input().split()))"
    cases = [("1 2 3", "1 2 3"), ("1 2", "1 3"), ("4 5", "5 4")]

    result = await python(client, code, cases=cases, checker=checker, stop_early=False)
    exits = await python(client, code, cases=cases, checker=Checker(code="raise SystemExit(5)"))
    raises = await python(client, code, cases=cases, checker=Checker(code="import os\n1/0"))
    slow = Checker(code="while True: pass", limits=PhaseLimits(wall_s=0.2))
    endless = await python(client, code, cases=cases, checker=slow)
    absent = await python(client, code, cases=cases, checker=Checker(code="", type="ruby"))

    right, wrong = CallStatus.FINISHED, CallStatus.WRONG_ANSWER
    assert [case.status for case in result.cases] == [right, wrong, right], result.cases
    assert result.cases[0].checker is not None
    assert result.cases[0].checker.stdout == b"seen 1 2 3 3 2 1\n 1 2 3\n"
    for broken in (exits, raises, endless, absent):
        assert (broken.status, len(broken.cases)) == (CallStatus.CHECKER_ERROR, 1), broken
    assert raises.cases[0].checker is not None
    assert b"ZeroDivisionError" in raises.cases[0].checker.stderr
    assert absent.worker == result.worker, "a checker that is not there costs no place"


async def test_code_that_leaves_its_judge_no_room_has_not_passed_and_runs_once(client: AsyncClient) -> None:
    code = """
count = 0
try:
    while True: open(f"/tmp/{count}", "w").close(); count += 1
except OSError: pass
"""
    result = await python(client, code, cases=[("", "x")], checker="raise SystemExit(1)")

    assert result.status is CallStatus.MEMORY_LIMIT, result.cases
    assert result.cases[0].run.status is CallStatus.FINISHED


async def test_a_program_that_takes_itself_away_has_failed(client: AsyncClient) -> None:
    making = 'if [ "$1" = compile ]; then cp main.sh main; chmod 755 main; else rm main; fi'
    making = f"#!/bin/bash\n{making}\n"
    gone = await client.call("own", making, cases=[("", ""), ("", "")], **PATIENT)
    never = await client.call("own", "true", **PATIENT)

    assert [case.status for case in gone.cases] == [CallStatus.FINISHED, CallStatus.ERROR]
    assert (never.status, never.compile is not None and never.compile.status) == ("error", "finished")


async def test_words_of_checkers_count_for_the_size_of_an_answer(
    client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CALL_ANSWER_BYTES_MAX", 1_500)
    checker = "print('x' * 999)"

    result = await python(client, "", cases=[("", "")] * 3, checker=checker)

    said = [len(case.checker.stdout) for case in result.cases if case.checker is not None]
    assert (said, result.status) == ([1_000, 0, 0], CallStatus.FINISHED)


async def test_thousands_of_calls_each_have_their_result(client: AsyncClient) -> None:
    requests = [make_call("python", f"print({number})", **PATIENT) for number in range(60)]
    requests.insert(30, make_call("python", "1/0", **PATIENT))
    requests.insert(40, make_call("nonsense", "", **PATIENT))

    results = await client.call_many(requests, concurrency=16)

    assert isinstance(results.pop(40), UnsupportedError)
    failed = results.pop(30)
    assert isinstance(failed, CallResult)
    assert failed.status is CallStatus.ERROR
    assert [r.stdout if isinstance(r, CallResult) else r for r in results] == [f"{n}\n" for n in range(60)]


async def test_what_is_not_there_is_said(client: AsyncClient) -> None:
    with pytest.raises(UnsupportedError, match="rustc"):
        await client.call("rust", "fn main() {}", **PATIENT)
    with pytest.raises(EnvironmentNotFoundError):
        await client.call("python", "", **{**PATIENT, "environment": "nowhere"})
    with pytest.raises(UnsupportedError, match="no task type"):
        await client.call("cobol", "", **PATIENT)
    assert not [pool for pool in await client.call_pools() if pool.environment == "nowhere"]


async def test_who_waits_too_long_is_told_when_to_come_back(client: AsyncClient) -> None:
    await at_rest(client)
    long = asyncio.create_task(python(client, "import time; time.sleep(600)", run_timeout_s=600))
    await pool_is(client, lambda pool: pool.busy == 1)
    waiting = asyncio.create_task(python(client, "print(1)"))
    await pool_is(client, lambda pool: pool.queued == 1)
    with pytest.raises(CapacityError) as refused:
        await python(client, "", queue_timeout_s=0.05)
    long.cancel()
    await asyncio.gather(long, return_exceptions=True)

    assert refused.value.retry_after_s is not None
    assert (await waiting).stdout == "1\n"


async def test_a_caller_that_goes_away_takes_its_call_with_it(client: AsyncClient) -> None:
    await at_rest(client)
    before = (await python_pool(client)).retired
    task = asyncio.create_task(python(client, "while True: pass", run_timeout_s=600))
    await pool_is(client, lambda pool: pool.busy > 0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    await pool_is(client, lambda pool: (pool.busy, pool.retired) == (0, before + 1))
    assert (await python(client, "print(1)")).ok


async def test_shell_code_runs_without_an_interpreter_that_is_up(client: AsyncClient) -> None:
    result = await client.call("bash", 'cat; echo "$1" "$(id -u)" >&2; exit 3', stdin="in", args=["x"], **PATIENT)

    assert (result.stdout, result.exit_code) == ("in", 3)
    assert result.stderr.startswith("x ")
    assert result.stderr.split()[1] != "0"


async def test_the_places_leave_nothing_when_the_node_ends(small_store: Path) -> None:
    with private_place(small_store) as place:
        place.settings["calls"] = {"places_max": 2}
        async with served(place) as (_, client):
            assert (await python(client, "print(1)")).ok
            assert place.cgroup_files("sbx_*")
        await eventually(lambda: left_of(place) == [])


def left_of(place: Place) -> list[str]:
    """Cgroups and directories of containers."""
    found = [*place.cgroup_files("sbx_*"), *(place.state / "sandboxes").glob("sbx_*"), *(place.run / "sb").glob("*")]
    return [str(path) for path in found]


async def test_clients_of_sandbox_fusion_are_served(place: tuple[Place, AsyncClient]) -> None:
    """Their request, and the fields of their answer that reward functions read."""
    code = """
import sys
print(open("d/in").read() + input())
open("out", "w").write("x")
print("e", file=sys.stderr)
"""
    asked = {
        "code": code,
        "language": "python",
        "run_timeout": 60,
        "stdin": "in",
        "files": {"d/in": base64.b64encode(b"file ").decode()},
        "fetch_files": ["./out", "none"],
        "unknown_to_us": 1,
    }

    good = await run_code(place[0], asked)
    bad = await run_code(place[0], {"code": "1/0", "language": "python", "run_timeout": 60})
    slow = await run_code(place[0], {"code": "while True: pass", "language": "python", "run_timeout": 0.2})
    none = await run_code(place[0], {"code": "", "language": "D_ut"}, status=501)

    run = good["run_result"]
    assert (good["status"], run["status"], run["return_code"]) == ("Success", "Finished", 0)
    assert (run["stdout"], run["stderr"]) == ("file in\n", "e\n")
    assert good["files"] == {"./out": base64.b64encode(b"x").decode()}
    assert good["compile_result"] is None
    assert (bad["status"], bad["run_result"]["status"], bad["run_result"]["return_code"]) == ("Failed", "Finished", 1)
    assert "ZeroDivisionError" in bad["run_result"]["stderr"]
    assert (slow["status"], slow["run_result"]["status"]) == ("Failed", "TimeLimitExceeded")
    assert none["code"] == "unsupported"


async def run_code(place: Place, body: dict[str, Any], *, status: int = 200) -> dict[str, Any]:
    url = f"http://dsec/run_code?environment={ENVIRONMENT}"
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(place.run / "api.sock"))) as session:
        async with session.post(url, json=body) as response:
            assert response.status == status, await response.text()
            found: dict[str, Any] = await response.json()
            return found


PARTS = {
    "what runs calls": lambda line: b"/.dsec/dsec-call" in line,
    "the interpreter that is up": lambda line: b"/.dsec/zygote.py" in line,
    "the agent": lambda line: line.startswith(b"dsec-agent"),
}


@pytest.mark.parametrize("part", PARTS)
async def test_a_place_that_breaks_down_under_a_call_is_told_as_that(small_store: Path, part: str) -> None:
    with private_place(small_store) as place:
        place.settings["calls"] = {"places_max": 1}
        async with served(place) as (_, client):
            assert (await python(client, "print(1)")).ok
            code = "open('begun', 'w').close(); import time; time.sleep(600)"
            task = asyncio.create_task(python(client, code, run_timeout_s=600))
            # Before its code has begun another place would be given the call.
            await eventually(lambda: any(Path(f"/proc/{pid}/cwd/begun").exists() for pid in place.pids()))
            for pid in place.pids():
                if PARTS[part](command_line(pid)):
                    os.kill(pid, signal.SIGKILL)
            broken = await task
            after = await python(client, "print(2)")

    assert broken.status is CallStatus.PLATFORM_FAILURE
    assert broken.run is not None
    assert broken.run.detail
    assert (after.ok, after.stdout) == (True, "2\n")


async def test_places_of_a_service_that_was_killed_are_gone_after_the_next_start(small_store: Path) -> None:
    with private_place(small_store) as place:
        place.start_process()
        async with AsyncClient(place.url) as client:
            await place.ready(client)
            assert (await python(client, "print(1)")).ok
            before = set(place.cgroup_files("sbx_*"))
            place.kill_node()
            place.start_process()
            await place.ready(client)
            assert (await python(client, "print(2)")).ok
            await eventually(lambda: not before & set(place.cgroup_files("sbx_*")))
