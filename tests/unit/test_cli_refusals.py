"""After a command that failed: what its sandbox was refused meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from dsec.cli import egress
from dsec.cli.console import settings
from dsec.sdk.results import ExecResult
from dsec.wire.events import Denied, Event


class Place:
    """A sandbox, and the service that tells of it."""

    def __init__(self, *events: Event, network: str = "proxied") -> None:
        self.info = SimpleNamespace(network=network, name="box")
        self.id = "sbx_a"
        self.told = events
        self.asked = 0

    async def execs(self) -> list[Any]:
        self.asked += 1
        return [SimpleNamespace(id="exec_0", started_at=1.0), SimpleNamespace(id="exec_1", started_at=50.0)]

    async def events(self, after: str, **more: Any) -> AsyncIterator[Event]:
        for event in self.told:
            yield event

    async def tell(self, code: int = 6) -> None:
        result = ExecResult(
            id="exec_1", status="exited", exit_code=code, signal=None, cause=None, stdout_bytes=b"", stderr_bytes=b""
        )
        await egress.tell_refused(self, self, result)  # type: ignore[arg-type]


def refusal(at: float, *hosts: str, port: int = 443, reason: str = "rules") -> Event:
    denied = tuple(Denied(host=host, port=port, reason=reason) for host in hosts)
    return Event(kind="egress_denied", at=at, denied=denied)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(egress, "_GATHERED_S", 0.0)
    monkeypatch.setattr(egress, "_LATE_S", 0.0)


async def test_what_was_refused_since_the_command_began_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    place = Place(
        refusal(49.0, "early.example"), refusal(51.0, "a.example"), refusal(52.0, "a.example", "\x1b.example")
    )
    await place.tell()

    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == (
        "dsec: refused meanwhile: a.example:443 (rules), \ufffd.example:443 (rules); "
        "`dsec egress box` says what is allowed, and --allow changes it\n"
    )

    await Place(refusal(51.0, *(f"{letter}.example" for letter in "abcde"), port=0)).tell()
    assert "c.example (rules) and 2 more;" in capsys.readouterr().err


async def test_what_is_told_late_of_one_that_was_refused_before_is_waited_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Late(Place):
        looks = 0

        async def events(self, after: str, **more: Any) -> AsyncIterator[Event]:
            self.looks += 1
            yield refusal(49.0, "early.example")
            if self.looks == 2:
                yield refusal(51.0, "late.example")

    await Late().tell()

    assert "refused meanwhile: late.example:443 (rules); " in capsys.readouterr().err


@pytest.mark.parametrize(("reason", "says"), [("private", "only the operator does"), ("rate", "too much at once")])
async def test_rules_are_no_advice_where_rules_do_not_help(
    capsys: pytest.CaptureFixture[str], reason: str, says: str
) -> None:
    await Place(refusal(51.0, "10.0.0.1", reason=reason)).tell()
    said = capsys.readouterr().err

    assert f"10.0.0.1:443 ({reason}); " in said
    assert says in said
    assert "--allow changes it" not in said

    await Place(refusal(51.0, "10.0.0.1", reason=reason), refusal(52.0, "a.example")).tell()
    said = capsys.readouterr().err
    assert says in said
    assert "--allow changes it" in said


async def test_nothing_is_asked_or_said_where_it_is_of_no_use(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fine, none, early = (
        Place(refusal(51.0, "a.example")),
        Place(refusal(51.0, "a.example"), network="none"),
        Place(refusal(49.0, "a.example")),
    )
    await fine.tell(code=0)
    await none.tell()
    await early.tell()
    monkeypatch.setattr(settings, "json", True)
    await fine.tell()

    assert capsys.readouterr().err == ""
    assert (fine.asked, none.asked, early.asked) == (0, 0, 1)
