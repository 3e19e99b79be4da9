"""Programs of a node that outlive it: how they are started, found, and understood."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsec.core.errors import CapacityError, DsecError, HostError, InvalidArgumentError, NotFoundError
from dsec.storage import desk
from dsec.storage.locks import file_lock


def start(words: list[str], log: Path, *, keep_log: bool = True) -> bool:
    return desk.start("dsec-one", words, log, hint="do so", keep_log=keep_log)


def test_a_program_serves_once_it_has_exited_with_zero_or_another_one_does(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert start(["/bin/sh", "-c", "echo one"], log)
    assert not start(["/bin/sh", "-c", "echo two >&2; exit 3"], log)
    assert log.read_text() == "one\ntwo\n"
    assert start(["/bin/sh", "-c", "pwd"], log, keep_log=False)
    assert log.read_text() == "/\n"


def test_one_that_does_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="dsec-one does not start: no room") as caught:
        start(["/bin/sh", "-c", "echo no room; exit 1"], tmp_path / "log")
    assert caught.value.hint == "do so"
    with pytest.raises(HostError, match="no message"):
        start(["/bin/sh", "-c", "exit 9"], tmp_path / "other")
    with pytest.raises(HostError, match="cannot run"):
        start([str(tmp_path / "none")], tmp_path / "log")
    with pytest.raises(HostError, match="cannot run"):
        start(["/bin/true"], tmp_path / "none" / "log")


def test_a_run_directory_is_held_while_its_lock_is(tmp_path: Path) -> None:
    lock = tmp_path / "one.lock"
    assert not desk.is_held(lock)
    with file_lock(lock):
        assert desk.is_held(lock)
    lock.touch()
    assert not desk.is_held(lock)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("not_found", NotFoundError),
        ("invalid", InvalidArgumentError),
        ("busy", CapacityError),
        ("host", HostError),
        ("new", HostError),
    ],
)
def test_the_word_of_a_refusal_is_an_error_of_ours(code: str, error: type[DsecError]) -> None:
    found = desk.error_of("it refuses", code, hint="look")
    assert type(found) is error
    assert found.hint == ("look" if error is HostError else None)
