"""A snapshot of the files of a fake instance: all of them, for there is nothing below."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from dsec.backends.base import CapturedLayer
from dsec.backends.fake.files import FileTree
from dsec.core.errors import SandboxFaultError, StorageError
from dsec.core.faults import fault_point

if TYPE_CHECKING:
    from dsec.backends.fake.host import FakeHost
    from dsec.backends.fake.sandbox import FakeSandbox


class FakeCapture:
    def __init__(self, host: FakeHost, sandbox: FakeSandbox) -> None:
        self._host = host
        self._sandbox = sandbox
        self._taken: FileTree | None = None

    async def look(self) -> bool:
        await self._step("look")
        return True

    async def take(self, *, within_s: float) -> int:
        await self._step("take")
        assert self._sandbox.frozen
        self._taken = self._sandbox.agent.files.copy(self._sandbox.wall_ns)
        return self._taken.used_bytes

    async def keep(self, run: tuple[str, ...] = ()) -> CapturedLayer:
        await self._step("keep")
        assert self._taken is not None
        digest = hashlib.sha256(b"fake layer %d" % self._host.next_serial()).hexdigest()
        self._host.layers[digest] = self._taken
        entries = sum(1 for _ in self._taken.walk(b"/"))
        return CapturedLayer(digest, self._taken.used_bytes, entries, merged=bool(run))

    async def close(self) -> None:
        """Nothing is on the way here."""

    async def _step(self, name: str) -> None:
        try:
            fault_point(f"fake.snapshot.{name}")
        except OSError as error:
            raise StorageError(f"the files cannot be copied: {error}") from error
        await self._host.delay(f"snapshot.{name}")
        if self._sandbox.ended is not None:
            raise SandboxFaultError("the sandbox has ended", sandbox=self._sandbox.spec.id)
