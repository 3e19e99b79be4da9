"""The far end of a link between processes of a cluster, by hand."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import Self

from dsec.core.ids import NodeId
from dsec.wire.codec import pack
from dsec.wire.link import Hello, Kind, PacketDecoder, packet


class Raw:
    """A peer that may send anything."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.decoder = PacketDecoder()

    def send(self, kind: Kind, id: int, *parts: bytes) -> None:
        self.writer.write(b"".join(packet(kind, id, *parts)))

    async def welcomed(self, node: NodeId) -> Self:
        self.send(Kind.HELLO, 0, pack(Hello(1, 1, node)))
        assert await self.kinds(1) == [Kind.WELCOME]
        return self

    async def kinds(self, count: int) -> list[int]:
        found: list[int] = []
        async with asyncio.timeout(60):
            while len(found) < count:
                data = await self.reader.read(65_536)
                if not data:
                    break
                found += [one.kind for one in self.decoder.feed(data) if one.kind != Kind.PING]
        return found

    async def is_cut(self) -> bool:
        async with asyncio.timeout(60):
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                while await self.reader.read(65_536):
                    pass
        return True
