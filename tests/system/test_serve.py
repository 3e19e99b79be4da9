"""`dsec up` as a process: readiness, one for a run directory, signals, what a kill leaves, `dsec down`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

SPEC = {"environment": {"base": "base"}, "substrate": "fake"}


class Place:
    """A run and a state directory, and the services that were started on them."""

    def __init__(self, directory: Path) -> None:
        self.run = directory / "run"
        self.state = directory / "state"
        self.socket = self.run / "api.sock"
        self.substrate = "fake"
        self.processes: list[subprocess.Popen[bytes]] = []

    def command(self, verb: str, *more: str) -> list[str]:
        directories = ["--run-dir", str(self.run), "--state-dir", str(self.state)]
        substrate = ["--substrate", self.substrate] if verb == "up" else []
        return [sys.executable, "-m", "dsec.serve", verb, *directories, *substrate, *more]

    def call(self, verb: str, *more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(verb, *more), capture_output=True, text=True, timeout=90, stdin=subprocess.DEVNULL
        )

    def start(self, *more: str) -> subprocess.Popen[bytes]:
        """In the foreground, and ready."""
        process = subprocess.Popen(
            self.command("up", *more), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self.processes.append(process)
        wait_for(lambda: self.answers() or process.poll() is not None)
        return process

    def pid(self) -> int:
        return int((self.run / "dsec.pid").read_text())

    def answers(self) -> bool:
        try:
            return bool(self.get("/v1/health")["version"])
        except (OSError, aiohttp.ClientError):
            return False

    def get(self, path: str) -> Any:
        return asyncio.run(_request(self.socket, "GET", path))

    def post(self, path: str, body: Any) -> Any:
        return asyncio.run(_request(self.socket, "POST", path, json=body))


async def _request(socket: Path, method: str, path: str, **more: Any) -> Any:
    async with aiohttp.ClientSession("http://dsec", connector=aiohttp.UnixConnector(str(socket))) as client:
        async with client.request(method, path, **more) as answer:
            return await answer.json()


def runs(pid: int) -> bool:
    """Not so for one that has ended and that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(condition: Callable[[], Any], *, deadline_s: float = 60.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


@pytest.fixture
def place(short_tmp: Path) -> Iterator[Place]:
    found = Place(short_tmp)
    yield found
    for process in found.processes:
        process.kill()
        process.communicate(timeout=60)
    with contextlib.suppress(OSError, ValueError):
        os.kill(found.pid(), signal.SIGKILL)


def test_a_detached_service_answers_when_the_command_returns_and_ends_when_told(place: Place) -> None:
    up = place.call("up", "--detach")

    assert up.returncode == 0, up.stderr
    assert place.get("/v1/health")["pid"] == place.pid()
    sandbox = place.post("/v1/sandboxes", {"spec": SPEC})
    assert sandbox["state"] == "running"
    pid = place.pid()
    down = place.call("down")
    assert (down.returncode, str(pid) in down.stderr) == (0, True)
    assert not runs(pid)
    assert not place.socket.exists()
    assert place.call("down").returncode == 0  # nothing to do is fine
    lines = [json.loads(line) for line in (place.state / "dsec.log").read_text().splitlines()]
    assert [line["event"] for line in lines if line["part"] == "serve.up"] == ["ready", "stopping", "stopped"]


def test_a_second_one_says_who_is_there(place: Place) -> None:
    process = place.start()

    for more in ((), ("--detach",)):
        second = place.call("up", *more)
        assert second.returncode == 125
        assert f"process {process.pid}" in second.stderr
    assert place.answers()


def test_what_kill_9_leaves_does_not_stop_the_next_one(place: Place) -> None:
    first = place.start()
    node = place.get("/v1/health")["node"]
    first.kill()
    first.wait(60)
    assert place.socket.exists()

    place.start()

    assert place.get("/v1/health")["node"] == node


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_order(place: Place, number: signal.Signals) -> None:
    process = place.start()

    process.send_signal(number)
    output, _ = process.communicate(timeout=60)

    assert process.returncode == 0, output
    assert not place.socket.exists()
    assert list(place.run.iterdir()) == [place.run / "dsec.pid"]


def test_a_request_under_way_gets_its_grace_and_a_second_signal_takes_it(place: Place, tmp_path: Path) -> None:
    (tmp_path / "dsec.toml").write_text("[api]\ngrace_s = 600\n", encoding="utf-8")
    process = place.start("--config", str(tmp_path / "dsec.toml"))
    sandbox = place.post("/v1/sandboxes", {"spec": SPEC})
    exec = "exe_aaaaaaaaaaaaaaaa"
    place.post(f"/v1/sandboxes/{sandbox['id']}/execs", {"id": exec, "shell": "echo begun; sleep 600"})

    async def follow_and_stop() -> None:
        async with aiohttp.ClientSession("http://dsec", connector=aiohttp.UnixConnector(str(place.socket))) as client:
            async with client.get(f"/v1/sandboxes/{sandbox['id']}/execs/{exec}/output") as answer:
                assert b"begun" in await answer.content.readany()
                process.send_signal(signal.SIGTERM)
                await asyncio.to_thread(wait_for, lambda: not place.socket.exists())
                assert process.poll() is None
                process.send_signal(signal.SIGTERM)
                with pytest.raises(aiohttp.ClientPayloadError):
                    await answer.read()

    asyncio.run(follow_and_stop())

    assert process.wait(60) == 0


@pytest.mark.parametrize("more", [(), ("--detach",)])
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--listen", "nowhere"), "not an address"),
        (("--listen", "0.0.0.0:0"), "unencrypted"),
        (("--listen", "127.0.0.1:0", "--tls-certificate", "/missing", "--tls-key", "/missing"), "certificate"),
        (("--substrate", "cloud"), "substrate"),
        (("--config", "/missing.toml"), "/missing.toml"),
    ],
)
def test_what_cannot_be_started_says_why_and_leaves_nothing_running(
    place: Place, flags: tuple[str, ...], said: str, more: tuple[str, ...]
) -> None:
    done = place.call("up", *flags, *more)

    assert done.returncode in (2, 125)
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not place.socket.exists()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_tcp_with_tls_takes_tokens(place: Place, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost",
         "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    place.call(
        "up", "--detach", "--listen", "127.0.0.1:0", "--tls-certificate", str(certificate), "--tls-key", str(key)
    )
    ready = json.loads((place.state / "dsec.log").read_text().splitlines()[0])
    port = ready["tcp"][0].rpartition(":")[2]
    token = place.post("/v1/tokens", {"principal": "t", "project": "/t", "rights": ["read"]})["token"]

    async def ask() -> list[int]:
        trusted = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=str(certificate)))
        async with aiohttp.ClientSession(f"https://localhost:{port}", connector=trusted) as client:
            statuses = []
            for headers in ({}, {"Authorization": f"Bearer {token}"}):
                async with client.get("/v1/sandboxes", headers=headers) as answer:
                    statuses.append(answer.status)
            return statuses

    assert asyncio.run(ask()) == [401, 200]
    assert place.call("down").returncode == 0


@pytest.mark.root
def test_down_leaves_sandboxes_running_and_with_destroy_leaves_nothing(place: Place, tmp_path: Path) -> None:
    (tmp_path / "root/tmp").mkdir(parents=True)
    place.substrate = "container"
    assert place.call("up", "--detach").returncode == 0
    if (reason := place.get("/v1/doctor")["substrates"]["container"]) != "ok":
        place.call("down")
        pytest.skip(reason)
    build = {"name": "bare", "source": {"kind": "directory", "path": str(tmp_path / "root")}}
    try:
        assert '"done"' in asyncio.run(_text(place.socket, "/v1/environments", build))
        spec = {"environment": {"base": "bare"}, "memory_bytes": 64 << 20}
        assert place.post("/v1/sandboxes", {"spec": spec})["state"] == "running"

        left = place.call("down")
        launcher = int((place.run / "launch.pid").read_text())
        assert "left as before: 1 sandbox;" in left.stderr
        assert runs(launcher)
        assert place.call("up", "--detach").returncode == 0
    finally:
        done = place.call("down", "--destroy")

    assert done.returncode == 0, done.stderr
    assert not runs(launcher)
    assert str(place.run) not in Path("/proc/self/mountinfo").read_text()


def test_destroy_needs_a_service_to_ask(place: Place) -> None:
    done = place.call("down", "--destroy")

    assert (done.returncode, "nothing runs" in done.stderr) == (125, True)


async def _text(socket: Path, path: str, body: Any) -> str:
    async with aiohttp.ClientSession("http://dsec", connector=aiohttp.UnixConnector(str(socket))) as client:
        async with client.post(path, json=body) as answer:
            return await answer.text()
