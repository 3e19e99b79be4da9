"""A sandbox, as its owner holds it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

import msgspec

from dsec.core import limits
from dsec.core.errors import DsecError, GoneError, InvalidArgumentError, NotFoundError
from dsec.core.ids import main_exec_id, parse_exec_id
from dsec.core.spec import Environment, Place, ReadyProbe, VolumeMount, check_path
from dsec.core.states import ENDED
from dsec.sdk import transfer
from dsec.sdk.files import AsyncFiles
from dsec.sdk.leaving import body_first
from dsec.sdk.output import Offsets
from dsec.sdk.ports import AsyncConnection, open_connection
from dsec.sdk.process import AsyncProcess
from dsec.sdk.pty import AsyncPty
from dsec.sdk.requests import Command, CreateOptions, as_list, make_exec
from dsec.sdk.results import ExecResult
from dsec.sdk.running import OutputCallback, run_command, start_process
from dsec.sdk.screen import AsyncScreen
from dsec.sdk.sessions import AsyncSession
from dsec.sdk.snapshots import MAKING_TIMEOUT_S, AsyncSnapshot
from dsec.wire.records import (
    EgressRequest,
    ExecInfo,
    ExecPage,
    Metrics,
    SessionInfo,
    SessionPage,
    SessionRequest,
    TtlRequest,
    TtySize,
)
from dsec.wire.records import Sandbox as SandboxInfo
from dsec.wire.snapshots import Forked, ForkRequest, RollbackRequest, SnapshotInfo, SnapshotRequest

if TYPE_CHECKING:
    from dsec.sdk.client import AsyncClient

ExecInfos = list[ExecInfo]  # in the class, `list` is the method
SessionInfos = list[SessionInfo]


class AsyncSandbox:
    """A place to run commands in. `async with` destroys it at the end; without that it lives on until `destroy`, or
    its time to live is over.

        async with await dsec.AsyncSandbox.create("base") as sb:
            result = await sb.exec("echo hello")
            print(result.stdout)
    """

    def __init__(self, client: AsyncClient, info: SandboxInfo) -> None:
        self._client = client
        self._transport = client._transport
        self._info = info
        self._path = f"/sandboxes/{info.id}"
        self._files = AsyncFiles(self._transport, info.id)

    # ---- making and finding ----

    @classmethod
    async def create(
        cls,
        environment: str | Environment = "base",
        *,
        backend: str = "container",
        cpu: float | None = None,
        memory: int | str | None = None,
        disk: int | str | None = None,
        pids: int | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        workdir: str | None = None,
        network: str = "none",
        egress: Sequence[str] | None = None,
        ttl_running_s: float | None = None,
        ttl_idle_s: float | None = None,
        labels: Mapping[str, str] | None = None,
        name: str | None = None,
        privilege_gain: bool | None = None,
        keepalive: bool | None = None,
        start: bool | None = None,
        entrypoint: Sequence[str] | None = None,
        command: Sequence[str] | None = None,
        ready: Mapping[str, Any] | ReadyProbe | None = None,
        volumes: Sequence[str | VolumeMount] = (),
        place: Place | None = None,
        job: str | None = None,
        snapshot: str | AsyncSnapshot | None = None,
        idempotency_key: str | None = None,
        timeout_s: float = limits.CREATE_TIMEOUT_S_DEFAULT,
        queue_s: float = 0.0,
        client: AsyncClient | None = None,
    ) -> AsyncSandbox:
        """A new sandbox, running and reachable; or an error, and nothing of it is left.

        `environment`: a name, or `dsec.Environment(base=…, workspace=…, toolkits=(…,))`. `cpu` in cores (1);
        `memory` ("1GiB") and `disk` as bytes or text; at most `pids` (1024) processes; `env`, `user` and
        `workdir` are the defaults of its commands; `ttl_running_s` counts from now, `ttl_idle_s` from its last use;
        with `keepalive` processes in the background are use, too.
        `network`: "none" is loopback alone; with "proxied" it reaches, by TCP and through the node, what `egress`
        allows: names such as "packages.example" (ports 80 and 443), "*.mirror.example:80" or "10.1.0.0/16:5432"; None
        is all that is public, [] nothing.
        `privilege_gain` lets set-user-id programs (sudo) raise privileges inside. `start` runs what the environment
        says (ENTRYPOINT and CMD, or `entrypoint` and `command`): it is `main`. With `ready` this returns once it is so:
        a `dsec.ReadyProbe`, or its fields, such as {"port": 8080} or {"shell": "test -e /run/up", "timeout_s": 60}.
        `volumes`: such as "data:/data"
        or "data:/data:ro", or a `dsec.VolumeMount`, which also names datasets of the node. `place`: a `dsec.Place` says
        which nodes it may be on, and which sandboxes are to spread over them. `job`: the name of a job of the project,
        with which it is paused and stopped.
        `snapshot`: a name, id or Snapshot. The files are those of the snapshotted sandbox then, and so is its
        environment and whatever is not given here, but for the name; `env` and `labels` add to it.
        `idempotency_key`: the same key gives the same sandbox (default: a random one, which makes the retries of this
        call safe). `queue_s`: where there is no room it waits for some, so long, in turn with other projects' creates,
        before `timeout_s` begins. `client`: default the local service.
        Raises CapacityError, LaunchError, EnvironmentNotFoundError, DeadlineError …
        """
        return await _client(client).create(
            environment,
            backend=backend,
            cpu=cpu,
            memory=memory,
            disk=disk,
            pids=pids,
            env=env,
            user=user,
            workdir=workdir,
            network=network,
            egress=egress,
            ttl_running_s=ttl_running_s,
            ttl_idle_s=ttl_idle_s,
            labels=labels,
            name=name,
            privilege_gain=privilege_gain,
            keepalive=keepalive,
            start=start,
            entrypoint=entrypoint,
            command=command,
            ready=ready,
            volumes=volumes,
            place=place,
            job=job,
            snapshot=snapshot,
            idempotency_key=idempotency_key,
            timeout_s=timeout_s,
            queue_s=queue_s,
        )

    @classmethod
    async def create_many(
        cls,
        count: int,
        environment: str | Environment = "base",
        *,
        idempotency_key: str | None = None,
        timeout_s: float = limits.CREATE_TIMEOUT_S_DEFAULT,
        queue_s: float = 0.0,
        client: AsyncClient | None = None,
        **options: Unpack[CreateOptions],
    ) -> list[AsyncSandbox | DsecError]:
        """`count` sandboxes alike: for each, in order, the sandbox or the error that it failed with."""
        return await _client(client).create_many(
            count, environment, idempotency_key=idempotency_key, timeout_s=timeout_s, queue_s=queue_s, **options
        )

    @classmethod
    async def connect(cls, id: str, *, client: AsyncClient | None = None) -> AsyncSandbox:
        """A sandbox that exists, by its id, or by its name while it lives.

        Raises SandboxNotFoundError, GoneError when it has ended, ConflictError when several have the name.
        """
        return await _client(client).connect(id)

    @classmethod
    async def list(
        cls,
        *,
        labels: Mapping[str, str] | None = None,
        name: str | None = None,
        job: str | None = None,
        states: tuple[str, ...] = (),
        max_items: int = 10_000,
        client: AsyncClient | None = None,
    ) -> list[AsyncSandbox]:
        """The sandboxes that have all of `labels`; without `states` those that have not ended."""
        return await _client(client).list(labels=labels, name=name, job=job, states=states, max_items=max_items)

    # ---- about it ----

    @property
    def id(self) -> str:
        """`sbx_…`: with it, any client of the same owner may connect."""
        return self._info.id

    @property
    def name(self) -> str | None:
        """The name it was given."""
        return self._info.name

    @property
    def info(self) -> SandboxInfo:
        """What was last heard of it; `refresh` asks again."""
        return self._info

    @property
    def files(self) -> AsyncFiles:
        """Its files."""
        return self._files

    @property
    def main(self) -> AsyncProcess:
        """The environment's own program. Use of it raises ExecNotFoundError unless the sandbox was created with
        `start=True`."""
        return AsyncProcess(self._transport, self.id, main_exec_id(self.id), stdin_offset=None)

    async def refresh(self) -> SandboxInfo:
        """Asks for its present state. One that has ended stays readable for a day."""
        return await self._told("GET", "")

    async def metrics(self) -> Metrics:
        """What it uses now, and its limits."""
        return await self._transport.call("GET", f"{self._path}/metrics", Metrics)

    async def set_ttl(self, *, ttl_running_s: float | None = None, ttl_idle_s: float | None = None) -> SandboxInfo:
        """Replaces both times to live; None is none. `ttl_running_s` counts from now."""
        return await self._told("PUT", "/ttl", TtlRequest(ttl_running_s=ttl_running_s, ttl_idle_s=ttl_idle_s))

    async def set_egress(self, egress: Sequence[str] | None) -> SandboxInfo:
        """Replaces what it reaches, with network "proxied"; None is all that is public, [] nothing.

        Connections that are still allowed go on, the others are cut. Raises SandboxStateError where its network is
        none. After an UnavailableError what is asked for holds as soon as the node's forwarder is back.
        """
        rules = None if egress is None else as_list(egress, "egress")
        return await self._told("PUT", "/egress", EgressRequest(egress=rules))

    async def pause(self, *, deep: bool = False) -> SandboxInfo:
        """Stops all of it and keeps its memory. The next use resumes it first; its times to live stand still.

        `deep`, of virtual machines: its memory goes to the disk, and nothing of it takes memory or processor any more,
        even over a reboot of its node. Raises UnsupportedError elsewhere, StorageError: then it is paused.
        """
        if not deep:
            return await self._told("POST", "/pause")
        self._info = await self._transport.call(
            "POST",
            f"{self._path}/pause",
            SandboxInfo,
            query={"deep": True},
            repeatable=True,
            long=True,
            timeout_s=MAKING_TIMEOUT_S,
        )
        return self._info

    async def resume(self) -> SandboxInfo:
        """Lets a paused sandbox go on. One that runs is fine."""
        return await self._told("POST", "/resume")

    async def snapshot(self, name: str | None = None, *, idempotency_key: str | None = None) -> AsyncSnapshot:
        """Keeps what it has on its disk now, by a name that is unique in its project (default: the snapshot's id).

        It stands still for a moment, and goes on. Volumes are not kept, and processes, memory and `/dev/shm` only of
        virtual machines (`info.keeps`): what is made from such a snapshot goes on where it was.
        Raises ConflictError (the name is taken, or another snapshot of it is being made), CapacityError, DeadlineError
        when it writes more than can be copied in the time for which it may stand still.
        """
        info = await self._transport.call(
            "POST",
            f"{self._path}:snapshot",
            SnapshotInfo,
            body=SnapshotRequest(name=name),
            key=idempotency_key or secrets.token_hex(16),
            long=True,
            timeout_s=MAKING_TIMEOUT_S,
        )
        return AsyncSnapshot(self._client, info)

    async def fork(
        self,
        count: int = 1,
        *,
        idempotency_key: str | None = None,
        timeout_s: float = limits.CREATE_TIMEOUT_S_DEFAULT,
    ) -> Sequence[AsyncSandbox]:
        """`count` new sandboxes on what it has now, alike but for the name: all of them, or an error.

        It stands still for a moment, and goes on; what is copied `snapshot` says. Variables, limits, labels and times
        to live are as it was given them. `timeout_s` is for the start of each.
        Raises what `snapshot` raises, and what `create` raises: none of them is left then.
        """
        forked = await self._transport.call(
            "POST",
            f"{self._path}:fork",
            Forked,
            body=ForkRequest(count=count, timeout_s=timeout_s),
            key=idempotency_key or secrets.token_hex(16),
            long=True,
            timeout_s=MAKING_TIMEOUT_S,
        )
        return [type(self)(self._client, info) for info in forked.sandboxes]

    async def rollback(self, snapshot: str | AsyncSnapshot) -> SandboxInfo:
        """Takes it back to a snapshot, by name, id or Snapshot; its id, name and limits stay.

        All that runs in it ends (`cause` is `rolled_back`). With `start=True` its program is started again, as another
        `main`, and waited for as at the create. The snapshot need not be its own. Raises NotFoundError,
        SandboxStateError while a snapshot of it is being made, LaunchError: then it is as it was, unless the error's
        `step` is `start` or `ready`: then it has gone back, and its program does not run.
        """
        reference = snapshot.id if isinstance(snapshot, AsyncSnapshot) else snapshot
        if not isinstance(reference, str):
            raise InvalidArgumentError(f"a snapshot is a name, an id or a Snapshot, not {reference!r}")
        self._info = await self._transport.call(
            "POST",
            f"{self._path}:rollback",
            SandboxInfo,
            body=RollbackRequest(reference),
            long=True,
            timeout_s=_ROLLBACK_TIMEOUT_S,
        )
        return self._info

    async def destroy(self) -> None:
        """Ends and removes it. One that has ended already is fine."""
        try:
            await self._told("DELETE", "")
        except (GoneError, NotFoundError):
            return

    async def _told(self, method: str, suffix: str, body: msgspec.Struct | None = None) -> SandboxInfo:
        self._info = await self._transport.call(
            method, f"{self._path}{suffix}", SandboxInfo, body=body, repeatable=True
        )
        return self._info

    # ---- commands ----

    async def exec(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: bytes | str | None = None,
        timeout_s: float | None = None,
        grace_s: float = limits.EXEC_GRACE_S_DEFAULT,
        tty: bool = False,
        on_stdout: OutputCallback | None = None,
        on_stderr: OutputCallback | None = None,
        check: bool = False,
        stderr: Literal["separate", "merge"] = "separate",
        output_bytes_max: int | None = None,
        record_bytes_max: int = limits.EXEC_OUTPUT_BYTES_DEFAULT,
        rlimits: Mapping[str, int] | None = None,
        secrets: Mapping[str, str] | None = None,
    ) -> ExecResult:
        """Runs a command to its end. Text runs in a shell (bash, else sh), a list as it is.

        A command that fails is a result; with `check=True` it is a CommandError, whose `result` is the same.
        `stdin` is given whole; without it the command reads end-of-file. No timeout unless asked: after `timeout_s` all
        its processes get TERM, after `grace_s` KILL, and `timed_out` is true. `on_stdout` and `on_stderr` hear text as
        it comes, never split within a character; they may be coroutine functions. `stderr="merge"` sends both to
        stdout, in their order. `output_bytes_max` kills what writes more; of what is written the last and first of
        `record_bytes_max` per stream are kept, and `truncated` says so. `secrets` are environment variables that are
        written nowhere. When this call is cancelled (Ctrl-C), or a callback raises, the command is killed.
        """
        request = make_exec(
            command,
            cwd=cwd,
            env=env,
            user=user,
            stdin=stdin,
            timeout_s=timeout_s,
            grace_s=grace_s,
            tty=TtySize() if tty else None,
            stderr=stderr,
            output_bytes_max=output_bytes_max,
            record_bytes_max=record_bytes_max,
            rlimits=rlimits,
            secrets=secrets,
        )
        streamed = (stdin.encode() if isinstance(stdin, str) else stdin) if request.stdin else None
        return await run_command(
            self._transport, self.id, request, stdin=streamed, on_stdout=on_stdout, on_stderr=on_stderr, check=check
        )

    async def start(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: bytes | str | bool = False,
        timeout_s: float | None = None,
        grace_s: float = limits.EXEC_GRACE_S_DEFAULT,
        tty: TtySize | bool = False,
        stderr: Literal["separate", "merge"] = "separate",
        output_bytes_max: int | None = None,
        record_bytes_max: int = limits.EXEC_OUTPUT_BYTES_DEFAULT,
        rlimits: Mapping[str, int] | None = None,
        secrets: Mapping[str, str] | None = None,
    ) -> AsyncProcess:
        """Starts a command and returns at once. It goes on whatever becomes of this client; only when this call itself
        is cancelled, it is killed.

        `stdin=True` keeps its stdin open for `write` and `close_stdin`; bytes or text (at most 1 MiB) are given whole.
        The other arguments are those of `exec`.
        """
        request = make_exec(
            command,
            cwd=cwd,
            env=env,
            user=user,
            stdin=stdin,
            timeout_s=timeout_s,
            grace_s=grace_s,
            tty=(TtySize() if tty is True else tty) or None,
            stderr=stderr,
            output_bytes_max=output_bytes_max,
            record_bytes_max=record_bytes_max,
            rlimits=rlimits,
            secrets=secrets,
        )
        if request.stdin and not isinstance(stdin, bool):
            from dsec.core.errors import LimitError

            raise LimitError("stdin of a started command is at most 1 MiB", hint="use stdin=True and write()")
        return await start_process(self._transport, self.id, request)

    async def attach(self, exec_id: str, offset: int = 0, *, stderr_offset: int = 0) -> AsyncProcess:
        """A command that was started before, by this client or another. Output comes from the offsets on.

        Raises ExecNotFoundError.
        """
        process = AsyncProcess(
            self._transport,
            self.id,
            parse_exec_id(exec_id),
            offsets=Offsets(offset, stderr_offset),
            stdin_offset=None,
        )
        await process.info()
        return process

    async def execs(self) -> ExecInfos:
        """Its commands, running and ended, as far as they are still on record."""
        return (await self._transport.call("GET", f"{self._path}/execs", ExecPage)).execs

    async def pty(
        self,
        command: Command | None = None,
        *,
        cols: int = 80,
        rows: int = 24,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        secrets: Mapping[str, str] | None = None,
    ) -> AsyncPty:
        """A terminal with a command on it: by default a login shell."""
        request = make_exec(
            command if command is not None else _LOGIN_SHELL,
            cwd=cwd,
            env=env,
            user=user,
            stdin=True,
            tty=TtySize(cols, rows),
            secrets=secrets,
        )
        return AsyncPty(await start_process(self._transport, self.id, request))

    def session(
        self,
        name: str = "main",
        *,
        shell: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> AsyncSession:
        """A lasting shell by its name; the first command in it starts it. The other arguments count only then."""
        request = SessionRequest(name=name, shell=shell, cwd=cwd, env=dict(env or {}), user=user)
        return AsyncSession(self._transport, self.id, request)

    async def sessions(self) -> SessionInfos:
        """Its sessions that live."""
        return (await self._transport.call("GET", f"{self._path}/sessions", SessionPage)).sessions

    # ---- its screen ----

    @property
    def screen(self) -> AsyncScreen:
        """Its screen, keyboard and mouse, where it is a full machine."""
        return AsyncScreen(self._transport, self.id)

    # ---- files and ports ----

    async def upload(
        self, local: str | PathLike[str], remote: str, *, user: str | None = None, resume: bool = False
    ) -> transfer.Transfer:
        """Copies a file, or what is in a directory, into the sandbox; in constant memory, taken up where it broke.

        A file becomes `remote`, or goes below it when that is a directory or ends in "/". Of a directory the content
        goes below `remote`, which is made. Owners become `user`, or root. With `resume` what an upload of the same
        unchanged file has left behind (of more than 8 MiB; its process was killed, say) is read back, compared, and
        gone on from; and an upload that fails leaves its part for that.
        Raises ConflictError when the file is changed meanwhile.
        """
        return await transfer.upload(
            self._transport, self._files, self.id, Path(local), remote, user=user, resume=resume
        )

    async def download(
        self,
        remote: str,
        local: str | PathLike[str],
        *,
        max_bytes: int = limits.DOWNLOAD_BYTES_DEFAULT,
        max_entries: int = limits.DOWNLOAD_ENTRIES_DEFAULT,
        user: str | None = None,
        resume: bool = False,
    ) -> transfer.Transfer:
        """Copies a file, or what is in a directory, out of the sandbox. Nothing is written outside `local`.

        The sandbox is not trusted: links that lead out of `local`, devices and the like are left out (and named in
        `skipped`), set-id bits and owners are not taken over. Raises LimitError above `max_bytes` or `max_entries`.
        With `resume` a download of a file goes on with what one before has left beside `local`, and leaves it there
        when it fails. Raises ConflictError when the file was changed in between.
        """
        return await transfer.download(
            self._transport,
            self._files,
            self.id,
            remote,
            Path(local),
            below=str(local).endswith("/"),
            user=user,
            max_bytes=max_bytes,
            max_entries=max_entries,
            resume=resume,
        )

    async def connect_port(
        self, port: int | None = None, *, host: str = "localhost", path: str | None = None
    ) -> AsyncConnection:
        """A connection to a TCP port inside the sandbox, or to a UNIX socket by its `path`."""
        query = {"port": port, "host": host} if path is None else {"path": check_path(path)}
        return await open_connection(self._transport, f"{self._path}/connect", query)

    # ---- its end ----

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        with body_first(error):
            await self.destroy()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self._info.state}>"

    @property
    def ended(self) -> bool:
        """Whether it had ended when it was last heard of."""
        return self._info.state in ENDED


_ROLLBACK_TIMEOUT_S = 240.0
# `$0` is the shell that runs this: bash where there is one.
_LOGIN_SHELL = 'exec "$0" -l'


def _client(client: AsyncClient | None) -> AsyncClient:
    if client is not None:
        return client
    from dsec.sdk.client import default_client

    return default_client()
