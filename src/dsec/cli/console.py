"""What the commands share: settings, the client, and how things are said."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer

from dsec.cli.completion import complete_sandbox

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Sequence

    from dsec.core.errors import DsecError
    from dsec.sdk.client import AsyncClient
    from dsec.sdk.sandbox import AsyncSandbox


T = TypeVar("T")
_SAID_LINES: Final = 5  # of each output of a program that ended before it was ready
_SAID_WIDTH: Final = 200


@dataclass(slots=True)
class Settings:
    url: str | None = None
    token: str | None = None
    project: str | None = None
    node: str | None = None
    json: bool = False  # set by the command that runs
    quiet: bool = False


settings = Settings()


def _json_chosen(value: bool) -> bool:
    settings.json = settings.json or value
    return value


def _node_chosen(value: str | None) -> str | None:
    settings.node = value or settings.node
    return value


OnNode = Annotated[
    str | None,
    typer.Option(
        "--node", metavar="NODE", help="Of a cluster: on this one.", callback=_node_chosen, show_default=False
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Answer in JSON.", callback=_json_chosen)]
SandboxName = Annotated[
    str,
    typer.Argument(metavar="SANDBOX", help="Its id, or its name.", show_default=False, autocompletion=complete_sandbox),
]


def client() -> AsyncClient:
    from dsec.sdk.client import AsyncClient

    return AsyncClient(settings.url, settings.token, project=settings.project, node=settings.node)


async def find(client: AsyncClient, name: str) -> AsyncSandbox:
    """A live sandbox by id or name."""
    return await client.connect(name)


async def find_id(client: AsyncClient, name: str) -> str:
    """The id of what `name` means: an id, or a live sandbox's name. Raises SandboxNotFoundError, ConflictError."""
    return name if name.startswith("sbx_") else (await client.find(name)).id


class EndedError(Exception):
    """A signal that ends programs has come, and what was under way was ended as by Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by signal {number}")
        self.signal = number


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Raises KeyboardInterrupt, or EndedError after SIGTERM or SIGHUP, once what was under way has been ended."""
    whole = _until_ended(work)
    try:
        import asyncio  # 40 ms that `dsec --help` does not need

        return asyncio.run(whole)
    finally:
        for begun in (whole, work):
            begun.close()  # has no effect once it has run; Ctrl-C may come before it begins


async def _until_ended(work: Coroutine[Any, Any, T]) -> T:
    import asyncio
    import signal
    import threading

    task, loop, ended = asyncio.current_task(), asyncio.get_running_loop(), []

    def end(number: int) -> None:
        loop.remove_signal_handler(number)  # a second one does not wait
        ended.append(number)
        assert task is not None
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGHUP):
        # Under nohup(1) SIGHUP is ignored, and stays so.
        if threading.current_thread() is threading.main_thread() and signal.getsignal(number) is signal.SIG_DFL:
            loop.add_signal_handler(number, end, number)
    try:
        return await work
    except asyncio.CancelledError:
        if ended:
            raise EndedError(ended[0]) from None
        raise


def for_each(
    what: Sequence[str],
    act: Callable[[AsyncClient, str], Awaitable[object]],
    *,
    said: str = "removed {}",
    key: str = "removed",
) -> None:
    """One after the other; the first that fails ends it."""

    async def work() -> None:
        async with client() as c:
            for one in what:
                await act(c, one)
                if not settings.json:
                    say(said.format(one))
        if settings.json:
            put_json({"removed": what, key: what})

    run_async(work())


def say(text: str) -> None:
    """Talk, for people; --quiet is without."""
    if not settings.quiet:
        complain(text)


def without(nodes: Sequence[str]) -> str:
    return f"without {', '.join(nodes)}, which {'does' if len(nodes) == 1 else 'do'} not answer"


async def of_cluster(client: AsyncClient) -> bool:
    """Whether what answers stands before several nodes, and so what is on one says which."""
    return not (await client.health()).node


def warn_of(silent: Collection[str]) -> None:
    """Of a list that lacks what is on these nodes."""
    if silent:
        complain(f"warning: these nodes did not answer, and theirs are not here: {', '.join(sorted(silent))}")


def complain(text: str) -> None:
    """What is said in any case."""
    print(text, file=sys.stderr, flush=True)


def put_json(value: Any) -> None:
    from dsec.wire.codec import to_json

    sys.stdout.write(to_json(value).decode() + "\n")
    sys.stdout.flush()


def fail(error: DsecError) -> None:
    """An error, and what to try next."""
    from dsec.cli.hints import next_step

    if settings.json:
        from dsec.wire.errors import body_of

        error.hint = next_step(error)
        put_json({"error": body_of(error)})
        return
    complain(f"error: {clean(error.message)}")
    for what, value in (("sandbox", error.sandbox), ("exec", error.exec), ("step", error.step)):
        if value and value not in error.message:
            complain(f"  {what}: {clean(value)}")
    for name in ("stdout", "stderr"):
        if lines := str(error.detail.get(name) or "").strip().splitlines()[-_SAID_LINES:]:
            complain(f"  its last {name}:")
            for line in lines:
                complain(f"    {clean(line)[:_SAID_WIDTH]}")
    complain(f"  try: {clean(next_step(error))}")


def clean(text: str) -> str:
    """Without control characters: what a sandbox chose must not steer the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    for line in lay_out(headings, rows):
        print(line)


def lay_out(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Columns of text, readable without colour, and by programs that split lines."""
    lines = [list(headings), *([" ".join(clean(cell).split()) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headings))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def when(at: float) -> str:
    """A time of the clock, as people of this machine read it."""
    return time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(at))


def age(seconds: float) -> str:
    """ "5s", "3m", "2h", "4d"."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{max(int(seconds), 0)}s"


def parse_pairs(pairs: Sequence[str] | None, what: str) -> dict[str, str]:
    """`KEY=value` each; a variable without `=` takes its value from our own environment, as with other tools."""
    import os

    from dsec.core.errors import InvalidArgumentError

    found: dict[str, str] = {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not equals and what == "label":
            raise InvalidArgumentError(f"{what} {pair[:80]!r} is not KEY=VALUE", hint="such as --label run=7")
        if not equals and key not in os.environ:
            raise InvalidArgumentError(f"{what} {pair[:80]!r} is not set here", hint="write KEY=VALUE")
        found[key] = value if equals else os.environ[key]
    return found
