"""The blocking SDK. Derived from the asynchronous one by tools/derive_sync.py; changes belong there."""

from __future__ import annotations

import signal as signals
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, Literal, Self, Unpack

from dsec.core import limits
from dsec.core.errors import (
    DsecError,
)
from dsec.core.spec import Environment, Place, ReadyProbe, VolumeMount
from dsec.sdk import transfer
from dsec.sdk.blocking import Blocking, portal, unwrap
from dsec.sdk.calls import CallOptions, CallResult
from dsec.sdk.client import AsyncClient, AsyncCreated
from dsec.sdk.environments import AsyncEnvironments
from dsec.sdk.files import READ_BYTES_DEFAULT, AsyncFiles, AsyncWatch, RemotePath
from dsec.sdk.grants import AsyncGrants
from dsec.sdk.groups import AsyncGroup, AsyncGroups
from dsec.sdk.jobs import AsyncJob, AsyncJobs
from dsec.sdk.layers import AsyncLayers
from dsec.sdk.machines import AsyncMachines
from dsec.sdk.ports import AsyncConnection
from dsec.sdk.process import AsyncProcess
from dsec.sdk.projects import AsyncProjects
from dsec.sdk.pty import AsyncPty
from dsec.sdk.reports import JobReport
from dsec.sdk.requests import Command, CreateOptions
from dsec.sdk.results import Chunk, ExecResult
from dsec.sdk.running import OutputCallback
from dsec.sdk.sandbox import AsyncSandbox, ExecInfos, SessionInfos
from dsec.sdk.screen import AsyncScreen
from dsec.sdk.sessions import AsyncSession
from dsec.sdk.snapshots import AsyncSnapshot, AsyncSnapshots
from dsec.sdk.socketlike import SocketLike
from dsec.sdk.tokens import AsyncTokens
from dsec.sdk.volumes import AsyncVolumes
from dsec.wire.calls import CallPool, CallRequest, TaskTypeInfo
from dsec.wire.collect import GcReport
from dsec.wire.environments import (
    BuildEvent,
    BuildSource,
    EnvironmentInfo,
    EnvironmentStats,
    EnvironmentTrace,
    LayerUse,
)
from dsec.wire.events import Event
from dsec.wire.groups import GroupInfo, GroupLink, GroupStep
from dsec.wire.iam import (
    AuditPage,
    GrantInfo,
    Policy,
    PrincipalInfo,
    ProjectInfo,
    Quota,
    QuotaInfo,
    WhoAmI,
)
from dsec.wire.images import ExportedImage, ExportTarget
from dsec.wire.jobs import JobInfo
from dsec.wire.layers import EnvironmentDiff, LayerInfo
from dsec.wire.machines import DiskFile, MachineInfo
from dsec.wire.plans import Explanation, GroupExplanation
from dsec.wire.records import (
    DoctorReport,
    ExecInfo,
    FileInfo,
    Health,
    Metrics,
    SessionInfo,
    TtySize,
    WatchNotice,
)
from dsec.wire.records import Sandbox as SandboxInfo
from dsec.wire.screens import Action, ScreenSize
from dsec.wire.snapshots import (
    Published,
    SnapshotInfo,
)
from dsec.wire.tokens import TokenAnswer, TokenInfo
from dsec.wire.usage import UsagePage
from dsec.wire.volumes import VolumeInfo


class Process(Blocking[AsyncProcess]):
    """One exec of a sandbox. It goes on when this object, or the connection, is lost; `attach` finds it again.

    Iterating gives `Chunk`s of output until the end; `wait()` gives the ExecResult. Both may be done, in any order.
    """

    @property
    def id(self) -> str:
        """The exec's id: with it, any client may attach."""
        return self._async.id

    @property
    def sandbox_id(self) -> str:
        """Of the sandbox that it runs in."""
        return self._async.sandbox_id

    def __iter__(self) -> Iterator[Chunk]:
        return portal().iterate(self._async.__aiter__())

    def output(self, *, follow: bool = True) -> Iterator[Chunk]:
        """Its output from the beginning, until its end; without `follow` what is on record now."""
        return portal().iterate(self._async.output(follow=follow))

    def wait(self, timeout_s: float | None = None) -> ExecResult:
        """The result, once the command has ended. Raises DeadlineError after `timeout_s`; the command then goes on."""
        return portal().run(self._async.wait(timeout_s))

    def info(self) -> ExecInfo:
        """The state of the command now."""
        return portal().run(self._async.info())

    def write(self, data: bytes | str) -> None:
        """Writes all of `data` to the command's stdin; waits while the command does not read.

        Needs an exec that was started with `stdin=True` or a terminal. Text is sent as UTF-8.
        """
        portal().run(self._async.write(data))

    def close_stdin(self) -> None:
        """The command reads end-of-file after what was written. Doing it twice is fine, and after its end too."""
        portal().run(self._async.close_stdin())

    def signal(self, signal: int | str = signals.SIGTERM, *, tree: bool = False) -> ExecInfo:
        """Sends a signal (number, or name such as "INT") to the command's process group, or to all its processes."""
        return portal().run(self._async.signal(signal, tree=tree))

    def kill(self) -> ExecInfo:
        """Kills every process of the command at once. Ended already is fine."""
        return portal().run(self._async.kill())

    def resize(self, cols: int, rows: int) -> ExecInfo:
        """Tells the command's terminal its new size."""
        return portal().run(self._async.resize(cols, rows))


class Pty(Blocking[AsyncPty]):
    """An interactive command on a terminal. Leaving the `with` block hangs it up (kills what runs on it)."""

    @property
    def id(self) -> str:
        """The exec's id: with it, any client may attach."""
        return self._async.id

    def read(self, max_bytes: int = 65536) -> bytes:
        """What the terminal shows next, at least one byte; empty once the command has ended."""
        return portal().run(self._async.read(max_bytes))

    def write(self, data: bytes | str) -> None:
        """Types `data`. Text is sent as UTF-8; a return key is "\\r" or "\\n"."""
        portal().run(self._async.write(data))

    def resize(self, cols: int, rows: int) -> None:
        """Tells the terminal its new size; what runs on it gets SIGWINCH."""
        portal().run(self._async.resize(cols, rows))

    def wait(self, timeout_s: float | None = None) -> ExecResult:
        """The result, once the command has ended; all that the terminal showed is in its `stdout`."""
        return portal().run(self._async.wait(timeout_s))

    def kill(self) -> None:
        """Kills what runs on the terminal. Ended already is fine."""
        portal().run(self._async.kill())

    def close(self) -> None:
        """Hangs up: kills what runs on the terminal and stops reading it. Doing it twice is fine."""
        portal().run(self._async.close())

    def __enter__(self) -> Self:
        portal().run(self._async.__aenter__())
        return self

    def __exit__(self, *error: object) -> None:
        portal().run(self._async.__aexit__(*error))


class Session(Blocking[AsyncSession]):
    """One named shell. It is opened by the first command (or `open`), and found again by its name.

    One command at a time: a second one meanwhile raises ConflictError. Its status is as trustworthy as the shell,
    which belongs to the sandbox: for grading use `Sandbox.exec`.
    """

    @property
    def name(self) -> str:
        """The session's name: any client finds it by that."""
        return self._async.name

    def open(self) -> SessionInfo:
        """Starts the shell unless it is there; says which."""
        return portal().run(self._async.open())

    def exec(
        self,
        command: Command,
        *,
        timeout_s: float | None = None,
        grace_s: float = limits.EXEC_GRACE_S_DEFAULT,
        on_stdout: OutputCallback | None = None,
        on_stderr: OutputCallback | None = None,
        check: bool = False,
        output_bytes_max: int | None = None,
        record_bytes_max: int = limits.EXEC_OUTPUT_BYTES_DEFAULT,
    ) -> ExecResult:
        """Runs a command in the shell; `cd`, variables and functions stay for the next one.

        Arguments as those of `Sandbox.exec`; directory, environment and user are the shell's. When the command ends the
        shell itself (`exit`), `session_ended` is true in the result, and the next exec begins a new one.
        """
        return portal().run_calling(
            lambda bridge: self._async.exec(
                command,
                timeout_s=timeout_s,
                grace_s=grace_s,
                on_stdout=bridge(on_stdout),
                on_stderr=bridge(on_stderr),
                check=check,
                output_bytes_max=output_bytes_max,
                record_bytes_max=record_bytes_max,
            )
        )

    def close(self) -> None:
        """Ends the shell and what runs in it. One that has ended already is fine."""
        portal().run(self._async.close())

    def __enter__(self) -> Self:
        portal().run(self._async.__aenter__())
        return self

    def __exit__(self, *error: object) -> None:
        portal().run(self._async.__aexit__(*error))


class Watch(Blocking[AsyncWatch]):
    """Notices of changes, as they happen. One of kind "overflow" says that some were lost.

    Iterating raises UnavailableError when the connection is lost.
    """

    def __iter__(self) -> Iterator[WatchNotice]:
        return portal().iterate(self._async.__aiter__())

    def close(self) -> None:
        """Stops watching. Doing it twice is fine."""
        portal().run(self._async.close())

    def __enter__(self) -> Self:
        portal().run(self._async.__aenter__())
        return self

    def __exit__(self, *error: object) -> None:
        portal().run(self._async.__aexit__(*error))


class Files(Blocking[AsyncFiles]):
    """`sandbox.files`. `user` acts with that user's rights (default root). Failures raise FileError with the errno,
    or PathNotFoundError."""

    def read(
        self,
        path: RemotePath,
        *,
        encoding: str = "utf-8",
        errors: str = "strict",
        max_bytes: int = READ_BYTES_DEFAULT,
        user: str | None = None,
    ) -> str:
        """The file as text. Raises FileError when it is not; `errors="replace"` gives it anyway."""
        return portal().run(self._async.read(path, encoding=encoding, errors=errors, max_bytes=max_bytes, user=user))

    def read_bytes(
        self,
        path: RemotePath,
        *,
        offset: int = 0,
        length: int | None = None,
        max_bytes: int = READ_BYTES_DEFAULT,
        user: str | None = None,
    ) -> bytes:
        """The file's content, or `length` bytes of it from `offset`. Raises LimitError above `max_bytes`."""
        return portal().run(self._async.read_bytes(path, offset=offset, length=length, max_bytes=max_bytes, user=user))

    def stream(
        self, path: RemotePath, *, offset: int = 0, length: int | None = None, user: str | None = None
    ) -> Iterator[bytes]:
        """The file's content in pieces, in constant memory. A lost connection is made again where it broke.

        Raises ConflictError when the file has been changed in between.
        """
        return portal().iterate(self._async.stream(path, offset=offset, length=length, user=user))

    def write(
        self,
        path: RemotePath,
        data: str | bytes,
        *,
        offset: int | None = None,
        append: bool = False,
        mode: int | None = None,
        parents: bool = True,
        user: str | None = None,
    ) -> int:
        """Writes the file; gives the bytes written. Without `offset` and `append` it is replaced atomically.

        Text is sent as UTF-8. `mode` is kept when None (0644 for a new file); missing directories are made.
        """
        return portal().run(
            self._async.write(path, data, offset=offset, append=append, mode=mode, parents=parents, user=user)
        )

    def stat(self, path: RemotePath, *, follow: bool = True, user: str | None = None) -> FileInfo:
        """What is at `path`; with `follow=False` a symbolic link itself."""
        return portal().run(self._async.stat(path, follow=follow, user=user))

    def exists(self, path: RemotePath, *, user: str | None = None) -> bool:
        """Whether anything is at `path`; a dangling symbolic link is not."""
        return portal().run(self._async.exists(path, user=user))

    def list(self, path: RemotePath, *, max_entries: int = 100000, user: str | None = None) -> list[FileInfo]:
        """The entries of a directory, sorted by name. Raises LimitError above `max_entries`."""
        return portal().run(self._async.list(path, max_entries=max_entries, user=user))

    def mkdir(self, path: RemotePath, *, parents: bool = True, mode: int = 493, user: str | None = None) -> None:
        """Makes a directory. With `parents` missing ones are made too, and one that exists is fine."""
        portal().run(self._async.mkdir(path, parents=parents, mode=mode, user=user))

    def move(self, path: RemotePath, target: RemotePath, *, replace: bool = True, user: str | None = None) -> None:
        """Renames `path` to `target`."""
        portal().run(self._async.move(path, target, replace=replace, user=user))

    def remove(
        self, path: RemotePath, *, recursive: bool = False, missing_ok: bool = False, user: str | None = None
    ) -> None:
        """Removes a file or an empty directory; with `recursive` a directory and all below it."""
        portal().run(self._async.remove(path, recursive=recursive, missing_ok=missing_ok, user=user))

    def chmod(self, path: RemotePath, mode: int, *, user: str | None = None) -> None:
        """Sets the permission bits, such as 0o755."""
        portal().run(self._async.chmod(path, mode, user=user))

    def chown(
        self, path: RemotePath, owner: str | int | None = None, group: str | int | None = None, *, follow: bool = True
    ) -> None:
        """Sets owner and group, each by name or number; None leaves it."""
        portal().run(self._async.chown(path, owner, group, follow=follow))

    def symlink(self, path: RemotePath, target: RemotePath, *, user: str | None = None) -> None:
        """Makes a symbolic link at `path` that holds `target`."""
        portal().run(self._async.symlink(path, target, user=user))

    def watch(self, path: RemotePath, *, recursive: bool = False) -> Watch:
        """Changes below a directory, from the return of this call on: iterate over it, and close it at the end."""
        result: Watch = wrap(portal().run(self._async.watch(path, recursive=recursive)))
        return result


class Connection(SocketLike, Blocking[AsyncConnection]):
    """Bytes both ways. `write_eof` closes one direction, as `shutdown` does with a socket; `close` ends both."""

    def read(self, max_bytes: int = 65536) -> bytes:
        """At least one byte and at most `max_bytes`; empty at the other side's end-of-file.

        Raises UnavailableError when the connection is lost.
        """
        return portal().run(self._async.read(max_bytes))

    def read_exactly(self, count: int) -> bytes:
        """`count` bytes. Raises EOFError when there are fewer."""
        return portal().run(self._async.read_exactly(count))

    def write(self, data: bytes) -> None:
        """Sends all of `data`; waits while the other side is behind."""
        portal().run(self._async.write(data))

    def write_eof(self) -> None:
        """The other side reads end-of-file. Reading goes on. Doing it twice is fine."""
        portal().run(self._async.write_eof())

    def close(self) -> None:
        """Ends both directions. Doing it twice is fine."""
        portal().run(self._async.close())

    def __iter__(self) -> Iterator[bytes]:
        return portal().iterate(self._async.__aiter__())

    def __enter__(self) -> Self:
        portal().run(self._async.__aenter__())
        return self

    def __exit__(self, *error: object) -> None:
        portal().run(self._async.__aexit__(*error))


class Screen(Blocking[AsyncScreen]):
    """`sandbox.screen`: what a machine shows, and what a hand at it would do. Points are pixels from the top left.

    Only sandboxes of backend "fullvm" have one: the methods raise UnsupportedError for others.
    """

    def screenshot(self) -> bytes:
        """What it shows now, as PNG."""
        return portal().run(self._async.screenshot())

    def size(self) -> ScreenSize:
        """Width and height now; a machine may change them at any time."""
        return portal().run(self._async.size())

    def move(self, x: int, y: int) -> None:
        """Moves the pointer."""
        portal().run(self._async.move(x, y))

    def click(self, x: int, y: int, *, button: str = "left") -> None:
        """Moves the pointer there, and presses a button: left, middle or right."""
        portal().run(self._async.click(x, y, button=button))

    def double_click(self, x: int, y: int, *, button: str = "left") -> None:
        """Clicks twice."""
        portal().run(self._async.double_click(x, y, button=button))

    def drag(self, x: int, y: int, to_x: int, to_y: int, *, button: str = "left") -> None:
        """Presses a button at the first point, and lets it go at the second."""
        portal().run(self._async.drag(x, y, to_x, to_y, button=button))

    def scroll(self, dx: int = 0, dy: int = 0) -> None:
        """Turns the wheel where the pointer is, by clicks: right and down are positive."""
        portal().run(self._async.scroll(dx, dy))

    def type(self, text: str) -> None:
        """Types text as a US keyboard does; newline is Enter. Raises InvalidArgumentError for what that lacks."""
        portal().run(self._async.type(text))

    def key(self, key: str) -> None:
        """Presses a key, or several that are held together: "enter", "f5", "ctrl+l", "ctrl+alt+delete"."""
        portal().run(self._async.key(key))

    def act(self, *actions: Action) -> ScreenSize:
        """Several of the above in one request, in this order. The screen's size then."""
        return portal().run(self._async.act())

    def view(self) -> Connection:
        """A connection that speaks RFB (VNC) without a password, for a viewer."""
        result: Connection = wrap(portal().run(self._async.view()))
        return result


class Environments(Blocking[AsyncEnvironments]):
    """`client.environments`: what the service has, and how more are made."""

    def list(self, *, missing: set[str] | None = None) -> list[EnvironmentInfo]:
        """All of them, by name. Nodes of a cluster that did not answer are added to
        `missing`."""
        return portal().run(self._async.list(missing=missing))

    def get(self, name: str) -> EnvironmentInfo:
        """One of them. Raises EnvironmentNotFoundError."""
        return portal().run(self._async.get(name))

    def exists(self, name: str) -> bool:
        """Whether there is one of that name."""
        return portal().run(self._async.exists(name))

    def build(
        self,
        name: str,
        source: BuildSource,
        *,
        replace: bool = False,
        refresh: bool = False,
        on_event: Callable[[BuildEvent], Any] | None = None,
    ) -> EnvironmentInfo:
        """Makes the environment `name`, and returns once sandboxes can start from it.

        `source`: `dsec.DebianSource(packages=(…))`, `RegistrySource("host/path:tag")`, `DirectorySource`, `TarSource`,
        `OciSource`, `DockerArchiveSource`, `DockerfileSource`, or `StoreSource(url=…, environment=…)` for what was
        pushed to a store; paths are the node's. A name that exists
        with the same content is success at once; with other content it is a ConflictError unless `replace`. `refresh`
        builds even what was built before. `on_event` hears each BuildEvent.
        """
        return portal().run_calling(
            lambda bridge: self._async.build(name, source, replace=replace, refresh=refresh, on_event=bridge(on_event))
        )

    def create(
        self,
        name: str,
        base: str,
        *,
        workspace: str | None = None,
        toolkits: Sequence[str] = (),
        follow: bool = False,
        replace: bool = False,
    ) -> EnvironmentInfo:
        """Puts the environment `name` together from others, each by reference: NAME, NAME:TAG or NAME@DIGEST.

        Later ones hide what earlier ones have in the same place. It stays what its parts are now, until `update`; with
        `follow` they are looked up at each create of a sandbox. Put together the same way already is success; other
        content is a ConflictError unless `replace`.
        """
        return portal().run(
            self._async.create(name, base, workspace=workspace, toolkits=toolkits, follow=follow, replace=replace)
        )

    def update(self, name: str) -> EnvironmentInfo:
        """Locks an environment that is made of others to what those are now. What it was stays as NAME@DIGEST."""
        return portal().run(self._async.update(name))

    def diff(self, one: str, other: str) -> EnvironmentDiff:
        """What `other` has more, less and otherwise: layers, parts and configuration."""
        return portal().run(self._async.diff(one, other))

    def collapse(self, name: str, *, on_event: Callable[[BuildEvent], Any] | None = None) -> EnvironmentInfo:
        """As `client.layers.collapse`."""
        return portal().run_calling(lambda bridge: self._async.collapse(name, on_event=bridge(on_event)))

    def push(self, name: str, store: str, *, on_event: Callable[[BuildEvent], Any] | None = None) -> EnvironmentInfo:
        """Puts an environment into a store, from which other nodes build it with `StoreSource`.

        `store`: `file:///directory` of the node, or `s3://bucket/prefix`. What is there already is left as it is.
        The answer's digests are the store's: they name all that is ever read of it (`StoreSource(…, digest=…)`).
        UnsupportedError where layers are kept as directories, or the store is read only.
        """
        return portal().run_calling(lambda bridge: self._async.push(name, store, on_event=bridge(on_event)))

    def export(
        self, name: str, target: ExportTarget, *, on_event: Callable[[BuildEvent], Any] | None = None
    ) -> ExportedImage:
        """Makes an environment an image of the OCI, for other tools and machines.

        `target`: `dsec.RegistryTarget("host/path:tag")`, or on the node `LayoutTarget("/directory")` or
        `ArchiveTarget("/file.tar")` for `docker load`. What is there already is not sent again. ConflictError,
        NotFoundError and StorageError as the registry says.
        """
        return portal().run_calling(lambda bridge: self._async.export(name, target, on_event=bridge(on_event)))

    def stats(self, name: str) -> EnvironmentStats:
        """How much of each layer has been loaded from its store, and why the store failed last."""
        return portal().run(self._async.stats(name))

    def trace(self, name: str) -> EnvironmentTrace:
        """Records in the store what has been read so far, so that other nodes load that first.

        ConflictError when nothing was read; UnsupportedError for a store that is read only.
        """
        return portal().run(self._async.trace(name))

    def remove(self, name: str, *, missing_ok: bool = False) -> None:
        """Removes the name; its layers go once nothing uses them. Raises EnvironmentNotFoundError."""
        portal().run(self._async.remove(name, missing_ok=missing_ok))


class Layers(Blocking[AsyncLayers]):
    """`client.layers`: what is on the node's disk, each once however many environments have it."""

    def build(
        self,
        name: str,
        source: BuildSource,
        *,
        replace: bool = False,
        refresh: bool = False,
        on_event: Callable[[BuildEvent], Any] | None = None,
    ) -> EnvironmentInfo:
        """Makes the layers of `name` (NAME, or NAME:TAG), to be a part of environments or one by itself.

        As `client.environments.build`: an image keeps one layer for each of its own, other sources give one.
        """
        return portal().run_calling(
            lambda bridge: self._async.build(name, source, replace=replace, refresh=refresh, on_event=bridge(on_event))
        )

    def list(self) -> list[LayerInfo]:
        """All of them, by digest."""
        return portal().run(self._async.list())

    def get(self, digest: str) -> LayerInfo:
        """One of them, by its digest or 12 digits of it. Raises NotFoundError."""
        return portal().run(self._async.get(digest))

    def stats(self, digest: str) -> LayerUse:
        """How much of it has been loaded from its store, and why the store failed last."""
        return portal().run(self._async.stats(digest))

    def remove(self, digest: str) -> None:
        """Removes a layer that no environment and no sandbox has. Raises NotFoundError, ConflictError."""
        portal().run(self._async.remove(digest))

    def collapse(self, environment: str, *, on_event: Callable[[BuildEvent], Any] | None = None) -> EnvironmentInfo:
        """Makes one layer of runs of an environment's lower layers, for creates from now on; sandboxes see the same.

        Of environments with more than 16 layers; it is done by itself when they are built or composed.
        """
        return portal().run_calling(lambda bridge: self._async.collapse(environment, on_event=bridge(on_event)))


class Volumes(Blocking[AsyncVolumes]):
    """`client.volumes`: named directories of a project, for `Sandbox.create(volumes=[…])`."""

    def create(self, name: str, *, size: int | str | None = None, uid: int = 0, gid: int = 0) -> VolumeInfo:
        """A new, empty volume of the caller's project; one of that name, size and owner is fine.

        `size`: what can be written in it, as bytes or text such as "10GiB"; without it, as much as the node's disk has.
        `uid`, `gid`: whose its top directory is, as sandboxes see it. ConflictError when there is another one of that
        name, UnsupportedError where a size cannot be kept.
        """
        return portal().run(self._async.create(name, size=size, uid=uid, gid=gid))

    def list(self, *, missing: set[str] | None = None) -> list[VolumeInfo]:
        """Volumes of the caller's projects, then the nodes' datasets. Nodes of a cluster that did not answer are added
        to `missing`."""
        return portal().run(self._async.list(missing=missing))

    def get(self, name: str, *, project: str | None = None) -> VolumeInfo:
        """One of them, with what it takes of the disk and which sandboxes have it. Raises VolumeNotFoundError."""
        return portal().run(self._async.get(name, project=project))

    def remove(self, name: str, *, project: str | None = None, missing_ok: bool = False) -> None:
        """Removes it with all that is in it. Raises VolumeNotFoundError; ConflictError while a sandbox has it."""
        portal().run(self._async.remove(name, project=project, missing_ok=missing_ok))


class Machines(Blocking[AsyncMachines]):
    """`client.machines`: images by whose names sandboxes of backend "fullvm" are created."""

    def list(self) -> list[MachineInfo]:
        """All of them, by name."""
        return portal().run(self._async.list())

    def import_disk(
        self,
        name: str,
        path: str | PathLike[str],
        *,
        format: str,
        firmware: str = "bios",
        agent: str = "none",
        bus: str = "virtio",
        boot_wait_s: float = 0.0,
    ) -> MachineInfo:
        """Copies a disk, a file of the node, as the image `name`. What it is must be said: nothing is guessed.

        `format`: raw or qcow2. `firmware`: bios or uefi. `agent`: which one runs inside: dsec, qga (the
        qemu-guest-agent: it says when the system is up) or none. `bus`: virtio, or sata for systems without drivers for
        virtual machines. The first machine of a shape is booted, and saved `boot_wait_s` after power on (or after its
        agent's first answer); all others go on from there.
        Raises ConflictError when there is an image of that name.
        """
        return portal().run(
            self._async.import_disk(
                name, path, format=format, firmware=firmware, agent=agent, bus=bus, boot_wait_s=boot_wait_s
            )
        )

    def build(
        self,
        name: str,
        packages: Sequence[str] = (),
        *,
        desktop: bool = False,
        suite: str | None = None,
        disk: int | str = "10GiB",
        on_event: Callable[[BuildEvent], Any] | None = None,
    ) -> MachineInfo:
        """Installs a Debian system with our agent as the image `name`, and `packages` with it.

        `desktop`: with X, a window manager and a terminal on the screen. `disk`: of a machine that asks for no other.
        `on_event` hears each BuildEvent. Raises ConflictError when there is an image of that name.
        """
        return portal().run_calling(
            lambda bridge: self._async.build(
                name, packages, desktop=desktop, suite=suite, disk=disk, on_event=bridge(on_event)
            )
        )

    def push(self, name: str, store: str) -> MachineInfo:
        """Puts an image into a store: a directory (`file:///…`) or a bucket (`s3://…`). Layers of its disk that are
        there already are left as they are. `digest` of the answer names all that will be read of it.
        """
        return portal().run(self._async.push(name, store))

    def pull(self, name: str, store: str, *, image: str | None = None, digest: str | None = None) -> MachineInfo:
        """Makes the image `image` of a store (without it: the one of this name) the image `name`; its disk is loaded as
        machines read it. `digest`: as a push told it; no other is taken. Raises ConflictError when there is an image of
        that name.
        """
        return portal().run(self._async.pull(name, store, image=image, digest=digest))

    def commit(self, name: str, sandbox: str) -> MachineInfo:
        """Makes the disk of a full machine, `sandbox` by its id, the image `name`, as after a power cut at this moment.
        What it has written lies above the image that it began as, and only that is kept anew.
        """
        return portal().run(self._async.commit(name, sandbox))

    def collapse(self, name: str) -> MachineInfo:
        """Makes the layers of an image's disk above the lowest one; machines see the same. It needs qemu-img."""
        return portal().run(self._async.collapse(name))

    def export(self, name: str, path: str | PathLike[str], *, format: str) -> DiskFile:
        """Writes the disk of the image `name`, whole, into a new file of the node; what is empty takes no room.
        `format`: raw or qcow2. It needs qemu-img. Raises ConflictError when there is a file of that name.
        """
        return portal().run(self._async.export(name, path, format=format))

    def export_snapshot(self, snapshot: str, path: str | PathLike[str], *, format: str) -> DiskFile:
        """As `export`, of a machine's snapshot, by name or id: the disk as after a power cut at that moment. Of a
        microvm the one that it writes to: ext4, with what differs from its environment in `upper`."""
        return portal().run(self._async.export_snapshot(snapshot, path, format=format))

    def trace(self, name: str) -> EnvironmentTrace:
        """Records in the store what has been read of an image's disk so far, so that other nodes load that first.

        ConflictError when nothing was read; UnsupportedError for a store that is read only.
        """
        return portal().run(self._async.trace(name))

    def remove(self, name: str, *, missing_ok: bool = False) -> None:
        """Removes an image. Machines of it run on. Raises EnvironmentNotFoundError."""
        portal().run(self._async.remove(name, missing_ok=missing_ok))


class Tokens(Blocking[AsyncTokens]):
    """`client.tokens`: for who manages a project."""

    def create(
        self, principal: str, *, project: str = "/", rights: Sequence[str] = ("use",), ttl_s: float | None = None
    ) -> TokenAnswer:
        """A new token, which is shown this once; it is good for the project and all below it.

        `principal` is a name in the project, or "name@/other"; project, principal and grant are made when they are new.
        `rights`: "read", "use" (includes read), "manage" (includes both; sub-projects, tokens, grants, and quotas of
        what is below), "admin" (of "/" only, includes all).
        """
        return portal().run(self._async.create(principal, project=project, rights=rights, ttl_s=ttl_s))

    def rotate(
        self, id: str = "self", *, overlap_s: float = limits.TOKEN_OVERLAP_S_DEFAULT, ttl_s: float | None = None
    ) -> TokenAnswer:
        """A new token in the place of one, by default of the client's own, which stays good for `overlap_s` more."""
        return portal().run(self._async.rotate(id, overlap_s=overlap_s, ttl_s=ttl_s))

    def list(self) -> list[TokenInfo]:
        """The tokens of projects that the caller manages, without their secrets."""
        return portal().run(self._async.list())

    def revoke(self, id: str) -> TokenInfo:
        """Ends a token at once, and those that came of it by rotation. "self" is the client's own."""
        return portal().run(self._async.revoke(id))


class Projects(Blocking[AsyncProjects]):
    """`client.projects`: projects in projects. A quota or a policy binds a project and all below it."""

    def create(self, path: str) -> ProjectInfo:
        """A new project, such as "/team/run-7", below one that the caller manages."""
        return portal().run(self._async.create(path))

    def list(self, below: str | None = None) -> list[ProjectInfo]:
        """Those that the caller may read, by path; `below`: only that one and those below it."""
        return portal().run(self._async.list(below))

    def get(self, path: str) -> ProjectInfo:
        """One of them, with its quota and its policy. Raises NotFoundError."""
        return portal().run(self._async.get(path))

    def remove(self, path: str) -> None:
        """With its principals, grants and tokens. ConflictError while it has sandboxes, or projects below it."""
        portal().run(self._async.remove(path))

    def quota(self, path: str) -> QuotaInfo:
        """Its caps, and every cap that binds it, with what is used of each."""
        return portal().run(self._async.quota(path))

    def set_quota(self, path: str, quota: Quota) -> QuotaInfo:
        """Replaces its caps: what all sandboxes of it and below it may have together.

        Takes the right manage over the project above it. A cap is at most that of every project above.
        """
        return portal().run(self._async.set_quota(path, quota))

    def set_policy(self, path: str, policy: Policy) -> ProjectInfo:
        """Replaces its policy: what each sandbox of it and below it must be like. Takes what `set_quota` takes."""
        return portal().run(self._async.set_policy(path, policy))


class Grants(Blocking[AsyncGrants]):
    """`client.grants`: rights over projects, handed on. A grant ends with the one that its giver had it by."""

    def create(self, principal: str, *, project: str, right: str = "use", ttl_s: float | None = None) -> GrantInfo:
        """Gives a right over a project and all below it: at most what the caller has, and for no longer.

        `principal` is "name@/team", or a name in `project`, which is made when it is new.
        """
        return portal().run(self._async.create(principal, project=project, right=right, ttl_s=ttl_s))

    def principals(self) -> list[PrincipalInfo]:
        """Those of projects that the caller manages."""
        return portal().run(self._async.principals())

    def list(self) -> list[GrantInfo]:
        """Those over projects that the caller manages, and the caller's own; newest first."""
        return portal().run(self._async.list())

    def revoke(self, id: str) -> None:
        """Takes it back, and with it all that was given by it."""
        portal().run(self._async.revoke(id))

    def remove_principal(self, id: str) -> None:
        """With its tokens and its grants, and with all that it has given to others."""
        portal().run(self._async.remove_principal(id))


class Snapshot(Blocking[AsyncSnapshot]):
    """What one sandbox had on its disk at one moment. It stays until `remove`, whatever becomes of the sandbox."""

    @property
    def id(self) -> str:
        """`snp_…`: with it, any client of the same owner finds it."""
        return self._async.id

    @property
    def name(self) -> str:
        """The name it was given, or its id."""
        return self._async.name

    @property
    def info(self) -> SnapshotInfo:
        """What is known of it: of which sandbox, when, how large."""
        return self._async.info

    def create(
        self, *, timeout_s: float = limits.CREATE_TIMEOUT_S_DEFAULT, **options: Unpack[CreateOptions]
    ) -> Sandbox:
        """A new sandbox on it; what `options` leave out is as it was in the snapshotted sandbox, but for the name."""
        result: Sandbox = wrap(portal().run(self._async.create(timeout_s=timeout_s, **options)))
        return result

    def publish(
        self,
        name: str,
        *,
        kind: Literal["workspace", "toolkit"] = "workspace",
        keep: Sequence[str] = (),
        replace: bool = False,
        dry_run: bool = False,
    ) -> Published:
        """Makes a workspace or toolkit of what it has above its environment, as NAME or NAME:TAG, for sandboxes of
        every project; one layer, without residue: temporary files, caches, histories, keys, credentials …

        `keep` names rules that are not applied; `dry_run` only says what would be removed. Needs the right admin.
        Raises ConflictError when the name stands for something else, unless `replace`.
        """
        return portal().run(self._async.publish(name, kind=kind, keep=keep, replace=replace, dry_run=dry_run))

    def remove(self, *, missing_ok: bool = False) -> None:
        """Removes it. Raises ConflictError while sandboxes that were made from it live."""
        portal().run(self._async.remove(missing_ok=missing_ok))


class Snapshots(Blocking[AsyncSnapshots]):
    """`client.snapshots`: those of the caller's project, and of projects below it."""

    def list(
        self, *, sandbox: str | None = None, max_items: int = 10000, missing: set[str] | None = None
    ) -> list[Snapshot]:
        """In the order in which they were made; with `sandbox` only those of this one, by its id. Nodes of a cluster
        that did not answer are added to `missing`."""
        result: list[Snapshot] = wrap(
            portal().run(self._async.list(sandbox=sandbox, max_items=max_items, missing=missing))
        )
        return result

    def get(self, name: str) -> Snapshot:
        """One of them, by name or id. Raises NotFoundError."""
        result: Snapshot = wrap(portal().run(self._async.get(name)))
        return result

    def exists(self, name: str) -> bool:
        """Whether there is one of that name or id."""
        return portal().run(self._async.exists(name))

    def remove(self, name: str, *, missing_ok: bool = False) -> None:
        """Removes one, by name or id. Raises NotFoundError, ConflictError while sandboxes made from it live."""
        portal().run(self._async.remove(name, missing_ok=missing_ok))


class Job(Blocking[AsyncJob]):
    """A job of the client's project. As a context manager it makes the job, renews its lease in the background, and
    stops it at the end; when an error leaves it, or the process ends, the lease decides.

        with client.job("train-7", lease_s=60) as job:
            sandboxes = client.create_many(32, "base", job=job.name)
    """

    @property
    def name(self) -> str:
        """Unique in its project; what `job=` of a create takes."""
        return self._async.name

    @property
    def info(self) -> JobInfo:
        """What was last heard of it; `refresh` asks again. Raises InvalidArgumentError before it was made."""
        return self._async.info

    @property
    def lost(self) -> DsecError | None:
        """Why its lease is not renewed any more: it was stopped, or removed. None: all is well."""
        return self._async.lost

    def refresh(self) -> JobInfo:
        """Asks for its present state, and for its sandboxes by state. Raises NotFoundError."""
        return portal().run(self._async.refresh())

    def heartbeat(self) -> JobInfo:
        """Its lease begins anew; if it was paused because that was missed, it goes on.

        Raises ConflictError when it is stopped.
        """
        return portal().run(self._async.heartbeat())

    def extend(self, seconds: float) -> JobInfo:
        """Its lease is good for so long from now on, whether heartbeats come or not. Raises ConflictError."""
        return portal().run(self._async.extend(seconds))

    def pause(self) -> JobReport:
        """Pauses all its sandboxes, on all nodes; it takes no new ones until it is resumed."""
        return portal().run(self._async.pause())

    def resume(self) -> JobReport:
        """Lets all its sandboxes go on."""
        return portal().run(self._async.resume())

    def stop(self) -> JobReport:
        """Destroys all its sandboxes, for good: it takes no new ones. Again is fine."""
        return portal().run(self._async.stop())

    def remove(self) -> None:
        """Forgets it, when it is stopped. Raises ConflictError while it is not."""
        portal().run(self._async.remove())

    def list(self, *, max_items: int = 10000) -> Sequence[Sandbox]:
        """Its sandboxes that have not ended."""
        result: Sequence[Sandbox] = wrap(portal().run(self._async.list(max_items=max_items)))
        return result

    def __enter__(self) -> Self:
        portal().run(self._async.__aenter__())
        return self

    def __exit__(self, *error: object) -> None:
        portal().run(self._async.__aexit__(*error))


class Jobs(Blocking[AsyncJobs]):
    """`client.jobs`: sandboxes of a project that live and end together, for `Sandbox.create(job=…)`."""

    def create(
        self,
        name: str,
        *,
        lease_s: float | None = None,
        on_missed: str = "pause",
        grace_s: float = limits.JOB_GRACE_S_DEFAULT,
    ) -> Job:
        """A new job; one of that name and with these terms is fine, and one that was stopped makes room.

        With `lease_s` somebody has to renew it: `client.job`, `job.heartbeat` or `job.extend`. When the lease is missed
        its sandboxes are paused, and those that cannot be are stopped `grace_s` later; with `on_missed="stop"` all are
        stopped `grace_s` later. Raises ConflictError when there is another one of that name.
        """
        result: Job = wrap(
            portal().run(self._async.create(name, lease_s=lease_s, on_missed=on_missed, grace_s=grace_s))
        )
        return result

    def get(self, name: str) -> Job:
        """A job by its name, with its sandboxes by state. Raises NotFoundError."""
        result: Job = wrap(portal().run(self._async.get(name)))
        return result

    def list(self, *, max_items: int = 10000) -> list[JobInfo]:
        """The jobs of the caller's project and of those below it; stopped ones for a day."""
        return portal().run(self._async.list(max_items=max_items))


class Group(Blocking[AsyncGroup]):
    """Several sandboxes that reach each other by name. `with` ends all of them at its end.

    with client.groups.create(
        {"db": {"environment": "postgres", "start": True}, "web": {"environment": "shop", "after": ["db"]}},
        links=["db:5432"],
    ) as group:
        web = group.sandbox("web")  # in it, db:5432 is the other's port
    """

    @property
    def name(self) -> str:
        """Unique among the groups and jobs of its project."""
        return self._async.name

    @property
    def info(self) -> GroupInfo:
        """What was last heard of it, with its sandboxes; `refresh` asks again."""
        return self._async.info

    @property
    def members(self) -> dict[str, str]:
        """Name → id of the sandbox."""
        return self._async.members

    def sandbox(self, name: str) -> Sandbox:
        """The member of that name. Raises NotFoundError."""
        result: Sandbox = wrap(portal().run(self._async.sandbox(name)))
        return result

    def refresh(self) -> GroupInfo:
        """Asks for its present state. Raises NotFoundError when it is gone."""
        return portal().run(self._async.refresh())

    def down(self) -> None:
        """Destroys all its sandboxes and forgets it; gone already is fine. Raises SandboxError when some of it could
        not be removed yet: the service goes on trying."""
        portal().run(self._async.down())

    def __enter__(self) -> Self:
        portal().run(self._async.__aenter__())
        return self

    def __exit__(self, *error: object) -> None:
        portal().run(self._async.__aexit__(*error))


class Groups(Blocking[AsyncGroups]):
    """`client.groups`: several sandboxes with private names, all of them or none."""

    def create(
        self,
        members: Mapping[str, Mapping[str, Any]],
        *,
        links: Iterable[str | GroupLink] = (),
        name: str | None = None,
        timeout_s: float = limits.CREATE_TIMEOUT_S_DEFAULT,
        on_step: Callable[[GroupStep], Any] | None = None,
    ) -> Group:
        """A new group, all of whose sandboxes run; or an error, and nothing of it is left.

        `members`: name → arguments of `Sandbox.create`, with `environment` among them, and `after`: names of those that
        are to be started, and ready, before. `links`: "db:5432", or a `dsec.GroupLink`: in all others, or in those that
        it names, `db:5432` reaches that port of db. A member has the sandbox name GROUP-MEMBER unless it is given one.
        `timeout_s` is for the start of each; `on_step` hears each GroupStep of it. The same again is success.
        Raises ConflictError (another group or job of that name), and what `Sandbox.create` raises, with the member that
        failed in `detail["member"]`.
        """
        result: Group = wrap(
            portal().run_calling(
                lambda bridge: self._async.create(
                    members, links=links, name=name, timeout_s=timeout_s, on_step=bridge(on_step)
                )
            )
        )
        return result

    def explain(
        self,
        members: Mapping[str, Mapping[str, Any]],
        *,
        links: Iterable[str | GroupLink] = (),
        name: str | None = None,
    ) -> GroupExplanation:
        """What would become of `create` with the same arguments now: where each member would go, or which of them has
        no node, and why. Nothing happens."""
        return portal().run(self._async.explain(members, links=links, name=name))

    def explain_compose(
        self,
        path: str | PathLike[str],
        *,
        name: str | None = None,
        profiles: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> GroupExplanation:
        """As `explain`, of what `from_compose` would start. No image is pulled: that one is not there is told. No
        volume is made, and those that `from_compose` would make keep no member from a node."""
        return portal().run(self._async.explain_compose(path, name=name, profiles=profiles, variables=variables))

    def from_compose(
        self,
        path: str | PathLike[str],
        *,
        name: str | None = None,
        profiles: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        timeout_s: float = limits.CREATE_TIMEOUT_S_DEFAULT,
        on_note: Callable[[str], Any] | None = None,
        on_step: Callable[[GroupStep], Any] | None = None,
    ) -> Group:
        """A group as a compose file describes it. `variables`: for `${NAME}` in it; default: this process' environment.

        `name`: default that of the file, or of its directory. Services with `profiles` are left out unless one of
        theirs is asked for. An `image` is an environment; one that is not there is pulled from its registry, for which
        the right admin is needed, and kept under its name. Named volumes are made (the
        same). `on_note` hears what means less here, such as published ports; `on_step` each GroupStep: images that are
        pulled, members that start and are ready, and who is waited for. Whatever of the file cannot be had here is
        an InvalidArgumentError that names service and key. Raises what `create` raises; UnsupportedError without the
        package PyYAML.
        """
        result: Group = wrap(
            portal().run_calling(
                lambda bridge: self._async.from_compose(
                    path,
                    name=name,
                    profiles=profiles,
                    variables=variables,
                    timeout_s=timeout_s,
                    on_note=bridge(on_note),
                    on_step=bridge(on_step),
                )
            )
        )
        return result

    def get(self, name: str) -> Group:
        """A group by its name, with its sandboxes. Raises NotFoundError."""
        result: Group = wrap(portal().run(self._async.get(name)))
        return result

    def list(self, *, max_items: int = 10000) -> list[GroupInfo]:
        """The groups of the caller's project and of those below it."""
        return portal().run(self._async.list(max_items=max_items))


class Sandbox(Blocking[AsyncSandbox]):
    """A place to run commands in. `with` destroys it at the end; without that it lives on until `destroy`, or
    its time to live is over.

        with dsec.Sandbox.create("base") as sb:
            result = sb.exec("echo hello")
            print(result.stdout)
    """

    @classmethod
    def create(
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
        snapshot: str | Snapshot | None = None,
        idempotency_key: str | None = None,
        timeout_s: float = limits.CREATE_TIMEOUT_S_DEFAULT,
        queue_s: float = 0.0,
        client: Client | None = None,
    ) -> Sandbox:
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
        result: Sandbox = wrap(
            portal().run(
                AsyncSandbox.create(
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
                    snapshot=unwrap(snapshot),
                    idempotency_key=idempotency_key,
                    timeout_s=timeout_s,
                    queue_s=queue_s,
                    client=unwrap(client),
                )
            )
        )
        return result

    @classmethod
    def create_many(
        cls,
        count: int,
        environment: str | Environment = "base",
        *,
        idempotency_key: str | None = None,
        timeout_s: float = limits.CREATE_TIMEOUT_S_DEFAULT,
        queue_s: float = 0.0,
        client: Client | None = None,
        **options: Unpack[CreateOptions],
    ) -> list[Sandbox | DsecError]:
        """`count` sandboxes alike: for each, in order, the sandbox or the error that it failed with."""
        result: list[Sandbox | DsecError] = wrap(
            portal().run(
                AsyncSandbox.create_many(
                    count,
                    environment,
                    idempotency_key=idempotency_key,
                    timeout_s=timeout_s,
                    queue_s=queue_s,
                    client=unwrap(client),
                    **options,
                )
            )
        )
        return result

    @classmethod
    def connect(cls, id: str, *, client: Client | None = None) -> Sandbox:
        """A sandbox that exists, by its id, or by its name while it lives.

        Raises SandboxNotFoundError, GoneError when it has ended, ConflictError when several have the name.
        """
        result: Sandbox = wrap(portal().run(AsyncSandbox.connect(id, client=unwrap(client))))
        return result

    @classmethod
    def list(
        cls,
        *,
        labels: Mapping[str, str] | None = None,
        name: str | None = None,
        job: str | None = None,
        states: tuple[str, ...] = (),
        max_items: int = 10000,
        client: Client | None = None,
    ) -> list[Sandbox]:
        """The sandboxes that have all of `labels`; without `states` those that have not ended."""
        result: list[Sandbox] = wrap(
            portal().run(
                AsyncSandbox.list(
                    labels=labels, name=name, job=job, states=states, max_items=max_items, client=unwrap(client)
                )
            )
        )
        return result

    @property
    def id(self) -> str:
        """`sbx_…`: with it, any client of the same owner may connect."""
        return self._async.id

    @property
    def name(self) -> str | None:
        """The name it was given."""
        return self._async.name

    @property
    def info(self) -> SandboxInfo:
        """What was last heard of it; `refresh` asks again."""
        return self._async.info

    @property
    def files(self) -> Files:
        """Its files."""
        result: Files = wrap(self._async.files)
        return result

    @property
    def main(self) -> Process:
        """The environment's own program. Use of it raises ExecNotFoundError unless the sandbox was created with
        `start=True`."""
        result: Process = wrap(self._async.main)
        return result

    def refresh(self) -> SandboxInfo:
        """Asks for its present state. One that has ended stays readable for a day."""
        return portal().run(self._async.refresh())

    def metrics(self) -> Metrics:
        """What it uses now, and its limits."""
        return portal().run(self._async.metrics())

    def set_ttl(self, *, ttl_running_s: float | None = None, ttl_idle_s: float | None = None) -> SandboxInfo:
        """Replaces both times to live; None is none. `ttl_running_s` counts from now."""
        return portal().run(self._async.set_ttl(ttl_running_s=ttl_running_s, ttl_idle_s=ttl_idle_s))

    def set_egress(self, egress: Sequence[str] | None) -> SandboxInfo:
        """Replaces what it reaches, with network "proxied"; None is all that is public, [] nothing.

        Connections that are still allowed go on, the others are cut. Raises SandboxStateError where its network is
        none. After an UnavailableError what is asked for holds as soon as the node's forwarder is back.
        """
        return portal().run(self._async.set_egress(egress))

    def pause(self, *, deep: bool = False) -> SandboxInfo:
        """Stops all of it and keeps its memory. The next use resumes it first; its times to live stand still.

        `deep`, of virtual machines: its memory goes to the disk, and nothing of it takes memory or processor any more,
        even over a reboot of its node. Raises UnsupportedError elsewhere, StorageError: then it is paused.
        """
        return portal().run(self._async.pause(deep=deep))

    def resume(self) -> SandboxInfo:
        """Lets a paused sandbox go on. One that runs is fine."""
        return portal().run(self._async.resume())

    def snapshot(self, name: str | None = None, *, idempotency_key: str | None = None) -> Snapshot:
        """Keeps what it has on its disk now, by a name that is unique in its project (default: the snapshot's id).

        It stands still for a moment, and goes on. Volumes are not kept, and processes, memory and `/dev/shm` only of
        virtual machines (`info.keeps`): what is made from such a snapshot goes on where it was.
        Raises ConflictError (the name is taken, or another snapshot of it is being made), CapacityError, DeadlineError
        when it writes more than can be copied in the time for which it may stand still.
        """
        result: Snapshot = wrap(portal().run(self._async.snapshot(name, idempotency_key=idempotency_key)))
        return result

    def fork(
        self, count: int = 1, *, idempotency_key: str | None = None, timeout_s: float = limits.CREATE_TIMEOUT_S_DEFAULT
    ) -> Sequence[Sandbox]:
        """`count` new sandboxes on what it has now, alike but for the name: all of them, or an error.

        It stands still for a moment, and goes on; what is copied `snapshot` says. Variables, limits, labels and times
        to live are as it was given them. `timeout_s` is for the start of each.
        Raises what `snapshot` raises, and what `create` raises: none of them is left then.
        """
        result: Sequence[Sandbox] = wrap(
            portal().run(self._async.fork(count, idempotency_key=idempotency_key, timeout_s=timeout_s))
        )
        return result

    def rollback(self, snapshot: str | Snapshot) -> SandboxInfo:
        """Takes it back to a snapshot, by name, id or Snapshot; its id, name and limits stay.

        All that runs in it ends (`cause` is `rolled_back`). With `start=True` its program is started again, as another
        `main`, and waited for as at the create. The snapshot need not be its own. Raises NotFoundError,
        SandboxStateError while a snapshot of it is being made, LaunchError: then it is as it was, unless the error's
        `step` is `start` or `ready`: then it has gone back, and its program does not run.
        """
        return portal().run(self._async.rollback(unwrap(snapshot)))

    def destroy(self) -> None:
        """Ends and removes it. One that has ended already is fine."""
        portal().run(self._async.destroy())

    def exec(
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
        it comes, never split within a character; in the calling thread. `stderr="merge"` sends both to
        stdout, in their order. `output_bytes_max` kills what writes more; of what is written the last and first of
        `record_bytes_max` per stream are kept, and `truncated` says so. `secrets` are environment variables that are
        written nowhere. When this call is cancelled (Ctrl-C), or a callback raises, the command is killed.
        """
        return portal().run_calling(
            lambda bridge: self._async.exec(
                command,
                cwd=cwd,
                env=env,
                user=user,
                stdin=stdin,
                timeout_s=timeout_s,
                grace_s=grace_s,
                tty=tty,
                on_stdout=bridge(on_stdout),
                on_stderr=bridge(on_stderr),
                check=check,
                stderr=stderr,
                output_bytes_max=output_bytes_max,
                record_bytes_max=record_bytes_max,
                rlimits=rlimits,
                secrets=secrets,
            )
        )

    def start(
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
    ) -> Process:
        """Starts a command and returns at once. It goes on whatever becomes of this client; only when this call itself
        is cancelled, it is killed.

        `stdin=True` keeps its stdin open for `write` and `close_stdin`; bytes or text (at most 1 MiB) are given whole.
        The other arguments are those of `exec`.
        """
        result: Process = wrap(
            portal().run(
                self._async.start(
                    command,
                    cwd=cwd,
                    env=env,
                    user=user,
                    stdin=stdin,
                    timeout_s=timeout_s,
                    grace_s=grace_s,
                    tty=tty,
                    stderr=stderr,
                    output_bytes_max=output_bytes_max,
                    record_bytes_max=record_bytes_max,
                    rlimits=rlimits,
                    secrets=secrets,
                )
            )
        )
        return result

    def attach(self, exec_id: str, offset: int = 0, *, stderr_offset: int = 0) -> Process:
        """A command that was started before, by this client or another. Output comes from the offsets on.

        Raises ExecNotFoundError.
        """
        result: Process = wrap(portal().run(self._async.attach(exec_id, offset, stderr_offset=stderr_offset)))
        return result

    def execs(self) -> ExecInfos:
        """Its commands, running and ended, as far as they are still on record."""
        return portal().run(self._async.execs())

    def pty(
        self,
        command: Command | None = None,
        *,
        cols: int = 80,
        rows: int = 24,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        secrets: Mapping[str, str] | None = None,
    ) -> Pty:
        """A terminal with a command on it: by default a login shell."""
        result: Pty = wrap(
            portal().run(self._async.pty(command, cols=cols, rows=rows, cwd=cwd, env=env, user=user, secrets=secrets))
        )
        return result

    def session(
        self,
        name: str = "main",
        *,
        shell: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> Session:
        """A lasting shell by its name; the first command in it starts it. The other arguments count only then."""
        result: Session = wrap(self._async.session(name, shell=shell, cwd=cwd, env=env, user=user))
        return result

    def sessions(self) -> SessionInfos:
        """Its sessions that live."""
        return portal().run(self._async.sessions())

    @property
    def screen(self) -> Screen:
        """Its screen, keyboard and mouse, where it is a full machine."""
        result: Screen = wrap(self._async.screen)
        return result

    def upload(
        self, local: str | PathLike[str], remote: str, *, user: str | None = None, resume: bool = False
    ) -> transfer.Transfer:
        """Copies a file, or what is in a directory, into the sandbox; in constant memory, taken up where it broke.

        A file becomes `remote`, or goes below it when that is a directory or ends in "/". Of a directory the content
        goes below `remote`, which is made. Owners become `user`, or root. With `resume` what an upload of the same
        unchanged file has left behind (of more than 8 MiB; its process was killed, say) is read back, compared, and
        gone on from; and an upload that fails leaves its part for that.
        Raises ConflictError when the file is changed meanwhile.
        """
        return portal().run(self._async.upload(local, remote, user=user, resume=resume))

    def download(
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
        return portal().run(
            self._async.download(remote, local, max_bytes=max_bytes, max_entries=max_entries, user=user, resume=resume)
        )

    def connect_port(self, port: int | None = None, *, host: str = "localhost", path: str | None = None) -> Connection:
        """A connection to a TCP port inside the sandbox, or to a UNIX socket by its `path`."""
        result: Connection = wrap(portal().run(self._async.connect_port(port, host=host, path=path)))
        return result

    def __enter__(self) -> Self:
        portal().run(self._async.__aenter__())
        return self

    def __exit__(self, *error: object) -> None:
        portal().run(self._async.__aexit__(*error))

    @property
    def ended(self) -> bool:
        """Whether it had ended when it was last heard of."""
        return self._async.ended


class Created(Blocking[AsyncCreated]):
    """One of many: exactly one of `sandbox` and `error`."""

    @property
    def index(self) -> int:
        value: int = wrap(self._async.index)
        return value

    @property
    def sandbox(self) -> Sandbox | None:
        value: Sandbox | None = wrap(self._async.sandbox)
        return value

    @property
    def error(self) -> DsecError | None:
        value: DsecError | None = wrap(self._async.error)
        return value


class Client(Blocking[AsyncClient]):
    """Speaks to one service. Arguments win over DSEC_URL, DSEC_TOKEN, DSEC_PROJECT and DSEC_NODE; without any of them
    it is the service of this machine, which is started when it does not run. `project`: that it acts in, and no higher.
    `node`: of a cluster, which is meant by all that is of one node (environments, volumes), and where creates go.

        with dsec.Client() as client:
            sandboxes = client.list()
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        project: str | None = None,
        node: str | None = None,
        request_timeout_s: float = 60.0,
    ) -> None:
        self._async = AsyncClient(url, token, project=project, node=node, request_timeout_s=request_timeout_s)

    @property
    def url(self) -> str:
        """Where the service is."""
        return self._async.url

    @property
    def environments(self) -> Environments:
        """What sandboxes start from."""
        result: Environments = wrap(self._async.environments)
        return result

    @property
    def layers(self) -> Layers:
        """What environments are made of."""
        result: Layers = wrap(self._async.layers)
        return result

    @property
    def snapshots(self) -> Snapshots:
        """What sandboxes had on their disks, kept by name."""
        result: Snapshots = wrap(self._async.snapshots)
        return result

    @property
    def machines(self) -> Machines:
        """Images that full machines begin as."""
        result: Machines = wrap(self._async.machines)
        return result

    @property
    def volumes(self) -> Volumes:
        """Directories that outlive sandboxes."""
        result: Volumes = wrap(self._async.volumes)
        return result

    @property
    def jobs(self) -> Jobs:
        """Sandboxes that are paused, resumed and stopped together, and have a lease."""
        result: Jobs = wrap(self._async.jobs)
        return result

    @property
    def groups(self) -> Groups:
        """Several sandboxes with private names, all of them or none."""
        result: Groups = wrap(self._async.groups)
        return result

    def job(
        self,
        name: str,
        *,
        lease_s: float | None = limits.JOB_LEASE_S_DEFAULT,
        on_missed: str = "pause",
        grace_s: float = limits.JOB_GRACE_S_DEFAULT,
    ) -> Job:
        """A job for an `with` block: made or found at its beginning, its lease renewed within it, and stopped at
        its end. When an error leaves the block, or this process ends, nobody renews the lease: what then becomes of its
        sandboxes is `on_missed`. Arguments as those of `client.jobs.create`."""
        result: Job = wrap(self._async.job(name, lease_s=lease_s, on_missed=on_missed, grace_s=grace_s))
        return result

    @property
    def tokens(self) -> Tokens:
        """Who may call over the network."""
        result: Tokens = wrap(self._async.tokens)
        return result

    @property
    def projects(self) -> Projects:
        """Whose sandboxes they are: projects in projects, with their quotas and policies."""
        result: Projects = wrap(self._async.projects)
        return result

    @property
    def grants(self) -> Grants:
        """Who may do what in which project."""
        result: Grants = wrap(self._async.grants)
        return result

    def explain(
        self, environment: str | Environment = "base", *, snapshot: str | None = None, **options: Unpack[CreateOptions]
    ) -> Explanation:
        """What would become of `create` with the same arguments now, and why: the policy that forbids it, the caps that
        bind it, and for each node whether it could take it. Nothing happens."""
        return portal().run(self._async.explain(environment, snapshot=snapshot, **options))

    def usage(
        self,
        project: str | None = None,
        *,
        by: str = "project",
        job: str | None = None,
        since: float = 0.0,
        until: float | None = None,
        limit: int = 100,
        cursor: str | None = None,
    ) -> UsagePage:
        """What sandboxes of a project, by default the caller's, and of those below it have used.

        `by`: "project", "day" or "job" give totals, "sandbox" a record of each, `limit` at a time. `job`: of this one,
        by job or sandbox. Of those that ended in
        [since, until) (seconds since the epoch; totals in whole days, UTC), and without `until` of those that live.
        """
        return portal().run(
            self._async.usage(project, by=by, job=job, since=since, until=until, limit=limit, cursor=cursor)
        )

    def whoami(self) -> WhoAmI:
        """Who the service takes this client for, and what they may do where."""
        return portal().run(self._async.whoami())

    def audit(self, *, principal: str | None = None, limit: int = 100, cursor: str | None = None) -> AuditPage:
        """Who changed what, newest first, in projects that the caller manages; `next` is the cursor of the next page.

        `principal`: only of this one, such as "ci@/team".
        """
        return portal().run(self._async.audit(principal=principal, limit=limit, cursor=cursor))

    def events(
        self,
        after: str | None = None,
        *,
        follow: bool = True,
        project: str | None = None,
        labels: Mapping[str, str] | None = None,
        sandbox: str | None = None,
        job: str | None = None,
        kinds: Sequence[str] = (),
    ) -> Iterator[Event]:
        """What happens to sandboxes, in order, over lost connections: created, running, paused, resumed, rested,
        snapshot, rolled_back, egress_denied, destroyed, expired, failed. `kinds`: only these; operators see nodes, too.

            for event in client.events(labels={"run": "7"}):
                print(event.kind, event.sandbox, event.cause)

        Each has a `position`. `after` one goes on there; "oldest" begins with what is kept; None begins now, or with
        `follow=False`, which ends at what has happened by now, with the oldest. Where something is not kept any more,
        an event of kind "gap" says so. What was read by another process may come once more: by `node` and `number`.
        """
        return portal().iterate(
            self._async.events(
                after, follow=follow, project=project, labels=labels, sandbox=sandbox, job=job, kinds=kinds
            )
        )

    def call(self, type: str, code: str, **options: Unpack[CallOptions]) -> CallResult:
        """Runs `code` once, in a place made before, and gives what came of it; nothing of it stays.

        `type` is the kind of task: "python", "bash", "c", "cpp", … (`call_types`); compiled ones are compiled first.
        `environment` is "base" unless given. `stdin`, `args`, `env` and `files` (relative path → content) are what it
        finds; `collect` names files to give back. Limits of the run: `run_timeout_s` (10), `cpu_s` (all its processes),
        `memory`, `output_bytes` (each of stdout and stderr), `pids`, `file_bytes`; of the compiler
        `compile_timeout_s` (30); of the wait for a place `queue_timeout_s` (60).

        With `cases`, of (stdin, expected output or None), it is compiled once and run for each, to the first that is
        not right unless `stop_early` is False. `compare`: "exact", "lines", "tokens" or "numbers"; or `checker`: Python
        code (or a `dsec.Checker`) that finds the files input, output and expected, and exits 0 for right, 1 for wrong.

        Raises UnsupportedError (no such type, or the environment lacks its toolchain), EnvironmentNotFoundError,
        CapacityError (no place was free within `queue_timeout_s`), LimitError. Code that fails is a result.
        """
        return portal().run(self._async.call(type, code, **options))

    def call_many(self, requests: Iterable[CallRequest], *, concurrency: int = 64) -> list[CallResult | DsecError]:
        """Many calls, `concurrency` of them under way at once: for each, in order, its result or the error that it
        failed with. `dsec.make_call` makes a request from the arguments of `call`."""
        return portal().run(self._async.call_many(requests, concurrency=concurrency))

    def call_types(self) -> list[TaskTypeInfo]:
        """What calls can be of; whether an environment has what it takes shows at its first use."""
        return portal().run(self._async.call_types())

    def call_pools(self) -> list[CallPool]:
        """The places for calls of the node, now."""
        return portal().run(self._async.call_pools())

    def create(
        self,
        environment: str | Environment = "base",
        *,
        idempotency_key: str | None = None,
        snapshot: str | Snapshot | None = None,
        timeout_s: float = limits.CREATE_TIMEOUT_S_DEFAULT,
        queue_s: float = 0.0,
        **options: Unpack[CreateOptions],
    ) -> Sandbox:
        """A new sandbox; arguments as those of `Sandbox.create`."""
        result: Sandbox = wrap(
            portal().run(
                self._async.create(
                    environment,
                    idempotency_key=idempotency_key,
                    snapshot=unwrap(snapshot),
                    timeout_s=timeout_s,
                    queue_s=queue_s,
                    **options,
                )
            )
        )
        return result

    def create_many(
        self,
        count: int,
        environment: str | Environment = "base",
        *,
        idempotency_key: str | None = None,
        timeout_s: float = limits.CREATE_TIMEOUT_S_DEFAULT,
        queue_s: float = 0.0,
        **options: Unpack[CreateOptions],
    ) -> list[Sandbox | DsecError]:
        """`count` sandboxes alike: for each, in order, the sandbox or the error that it failed with."""
        result: list[Sandbox | DsecError] = wrap(
            portal().run(
                self._async.create_many(
                    count, environment, idempotency_key=idempotency_key, timeout_s=timeout_s, queue_s=queue_s, **options
                )
            )
        )
        return result

    def iter_create(
        self,
        count: int,
        environment: str | Environment = "base",
        *,
        idempotency_key: str | None = None,
        timeout_s: float = limits.CREATE_TIMEOUT_S_DEFAULT,
        queue_s: float = 0.0,
        **options: Unpack[CreateOptions],
    ) -> Iterator[Created]:
        """`count` sandboxes alike, each as soon as it is there (or has failed); every index comes once."""
        for item in portal().iterate(
            self._async.iter_create(
                count, environment, idempotency_key=idempotency_key, timeout_s=timeout_s, queue_s=queue_s, **options
            )
        ):
            yield wrap(item)

    def connect(self, id: str) -> Sandbox:
        """A sandbox that exists, by its id, or by its name while it lives.

        Raises SandboxNotFoundError, GoneError when it has ended, ConflictError when several have the name.
        """
        result: Sandbox = wrap(portal().run(self._async.connect(id)))
        return result

    def find(self, name: str, *, ended: bool = False) -> Sandbox:
        """The sandbox of this name that lives; with `ended` also the one of this name that ended last.

        Raises SandboxNotFoundError, GoneError when the only one has ended, ConflictError when several live, and
        UnavailableError when it may be on a node that does not answer.
        """
        result: Sandbox = wrap(portal().run(self._async.find(name, ended=ended)))
        return result

    def get(self, id: str) -> Sandbox:
        """A sandbox by its id, also one that has ended within the last day. Raises SandboxNotFoundError."""
        result: Sandbox = wrap(portal().run(self._async.get(id)))
        return result

    def list(
        self,
        *,
        labels: Mapping[str, str] | None = None,
        name: str | None = None,
        job: str | None = None,
        states: tuple[str, ...] = (),
        max_items: int = 10000,
        metrics: bool = False,
        missing: set[str] | None = None,
    ) -> list[Sandbox]:
        """The sandboxes that have all of `labels`; without `states` those that have not ended. With `metrics` each
        one's `info` has its figures as they are now. Nodes of a cluster that did not answer are added to `missing`."""
        result: list[Sandbox] = wrap(
            portal().run(
                self._async.list(
                    labels=labels,
                    name=name,
                    job=job,
                    states=states,
                    max_items=max_items,
                    metrics=metrics,
                    missing=missing,
                )
            )
        )
        return result

    def health(self) -> Health:
        """The service's version and node."""
        return portal().run(self._async.health())

    def doctor(self) -> DoctorReport:
        """What the node can do, and what it lacks."""
        return portal().run(self._async.doctor())

    def collect_garbage(self, *, dry_run: bool = False) -> GcReport:
        """Removes what nothing needs on the node: what names of environments stood for, layers, caches past their time,
        remains of killed processes. Never volumes. `dry_run` only says what that is."""
        return portal().run(self._async.collect_garbage(dry_run=dry_run))

    def close(self) -> None:
        """Closes the connections. The client may be used again; sandboxes are not touched."""
        portal().run(self._async.close())

    def __enter__(self) -> Self:
        portal().run(self._async.__aenter__())
        return self

    def __exit__(self, *error: object) -> None:
        portal().run(self._async.__aexit__(*error))


def wrap(value: Any) -> Any:
    """Asynchronous objects as blocking ones, also in a list; anything else as it is."""
    if isinstance(value, list):
        return [wrap(item) for item in value]
    kind = _KINDS.get(type(value))
    return value if kind is None else kind._of(value)


def create_many(
    count: int,
    environment: str | Environment = "base",
    *,
    idempotency_key: str | None = None,
    timeout_s: float = limits.CREATE_TIMEOUT_S_DEFAULT,
    queue_s: float = 0.0,
    client: Client | None = None,
    **options: Unpack[CreateOptions],
) -> list[Sandbox | DsecError]:
    """`count` sandboxes alike: for each, in order, the sandbox or the error that it failed with."""
    return Sandbox.create_many(
        count,
        environment,
        idempotency_key=idempotency_key,
        timeout_s=timeout_s,
        queue_s=queue_s,
        client=client,
        **options,
    )


_KINDS: dict[type, Any] = {
    AsyncProcess: Process,
    AsyncPty: Pty,
    AsyncSession: Session,
    AsyncWatch: Watch,
    AsyncFiles: Files,
    AsyncConnection: Connection,
    AsyncScreen: Screen,
    AsyncEnvironments: Environments,
    AsyncLayers: Layers,
    AsyncVolumes: Volumes,
    AsyncMachines: Machines,
    AsyncTokens: Tokens,
    AsyncProjects: Projects,
    AsyncGrants: Grants,
    AsyncSnapshot: Snapshot,
    AsyncSnapshots: Snapshots,
    AsyncJob: Job,
    AsyncJobs: Jobs,
    AsyncGroup: Group,
    AsyncGroups: Groups,
    AsyncSandbox: Sandbox,
    AsyncCreated: Created,
    AsyncClient: Client,
}
