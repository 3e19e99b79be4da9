"""What callers write becomes the records of the contract. Pure; raises InvalidArgumentError before anything is sent."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, TypedDict

import msgspec

from dsec.core import limits
from dsec.core.errors import InvalidArgumentError
from dsec.core.ids import new_exec_id
from dsec.core.spec import (
    Environment,
    NetworkMode,
    Place,
    ReadyProbe,
    SandboxSpec,
    Substrate,
    VolumeMount,
    parse_volume,
)
from dsec.core.units import parse_size
from dsec.wire.records import ExecRequest, TtySize

Command = str | Sequence[str | bytes]
STDIN_INLINE_BYTES_MAX: Final = 1 << 20  # sent in the request itself; more is streamed
INLINE_WAIT_S: Final = 20.0  # a command that ends within this costs one round trip


_NOT_OFFERED: Final = (Substrate.FAKE, Substrate.FNCALL, NetworkMode.ROUTED)  # to who looks for a word

# Whose default differs from None, and whose value from a snapshot may be another: option → field of the spec.
_SAID: Final = {
    "cpu": "cpu",
    "memory": "memory_bytes",
    "pids": "pids_max",
    "privilege_gain": "privilege_gain",
    "keepalive": "keepalive",
    "start": "start",
}


class CreateOptions(TypedDict, total=False):
    """What may be asked of a sandbox besides its environment. `Sandbox.create` documents each."""

    backend: str
    cpu: float | None
    memory: int | str | None
    disk: int | str | None
    pids: int | None
    env: Mapping[str, str] | None
    user: str | None
    workdir: str | None
    network: str
    egress: Sequence[str] | None
    ttl_running_s: float | None
    ttl_idle_s: float | None
    labels: Mapping[str, str] | None
    name: str | None
    privilege_gain: bool | None
    keepalive: bool | None
    start: bool | None
    entrypoint: Sequence[str] | None
    command: Sequence[str] | None
    ready: Mapping[str, Any] | ReadyProbe | None
    volumes: Sequence[str | VolumeMount]
    place: Place | None
    job: str | None


def make_spec(
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
) -> SandboxSpec:
    return SandboxSpec(
        environment=environment if isinstance(environment, Environment) else Environment(base=environment),
        substrate=_chosen(Substrate, backend, "backend"),
        cpu=1.0 if cpu is None else cpu,
        memory_bytes=limits.GIB if memory is None else parse_size(memory, "memory"),
        disk_bytes=None if disk is None else parse_size(disk, "disk"),
        pids_max=1024 if pids is None else pids,
        network=_chosen(NetworkMode, network, "network"),
        egress=None if egress is None else tuple(as_list(egress, "egress")),
        env=as_mapping(env, "env"),
        user=user,
        workdir=workdir,
        ttl_running_s=ttl_running_s,
        ttl_idle_s=ttl_idle_s,
        labels=as_mapping(labels, "labels"),
        name=name,
        privilege_gain=bool(privilege_gain),
        keepalive=bool(keepalive),
        start=bool(start),
        entrypoint=None if entrypoint is None else tuple(as_list(entrypoint, "entrypoint")),
        command=None if command is None else tuple(as_list(command, "command")),
        ready=_probe(ready),
        volumes=tuple(
            volume if isinstance(volume, VolumeMount) else parse_volume(volume)
            for volume in as_list(volumes, "volumes")
        ),
        place=place,
        job=job,
    )


def said_of(options: CreateOptions, snapshot: str | None) -> tuple[str, ...] | msgspec.UnsetType:
    """What counts as asked for with a snapshot, also where it is the default."""
    if snapshot is None:
        return msgspec.UNSET
    return tuple(field for name, field in _SAID.items() if options.get(name) is not None)


def as_bytes(data: Any, what: str) -> bytes:
    """Text as UTF-8. A number is refused: `bytes(5)` would be five zeroes."""
    if isinstance(data, str):
        return data.encode("utf-8", "surrogateescape")
    if isinstance(data, (bytes, bytearray, memoryview)):
        return bytes(data)
    raise InvalidArgumentError(f"{what} must be text or bytes, not {type(data).__name__}")


def as_text(text: Any, what: str) -> str:
    if not isinstance(text, str):
        raise InvalidArgumentError(f"{what} must be text, not {type(text).__name__}")
    return text


def as_list(items: Any, what: str) -> list[Any]:
    """One text is refused: its characters are not what is meant."""
    if isinstance(items, (str, bytes)) or not isinstance(items, Iterable):
        raise InvalidArgumentError(f"{what} must be a list, not {type(items).__name__}", hint=f"such as {what}=[…]")
    return list(items)


def as_mapping(items: Any, what: str) -> dict[Any, Any]:
    if items is not None and not isinstance(items, Mapping):
        raise InvalidArgumentError(f"{what} must be a mapping, not {type(items).__name__}")
    return dict(items or {})


def _probe(ready: Mapping[str, Any] | ReadyProbe | None) -> ReadyProbe | None:
    if ready is None or isinstance(ready, ReadyProbe):
        return ready
    try:
        return msgspec.convert(dict(ready), ReadyProbe)
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"ready is not a probe: {error}", hint='such as ready={"port": 8080}, {"shell": …} or {"argv": […]}'
        ) from error


def _chosen(kind: Any, value: str, what: str) -> Any:
    try:
        return kind(value)
    except ValueError as error:
        names = ", ".join(sorted(one for one in kind if one not in _NOT_OFFERED))
        raise InvalidArgumentError(f"there is no {what} {str(value)[:40]!r}", hint=f"one of {names}") from error


def make_exec(
    command: Command,
    *,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    user: str | None = None,
    stdin: bytes | str | bool | None = None,
    timeout_s: float | None = None,
    grace_s: float = limits.EXEC_GRACE_S_DEFAULT,
    tty: TtySize | None = None,
    stderr: Literal["separate", "merge"] = "separate",
    output_bytes_max: int | None = None,
    record_bytes_max: int = limits.EXEC_OUTPUT_BYTES_DEFAULT,
    rlimits: Mapping[str, int] | None = None,
    secrets: Mapping[str, str] | None = None,
    session: str | None = None,
    wait_s: float | None = None,
) -> ExecRequest:
    """A text runs in a shell, a list as it is. Every exec has an id of its own, minted here: it never runs twice."""
    if stderr not in ("separate", "merge"):
        raise InvalidArgumentError('stderr must be "separate" or "merge"')
    data = stdin if stdin is None or isinstance(stdin, bool) else as_bytes(stdin, "stdin")
    inline = isinstance(data, (bytes, bytearray)) and len(data) <= STDIN_INLINE_BYTES_MAX and tty is None
    return ExecRequest(
        id=new_exec_id(),
        **_command(command, session=session is not None),
        cwd=cwd,
        env=as_mapping(env, "env"),
        user=user,
        stdin=data is True or (data is not None and data is not False and not inline),
        stdin_data=bytes(data) if inline and isinstance(data, (bytes, bytearray)) else None,
        tty=tty,
        timeout_s=timeout_s,
        grace_s=grace_s,
        output_bytes_max=output_bytes_max,
        record_bytes_max=record_bytes_max,
        merge_stderr=stderr == "merge",
        rlimits=dict(rlimits or {}),
        session=session,
        secrets=dict(secrets or {}),
        wait_s=wait_s,
    )


def _command(command: Command, *, session: bool) -> dict[str, Any]:
    if isinstance(command, str):
        return {"shell": command}
    if isinstance(command, (bytes, bytearray)) or not isinstance(command, Sequence):
        raise InvalidArgumentError("a command is text for a shell, or a list of arguments")
    items = list(command)
    if not all(isinstance(item, (str, bytes)) for item in items):
        raise InvalidArgumentError("every argument of a command must be text or bytes")
    if session:
        return {"shell": shlex.join(item if isinstance(item, str) else item.decode() for item in items)}
    if any(isinstance(item, bytes) for item in items):
        return {"argv_bytes": [item.encode() if isinstance(item, str) else item for item in items]}
    return {"argv": items}
