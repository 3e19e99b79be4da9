"""One call in a place that breaks down, or lies: what is told of it, and whether it may be tried again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from dsec.backends.fncall.perform import Performed, perform
from dsec.backends.fncall.runner import Answer, Finished, NewFile, Order, Placed, Ran
from dsec.backends.fncall.tasks import TaskTypes
from dsec.core.errors import Outcome, SandboxFaultError
from dsec.wire.calls import CallCase, CallRequest, CallStatus

LOST = SandboxFaultError("the place is lost")
UNSENT = SandboxFaultError("the place is lost", outcome=Outcome.UNCHANGED)
PLACED, DONE = Answer(placed=Placed(b"/call/1")), Answer(finished=Finished())
RAN = Answer(ran=Ran(why="ended", code=0, out=b"1\n"))
GONE = Answer(ran=Ran(why="lost", detail="it has ended"))


class ScriptedWorker:
    """Answers as it is told, in order; an error is raised in place of an answer."""

    id, memory_bytes, own_bytes = "sbx_x", 1 << 30, 0

    def __init__(self, *script: Answer | SandboxFaultError) -> None:
        self.script = list(script)
        self.calls = 0

    async def ask(self, orders: Sequence[Order], *, later: int = 0) -> list[Answer]:
        return [await self.rest() for _ in range(len(orders) - later)]

    async def rest(self) -> Answer:
        said = self.script.pop(0)
        if isinstance(said, SandboxFaultError):
            raise said
        return said

    async def bound(self, _: int | None) -> None: ...

    def memory(self) -> tuple[int | None, bool]:
        return None, False

    def weigh(self) -> None: ...

    def environment(self, *_: object) -> list[bytes]:
        return []

    def done(self) -> None:
        self.calls += 1


async def performed(worker: ScriptedWorker, **fields: Any) -> tuple[Performed, str | None]:
    request = CallRequest(type="sh", code="", **fields)
    done = await perform(worker, request, TaskTypes().get("sh"))  # type: ignore[arg-type]
    return done, await done.end


async def test_the_answer_is_there_before_the_place_is_clean() -> None:
    worker = ScriptedWorker(PLACED, RAN, DONE)
    done = await perform(worker, CallRequest(type="sh", code=""), TaskTypes().get("sh"))  # type: ignore[arg-type]

    assert (done.answer.status, len(worker.script), worker.calls) == (CallStatus.FINISHED, 1, 0)
    assert (await done.end, len(worker.script), worker.calls) == (None, 0, 1)


@pytest.mark.parametrize(
    ("script", "fields"),
    [
        ([UNSENT], {}),
        ([Answer(refused="no room"), Answer(refused="no room")], {}),
        ([PLACED, GONE], {}),
        ([LOST], {"cases": (CallCase(),)}),
        ([PLACED, UNSENT], {"cases": (CallCase(),)}),
    ],
)
async def test_what_was_not_begun_with_may_be_tried_again(script: list[Any], fields: dict[str, Any]) -> None:
    with pytest.raises(SandboxFaultError):
        await performed(ScriptedWorker(*script), **fields)


LIE = Answer(finished=Finished(files=[NewFile(path=b"other", data=b"", mode=0o644)]))


@pytest.mark.parametrize(
    ("script", "fields"),
    [
        ([LOST], {}),
        ([PLACED, LOST], {}),
        ([PLACED, Answer(refused="it cannot be killed")], {}),
        ([PLACED, RAN, LOST], {"collect": ("out",)}),
        ([PLACED, RAN, LIE], {"collect": ("out",)}),
        ([PLACED, RAN, UNSENT], {"cases": (CallCase(), CallCase())}),
        ([PLACED, RAN, GONE], {"cases": (CallCase(), CallCase())}),
    ],
)
async def test_what_may_have_run_is_told_as_ours_and_the_place_is_given_up(
    script: list[Any], fields: dict[str, Any]
) -> None:
    done, spoilt = await performed(ScriptedWorker(*script), **fields)

    assert done.answer.status is CallStatus.PLATFORM_FAILURE
    assert done.answer.missing == list(fields.get("collect", ()))
    assert spoilt


async def test_a_place_in_which_something_stays_is_given_up_and_the_answer_stands() -> None:
    done, spoilt = await performed(ScriptedWorker(PLACED, RAN, Answer(finished=Finished(dirty="a file"))))

    assert (done.answer.status, spoilt) == (CallStatus.FINISHED, "a file")


@pytest.mark.parametrize(
    ("detail", "env", "for_all"),
    [
        ("sh: No such file or directory (os error 2)", {}, True),
        ("sh: No such file or directory (os error 2)", {"PATH": "/x"}, False),
        ("sh: Resource temporarily unavailable (os error 11)", {}, False),
    ],
)
async def test_only_a_program_that_is_not_there_is_the_environments_fault(
    detail: str, env: dict[str, str], for_all: bool
) -> None:
    done, spoilt = await performed(ScriptedWorker(PLACED, Answer(ran=Ran(why="start", detail=detail)), DONE), env=env)

    assert done.lacks is not None
    assert (done.for_all, spoilt) == (for_all, None)
