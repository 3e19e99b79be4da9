"""A token is known to its holder alone: the service writes it nowhere, and repeats it to nobody."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

SPEC = {"environment": {"base": "base"}, "substrate": "fake"}


@dataclass
class Running:
    directory: Path
    url: str
    pid: int

    def client(self, *, local: bool = False, token: str | None = None) -> aiohttp.ClientSession:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        if local:
            return aiohttp.ClientSession(
                "http://dsec", headers=headers, connector=aiohttp.UnixConnector(str(self.directory / "r/api.sock"))
            )
        return aiohttp.ClientSession(self.url, headers=headers)

    def holders(self, text: str) -> list[str]:
        """Files of the service, and what the machine shows of its process, that hold it."""
        places = [path for path in self.directory.rglob("*") if path.is_file()]
        places += [Path(f"/proc/{self.pid}/{name}") for name in ("cmdline", "environ", "comm")]
        return [str(place) for place in places if text.encode() in place.read_bytes()]


@pytest.fixture
def service(short_tmp: Path) -> Iterator[Running]:
    """With every line of its log, and started by somebody who hides nothing from others."""
    flags = ["--run-dir", f"{short_tmp}/r", "--state-dir", f"{short_tmp}/s"]
    command = [sys.executable, "-m", "dsec.serve"]
    up = [*command, "up", *flags, "--substrate", "fake", "--listen", "127.0.0.1:0", "--log-level", "debug", "--detach"]
    subprocess.run(up, check=True, timeout=90, capture_output=True, umask=0)
    try:
        lines = (short_tmp / "s/dsec.log").read_text().splitlines()
        address = next(ready["tcp"][0] for line in lines if "tcp" in (ready := json.loads(line)))
        yield Running(short_tmp, f"http://{address}", int((short_tmp / "r/dsec.pid").read_text().split()[0]))
    finally:
        subprocess.run([*command, "down", *flags], check=True, timeout=90, capture_output=True)


async def _token(service: Running) -> str:
    request = {"principal": "ci", "project": "/", "rights": ["admin"]}
    async with service.client(local=True) as client, client.post("/v1/tokens", json=request) as answer:
        assert answer.status == 201, await answer.text()
        token: str = (await answer.json())["token"]
        return token


async def _misuse(client: aiohttp.ClientSession, token: str) -> list[str]:
    """Everything that somebody may do with a token by mistake. The answers."""
    answers = []
    for method, path, options in (
        ("GET", f"/v1/sandboxes?token={token}", {}),
        ("GET", f"/v1/sandboxes?access_token={token}&limit=x", {}),
        ("GET", f"/v1/sandboxes/{token}", {}),
        ("GET", f"/{token}", {}),
        ("GET", "/v1/sandboxes", {"headers": {"Authorization": f"Basic {token}"}}),
        ("GET", "/v1/sandboxes", {"headers": {"Authorization": token}}),
        ("GET", "/v1/sandboxes", {"headers": {"Authorization": f"Bearer {token}x"}}),
        ("GET", "/v1/sandboxes", {"headers": {"Cookie": f"token={token}", "X-Api-Key": token}}),
        ("DELETE", f"/v1/tokens/{token}", {}),
        ("POST", "/v1/tokens", {"json": {"principal": "x", "project": token, "rights": ["use"]}}),
        ("POST", "/v1/tokens", {"json": {"token": token}}),
        ("POST", "/v1/tokens", {"data": f'{{"principal": "{token}'}),
        ("POST", "/v1/sandboxes", {"json": {"spec": {**SPEC, "user": token, "x": token}}}),
        ("POST", "/v1/sandboxes", {"json": {"spec": SPEC}, "headers": {"Idempotency-Key": token * 20}}),
    ):
        async with client.request(method, path, **options) as answer:  # type: ignore[arg-type]
            answers.append(f"{answer.status} {await answer.text()}")
    return answers


async def test_a_token_is_written_nowhere_and_said_to_nobody(service: Running) -> None:
    token = await _token(service)
    secret = token.removeprefix("dsec_")
    run = {"id": "exe_aaaaaaaaaaaaaaaa", "shell": "echo x", "wait_s": 20}
    async with service.client(token=token) as client:
        async with client.post("/v1/sandboxes", json={"spec": SPEC}) as answer:
            sandbox = (await answer.json())["id"]
        async with client.post(f"/v1/sandboxes/{sandbox}/execs", json=run) as answer:
            assert answer.status == 200
        with pytest.raises(aiohttp.WSServerHandshakeError):
            await client.ws_connect(f"/v1/sandboxes/{sandbox}/nothing")
        answers = await _misuse(client, token)
        for path in ("/v1/tokens", "/v1/doctor", "/v1/sandboxes", "/metrics"):
            async with client.get(path) as answer:
                answers.append(await answer.text())
    async with service.client() as stranger:
        answers += await _misuse(stranger, token)

    assert not [text[:200] for text in answers if secret[:16] in text]
    assert not [text for text in answers if text.startswith("5")]
    assert service.holders(secret[:16]) == []
    assert service.holders(sandbox) != [], "the search finds what is there"
    async with service.client(local=True) as client, client.delete(f"/v1/sandboxes/{sandbox}") as answer:
        assert answer.status < 300


async def test_a_revoked_token_ends_with_the_next_request(service: Running) -> None:
    token = await _token(service)
    async with service.client(token=token) as client:
        async with client.get("/v1/tokens") as answer:
            [known] = (await answer.json())["tokens"]
        async with client.delete(f"/v1/tokens/{known['id']}") as answer:
            assert answer.status == 200
        async with client.get("/v1/sandboxes") as answer:
            assert answer.status == 401


async def test_a_page_in_a_browser_reaches_nothing(service: Running) -> None:
    """On loopback a page may send what it likes, under any name (DNS rebinding); it has no token."""
    page = {"Origin": "http://evil.example", "Host": "evil.example"}
    async with service.client() as client:
        for method, path in (
            ("OPTIONS", "/v1/sandboxes"),
            ("GET", "/v1/sandboxes"),
            ("POST", "/v1/sandboxes"),
            ("GET", "/v1/health"),
            ("GET", "/metrics"),
        ):
            asked = {**page, "Access-Control-Request-Method": "POST", "Access-Control-Request-Private-Network": "true"}
            async with client.request(method, path, headers=asked, data=None) as answer:
                assert not [name for name in answer.headers if name.lower().startswith("access-control")]
                assert path == "/v1/health" or answer.status in (401, 404, 405), (method, path, answer.status)
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await client.ws_connect("/v1/sandboxes/sbx_x_y/connect?port=1", headers=page)
        assert refused.value.status == 401


async def test_nobody_else_reads_what_the_service_keeps(service: Running) -> None:
    modes = {path: path.lstat().st_mode for path in [service.directory / "r", service.directory / "s"]}
    assert [path for path, mode in modes.items() if stat.S_IMODE(mode) & 0o077] == []

    def open_to_others() -> list[str]:
        found = []
        for top in modes:
            for path in top.rglob("*"):
                mode = path.lstat().st_mode
                if stat.S_IMODE(mode) & 0o022 and not stat.S_ISLNK(mode):
                    found.append(f"{path} {stat.S_IMODE(mode):o}")
        return found

    assert open_to_others() == []
    assert stat.S_IMODE(os.lstat(service.directory / "r/api.sock").st_mode) == 0o600
