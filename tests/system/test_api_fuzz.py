"""Schemathesis reads the OpenAPI document and asks what it allows, and what it does not, of a real service."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from dsec.wire.api import TYPE_NDJSON
from dsec.wire.events import EventKind

# What a schema cannot say (a body's own checks) may be refused; an ability that the fake lacks is 501.
CONFIG = """
hooks = "{hooks}"
parameters = {{ "path.id" = "{sandbox}", "path.exec" = "{exec}", "path.token" = "{token}", "path.grant" = "{grant}" }}

[checks]
positive_data_acceptance.enabled = false
negative_data_rejection.expected-statuses = ["4xx"]
not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", 501]

# What ends it is asked of one that nobody else needs: without its grant, all that follows is refused.
[[operations]]
include-operation-id = ["destroy_sandbox", "set_ttl"]
parameters = {{ "path.id" = "{doomed}" }}

[[operations]]
include-path-regex = "^/v1/(jobs|snapshots|volumes)/"
exclude-operation-id = ["remove_job", "remove_snapshot", "remove_volume"]
parameters = {{ "path.name" = "known" }}

# Without an end to it, there would be no answer to judge.
[[operations]]
include-operation-id = "read_events"
parameters = {{ "query.follow" = "false" }}

[[operations]]
include-operation-id = "remove_principal"
parameters = {{ "query.id" = "other@/" }}
"""
EXEC = "exe_aaaaaaaaaaaaaaaa"
HOOKS = Path(__file__).with_name("api_fuzz_hooks.py")


@pytest.fixture
def service(short_tmp: Path) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Address, admin token, and what paths are about: a sandbox with one ended exec, a token that nobody uses."""
    flags = ["--run-dir", f"{short_tmp}/r", "--state-dir", f"{short_tmp}/s"]
    command = [sys.executable, "-m", "dsec.serve"]
    up = [*command, "up", *flags, "--substrate", "fake", "--listen", "127.0.0.1:0", "--detach"]
    subprocess.run(up, check=True, timeout=90, capture_output=True)
    try:
        ready = json.loads((short_tmp / "s/dsec.log").read_text().splitlines()[0])
        token, about = asyncio.run(_prepare(short_tmp / "r/api.sock"))
        yield f"http://{ready['tcp'][0]}", token, about
        errors = [json.loads(line) for line in (short_tmp / "s/dsec.log").read_text().splitlines()]
        assert [line for line in errors if line["level"] == "error"] == []
    finally:
        subprocess.run([*command, "down", *flags], check=True, timeout=90, capture_output=True)


def _narrowed(document: dict[str, Any]) -> dict[str, Any]:
    """With the form that names have, and for what this service has: hardly a body would get past those else."""
    schemas = document["components"]["schemas"]
    schemas["Environment"]["properties"]["base"]["pattern"] = "^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$"
    schemas["Substrate"]["enum"] = ["fake"]
    schemas["ExecRequest"]["properties"]["id"]["pattern"] = "^exe_[a-z2-7]{16}$"
    asked = {param["name"]: param["schema"] for param in document["paths"]["/v1/events"]["get"]["parameters"]}
    asked["after"]["enum"] = ["oldest"]
    asked["sandbox"]["pattern"] = "^sbx_[a-z2-7]{8}_[a-z2-7]{16}$"
    asked["kind"]["items"]["enum"] = [str(kind) for kind in EventKind]
    asked["label"]["items"]["pattern"] = "^[a-z]{1,8}=[a-z]{0,8}$"
    for methods in document["paths"].values():
        for operation in methods.values():
            for content in (answer.get("content", {}) for answer in operation["responses"].values()):
                if TYPE_NDJSON in content:  # as the hooks read it: a list of such lines, or errors
                    line = {"anyOf": [content[TYPE_NDJSON]["schema"], {"type": "object", "required": ["error"]}]}
                    content[TYPE_NDJSON]["schema"] = {"type": "array", "items": line}
    return document


async def _prepare(socket: Path) -> tuple[str, dict[str, str]]:
    async with aiohttp.ClientSession("http://dsec", connector=aiohttp.UnixConnector(str(socket))) as client:
        request = {"principal": "fuzz", "project": "/", "rights": ["admin"]}
        async with client.post("/v1/tokens", json=request) as answer:
            token = (await answer.json())["token"]
        async with client.post("/v1/tokens", json={**request, "principal": "other"}) as answer:
            other = (await answer.json())["info"]["id"]
        async with client.get("/v1/grants") as answer:
            grants = {grant["principal"]: grant["id"] for grant in (await answer.json())["grants"]}
        spec = {"environment": {"base": "base"}, "substrate": "fake"}
        async with client.post("/v1/sandboxes", json={"spec": spec}) as answer:
            sandbox = (await answer.json())["id"]
        async with client.post("/v1/sandboxes", json={"spec": spec}) as answer:
            doomed = (await answer.json())["id"]
        for what in ("jobs", "volumes", f"sandboxes/{sandbox}:snapshot"):
            async with client.post(f"/v1/{what}", json={"name": "known"}) as answer:
                assert answer.status < 300, await answer.text()
        run = {"id": EXEC, "shell": "echo x", "wait_s": 20}
        async with client.post(f"/v1/sandboxes/{sandbox}/execs", json=run) as answer:
            assert (await answer.json())["exec"]["state"] == "ended"
        about = {"sandbox": sandbox, "exec": EXEC, "doomed": doomed, "token": other, "grant": grants["other@/"]}
        return token, about


@pytest.mark.parametrize(
    "phases", [("fuzzing", "2"), pytest.param(("coverage,fuzzing", "20"), marks=pytest.mark.slow)], ids=["few", "many"]
)
@pytest.mark.timeout(3_600)
def test_the_service_does_what_its_document_says(
    service: tuple[str, str, dict[str, str]], tmp_path: Path, phases: tuple[str, str]
) -> None:
    url, token, about = service
    with urllib.request.urlopen(f"{url}/openapi.json", timeout=60) as answer:
        (tmp_path / "openapi.json").write_text(json.dumps(_narrowed(json.load(answer))))
    config = tmp_path / "schemathesis.toml"
    config.write_text(CONFIG.format(**about, hooks=HOOKS), encoding="utf-8")
    seed = os.environ.get("DSEC_TEST_SEED", "1")  # the same questions each time, unless told otherwise
    program = Path(sys.executable).with_name("schemathesis")

    done = subprocess.run(
        [
            program, "--config-file", config, "run", "openapi.json", "--url", url,
            "--header", f"Authorization: Bearer {token}",
            "--phases", phases[0], "--max-examples", phases[1], "--seed", seed, "--request-timeout", "75",
            "--continue-on-failure", "--no-color",
        ],
        cwd=tmp_path, capture_output=True, text=True, timeout=3_000,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout[-8_000:]
    # Each of them was let in: an answer of 401 says nothing of what is behind it.
    assert "Authentication failed" not in done.stdout, done.stdout[-8_000:]
