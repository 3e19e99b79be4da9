"""Load on API replicas: creates at a rate, and bursts of them, over HTTP on their sockets; each with a key of its own.

`python -m bench.simload`: a `Plan` as JSON on standard input, a `Report` as JSON in the file that it names. A create
that was not answered is tried again with its key, at another replica, as the SDK does.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import msgspec

_TRIED_S: Final = 60.0
_AGAIN_S: Final = 0.1
_AGAIN: Final = frozenset(
    (
        *("429", "500", "502", "503", "504", "no_capacity", "unavailable", "TimeoutError", "ConnectionError"),
        *("ConnectionRefusedError", "ConnectionResetError", "FileNotFoundError", "BrokenPipeError"),
    )
)


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """`count` creates, begun at `rate` a second."""

    name: str
    rate: float
    count: int
    batch: int = 1  # in a request


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    sockets: tuple[str, ...]
    report: str  # a file
    phases: tuple[Phase, ...]
    project: str
    connections: int  # to each replica, at most
    lives_s: float  # mean
    destroyed: float = 0.3  # part of the sandboxes that their owner destroys, after a moment
    seed: int = 1


class PhaseReport(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    began_at: float  # wall clock
    ended_at: float
    created: int
    failed: dict[str, int]  # status or error → creates that had no other answer in the end
    tried_again: int  # requests
    begun_ms: list[float]  # p50, p95, p99, the longest, from when the create was due
    sent_ms: list[float]  # the same, from when its last try was sent


class Report(msgspec.Struct, frozen=True, kw_only=True):
    phases: list[PhaseReport]
    acknowledged: list[tuple[str, str]]  # key and id
    destroyed: list[str]


class _Connection(asyncio.Protocol):
    """HTTP/1.1, one request at a time."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._came: list[tuple[int, float]] = []  # how much there was by when
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._transport: asyncio.Transport | None = None
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError("the connection was lost"))

    def data_received(self, data: bytes) -> None:
        self._data += data
        self._came.append((len(self._data), time.perf_counter()))
        end = self._data.find(b"\r\n\r\n")
        if end < 0 or self._answer is None or self._answer.done():
            return
        head, body = bytes(self._data[:end]), memoryview(self._data)[end + 4 :]
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        if b"transfer-encoding" in fields:
            whole = body[-5:] == b"0\r\n\r\n"
        else:
            whole = len(body) >= int(fields.get(b"content-length", b"0"))
        if whole:
            self._answer.set_result((int(head[9:12]), bytes(body)))

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        if self.lost or self._transport is None:
            raise ConnectionError("the connection was lost")
        self._data.clear()
        self._came.clear()
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    def came_at(self, part: float) -> float:
        """When that part of the last answer was there."""
        size = part * len(self._data)
        return next((at for length, at in self._came if length >= size), self._came[-1][1])

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class _Replica:
    def __init__(self, path: str, connections: int) -> None:
        self.path = path
        self._free: list[_Connection] = []
        self._room = asyncio.Semaphore(connections)

    async def ask(self, request: bytes) -> tuple[int, bytes, float, list[float]]:
        """Status, body, when it was sent, and when each hundredth of the answer had come. Raises OSError."""
        async with self._room:
            connection = self._free.pop() if self._free else await self._connect()
            sent_at = time.perf_counter()
            try:
                async with asyncio.timeout(_TRIED_S):
                    status, body = await connection.ask(request)
            except BaseException:
                connection.close()
                raise
            came = [connection.came_at(part / 100) for part in range(1, 101)]
            self._free.append(connection)
            return status, body, sent_at, came

    async def _connect(self) -> _Connection:
        _, connection = await asyncio.get_running_loop().create_unix_connection(_Connection, self.path)
        return connection

    def close(self) -> None:
        for connection in self._free:
            connection.close()


@dataclass
class _Load:
    plan: Plan
    replicas: list[_Replica]
    rng: random.Random
    acknowledged: list[tuple[str, str]] = field(default_factory=list)
    destroyed: list[str] = field(default_factory=list)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    turn: int = 0

    def replica(self) -> _Replica:
        self.turn += 1
        return self.replicas[self.turn % len(self.replicas)]

    def request(self, method: str, path: str, key: str, body: bytes = b"") -> bytes:
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: bench\r\nDsec-Project: {self.plan.project}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nIdempotency-Key: {key}\r\n\r\n"
        )
        return head.encode() + body

    async def phase(self, phase: Phase) -> PhaseReport:
        found = _Found(phase.name)
        loop = asyncio.get_running_loop()
        began, began_at = loop.time(), time.time()
        tasks: deque[asyncio.Task[None]] = deque()
        for number in range(0, phase.count, phase.batch):
            due = began + number / phase.rate
            if (wait_s := due - loop.time()) > 0:
                await asyncio.sleep(wait_s)
            count = min(phase.batch, phase.count - number)
            tasks.append(asyncio.create_task(self.create(f"{phase.name}-{self.plan.seed}-{number}", count, due, found)))
        await asyncio.gather(*tasks)
        return found.report(began_at)

    async def create(self, key: str, count: int, due: float, found: _Found) -> None:
        """One, or a batch of them."""
        late = time.perf_counter() - asyncio.get_running_loop().time() + due
        life_s = self.rng.expovariate(1 / self.plan.lives_s)
        spec = {"environment": {"base": "base"}, "ttl_running_s": round(max(life_s, 1.0), 3)}
        asked: dict[str, Any] = {"spec": spec} if count == 1 else {"spec": spec, "count": count}
        path = "/v1/sandboxes" if count == 1 else "/v1/sandboxes:batch"
        request = self.request("POST", path, key, json.dumps(asked).encode())
        made: dict[str, str] = {}
        while True:
            why: Counter[str] = Counter()
            try:
                status, answer, sent_at, came = await self.replica().ask(request)
            except (OSError, TimeoutError) as error:
                why[type(error).__name__] += count - len(made)
            else:
                self._read(key, count, status, answer, (late, sent_at, came), made, why, found)
            if len(made) == count:
                return
            if time.perf_counter() - late > _TRIED_S or not why.keys() & _AGAIN:
                for name, number in why.items():
                    found.failed[name] = found.failed.get(name, 0) + number
                return
            found.tried_again += 1
            await asyncio.sleep(_AGAIN_S)

    def _read(
        self,
        key: str,
        count: int,
        status: int,
        answer: bytes,
        times: tuple[float, float, list[float]],
        made: dict[str, str],
        why: Counter[str],
        found: _Found,
    ) -> None:
        """One sandbox, or a line for each of a batch. What was made for the key before is not counted again."""
        late, sent_at, came = times
        if status not in (200, 201):
            why[str(status)] += count - len(made)
            return
        lines = [answer] if count == 1 else [line for line in answer.split(b"\n") if line[:1] == b"{"]
        for place, line in enumerate(lines):
            item = msgspec.json.decode(line)
            sandbox = item if count == 1 else item.get("sandbox")
            name = key if count == 1 else f"{key}/{item['index']}"
            if sandbox is None:
                why[item["error"]["code"]] += 1
            elif name not in made:
                made[name] = sandbox["id"]
                at = came[100 * place // len(lines)]
                found.begun_s.append(at - late)
                found.sent_s.append(at - sent_at)
                self._made(name, sandbox["id"])

    def _made(self, key: str, id: str) -> None:
        self.acknowledged.append((key, id))
        if self.rng.random() < self.plan.destroyed:
            task = asyncio.create_task(self.destroy(id))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def destroy(self, id: str) -> None:
        await asyncio.sleep(self.rng.uniform(0.5, 20.0))
        try:
            status, *_ = await self.replica().ask(self.request("DELETE", f"/v1/sandboxes/{id}", f"end-{id}"))
        except (OSError, TimeoutError):
            return
        if status == 200:
            self.destroyed.append(id)


class _Found:
    def __init__(self, name: str) -> None:
        self.name = name
        self.begun_s: list[float] = []
        self.sent_s: list[float] = []
        self.failed: dict[str, int] = {}
        self.tried_again = 0

    def report(self, began_at: float) -> PhaseReport:
        return PhaseReport(
            name=self.name,
            began_at=began_at,
            ended_at=time.time(),
            created=len(self.begun_s),
            failed=self.failed,
            tried_again=self.tried_again,
            begun_ms=_spread(self.begun_s),
            sent_ms=_spread(self.sent_s),
        )


def _spread(seconds: list[float]) -> list[float]:
    ordered = sorted(seconds)
    if not ordered:
        return []
    return [round(1000 * ordered[min(int(part * len(ordered)), len(ordered) - 1)], 2) for part in (0.5, 0.95, 0.99, 1)]


async def run(plan: Plan) -> Report:
    load = _Load(plan, [_Replica(path, plan.connections) for path in plan.sockets], random.Random(plan.seed))
    phases = []
    for phase in plan.phases:
        phases.append(await load.phase(phase))
        print(json.dumps({"phase": phase.name}), file=sys.stderr, flush=True)
    await asyncio.gather(*load.tasks)
    for replica in load.replicas:
        replica.close()
    return Report(phases=phases, acknowledged=load.acknowledged, destroyed=load.destroyed)


def as_dict(report: PhaseReport) -> dict[str, Any]:
    return msgspec.structs.asdict(report)


if __name__ == "__main__":
    import uvloop

    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=Plan)
    Path(plan.report).write_bytes(msgspec.json.encode(uvloop.run(run(plan))))
