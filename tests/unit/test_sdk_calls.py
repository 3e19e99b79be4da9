"""Many calls at once: bounded, in order, each with its own end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dsec.core.errors import CapacityError, InvalidArgumentError, LimitError
from dsec.sdk import client as sdk
from dsec.sdk.calls import CallResult, make_call
from dsec.sdk.client import AsyncClient
from dsec.wire.calls import CallRequest, CallStatus


async def test_thousands_of_calls_are_under_way_no_more_than_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    under_way, most = 0, 0

    async def send(_: object, request: CallRequest) -> CallResult:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)
        under_way -= 1
        if request.code == "7":
            raise CapacityError("no room", retry_after_s=1.0)
        return CallResult(status=CallStatus.FINISHED, worker=request.code)

    monkeypatch.setattr(sdk, "send_call", send)
    requests: list[Any] = [make_call("python", str(number)) for number in range(5_000)]
    requests[9] = "no call"
    async with AsyncClient("unix:///nowhere") as client:
        results = await client.call_many(iter(requests), concurrency=32)
        with pytest.raises(LimitError):
            await client.call_many([], concurrency=0)

    assert most == 32
    assert isinstance(results[7], CapacityError)
    assert isinstance(results[9], InvalidArgumentError)
    others = [result for result in results if isinstance(result, CallResult)]
    assert [result.worker for result in others] == [str(number) for number in range(5_000) if number not in (7, 9)]
