"""Machines of a cluster as network namespaces on a bridge, for tests that cut and heal what is between them.

The bridge has a namespace of its own, too: nothing of the machine's own network is touched, and all ends with them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

PROGRAMS: Final = ("ip", "iptables", "nsenter")
_HUB: Final = "hub"
_NET: Final = "10.213.0"  # of these namespaces alone


def able() -> bool:
    return os.geteuid() == 0 and all(map(shutil.which, PROGRAMS))


@dataclass
class Networks:
    """Made by `networks`. A machine is known by its name."""

    word: str = field(default_factory=lambda: f"dsec-{secrets.token_hex(3)}")
    machines: dict[str, str] = field(default_factory=dict)  # name → address
    _made: list[str] = field(default_factory=list)

    def address(self, name: str) -> str:
        return self.machines[name]

    def wrap(self, name: str) -> tuple[str, ...]:
        """What a command is preceded by to run there."""
        return ("nsenter", f"--net={Path('/run/netns') / self._space(name)}", "--")

    def cut(self, source: str, target: str) -> None:
        """What the one sends to the other is lost without a word, until it is healed."""
        self._rule("-A", source, target)

    def heal(self, source: str, target: str) -> None:
        self._rule("-D", source, target)

    @contextlib.contextmanager
    def apart(self, *ways: tuple[str, str]) -> Iterator[None]:
        """Each of these ways is cut."""
        with contextlib.ExitStack() as stack:
            for source, target in ways:
                self.cut(source, target)
                stack.callback(self.heal, source, target)
            yield

    # -- making ------------------------------------------------------------------------------------

    def make(self, names: Sequence[str]) -> None:
        self._add(_HUB)
        self._ip(_HUB, "link", "add", "br0", "type", "bridge")
        self._ip(_HUB, "link", "set", "br0", "up")
        for number, name in enumerate(names, 1):
            self._add(name)
            port = f"v{number}"
            self._ip(_HUB, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", self._space(name))
            self._ip(_HUB, "link", "set", port, "master", "br0", "up")
            self.machines[name] = f"{_NET}.{number}"
            self._ip(name, "link", "set", "lo", "up")
            self._ip(name, "addr", "add", f"{_NET}.{number}/24", "dev", "eth0")
            self._ip(name, "link", "set", "eth0", "up")

    def remove(self) -> None:
        """The last end of each pair of interfaces goes with its namespace."""
        for space in reversed(self._made):
            subprocess.run(["ip", "netns", "delete", space], check=False, capture_output=True)
        self._made.clear()

    def _space(self, name: str) -> str:
        return f"{self.word}-{name}"

    def _add(self, name: str) -> None:
        self._made.append(self._space(name))
        _run("ip", "netns", "add", self._space(name))

    def _ip(self, name: str, *words: str) -> None:
        _run("ip", "-n", self._space(name), *words)

    def _rule(self, verb: str, source: str, target: str) -> None:
        # Where it arrives: who sends sees nothing of it.
        _run(*self.wrap(target), "iptables", "-w", verb, "INPUT", "-s", self.address(source), "-j", "DROP")


@contextlib.contextmanager
def networks(*names: str) -> Iterator[Networks]:
    found = Networks()
    try:
        found.make(names)
        yield found
    finally:
        found.remove()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise AssertionError(f"{' '.join(command)}: {done.stderr.strip()}")
