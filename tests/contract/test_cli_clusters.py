"""What commands say where several nodes are behind the service: which node, and which did not answer."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dsec.cli import console, main
from dsec.sdk.client import AsyncClient
from dsec.sdk.transport import Transport
from dsec.wire.records import Health
from tests.contract.sdk_service import RunningService

LISTS = (("ls",), ("top", "--once"), ("env", "ls"), ("volume", "ls"), ("snapshot", "ls"))


@pytest.fixture
def clustered(service: RunningService, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that says of itself that it stands before several nodes, one of which does not answer."""
    monkeypatch.setenv("DSEC_URL", service.url)
    monkeypatch.setattr(console.settings, "json", False)
    real_call = Transport.call

    async def health(self: AsyncClient) -> Health:
        return Health(version="1", node="", started_at=0.0)

    async def call(self: Transport, *arguments: Any, **more: Any) -> Any:
        answer = await real_call(self, *arguments, **more)
        return msgspec.structs.replace(answer, missing=["zzzzzzzz"]) if hasattr(answer, "missing") else answer

    monkeypatch.setattr(AsyncClient, "health", health)
    monkeypatch.setattr(Transport, "call", call)


@pytest.mark.parametrize("words", LISTS, ids=" ".join)
def test_lists_warn_of_nodes_that_did_not_answer(
    words: tuple[str, ...], clustered: None, capsys: pytest.CaptureFixture[str]
) -> None:
    main.app(list(words), standalone_mode=False)

    said = capsys.readouterr()
    assert "these nodes did not answer, and theirs are not here: zzzzzzzz" in said.err
    assert said.out


@pytest.mark.parametrize("what", ["env", "volume", "snapshot"])
def test_lists_of_what_lies_on_nodes_say_on_which(
    what: str, clustered: None, capsys: pytest.CaptureFixture[str]
) -> None:
    main.app([what, "ls"], standalone_mode=False)

    assert "NODE" in capsys.readouterr().out.splitlines()[0]
