"""What the commands share: settings, the client, and how things are said."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Sequence

    from dsec.core.errors import DsecError
    from dsec.sdk.client import AsyncClient
    from dsec.sdk.sandbox import AsyncSandbox


T = TypeVar("T")


@dataclass(slots=True)
class Settings:
    url: str | None = None
    token: str | None = None
    json: bool = False  # set by the command that runs


settings = Settings()


def _json_chosen(value: bool) -> bool:
    settings.json = settings.json or value
    return value


Json = Annotated[bool, typer.Option("--json", help="Answer in JSON.", callback=_json_chosen)]
SandboxName = Annotated[str, typer.Argument(metavar="SANDBOX", help="Its id, or its name.", show_default=False)]

_NEXT: Final = {
    "unavailable": "is the service running? `dsec up` starts it, `dsec doctor` looks for what is wrong",
    "sandbox_not_found": "`dsec ls` shows the sandboxes that live",
    "gone": "`dsec ls --all` shows what has ended, and why",
    "environment_not_found": "`dsec env ls` shows what there is; `dsec env build base --debian` makes the usual one",
    "command_not_found": "is it in the environment, and in PATH? `dsec shell SANDBOX` lets you look",
    "invalid_argument": "the option's --help says what it takes",
    "path_not_found": "paths are the sandbox's own and absolute",
    "exec_not_found": "`dsec logs SANDBOX` shows the commands on record",
    "unauthenticated": "pass --token, or set DSEC_TOKEN; `dsec token create` on the service's machine makes one",
    "forbidden": "ask for a token with the right for it",
    "no_capacity": "`dsec ls` shows what uses the room; `dsec rm` frees it",
    "deadline_exceeded": "try again with a longer --timeout",
}
_NEXT_DEFAULT: Final = "`dsec doctor` looks for what is wrong with this machine"


def client() -> AsyncClient:
    from dsec.sdk.client import AsyncClient

    return AsyncClient(settings.url, settings.token)


async def find(client: AsyncClient, name: str) -> AsyncSandbox:
    """A live sandbox by id or name."""
    return await client.connect(await find_id(client, name))


async def find_id(client: AsyncClient, name: str) -> str:
    from dsec.core.errors import ConflictError, SandboxNotFoundError

    if name.startswith("sbx_"):
        return name
    found = await client.list(name=name)
    if not found:
        raise SandboxNotFoundError(f"there is no live sandbox named {name[:80]!r}")
    if len(found) > 1:
        raise ConflictError(f"{len(found)} sandboxes are named {name[:80]!r}", hint="use the id")
    return found[0].id


def run_async(work: Coroutine[Any, Any, T]) -> T:
    import asyncio  # 40 ms that `dsec --help` does not need

    return asyncio.run(work)


def say(text: str) -> None:
    """Talk, for people."""
    print(text, file=sys.stderr, flush=True)


def put_json(value: Any) -> None:
    from dsec.wire.codec import to_json

    sys.stdout.write(to_json(value).decode() + "\n")
    sys.stdout.flush()


def fail(error: DsecError) -> None:
    """An error, and what to try next."""
    if settings.json:
        from dsec.wire.errors import body_of

        put_json({"error": body_of(error)})
        return
    say(f"error: {clean(error.message)}")
    for what, value in (("sandbox", error.sandbox), ("exec", error.exec), ("step", error.step)):
        if value and value not in error.message:
            say(f"  {what}: {clean(value)}")
    reason = str(error.detail.get("code"))
    say(f"  try: {clean(error.hint) if error.hint else _NEXT.get(reason, _NEXT.get(error.code, _NEXT_DEFAULT))}")


def clean(text: str) -> str:
    """Without control characters: what a sandbox chose must not steer the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Columns of text, readable without colour, and by programs that split lines."""
    lines = [list(headings), *([" ".join(clean(cell).split()) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headings))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


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
            raise InvalidArgumentError(f"{what} {pair[:80]!r} is not KEY=VALUE")
        if not equals and key not in os.environ:
            raise InvalidArgumentError(f"{what} {pair[:80]!r} is not set here", hint="write KEY=VALUE")
        found[key] = value if equals else os.environ[key]
    return found
