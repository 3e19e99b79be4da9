"""The Log on JetStream streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Final

import msgspec
from nats.aio.msg import Msg

from dsec.cluster.engine.connection import Engine
from dsec.cluster.log import LogStream, Record, check_record, check_subject
from dsec.core.errors import ConflictError, DsecError, Outcome, UnavailableError
from dsec.core.limits import ENGINE_WAIT_S, LOG_READ_BYTES_MAX, LOG_READ_MAX
from dsec.observe.logs import get_logger
from dsec.wire.codec import to_json

log = get_logger(__name__)

_PAGE: Final = 256
_POLL_S: Final = 5.0  # followers look by themselves so often, beside being told: what is told may be lost
_RETRY_S: Final = 0.5
_ATTEMPT_S: Final = 2.0


class _State(msgspec.Struct, frozen=True):
    first_seq: int = 0
    last_seq: int = 0


class _Info(msgspec.Struct, frozen=True):
    state: _State = _State()


class EngineLog:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._layout = engine.layout

    async def append(self, stream: LogStream, subject: str, body: bytes, *, id: str, after: int | None = None) -> int:
        check_record(body, id)
        place = self._layout.log_subject(stream, check_subject(subject))
        try:
            return await self._engine.write(self._layout.log_stream(stream), place, body, id=id, expected=after)
        except ConflictError:
            raise ConflictError(f"the last record of {subject} is not {after} any more") from None

    async def read(self, stream: LogStream, subject: str, *, after: int = 0, limit: int = _PAGE) -> list[Record]:
        """Batched direct reads: no consumer is made, and replicas share the work."""
        limit = min(limit, LOG_READ_MAX)
        if not subject:
            return await self._batch(stream, self._layout.log_subject(stream, ""), after, limit)
        exact = self._layout.log_subject(stream, check_subject(subject))
        found = await self._batch(stream, exact, after, limit) + await self._batch(stream, exact + ".>", after, limit)
        return sorted(found)[:limit]

    async def bounds(self, stream: LogStream) -> tuple[int, int]:
        info: _Info = await self._engine.ask(f"STREAM.INFO.{self._layout.log_stream(stream)}", {}, _Info)
        return max(info.state.first_seq, 1), info.state.last_seq

    async def last(self, stream: LogStream, subject: str) -> Record | None:
        place = self._layout.log_subject(stream, check_subject(subject))
        found = await self._direct(stream, {"last_by_subj": place}, 1)
        return found[0] if found else None

    async def follow(self, stream: LogStream, subject: str = "", *, after: int = 0) -> AsyncGenerator[Record, None]:
        news = asyncio.Event()

        async def heard(_: Msg) -> None:
            news.set()

        place = self._layout.log_subject(stream, subject)
        told = [await self._engine.listen(one, heard) for one in ([place, place + ".>"] if subject else [place])]
        try:
            while True:
                news.clear()
                try:
                    found = await self.read(stream, subject, after=after)
                except DsecError as error:
                    log.info("a log cannot be read now", stream=str(stream), why=str(error))
                    await asyncio.sleep(_RETRY_S)
                    continue
                for record in found:
                    after = record.sequence
                    yield record
                if not found:
                    await _wait(news)
        finally:
            for subscription in told:
                try:
                    await subscription.unsubscribe()
                except Exception as error:  # the connection is closed
                    log.debug("a follower ended with its connection", error=str(error))

    async def purge(self, stream: LogStream, subject: str) -> None:
        place = self._layout.log_subject(stream, check_subject(subject))
        for filter in (place, place + ".>"):
            await self._engine.ask(f"STREAM.PURGE.{self._layout.log_stream(stream)}", {"filter": filter}, dict)

    async def _batch(self, stream: LogStream, place: str, after: int, limit: int) -> list[Record]:
        request = {"seq": after + 1, "next_by_subj": place, "batch": limit, "max_bytes": LOG_READ_BYTES_MAX}
        return await self._direct(stream, request, limit)

    async def _direct(self, stream: LogStream, request: dict[str, object], limit: int) -> list[Record]:
        await self._engine.check_there()
        loop = asyncio.get_running_loop()
        until = loop.time() + ENGINE_WAIT_S
        while loop.time() < until:
            try:
                return await self._ask_direct(stream, request, limit)
            except TimeoutError:
                await asyncio.sleep(_RETRY_S)
        raise UnavailableError(f"the engine does not read {stream}", outcome=Outcome.UNCHANGED, retry_after_s=1.0)

    async def _ask_direct(self, stream: LogStream, request: dict[str, object], limit: int) -> list[Record]:
        """Messages until the engine says that the batch is at its end."""
        answers: asyncio.Queue[Msg] = asyncio.Queue()
        client = self._engine.client
        inbox = client.new_inbox()
        subscription = await self._engine.listen(inbox, answers.put)
        found: list[Record] = []
        start = len(self._layout.log_subject(stream, "")) - 1
        try:
            await client.publish(f"$JS.API.DIRECT.GET.{self._layout.log_stream(stream)}", to_json(request), reply=inbox)
            while True:
                async with asyncio.timeout(_ATTEMPT_S):
                    message = await answers.get()
                headers = message.headers or {}
                status = headers.get("Status")
                if status in ("204", "404"):
                    return found
                if status is not None:
                    raise TimeoutError(status)  # 503: nobody is in charge now; 408: tried again
                record = Record(int(headers["Nats-Sequence"]), headers["Nats-Subject"][start:], message.data)
                found.append(record)
                if "batch" not in request:
                    return found
        finally:
            await subscription.unsubscribe()


async def _wait(news: asyncio.Event) -> None:
    try:
        async with asyncio.timeout(_POLL_S):
            await news.wait()
    except TimeoutError:
        return
