"""The streams that are open: counted by team, and ended when what they were opened with is no longer good."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Final

from dsec.core.errors import CapacityError, DsecError
from dsec.core.limits import PROJECT_STREAMS_MAX
from dsec.wire.frames import Frame
from dsec.wire.node import Stream, team_of

CHECK_S: Final = 2.0  # between two looks at the credentials of streams that last
_GRACE_S: Final = 3.0  # for the client to take its last words; then it is cut off


class OpenStreams:
    def __init__(self) -> None:
        self._of_teams: Counter[str] = Counter()
        self._checked: set[OpenStream] = set()
        self._timer: asyncio.TimerHandle | None = None

    def reserve(self, project: str) -> None:
        """Raises CapacityError when the project has as many as it may have. `OpenStream.close`, or `free`, follows."""
        team = team_of(project)
        if self._of_teams[team] >= PROJECT_STREAMS_MAX:
            raise CapacityError(
                f"{team} and the projects below it have {PROJECT_STREAMS_MAX} streams open",
                hint="close some: outputs that are followed, watches, connections, transfers",
                retry_after_s=1.0,
            )
        self._of_teams[team] += 1

    def free(self, project: str) -> None:
        team = team_of(project)
        self._of_teams[team] -= 1
        if not self._of_teams[team]:
            del self._of_teams[team]

    def add(
        self, stream: Stream, project: str, check: Callable[[], object] | None, cut: Callable[[], None]
    ) -> OpenStream:
        """One that `reserve` has counted. `check` raises once it may not go on; then it ends, and `cut` ends the
        connection if that is not enough."""
        found = OpenStream(self, stream, project, check, cut)
        if check is not None:
            self._checked.add(found)
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(CHECK_S, self._check)
        return found

    def forget(self, stream: OpenStream) -> None:
        self._checked.discard(stream)
        self.free(stream.project)

    def _check(self) -> None:
        self._timer = None
        for stream in list(self._checked):
            stream.recheck()
        if self._checked:
            self._timer = asyncio.get_running_loop().call_later(CHECK_S, self._check)

    def __len__(self) -> int:
        return self._of_teams.total()


class OpenStream:
    """A stream to the node (`wire.node.Stream`) that can be ended from outside, with an error."""

    def __init__(
        self,
        owner: OpenStreams,
        stream: Stream,
        project: str,
        check: Callable[[], object] | None,
        cut: Callable[[], None],
    ) -> None:
        self.project = project
        self._owner = owner
        self._stream = stream
        self._may_go_on = check
        self._cut = cut
        self._failure: DsecError | None = None
        self._ending: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    async def send(self, frame: Frame) -> None:
        try:
            await self._stream.send(frame)
        except DsecError:
            self._raise_failure()
            raise

    async def recv(self) -> Frame | None:
        try:
            frame = await self._stream.recv()
        except DsecError:
            self._raise_failure()
            raise
        self._raise_failure()
        return frame

    async def close(self, error: BaseException | None = None) -> None:
        """Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        try:
            await self._stream.close(error)
            if self._ending is not None:
                await asyncio.wait({self._ending})
        finally:
            if not self._closed:
                self._closed = True
                self._owner.forget(self)

    def recheck(self) -> None:
        if self._may_go_on is None or self._failure is not None:
            return
        try:
            self._may_go_on()
        except DsecError as error:
            self._failure = error
            loop = asyncio.get_running_loop()
            self._ending = loop.create_task(self._stream.close(error))
            self._timer = loop.call_later(_GRACE_S, self._cut)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
