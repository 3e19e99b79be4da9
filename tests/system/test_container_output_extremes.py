"""Output at its extremes: gigabytes, a hundred streams, readers that do not read, cut characters; and arguments."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from dsec.core.errors import InvalidArgumentError, LimitError
from dsec.core.limits import ARG_BYTES_MAX, MIB
from dsec.sdk.client import AsyncClient
from dsec.sdk.sandbox import AsyncSandbox
from dsec.testing.processes import all_processes
from tests.system.container_place import ENVIRONMENT

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox(client: AsyncClient) -> AsyncIterator[AsyncSandbox]:
    async with await client.create(ENVIRONMENT, memory="256MiB", pids=512) as sandbox:
        yield sandbox


def _resident_bytes(pid: int | str = "self") -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


def _agent(sandbox: AsyncSandbox) -> int:
    """The pid of its agent as this host sees it: the first process of its namespace."""
    for pid in all_processes():
        with contextlib.suppress(OSError):
            if sandbox.id in Path(f"/proc/{pid}/cgroup").read_text():
                inside = Path(f"/proc/{pid}/status").read_text().partition("NSpid:")[2].split("\n")[0].split()
                if len(inside) > 1 and inside[-1] == "1":
                    return pid
    raise AssertionError(f"no agent of {sandbox.id}")


@pytest.mark.slow
@pytest.mark.timeout(1_800)
async def test_five_gigabytes_are_followed_in_constant_memory(sandbox: AsyncSandbox) -> None:
    total, line = 5_000_000_000, b"0123456789abcde\n"
    agent = _agent(sandbox)
    process = await sandbox.start(f"yes 0123456789abcde | head -c {total}", record_bytes_max=MIB)
    here, there = _resident_bytes(), _resident_bytes(agent)
    peak_here, peak_there, pieces, seen, end = 0, 0, 0, 0, 0

    async with contextlib.aclosing(process.output()) as chunks:
        async for chunk in chunks:
            pieces += 1
            seen += len(chunk.data)
            end = chunk.offset + len(chunk.data)
            # Whole lines from where this piece begins.
            phase = chunk.offset % len(line)
            assert chunk.data == (line * (len(chunk.data) // len(line) + 2))[phase : phase + len(chunk.data)]
            if pieces % 500 == 0:
                peak_here, peak_there = max(peak_here, _resident_bytes()), max(peak_there, _resident_bytes(agent))
    info = await process.info()

    assert (info.out_bytes, info.exit_code, end) == (total, 0, total)
    # A reader that is slower than the command misses what the record has dropped, and is told.
    assert seen + sum(gap.end - gap.start for gap in info.gaps) >= total
    assert peak_here - here < 96 * MIB
    assert peak_there - there < 8 * MIB


async def test_a_hundred_streams_at_once_and_one_reader_that_never_reads(sandbox: AsyncSandbox) -> None:
    flood = await sandbox.start("yes never read")
    unread = flood.output()
    await anext(unread)

    async def one(number: int) -> tuple[int, int, int]:
        process = await sandbox.start(["seq", "-f", f"{number:03}-%05g", "1", "10000"])
        text, count = "", 0
        async with contextlib.aclosing(process.output()) as chunks:
            async for chunk in chunks:
                text, count = text + chunk.text, count + len(chunk.data)
        lines = text.splitlines()
        right = sum(line == f"{number:03}-{at:05}" for at, line in enumerate(lines, 1))
        return right, len(lines), count

    found = await asyncio.gather(*(one(number) for number in range(100)))

    assert found == [(10_000, 10_000, 100_000)] * 100
    assert (await flood.info()).state == "running"
    await unread.aclose()
    await flood.kill()
    assert (await flood.wait(60)).cause == "killed"


_PIECES = """
import os, time
for byte in "aé漢😀\\u0301".encode() * 20 + b"\\xff\\xfe\\xc3":
    os.write(1, bytes([byte]))
    time.sleep(0.0005)
"""


async def test_characters_that_come_in_pieces_are_put_together(sandbox: AsyncSandbox) -> None:
    text = ""
    chunks = 0

    def take(piece: str) -> None:
        nonlocal text, chunks
        text, chunks = text + piece, chunks + 1

    result = await sandbox.exec(["python3", "-c", _PIECES], on_stdout=take, timeout_s=60)

    assert text == result.stdout == "aé漢😀\u0301" * 20 + "\ufffd\ufffd\ufffd"
    assert result.stdout_bytes == ("aé漢😀\u0301" * 20).encode() + b"\xff\xfe\xc3"


async def test_arguments_at_their_bounds(sandbox: AsyncSandbox) -> None:
    count = ["sh", "-c", 'printf %s "$1" | wc -c', "x"]

    assert (await sandbox.exec([*count, "a" * ARG_BYTES_MAX])).stdout.strip() == str(ARG_BYTES_MAX)
    variable = "b" * (ARG_BYTES_MAX - len("LONG="))
    assert (await sandbox.exec("echo ${#LONG}", env={"LONG": variable})).stdout == f"{len(variable)}\n"
    many = await sandbox.exec(["sh", "-c", "echo $#", *["a" * 1_000] * 500])
    assert many.stdout == "499\n"

    for arguments in ([*count, "a" * (ARG_BYTES_MAX + 1)], "true " + "a" * ARG_BYTES_MAX):
        with pytest.raises(LimitError, match=f"one argument or variable has .* bytes; the most is {ARG_BYTES_MAX}"):
            await sandbox.exec(arguments)
    with pytest.raises(LimitError, match="one argument or variable"):
        await sandbox.exec(["true"], env={"LONG": "b" * ARG_BYTES_MAX})
    for options in ({"command": ["true", *["a" * 100_000] * 10]}, {"command": "true", "env": {"A": "a" * MIB}}):
        with pytest.raises(LimitError, match=r"command and environment have .* bytes; the most is 524288") as caught:
            await sandbox.exec(**options)  # type: ignore[arg-type]
        assert "stdin" in str(caught.value)


async def test_arguments_that_the_limits_of_the_command_do_not_allow(sandbox: AsyncSandbox) -> None:
    """A small stack leaves the kernel less room for arguments than our bound."""
    with pytest.raises(InvalidArgumentError, match="Argument list too long") as caught:
        await sandbox.exec(["true", *["a" * 1_000] * 400], rlimits={"stack": 65_536})

    assert "stdin" in str(caught.value)


async def test_a_timeout_ends_a_shell_that_waits_for_what_it_left_in_the_background(sandbox: AsyncSandbox) -> None:
    left = await sandbox.exec("sleep infinity & setsid sh -c 'setsid sleep infinity & exit' & echo left", timeout_s=60)
    waiting = await sandbox.exec("sleep infinity & wait", timeout_s=0.3)

    assert (left.stdout, left.cause) == ("left\n", None)
    assert waiting.cause == "timed_out"
