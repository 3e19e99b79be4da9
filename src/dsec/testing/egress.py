"""A `dsec-egress` of a test's own, in a network of the test's own."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from dsec.backends.egress import Egress
from dsec.testing.launchers import end_launcher
from dsec.wire.egress import EgressDenied, HelloArgs


@contextlib.asynccontextmanager
async def egress_of(
    run_dir: Path,
    *,
    wrap: tuple[str, ...] = (),
    settings: HelloArgs | None = None,
    denied: Callable[[EgressDenied], None] | None = None,
) -> AsyncIterator[Egress]:
    """A client whose program is started by the first sandbox, behind the words `wrap`, and ends with this context."""
    client = Egress(run_dir, settings=settings, denied=denied, wrap=wrap)
    try:
        yield client
    finally:
        await client.close()
        end_launcher(run_dir)
