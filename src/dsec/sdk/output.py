"""Follows the output of an exec from given offsets, over lost connections, without losing or doubling a byte."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from dsec.core.errors import DsecError, ProtocolError, UnavailableError
from dsec.sdk.retry import backoff_s
from dsec.sdk.transport import Transport
from dsec.wire import api
from dsec.wire.codec import unpack
from dsec.wire.errors import ErrorBody, error_of
from dsec.wire.frames import Channel, Data, Frame, FrameDecoder, FrameType, decode_data
from dsec.wire.records import ExecInfo, Gap, GapNotice

LOST_S_MAX: Final = 30.0  # without a byte of progress over repeated connections, then the error is passed on


@dataclass(frozen=True, slots=True)
class Ended:
    info: ExecInfo | None  # None: the record has been read to its present end, and the exec may be running


@dataclass(slots=True)
class Offsets:
    """How far each channel has been read."""

    out: int = 0
    err: int = 0

    def copy(self) -> Offsets:
        return Offsets(self.out, self.err)

    def advance(self, channel: int, end: int) -> None:
        if channel == Channel.OUT:
            self.out = max(self.out, end)
        else:
            self.err = max(self.err, end)

    def of(self, channel: int) -> int:
        return self.out if channel == Channel.OUT else self.err


async def follow_output(
    transport: Transport, path: str, at: Offsets, *, follow: bool = True
) -> AsyncGenerator[Data | Gap | Ended, None]:
    """Pieces of output in order, each byte once; the last item is Ended. `path` is the exec's; `at` moves along.

    A connection that breaks is made again at the offsets reached, with growing pauses. Raises the error of the last
    attempt after LOST_S_MAX without progress, and errors that the service tells at once.
    """
    failures, quiet_since = 0, time.monotonic()
    while True:
        try:
            async with aclosing(_one_connection(transport, path, at, follow=follow)) as items:
                async for item in items:
                    failures = 0
                    yield item
                    if isinstance(item, Ended):
                        return
            raise UnavailableError("the output stream ended before the exec did")
        except UnavailableError as error:
            # A long silence before the break is no reason to give up: the clock starts at the first failure.
            if failures == 0:
                quiet_since = time.monotonic()
            failures += 1
            if time.monotonic() - quiet_since > LOST_S_MAX:
                raise
            await asyncio.sleep(error.retry_after_s or backoff_s(failures - 1, random.random()))


async def _one_connection(
    transport: Transport, path: str, at: Offsets, *, follow: bool
) -> AsyncGenerator[Data | Gap | Ended, None]:
    query = {"out": at.out, "err": at.err, "follow": follow}
    decoder = FrameDecoder()
    async with transport.stream("GET", f"{path}/output", query=query, headers={"Accept": api.TYPE_FRAMES}) as response:
        async for chunk in response.pieces():
            for frame in decoder.feed(chunk):
                item = _item_of(frame, at)
                if item is not None:
                    yield item
                if isinstance(item, Ended):
                    return


def _item_of(frame: Frame, at: Offsets) -> Data | Gap | Ended | None:
    if frame.type == FrameType.DATA:
        return _new_part(decode_data(frame.body), at)
    if frame.type == FrameType.EVENT:
        gap = unpack(frame.body, GapNotice).gap
        if gap.end <= at.of(gap.channel):
            return None
        gap = Gap(gap.channel, max(gap.start, at.of(gap.channel)), gap.end)
        at.advance(gap.channel, gap.end)
        return gap
    if frame.type == FrameType.END:
        return Ended(_info_of(frame.body))
    if frame.type == FrameType.ERR:
        raise error_of(unpack(frame.body, ErrorBody))
    raise ProtocolError(f"a frame of type {frame.type} in an output stream")


def _new_part(data: Data, at: Offsets) -> Data | None:
    """What of a piece was not had before."""
    if data.channel not in (Channel.OUT, Channel.ERR):
        raise ProtocolError(f"output on channel {data.channel}")
    have = at.of(data.channel)
    at.advance(data.channel, data.offset + len(data.payload))
    if data.offset >= have:
        return data if data.payload else None
    fresh = data.payload[have - data.offset :]
    return Data(data.channel, have, data.sequence, fresh) if fresh else None


def _info_of(body: bytes) -> ExecInfo | None:
    try:
        return unpack(body, ExecInfo)
    except DsecError:
        return None
