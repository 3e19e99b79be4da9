"""A shell of one page: lists, pipes, redirections, variables, background. No loops and no globbing."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from typing import Final

from dsec.backends.fake.commands import SHELLS, find_command, parse_signal, run_command
from dsec.backends.fake.failures import AgentFailure
from dsec.backends.fake.process import BytesSource as _BytesSource
from dsec.backends.fake.process import FileSink, KilledError, NullSink, Pipe, Process, ShellExit, Source

_TOKEN: Final = re.compile(
    rb"""(?P<space>[ \t]+|\\\n)
    |(?P<redirect>2>&1|1?>&2|2>>|2>|>>|>|<)
    |(?P<op>&&|\|\||;|\n|\||&)
    |(?P<word>(?:'[^']*'|"(?:[^"\\]|\\.)*"|\\.|[^\s;&|<>'"\\])+)""",
    re.VERBOSE | re.DOTALL,
)
_PIECE: Final = re.compile(rb"""'([^']*)'|"((?:[^"\\]|\\.)*)"|\\(.)|([^'"\\]+)""", re.DOTALL)
_VARIABLE: Final = re.compile(rb"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*)|(\?)|(\$))")
_ASSIGNMENT: Final = re.compile(rb"([A-Za-z_]\w*)=(.*)\Z", re.DOTALL)

Token = tuple[str, bytes]


class Shell:
    """The state that lasts from one command to the next."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.status = 0

    async def run(self, text: bytes) -> int:
        """The last command's code. Raises ShellExit from `exit`, KilledError when the shell kills itself."""
        try:
            tokens = _tokens(text)
        except ValueError as error:
            await self.process.complain(f"sh: {error}")
            self.status = 2
            return 2
        for tokens_of_one, operator in _split(tokens, (b";", b"\n", b"&")):
            if not tokens_of_one:
                continue
            if operator == b"&":
                self._run_behind(tokens_of_one)
            else:
                self.status = await self._run_list(tokens_of_one)
        return self.status

    def _run_behind(self, tokens: list[Token]) -> None:
        behind = Shell(replace(self.process, env=dict(self.process.env)))
        task = asyncio.get_running_loop().create_task(behind._run_apart(tokens))
        background = self.process.context.background
        background.add(task)
        task.add_done_callback(background.discard)

    async def _run_apart(self, tokens: list[Token]) -> int:
        try:
            return await self._run_list(tokens)
        except ShellExit as error:
            return error.code
        except KilledError as error:
            return 128 + error.signal
        except BrokenPipeError:
            return 141

    async def _run_list(self, tokens: list[Token]) -> int:
        skip = False
        for pipeline, operator in _split(tokens, (b"&&", b"||")):
            if not skip:
                self.status = await self._run_pipeline(pipeline)
            skip = (operator == b"&&") == (self.status != 0) and operator != b""
        return self.status

    async def _run_pipeline(self, tokens: list[Token]) -> int:
        stages = [stage for stage, _ in _split(tokens, (b"|",))]
        if len(stages) == 1:
            return await self._run_simple(stages[0])
        running: list[asyncio.Task[int]] = []
        source: Source = self.process.stdin
        for index, stage in enumerate(stages):
            last = index == len(stages) - 1
            pipe = Pipe()
            stage_process = replace(
                self.process,
                env=dict(self.process.env),
                stdin=source,
                stdout=self.process.stdout if last else pipe,
            )
            running.append(
                asyncio.get_running_loop().create_task(
                    _run_stage(Shell(stage_process), stage, source, None if last else pipe)
                )
            )
            source = pipe
        try:
            await asyncio.wait(running)
        finally:
            for task in running:
                task.cancel()
        return running[-1].result()

    async def _run_simple(self, tokens: list[Token]) -> int:
        words, redirects = self._words(tokens)
        process, here = self.process, {}
        while words and (match := _ASSIGNMENT.match(words[0])):
            here[match.group(1)] = match.group(2)
            words.pop(0)
        if not words and not redirects:
            process.env.update(here)
            return 0
        try:
            process = self._redirected(
                replace(process, env={**process.env, **here} if here else process.env), redirects
            )
        except AgentFailure as error:
            await process.complain(f"sh: {error.message}")
            return 2
        if not words:
            return 0
        return await self._run_words(process, words)

    async def _run_words(self, process: Process, words: list[bytes]) -> int:
        name, args = words[0], words[1:]
        builtin = {b"exit": self._exit, b"cd": self._cd, b"export": self._export, b"unset": self._unset}.get(name)
        if builtin is not None:
            return await builtin(process, args)
        if name == b"trap":
            process.context.ignored.update(parse_signal(arg) for arg in args[1:] if args[0] == b"")
            return 0
        if name == b"wait":
            if process.context.background:
                await asyncio.wait(process.context.background)
            return 0
        program = find_command(name)
        if program is None:
            await process.complain(f"sh: {name.decode('utf-8', 'replace')}: not found")
            return 127
        if program in SHELLS:
            return await run_shell(process, args)
        return await run_command(process, program, args)

    async def _exit(self, process: Process, args: list[bytes]) -> int:
        raise ShellExit(int(args[0]) & 255 if args else self.status)

    async def _cd(self, process: Process, args: list[bytes]) -> int:
        target = process.path(args[0] if args else process.env.get(b"HOME", b"/"))
        try:
            if process.context.files.stat(target, user=process.user).kind != "directory":
                raise AgentFailure("file", f"{target!r}: ENOTDIR", "ENOTDIR")
        except AgentFailure as error:
            await process.complain(f"sh: cd: {error.message}")
            return 2
        self.process.cwd = _normal(target)
        return 0

    async def _export(self, process: Process, args: list[bytes]) -> int:
        for arg in args:
            if match := _ASSIGNMENT.match(arg):
                self.process.env[match.group(1)] = match.group(2)
        return 0

    async def _unset(self, process: Process, args: list[bytes]) -> int:
        for arg in args:
            self.process.env.pop(arg, None)
        return 0

    def _words(self, tokens: list[Token]) -> tuple[list[bytes], list[tuple[bytes, bytes]]]:
        words: list[bytes] = []
        redirects: list[tuple[bytes, bytes]] = []
        waiting: bytes | None = None
        for kind, text in tokens:
            if kind == "redirect":
                if b"&" in text:
                    redirects.append((text, b""))
                else:
                    waiting = text
            elif waiting is not None:
                redirects.append((waiting, self._expand(text)))
                waiting = None
            else:
                words.append(self._expand(text))
        return words, redirects

    def _expand(self, word: bytes) -> bytes:
        out = b""
        for single, double, escaped, plain in _PIECE.findall(word):
            if double:
                out += re.sub(rb"\\([\\\"$`])", rb"\1", self._variables(double))
            else:
                out += single + escaped + self._variables(plain)
        return out

    def _variables(self, text: bytes) -> bytes:
        def value(match: re.Match[bytes]) -> bytes:
            if match.group(3):
                return b"%d" % self.status
            if match.group(4):
                return b"%d" % self.process.context.pid
            return self.process.env.get(match.group(1) or match.group(2), b"")

        return _VARIABLE.sub(value, text)

    def _redirected(self, process: Process, redirects: list[tuple[bytes, bytes]]) -> Process:
        for operator, name in redirects:
            if operator == b"2>&1":
                process = replace(process, stderr=process.stdout)
            elif operator.endswith(b">&2"):
                process = replace(process, stdout=process.stderr)
            elif operator == b"<":
                _, data = process.context.files.read(process.path(name), user=process.user)
                process = replace(process, stdin=_BytesSource(bytes(data)))
            else:
                sink = _open_sink(process, name, append=operator.endswith(b">>"))
                process = replace(process, stderr=sink) if operator.startswith(b"2") else replace(process, stdout=sink)
        return process


async def run_shell(process: Process, args: list[bytes]) -> int:
    """`sh -c TEXT`, `sh FILE`, or commands from stdin: a shell of its own."""
    shell = Shell(replace(process, env=dict(process.env)))
    if args[:1] == [b"-c"] and len(args) > 1:
        text = args[1]
    elif args:
        _, data = process.context.files.read(process.path(args[0]), user=process.user)
        text = bytes(data)
    else:
        text = b""
        while piece := await process.stdin.read(65_536):
            text += piece
    try:
        return await shell.run(text)
    except ShellExit as error:
        return error.code


async def _run_stage(shell: Shell, tokens: list[Token], source: Source, pipe: Pipe | None) -> int:
    try:
        return await shell._run_apart(tokens)
    finally:
        if pipe is not None:
            pipe.close_write()
        if isinstance(source, Pipe):
            source.close_read()


def _open_sink(process: Process, name: bytes, *, append: bool) -> FileSink | NullSink:
    if name == b"/dev/null":
        return NullSink()
    return FileSink(process.context.files, process.path(name), process.user, append=append)


def _tokens(text: bytes) -> list[Token]:
    tokens: list[Token] = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise ValueError("syntax error")
        kind = match.lastgroup or ""
        if kind != "space":
            tokens.append((kind, match.group()))
        at = match.end()
    return tokens


def _split(tokens: list[Token], operators: tuple[bytes, ...]) -> list[tuple[list[Token], bytes]]:
    """Runs of tokens, each with the operator that ended it."""
    parts: list[tuple[list[Token], bytes]] = []
    part: list[Token] = []
    for kind, text in tokens:
        if kind == "op" and text in operators:
            parts.append((part, text))
            part = []
        else:
            part.append((kind, text))
    if part:
        parts.append((part, b""))
    return parts


def _normal(path: bytes) -> bytes:
    parts: list[bytes] = []
    for part in path.split(b"/"):
        if part == b"..":
            del parts[-1:]
        elif part not in (b"", b"."):
            parts.append(part)
    return b"/" + b"/".join(parts)
