"""From a request to something that runs: environment, directory, user, program; nothing has run when this fails."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dsec.backends.fake.commands import SHELLS, find_command, run_command
from dsec.backends.fake.execs import FakeExec
from dsec.backends.fake.failures import AgentFailure
from dsec.backends.fake.process import Context, NullSink, NullSource, Process
from dsec.backends.fake.shell import Shell, run_shell
from dsec.backends.fake.users import Account, find_account
from dsec.core.errors import InvalidArgumentError
from dsec.core.ids import parse_exec_id, parse_name
from dsec.wire import agent
from dsec.wire.frames import Channel

if TYPE_CHECKING:
    from dsec.backends.fake.agent import FakeAgent

_PATH: Final = b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ARGUMENT_BYTES_MAX: Final = 128 * 1024  # Linux, one string of argv
_NOFILE_MAX: Final = 1 << 20
_RLIMITS: Final = frozenset({"nofile", "core", "fsize", "nproc", "stack", "as", "cpu", "data", "memlock"})

Main = Callable[[], Awaitable[int]]


@dataclass(frozen=True, slots=True)
class StartedExec:
    exec: FakeExec
    process: Process
    main: Main


@dataclass(slots=True)
class FakeSession:
    """A lasting shell."""

    name: str
    pid: int
    shell: Shell
    busy: str | None = None

    def state(self, *, existing: bool = False) -> agent.SessionState:
        return agent.SessionState(name=self.name, pid=self.pid, busy=self.busy, existing=existing)


def prepare_exec(owner: FakeAgent, request: agent.Exec, pid: int) -> StartedExec:
    """Raises AgentFailure with the code that the protocol gives."""
    _check(request)
    if request.session is not None:
        return _prepare_in_session(owner, request)
    exec = FakeExec(owner.sandbox, request, pid)
    account = find_account(request.user or owner.sandbox.user)
    process = Process(
        context=Context(
            owner.files,
            owner.sandbox.sleep,
            pid,
            None if request.tty is None else (request.tty.cols, request.tty.rows),
        ),
        env=_environment(owner, account, request.env, tty=request.tty is not None),
        cwd=_directory(owner, account, request.cwd),
        user=account.user,
        stdin=exec.stdin if request.stdin else NullSource(),
        stdout=exec.sink(Channel.OUT),
        stderr=exec.sink(Channel.ERR),
    )
    return StartedExec(exec, process, _program(owner, request, process))


def prepare_session(owner: FakeAgent, request: agent.SessionOpen, pid: int) -> FakeSession:
    try:
        parse_name(request.name)
    except InvalidArgumentError as error:
        raise AgentFailure("invalid", error.message) from error
    if request.shell is not None and find_command(request.shell) not in SHELLS:
        raise AgentFailure("command_not_found", f"there is no shell {request.shell[:80]!r}", "ENOENT")
    account = find_account(request.user or owner.sandbox.user)
    process = Process(
        context=Context(owner.files, owner.sandbox.sleep, pid),
        env=_environment(owner, account, request.env, tty=False),
        cwd=_directory(owner, account, request.cwd),
        user=account.user,
        stdin=NullSource(),
        stdout=NullSink(),
        stderr=NullSink(),
    )
    return FakeSession(request.name, pid, Shell(process))


def _check(request: agent.Exec) -> None:
    try:
        parse_exec_id(request.id)
    except InvalidArgumentError as error:
        raise AgentFailure("invalid", error.message) from error
    if (request.argv is None) == (request.shell is None):
        raise AgentFailure("invalid", "exactly one of argv and shell must be given")
    strings = request.argv if request.argv is not None else [request.shell or b""]
    if not strings or any(b"\0" in text for text in strings):
        raise AgentFailure("invalid", "the command is empty or holds NUL")
    if any(len(text) >= _ARGUMENT_BYTES_MAX for text in strings):
        raise AgentFailure("argument_too_long", f"an argument has {_ARGUMENT_BYTES_MAX} bytes or more", "E2BIG")
    if any(not key or b"=" in key or b"\0" in key + value for key, value in request.env.items()):
        raise AgentFailure("invalid", "an environment variable that cannot be one")
    if request.timeout_s is not None and not request.timeout_s > 0:
        raise AgentFailure("invalid", "timeout_s must be above 0")
    for name, value in request.rlimits.items():
        if name not in _RLIMITS or value < 0:
            raise AgentFailure("invalid", f"limit {name[:40]!r} of {value}")
        if name == "nofile" and value > _NOFILE_MAX:
            raise AgentFailure("rlimit_refused", f"limit nofile of {value}", "EPERM")


def _prepare_in_session(owner: FakeAgent, request: agent.Exec) -> StartedExec:
    session = owner.sessions.get(request.session or "")
    if session is None:
        raise AgentFailure("session_not_found", f"there is no session {request.session!r}")
    own = (request.cwd, request.user, request.tty, request.env or None, request.rlimits or None)
    if request.shell is None or request.stdin or any(given is not None for given in own):
        raise AgentFailure("invalid", "an exec in a session has shell text only")
    if session.busy is not None:
        raise AgentFailure("session_busy", f"{session.busy} runs in session {session.name}")
    exec = FakeExec(owner.sandbox, request, session.pid)
    shell, text = session.shell, request.shell
    shell.process.stdout, shell.process.stderr = exec.sink(Channel.OUT), exec.sink(Channel.ERR)

    async def main() -> int:
        return await shell.run(text)

    return StartedExec(exec, shell.process, main)


def _program(owner: FakeAgent, request: agent.Exec, process: Process) -> Main:
    if request.shell is not None:
        text = request.shell

        async def shell() -> int:
            return await run_shell(process, [b"-c", text])

        return shell
    argv = request.argv or []
    name = find_command(argv[0])
    if name is None:
        return _script(owner, argv, process)
    if name in SHELLS:

        async def named_shell() -> int:
            return await run_shell(process, argv[1:])

        return named_shell

    async def command() -> int:
        return await run_command(process, name, argv[1:])

    return command


def _script(owner: FakeAgent, argv: list[bytes], process: Process) -> Main:
    path = process.path(argv[0])
    try:
        stat = owner.files.stat(path, user=process.user) if b"/" in argv[0] else None
    except AgentFailure:
        stat = None
    if stat is None:
        raise AgentFailure("command_not_found", f"there is no program {argv[0][:80]!r}", "ENOENT")
    if stat.kind != "file" or not stat.mode & 0o111:
        raise AgentFailure("not_executable", f"{argv[0][:80]!r} cannot be executed", "EACCES")

    async def main() -> int:
        return await run_shell(process, [path, *argv[1:]])

    return main


def _environment(owner: FakeAgent, account: Account, own: dict[bytes, bytes], *, tty: bool) -> dict[bytes, bytes]:
    env = dict(owner.sandbox.env)
    name = account.name.encode()
    for key, value in ((b"HOME", account.home), (b"USER", name), (b"LOGNAME", name), (b"SHELL", b"/bin/sh")):
        env.setdefault(key, value)
    env.setdefault(b"PATH", _PATH)
    if tty:
        env[b"TERM"] = b"xterm-256color"
    env.update(own)
    return env


def _directory(owner: FakeAgent, account: Account, asked: bytes | None) -> bytes:
    chosen = asked or owner.sandbox.workdir
    if chosen is None:
        return account.home if owner.files.exists(account.home) else b"/"
    try:
        if chosen.startswith(b"/") and owner.files.stat(chosen).kind == "directory":
            return chosen
    except AgentFailure as error:
        raise AgentFailure("cwd_not_found", f"there is no directory {chosen[:80]!r}", error.errno) from error
    raise AgentFailure("cwd_not_found", f"{chosen[:80]!r} is not a directory", "ENOTDIR")
