"""The programs that a fake sandbox has: enough of each for tests, and no more."""

from __future__ import annotations

import asyncio
import signal as signals
from collections.abc import Awaitable, Callable
from typing import Final

from dsec.backends.fake.failures import AgentFailure
from dsec.backends.fake.process import BytesSource, KilledError, Process, Source, ZeroSource

_PIECE: Final = 64 * 1024

Command = Callable[[Process, list[bytes]], Awaitable[int]]


async def _true(process: Process, args: list[bytes]) -> int:
    return 0


async def _false(process: Process, args: list[bytes]) -> int:
    return 1


async def _echo(process: Process, args: list[bytes]) -> int:
    newline = args[:1] != [b"-n"]
    await process.stdout.write(b" ".join(args if newline else args[1:]) + (b"\n" if newline else b""))
    return 0


async def _printf(process: Process, args: list[bytes]) -> int:
    if not args:
        return 2
    text = args[0].decode("latin-1").encode("latin-1").decode("unicode_escape").encode("latin-1")
    rest = list(args[1:])
    while True:
        before = len(rest)
        await process.stdout.write(_fill(text, rest))
        if not rest or len(rest) == before:
            return 0


def _fill(text: bytes, rest: list[bytes]) -> bytes:
    pieces = text.replace(b"%%", b"\0").replace(b"%d", b"%s").split(b"%s")
    out = pieces[0]
    for piece in pieces[1:]:
        out += (rest.pop(0) if rest else b"") + piece
    return out.replace(b"\0", b"%")


async def _cat(process: Process, args: list[bytes]) -> int:
    code = 0
    for name in args or [b"-"]:
        source = await _open(process, name, "cat")
        if source is None:
            code = 1
            continue
        while piece := await source.read(_PIECE):
            await process.stdout.write(piece)
    return code


async def _open(process: Process, name: bytes, who: str) -> Source | None:
    if name == b"-":
        return process.stdin
    if name == b"/dev/zero":
        return ZeroSource()
    if name == b"/dev/null":
        return BytesSource(b"")
    try:
        _, data = process.context.files.read(process.path(name), user=process.user)
    except AgentFailure as error:
        await process.complain(f"{who}: {name.decode('utf-8', 'replace')}: {error.errno}")
        return None
    return BytesSource(bytes(data))


async def _head(process: Process, args: list[bytes]) -> int:
    if len(args) < 2 or args[0] not in (b"-c", b"-n"):
        await process.complain("head: -c or -n with a number is needed")
        return 1
    left, lines = int(args[1]), args[0] == b"-n"
    source = await _open(process, args[2] if len(args) > 2 else b"-", "head")
    if source is None:
        return 1
    while left > 0 and (piece := await source.read(_PIECE if lines else min(left, _PIECE))):
        if lines:
            kept = piece.splitlines(keepends=True)[:left]
            left -= len(kept)
            piece = b"".join(kept)
        else:
            left -= len(piece)
        await process.stdout.write(piece)
    return 0


async def _wc(process: Process, args: list[bytes]) -> int:
    count = 0
    while piece := await process.stdin.read(_PIECE):
        count += piece.count(b"\n") if args == [b"-l"] else len(piece)
    await process.stdout.write(b"%d\n" % count)
    return 0


async def _yes(process: Process, args: list[bytes]) -> int:
    line = b" ".join(args or [b"y"]) + b"\n"
    piece = line * (_PIECE // len(line) + 1)
    while True:
        await process.stdout.write(piece)


async def _seq(process: Process, args: list[bytes]) -> int:
    numbers = [int(arg) for arg in args]
    first, last = (1, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[-1])
    for start in range(first, last + 1, 4096):
        await process.stdout.write(b"".join(b"%d\n" % n for n in range(start, min(start + 4096, last + 1))))
    return 0


async def _sleep(process: Process, args: list[bytes]) -> int:
    if not args:
        return 1
    await process.context.sleep(float("inf") if args[0] == b"infinity" else float(args[0]))
    return 0


async def _env(process: Process, args: list[bytes]) -> int:
    await process.stdout.write(b"".join(k + b"=" + v + b"\n" for k, v in sorted(process.env.items())))
    return 0


async def _pwd(process: Process, args: list[bytes]) -> int:
    await process.stdout.write(process.cwd + b"\n")
    return 0


async def _id(process: Process, args: list[bytes]) -> int:
    number = process.user.gid if args == [b"-g"] else process.user.uid
    await process.stdout.write(b"%d\n" % number)
    return 0


async def _uname(process: Process, args: list[bytes]) -> int:
    await process.stdout.write(b"Linux\n")
    return 0


async def _kill(process: Process, args: list[bytes]) -> int:
    number = 15
    if args and args[0].startswith(b"-"):
        number = parse_signal(args[0][1:])
        args = args[1:]
    if args != [b"%d" % process.context.pid]:
        await process.complain("kill: no such process")
        return 1
    if number in process.context.ignored:
        return 0
    raise KilledError(number)


async def _kill_self(process: Process, args: list[bytes]) -> int:
    raise KilledError(parse_signal(args[0]) if args else 9)


def parse_signal(text: bytes) -> int:
    if text.isdigit():
        return int(text)
    name = text.decode("ascii", "replace")
    return int(signals.Signals[name if name.startswith("SIG") else f"SIG{name}"])


async def _ls(process: Process, args: list[bytes]) -> int:
    for entry in process.context.files.list(process.path(args[-1] if args else b"."), user=process.user):
        await process.stdout.write(entry.name + b"\n")
    return 0


async def _mkdir(process: Process, args: list[bytes]) -> int:
    parents = b"-p" in args
    for name in _names(args):
        process.context.files.mkdir(process.path(name), parents=parents, user=process.user)
    return 0


async def _touch(process: Process, args: list[bytes]) -> int:
    for name in _names(args):
        process.context.files.write(process.path(name), b"", append=True, user=process.user)
    return 0


async def _rm(process: Process, args: list[bytes]) -> int:
    flags = b"".join(arg for arg in args if arg.startswith(b"-"))
    for name in _names(args):
        process.context.files.remove(
            process.path(name), recursive=b"r" in flags, missing_ok=b"f" in flags, user=process.user
        )
    return 0


async def _mv(process: Process, args: list[bytes]) -> int:
    source, target = _names(args)
    process.context.files.move(process.path(source), process.path(target), replace=True, user=process.user)
    return 0


async def _ln(process: Process, args: list[bytes]) -> int:
    target, name = _names(args)
    process.context.files.symlink(process.path(name), target, user=process.user)
    return 0


async def _chmod(process: Process, args: list[bytes]) -> int:
    mode, name = args
    process.context.files.chmod(process.path(name), int(mode, 8), user=process.user)
    return 0


async def _test(process: Process, args: list[bytes]) -> int:
    if args and args[-1] == b"]":
        args = args[:-1]
    if len(args) == 3:
        return int((args[0] == args[2]) != (args[1] == b"="))
    if len(args) != 2:
        return int(args in ([], [b""]))
    what, name = args
    if what == b"-t":
        return int(process.context.tty is None)
    if what in (b"-n", b"-z"):
        return int(bool(name) != (what == b"-n"))
    try:
        kind = process.context.files.stat(process.path(name), user=process.user).kind
    except AgentFailure:
        return 1
    return int(kind != {b"-d": "directory", b"-f": "file", b"-e": kind}.get(what))


async def _stty(process: Process, args: list[bytes]) -> int:
    if process.context.tty is None:
        await process.complain("stty: not a terminal")
        return 1
    cols, rows = process.context.tty
    await process.stdout.write(b"%d %d\n" % (rows, cols))
    return 0


def _names(args: list[bytes]) -> list[bytes]:
    return [arg for arg in args if not arg.startswith(b"-")]


COMMANDS: Final[dict[bytes, Command]] = {
    b"true": _true,
    b":": _true,
    b"false": _false,
    b"echo": _echo,
    b"printf": _printf,
    b"cat": _cat,
    b"head": _head,
    b"wc": _wc,
    b"yes": _yes,
    b"seq": _seq,
    b"sleep": _sleep,
    b"env": _env,
    b"pwd": _pwd,
    b"id": _id,
    b"uname": _uname,
    b"kill": _kill,
    b"kill-self": _kill_self,
    b"ls": _ls,
    b"mkdir": _mkdir,
    b"touch": _touch,
    b"rm": _rm,
    b"mv": _mv,
    b"ln": _ln,
    b"chmod": _chmod,
    b"test": _test,
    b"[": _test,
    b"stty": _stty,
}
SHELLS: Final = frozenset({b"sh", b"bash"})
_PLACES: Final = (b"/bin/", b"/usr/bin/")


def find_command(name: bytes) -> bytes | None:
    """The program's plain name; None when the fake sandbox has none of that name or path."""
    for place in _PLACES:
        if name.startswith(place):
            name = name[len(place) :]
            break
    return name if name in COMMANDS or name in SHELLS else None


async def run_command(process: Process, name: bytes, args: list[bytes]) -> int:
    """A command's exit code. What it does wrong is said on stderr, as a program would."""
    try:
        await asyncio.sleep(0)
        return await COMMANDS[name](process, args)
    except AgentFailure as error:
        await process.complain(f"{name.decode()}: {error.message}")
        return 1
    except (ValueError, IndexError, KeyError):
        await process.complain(f"{name.decode()}: bad arguments")
        return 2
    except BrokenPipeError:
        return 141
