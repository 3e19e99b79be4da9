"""Events from a caller's side: SDK, blocking SDK and command, against the real service."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing, closing

import pytest

import dsec
from dsec.cli import console, main
from dsec.core.errors import InvalidArgumentError, NotFoundError
from tests.contract.sdk_service import CuttingProxy, RunningService


async def test_a_follower_sees_each_event_once_over_lost_connections(
    service: RunningService, proxy: CuttingProxy
) -> None:
    labels = {"of": "lost"}
    seen: list[tuple[str | None, str]] = []
    made: list[str] = []
    async with dsec.AsyncClient(service.url) as direct, dsec.AsyncClient(f"unix://{proxy.path}") as client:

        async def make() -> None:
            for _ in range(6):
                sandbox = await direct.create("base", backend="fake", labels=labels)
                made.append(sandbox.id)
                await sandbox.destroy()

        begun = [event.position async for event in direct.events(follow=False)]
        proxy.answer_bytes, proxy.cuts_left = 1_500, 4
        making = asyncio.create_task(make())
        async with (
            asyncio.timeout(60),
            aclosing(client.events(begun[-1] if begun else "oldest", labels=labels)) as events,
        ):
            async for event in events:
                seen.append((event.sandbox, event.kind))
                if len(seen) == 18:
                    break
        await making

    assert seen == [(id, kind) for id in made for kind in ("created", "running", "destroyed")]


def test_the_blocking_client_iterates_too_and_goes_on_at_a_position(service: RunningService) -> None:
    labels = {"of": "blocking"}
    with dsec.Client(service.url) as client:
        client.create("base", backend="fake", labels=labels).destroy()
        with closing(client.events("oldest", labels=labels)) as events:
            first = next(events)
        rest = list(client.events(first.position, follow=False, labels=labels))
        assert [first.kind, *(event.kind for event in rest)] == ["created", "running", "destroyed"]
        with client.create("base", backend="fake", labels=labels) as one:
            with closing(client.events(rest[-1].position, sandbox=one.id, kinds=("running",))) as events:
                assert next(events).sandbox == one.id
        with pytest.raises(InvalidArgumentError):
            list(client.events("nowhere"))
        for follow in (True, False):
            with pytest.raises(NotFoundError, match="no project '/nowhere'"):
                list(client.events(project="/nowhere", follow=follow))


def test_the_command_shows_them_for_people_and_programs(
    service: RunningService, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSEC_URL", service.url)
    monkeypatch.setattr(console.settings, "json", False)
    with dsec.Client(service.url) as client:
        id = client.create("base", backend="fake", name="shown", labels={"of": "cli"}).id
        main.app(["events", "shown"], standalone_mode=False)
        lines = capsys.readouterr().out.splitlines()
        client.connect(id).destroy()
        main.app(["events", "--label", "of=cli", "--kind", "destroyed", "--json"], standalone_mode=False)
        (last,) = map(json.loads, capsys.readouterr().out.splitlines())

    assert [line.split()[2:6] for line in lines] == [
        ["created", id, "(shown)", "/"],
        ["running", id, "(shown)", "/"],
    ]
    assert (last["kind"], last["sandbox"], last["cause"]) == ("destroyed", id, "destroyed")
