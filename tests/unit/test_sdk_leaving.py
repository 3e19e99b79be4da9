"""What a `with` block raises when its body has failed, and leaving it fails, too."""

from __future__ import annotations

import pytest

from dsec.core.errors import UnavailableError
from dsec.sdk.sandbox import AsyncSandbox
from dsec.sdk.sync import Sandbox


class Gone(AsyncSandbox):
    """Its service has gone away."""

    def __init__(self) -> None:
        pass

    async def destroy(self) -> None:
        try:
            raise OSError("no socket")
        except OSError as error:
            raise UnavailableError("the service does not answer") from error


async def test_what_the_body_raises_is_told_with_what_failed_afterwards() -> None:
    with pytest.raises(ValueError, match="my own") as caught:
        async with Gone():
            raise ValueError("my own")

    assert caught.value.__notes__ == ["and then, on leaving the block: UnavailableError: the service does not answer"]


async def test_what_fails_on_leaving_alone_is_raised() -> None:
    with pytest.raises(UnavailableError):
        async with Gone():
            pass


def test_blocks_of_the_blocking_client_do_the_same() -> None:
    sandbox = Sandbox.__new__(Sandbox)
    sandbox._async = Gone()

    with pytest.raises(ValueError, match="my own") as caught, sandbox:
        raise ValueError("my own")

    assert "UnavailableError" in caught.value.__notes__[0]
    with pytest.raises(UnavailableError), sandbox:
        pass
