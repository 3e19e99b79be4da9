"""`python -m bench swap`: what nobody uses goes to swap (`[node.idle] page_out_s`): what the host has back of it, and
how long a first command takes that needs a tenth of it again, beside one of a sandbox that was only paused.

Swaps to a file of its own for that time, or to memory that is compressed (`--zram`), of which what it takes is told.
Emulated machines where the processor runs no guests: then only ratios count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import dsec
from bench import machine
from bench.memory import least
from bench.series import timed
from bench.service import private_service
from dsec.core.limits import GIB, MIB
from dsec.core.spec import Substrate
from dsec.density.cgroups import read_keyed, read_number
from dsec.testing.swap import own_swap, own_zram
from dsec.wire.api import STATE_DIR_ROOT

SETTINGS: Final = "[node.idle]\npause_s = 1.0\npage_out_s = 2.0\n[microvm]\npage_out = false\n"
HELD_MIB: Final[Mapping[Substrate, int]] = {Substrate.CONTAINER: 256, Substrate.MICROVM: 128}
SWAP_BYTES: Final = GIB
_ROUNDS: Final = 3
_CGROUPS: Final = Path("/sys/fs/cgroup")
_GONE_S: Final = 120.0
_GONE: Final = 0.5  # half of it: the rest follows, and is waited for
# Behind the command that has started it, so that nobody seems to use the sandbox: it holds so much, and answers whoever
# asks for a part of it with a sum that is right when each page of that is as it was.
_HOLDER: Final = """
import os, sys
os.mkfifo("/tmp/asked"); os.mkfifo("/tmp/told")
if os.fork():
    sys.exit()
os.setsid()
pages = int(sys.argv[1]) * 256
held = bytearray()
for number in range(pages):
    held += number.to_bytes(8, "little") + os.urandom(4088)
while True:
    with open("/tmp/asked") as file:
        parts = int(file.read())
    told = sum(int.from_bytes(held[at : at + 8], "little") for at in range(0, len(held) // parts, 4096))
    with open("/tmp/told", "w") as file:
        file.write(str(told))
"""


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench swap", description=__doc__)
    parser.add_argument("--environment", default="base", help="with python3")
    parser.add_argument("--state", type=Path, default=Path(STATE_DIR_ROOT), help="state directory with the environment")
    parser.add_argument("--backend", choices=[str(each) for each in HELD_MIB], action="append")
    parser.add_argument("--zram", action="store_true", help="swap to compressed memory instead of a file")
    parser.add_argument("--output", type=Path, help="write the figures as JSON here")
    options = parser.parse_args(arguments)
    chosen = [each for each in HELD_MIB if not options.backend or str(each) in options.backend]
    with ExitStack() as stack:
        zram = None
        if options.zram:
            zram = stack.enter_context(own_zram(SWAP_BYTES))
        else:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="dsec-swap-", dir=options.state))
            stack.enter_context(own_swap(Path(directory), SWAP_BYTES))
        service = stack.enter_context(private_service(options.state, SETTINGS))
        found = {}
        for each in chosen:
            found[str(each)] = measure(service.client, options.environment, each, zram=zram)
    show(found)
    if options.output:
        options.output.write_text(json.dumps({"machine": machine.describe(), "swapped": found}, indent=2) + "\n")


def measure(
    client: dsec.Client, environment: str, backend: Substrate, *, rounds: int = _ROUNDS, zram: Path | None = None
) -> dict[str, Any]:
    """Of a service with `SETTINGS`, on a host with swap. Raises AssertionError when a page has come back wrong."""
    mib = HELD_MIB[backend]
    kept, again = [], []
    with client.create(environment, backend=backend, memory=f"{2 * mib}MiB", timeout_s=600.0) as sandbox:
        sandbox.exec(["python3", "-c", _HOLDER, str(mib)], check=True, timeout_s=600.0)
        ask(sandbox, mib, 1)
        host = Counted(sandbox.id)
        before = host.charged_bytes(), host.resident_bytes()
        for _ in range(rounds):
            sandbox.pause()
            kept += timed(lambda: ask(sandbox, mib, 10))()
        rested, held = [], 0
        for _ in range(rounds):
            rested.append(_rested(host, before[0]))
            held = _compressed_bytes(zram)
            again += timed(lambda: ask(sandbox, mib, 10))()
        after = max(charged for charged, _ in rested), max(resident for _, resident in rested)
        ask(sandbox, mib, 1)
    return {
        "held_mib": mib,
        "charged_mib": [round(before[0] / MIB, 1), round(after[0] / MIB, 1)],
        "resident_mib": [round(before[1] / MIB, 1), round(after[1] / MIB, 1)],
        "charge_given_back": round(1 - after[0] / before[0], 3),
        "resident_given_back": round(1 - after[1] / before[1], 3),
        "paused_ms": [round(each, 1) for each in kept],
        "swapped_ms": [round(each, 1) for each in again],
        "zram_mib": round(held / MIB, 1),
        "ratio": round(statistics.median(again) / statistics.median(kept), 1),
    }


def ask(sandbox: dsec.Sandbox, mib: int, parts: int) -> None:
    """For one of so many equal parts of what it holds."""
    said = sandbox.exec(f"echo {parts} >/tmp/asked; cat /tmp/told", check=True, timeout_s=600.0).stdout
    pages = len(range(0, mib * MIB // parts, 4096))
    assert int(said) == pages * (pages - 1) // 2, "a page has come back as another"


def _compressed_bytes(zram: Path | None) -> int:
    """What all that is in it takes of the host's memory (the third number)."""
    return 0 if zram is None else int((zram / "mm_stat").read_text().split()[2])


def _rested(host: Counted, before: int) -> tuple[int, int]:
    until_s = time.monotonic() + _GONE_S
    while host.charged_bytes() > before * _GONE:
        if time.monotonic() > until_s:
            raise SystemExit(f"bench: after {_GONE_S:g} s without use its memory is still where it was")
        time.sleep(0.05)
    return least(host.charged_bytes), host.resident_bytes()


class Counted:
    """What one sandbox has of the host."""

    def __init__(self, sandbox: str) -> None:
        below = [f"{'*/' * depth}{sandbox}" for depth in range(1, 5)]
        found = [directory for pattern in below for directory in _CGROUPS.glob(pattern)]
        # A controller is in one hierarchy.
        names = ("memory.usage_in_bytes", "memory.current")
        self._file = next(file for each in found for name in names if (file := each / name).exists())
        self._tree = next(each for each in found if (each / "cgroup.events").exists())

    def charged_bytes(self) -> int:
        """By its cgroup; without pages of files, which the host takes whenever it wants them."""
        stat = read_keyed(self._file.with_name("memory.stat"))
        return (read_number(self._file) or 0) - stat.get("active_file", 0) - stat.get("inactive_file", 0)

    def resident_bytes(self) -> int:
        """By its processes: what is their own."""
        total = 0
        for file in self._tree.rglob("cgroup.procs"):
            for pid in file.read_text().split():
                status = Path("/proc", pid, "status").read_text()
                total += int(status.partition("RssAnon:")[2].split(maxsplit=1)[0]) * 1024
        return total


def show(found: Mapping[str, Mapping[str, Any]]) -> None:
    for name, row in found.items():
        resident, charged = row["resident_mib"], row["charged_mib"]
        print(
            f"{name:<10} {resident[0]} MiB of its own in memory, then {resident[1]}: {row['resident_given_back']:.1%} "
            f"given back; {charged[0]} MiB counted, then {charged[1]}: {row['charge_given_back']:.1%}"
        )
        print(
            f"{'':<10} a command that needs a tenth of it: {statistics.median(row['swapped_ms'])} ms, only paused "
            f"{statistics.median(row['paused_ms'])}: {row['ratio']} times"
        )
        if row["zram_mib"]:
            print(f"{'':<10} what it has given takes {row['zram_mib']} MiB, compressed")
