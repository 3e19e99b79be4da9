"""Makes the first call of a fault point fail, then the second, … until a run meets none that is left."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import Final, Self

from dsec.core.faults import install_hook

RUNS_MAX: Final = 1_000


def injected_error(name: str) -> BaseException:
    return OSError(errno.EIO, f"injected at {name}")


class Faults:
    """While entered, the nth call of a matching fault point fails; 0 fails none and only counts.

    `calls` are the points that were passed, in order; `hit` is the one that failed.
    """

    def __init__(self, nth: int, *, prefix: str = "", error: Callable[[str], BaseException] = injected_error) -> None:
        self.nth = nth
        self.calls: list[str] = []
        self.hit: str | None = None
        self.entered = False
        self._prefix = prefix
        self._error = error

    def __enter__(self) -> Self:
        old = install_hook(self._on_point)
        if old is not None:
            install_hook(old)
            raise RuntimeError("faults are injected already")
        self.entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        install_hook(None)

    def _on_point(self, name: str) -> None:
        if not name.startswith(self._prefix):
            return
        self.calls.append(name)
        if len(self.calls) == self.nth:
            self.hit = name
            raise self._error(name)


class each_nth_failure:
    """Iterates, with `for` or `async for`, over runs; every run enters the `Faults` that it is given once.

        async for faults in each_nth_failure("fake.create."):
            with faults, suppress(DsecError):
                await backend.create(...)
            assert host.leftovers() == []

    Ends after the first run in which nothing failed. Raises AssertionError after RUNS_MAX runs, when a run did not
    enter its faults, and when no point was passed at all: such a test would prove nothing.
    """

    def __init__(self, prefix: str = "", *, error: Callable[[str], BaseException] = injected_error) -> None:
        self._prefix = prefix
        self._error = error

    def __iter__(self) -> Iterator[Faults]:
        for nth in range(1, RUNS_MAX + 1):
            faults = Faults(nth, prefix=self._prefix, error=self._error)
            yield faults
            assert faults.entered, "the faults were not entered: use `with faults:`"
            if faults.hit is None:
                assert faults.calls, f"no fault point that begins with {self._prefix!r} was passed"
                return
        raise AssertionError(f"still failing after {RUNS_MAX} runs; last at {faults.hit}")

    async def __aiter__(self) -> AsyncIterator[Faults]:
        for faults in self:
            yield faults
