"""A create from a snapshot: what is said wins, though it is the default; what is not said is the snapshot's."""

from __future__ import annotations

import json
from collections.abc import Iterator

import aiohttp
import pytest

import dsec
from dsec.cli import console, main
from tests.contract.sdk_service import RunningService


@pytest.fixture
def snapshot(service: RunningService) -> Iterator[str]:
    with dsec.Client(service.url) as client, client.create("base", backend="fake", memory="2GiB", cpu=2) as sandbox:
        found = sandbox.snapshot()
        yield found.id
        client.snapshots.remove(found.id)


def test_by_the_sdk(service: RunningService, snapshot: str) -> None:
    with dsec.Client(service.url) as client:
        for options, memory in (({}, 2 << 30), ({"memory": "1GiB"}, 1 << 30), ({"memory": None}, 2 << 30)):
            with client.create(backend="fake", snapshot=snapshot, **options) as made:  # type: ignore[arg-type]
                assert (made.info.memory_bytes, made.info.cpu) == (memory, 2.0)
        plan = client.explain(backend="fake", snapshot=snapshot, cpu=1.0)
        assert (plan.spec.cpu, plan.spec.memory_bytes) == (1.0, 2 << 30)


async def test_in_json_what_is_there_is_said(service: RunningService, snapshot: str) -> None:
    async def memory_of(**more: object) -> int:
        spec = {"environment": {"base": "base"}, "substrate": "fake", **more}
        async with http.post("/v1/sandboxes:explain", json={"spec": spec, "snapshot": snapshot}) as answer:
            return (await answer.json())["spec"].get("memory_bytes", 1 << 30)

    connector = aiohttp.UnixConnector(str(service.socket))
    async with aiohttp.ClientSession("http://dsec", connector=connector) as http:
        assert await memory_of() == 2 << 30
        assert await memory_of(memory_bytes=1 << 30) == 1 << 30
        wrong = {"spec": {"environment": {"base": "base"}}, "given": ["no_such"]}
        async with http.post("/v1/sandboxes", json=wrong) as answer:
            assert (answer.status, (await answer.json())["code"]) == (400, "invalid_argument")


def test_by_the_command(
    service: RunningService, snapshot: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DSEC_URL", service.url)
    monkeypatch.setattr(console.settings, "json", False)

    for words, memory, cpu in (((), 2 << 30, 2.0), (("--memory", "1GiB", "--cpu", "1"), 1 << 30, 1.0)):
        main.app(["create", "--backend", "fake", "--snapshot", snapshot, "--json", *words], standalone_mode=False)
        info = json.loads(capsys.readouterr().out)
        main.app(["rm", info["id"]], standalone_mode=False)
        capsys.readouterr()
        assert (info["memory_bytes"], info["cpu"]) == (memory, cpu)
