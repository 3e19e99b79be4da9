"""Finding our programs, and saying clearly when they are not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsec import binaries
from dsec.core.errors import HostError


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    found = [tmp_path / "wheel", tmp_path / "checkout"]
    for place in found:
        place.mkdir()
    monkeypatch.setattr(binaries, "_PLACES", tuple(found))
    return found


def add(place: Path, mode: int = 0o755) -> Path:
    program = place / "dsec-agent"
    program.write_bytes(b"\x7fELF")
    program.chmod(mode)
    return program


def test_a_wheel_comes_before_a_checkout(places: list[Path]) -> None:
    program = add(places[0])
    add(places[1])

    assert binaries.find_binary("dsec-agent") == program


def test_a_checkout_serves_when_there_is_no_wheel(places: list[Path]) -> None:
    program = add(places[1])

    assert binaries.find_binary("dsec-agent") == program


def test_a_missing_program_is_a_host_error_that_says_what_to_do(places: list[Path]) -> None:
    with pytest.raises(HostError, match="dsec-agent is not there") as caught:
        binaries.find_binary("dsec-agent")

    assert "tools/setup" in (caught.value.hint or "")


def test_a_file_that_cannot_be_executed_does_not_count(places: list[Path]) -> None:
    add(places[0], mode=0o644)

    with pytest.raises(HostError):
        binaries.find_binary("dsec-agent")
