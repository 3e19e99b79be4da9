"""What is read ahead of a process that goes on: which of its memory that is, and that nothing of it changes."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from dsec.core.errors import HostError
from dsec.core.limits import KIB, MIB
from dsec.density import pagein
from dsec.density.pagein import Part, page_in, private_of, used_of

HELD = (
    "import os, sys; held = os.urandom(1024) * (32 << 10); print(id(held), flush=True); "
    "sys.stdin.readline(); print(held == held[:1024] * (32 << 10))"
)
PRIVATE = [Part(0x10000, 0x40000, of_file=False), Part(0x40000, 0x50000, of_file=True)]


def test_neighbours_are_one_part_and_each_is_of_one_mapping() -> None:
    near, far = 0x1000 + 32 * KIB, 0x2000 + 32 * KIB
    regions = [(0x10000, 0x11000), (0x11000 + near, 0x12000 + near), (0x3F000, 0x41000), (0x60000, 0x61000)]

    assert pagein._joined(regions, PRIVATE) == (
        *(Part(0x10000, 0x11000, of_file=False), Part(0x11000 + near, 0x12000 + near, of_file=False)),
        *(Part(0x3F000, 0x40000, of_file=False), Part(0x40000, 0x41000, of_file=True)),
    )
    assert pagein._joined([(0x10000, 0x11000), (0x11000 + 32 * KIB, far + 0x11000)], PRIVATE) == (
        Part(0x10000, 0x11000 + far, of_file=False),
    )


def test_what_is_not_mapped_to_be_written_needs_not_come() -> None:
    assert pagein._joined([(0x1000, 0x2000), (0x50000, 0x51000)], PRIVATE) == ()


@pytest.fixture
def holder() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """With 32 MiB of its own at an address, and stopped."""
    command = [sys.executable, "-c", HELD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = int(process.stdout.readline())
        process.send_signal(signal.SIGSTOP)
        yield process, address
        process.kill()


@pytest.mark.root
def test_what_a_process_holds_is_found_and_stays_as_it_is(holder: tuple[subprocess.Popen[str], int]) -> None:
    process, address = holder
    used = used_of(process.pid, private_of(process.pid))
    if not used:
        pytest.skip("this kernel does not tell (Linux 6.7 does)")
    assert any(part.start <= address + 16 * MIB < part.end and not part.of_file for part in used)

    page_in(process.pid, used, threading.Event(), touch=True)
    process.send_signal(signal.SIGCONT)

    assert process.communicate("\n")[0] == "True\n"


@pytest.mark.root
def test_what_is_much_is_not_read_ahead(
    holder: tuple[subprocess.Popen[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pagein, "USED_BYTES_MAX", 31 * MIB)

    assert used_of(holder[0].pid, private_of(holder[0].pid)) == ()


@pytest.mark.root
def test_who_stands_still_again_waits_for_nothing(
    holder: tuple[subprocess.Popen[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(pagein, "advise", lambda _, start, *rest: asked.append(start))
    stop = threading.Event()
    stop.set()

    page_in(holder[0].pid, PRIVATE, stop, touch=True)

    assert asked == []


def test_a_process_that_has_ended_is_told() -> None:
    with subprocess.Popen(["true"]) as process:
        pass

    with pytest.raises(HostError, match="cannot be read ahead"):
        page_in(process.pid, PRIVATE, threading.Event(), touch=True)
