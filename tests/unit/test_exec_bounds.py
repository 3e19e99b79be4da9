"""Numbers of an exec's request, and the output of a sandbox that is gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dsec.core.errors import GoneError, LimitError
from dsec.core.ids import new_exec_id
from dsec.core.limits import ARG_BYTES_MAX
from dsec.node.execlog import ExecLog
from dsec.wire.records import ExecRequest


@pytest.mark.parametrize(
    "options",
    [
        {"output_bytes_max": 1 << 64},
        {"output_bytes_max": -1},
        {"rlimits": {"nofile": 1 << 64}},
        {"rlimits": {"nofile": -1}},
    ],
)
def test_numbers_that_the_agent_cannot_be_told_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(LimitError):
        ExecRequest(id=new_exec_id(), argv=["true"], **options)


@pytest.mark.parametrize(
    "options",
    [
        {"argv": ["true", "a" * (ARG_BYTES_MAX + 1)]},
        {"argv_bytes": [b"true", b"\xff" * (ARG_BYTES_MAX + 1)]},
        {"shell": "a" * (ARG_BYTES_MAX + 1)},
        {"shell": "true", "env": {"A": "a" * (ARG_BYTES_MAX - 1)}},
    ],
    ids=lambda options: "+".join(options),
)
def test_one_argument_that_no_program_could_be_given_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(LimitError, match="one argument or variable"):
        ExecRequest(id=new_exec_id(), **options)


def test_the_text_of_a_session_is_no_argument() -> None:
    ExecRequest(id=new_exec_id(), shell="a" * (ARG_BYTES_MAX + 1), session="s")


def test_the_end_of_an_exec_of_a_removed_sandbox_is_gone(tmp_path: Path) -> None:
    log = ExecLog(tmp_path / "sandbox" / "execs.log")

    with pytest.raises(GoneError):
        log.read_end(0)
