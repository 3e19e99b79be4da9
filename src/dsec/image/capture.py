"""The process that makes a layer of what a sandbox has written, seen from the node."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from asyncio.subprocess import Process
from contextlib import suppress
from pathlib import Path
from typing import Final

from dsec.core.errors import InvalidArgumentError, StorageError
from dsec.image.mirroring import END, KEEP, LOOK, TAKE, MirrorAnswer, MirrorJob, MirrorStep
from dsec.image.publishing import PublishAnswer, PublishJob
from dsec.storage.layers import LayerStore
from dsec.storage.mirror import Mapped
from dsec.wire import codec
from dsec.wire.errors import error_of
from dsec.wire.snapshots import Published

_LINE_BYTES_MAX: Final = 1 << 20
_END_S: Final = 600.0  # of a process that removes what it had made on the way


class CaptureProcess:
    """Steps in turn, as `mirroring` has them. Close it, whatever happened: afterwards nothing of it is left but a layer
    that `keep` has told of, and that somebody else holds by then."""

    def __init__(self, state: Path, process: Process) -> None:
        self._state = state
        self._process = process
        self._errors = asyncio.create_task(_tail(process))
        self._busy = False  # with a step that nobody may have waited for to its end

    @classmethod
    async def start(cls, state: Path, source: int, *, trust_times: bool) -> CaptureProcess:
        """`source` is a descriptor of the tree's top; the caller may close it afterwards. Raises StorageError."""
        try:
            process = await asyncio.create_subprocess_exec(
                *_command(),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=_LINE_BYTES_MAX,
                start_new_session=True,
                pass_fds=(source,),
                env={**os.environ, "PYTHONUTF8": "1"},
            )
        except OSError as error:
            raise StorageError(f"the process that copies a sandbox's files did not start: {error.strerror}") from error
        capture = cls(state, process)
        try:
            await capture._send(codec.to_json(MirrorJob(os.fspath(state), source, trust_times)))
        except BaseException:
            await capture.close()
            raise
        return capture

    async def look(self, mapped: Mapped) -> MirrorAnswer:
        return await self._ask(MirrorStep(do=LOOK, mapped=list(mapped.paths), sure=mapped.sure))

    async def take(self, *, within_s: float) -> MirrorAnswer:
        return await self._ask(MirrorStep(do=TAKE, within_s=within_s))

    async def keep(self, run: tuple[str, ...] = ()) -> MirrorAnswer:
        return await self._ask(MirrorStep(do=KEEP, run=run))

    async def close(self) -> None:
        """Idempotent."""
        try:
            if self._process.returncode is None and not self._busy:
                await self._send(codec.to_json(MirrorStep(do=END)))
                async with asyncio.timeout(_END_S):
                    await self._process.wait()
        except TimeoutError:
            pass
        finally:
            await asyncio.shield(self._end())

    async def _end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)
        await self._process.wait()
        await self._errors
        await asyncio.to_thread(LayerStore(self._state).clean)

    async def _ask(self, step: MirrorStep) -> MirrorAnswer:
        """Raises what the process tells, or StorageError when it is gone."""
        self._busy = True
        await self._send(codec.to_json(step))
        assert self._process.stdout is not None
        try:
            line = await self._process.stdout.readline()
            answer = codec.from_json(line, MirrorAnswer) if line else None
        except (ValueError, InvalidArgumentError) as error:
            raise StorageError("the process that copies a sandbox's files answers nonsense") from error
        self._busy = False
        if answer is None:
            words = (await self._errors).decode(errors="replace").strip()[-500:]
            raise StorageError(f"the process that copies a sandbox's files has ended: {words or 'no message'}")
        if answer.error is not None:
            raise error_of(answer.error)
        return answer

    async def _send(self, line: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + b"\n")
        with suppress(ConnectionError):  # it has ended: its answer says so
            await self._process.stdin.drain()


async def publish(job: PublishJob) -> Published:
    """In a process of its own, which ends with this call. Raises what it tells, or StorageError."""
    process = await asyncio.create_subprocess_exec(
        *_command("dsec.image.publishing"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=_LINE_BYTES_MAX,
        start_new_session=True,
        env={**os.environ, "PYTHONUTF8": "1"},
    )
    errors = asyncio.create_task(_tail(process))
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(codec.to_json(job) + b"\n")
        with suppress(ConnectionError):
            await process.stdin.drain()
        line = await process.stdout.readline()
        if not line:
            words = (await errors).decode(errors="replace").strip()[-500:]
            raise StorageError(f"the process that publishes has ended: {words or 'no message'}")
        answer = codec.from_json(line, PublishAnswer)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 9)  # its result is on the disk before it tells it
        await asyncio.shield(_cleaned(process, errors, Path(job.state)))
    if answer.published is None:
        raise (
            StorageError("the process that publishes says nothing") if answer.error is None else error_of(answer.error)
        )
    return answer.published


async def _cleaned(process: Process, errors: asyncio.Task[bytes], state: Path) -> None:
    await process.wait()
    await errors
    await asyncio.to_thread(LayerStore(state).clean)


def _command(module: str = "dsec.image.mirroring") -> list[str]:
    """As root in process and mount namespaces of its own: its end is the end of all that it has started."""
    worker = [sys.executable, "-m", module]
    unshare = shutil.which("unshare")
    if os.geteuid() != 0 or unshare is None:
        return worker
    return [unshare, "--mount", "--pid", "--fork", "--kill-child=KILL", "--mount-proc", *worker]


async def _tail(process: Process) -> bytes:
    """The last of stderr, read so that it never fills."""
    assert process.stderr is not None
    tail = b""
    while data := await process.stderr.read(65_536):
        tail = (tail + data)[-4_096:]
    return tail
