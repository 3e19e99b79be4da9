"""What the journal keeps of a container: enough to adopt it, or to remove every trace of it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from dsec.core.errors import ProtocolError, StorageError
from dsec.wire.codec import pack, unpack
from dsec.wire.launch import DestroyArgs, LaunchPlan

RECORD_VERSION = 1


class ContainerRecord(msgspec.Struct, frozen=True, kw_only=True):
    version: int = RECORD_VERSION
    sandbox: str
    boot_id: str
    id_base: int
    directory: str
    socket: str
    cgroup2: str | None
    cgroup1: dict[str, str]
    instance: str = ""  # by which the launcher knows it, where that is not the sandbox: it was a spare once
    pid: int = 0  # 0: an intent, nothing may have been started
    start_ticks: int = 0
    view: str = "host"  # live | static | host, as it was given
    disk_limited: bool = False  # what it writes lies in a file system, or below a quota, that counts it alone

    @property
    def launched_as(self) -> str:
        return self.instance or self.sandbox

    def to_bytes(self) -> bytes:
        return pack(self)

    def destroy_args(self) -> DestroyArgs:
        return DestroyArgs(
            sandbox=self.launched_as,
            pid=self.pid or None,
            start_ticks=self.start_ticks or None,
            directory=self.directory,
            socket=self.socket,
            cgroup2=self.cgroup2,
            cgroup1=self.cgroup1,
        )


def record_of(plan: LaunchPlan, boot_id: str) -> ContainerRecord:
    return ContainerRecord(
        sandbox=plan.named or plan.sandbox,
        instance=plan.sandbox if plan.named else "",
        boot_id=boot_id,
        id_base=plan.id_base,
        directory=plan.directory,
        socket=plan.socket,
        cgroup2=plan.cgroup2,
        cgroup1=plan.cgroup1,
    )


def parse_record(data: bytes) -> ContainerRecord:
    """Raises StorageError for a record of a later version or of nothing that we know."""
    try:
        record = unpack(data, ContainerRecord)
    except ProtocolError as error:
        raise StorageError(f"the journal's record of a container is not readable: {error}") from error
    if record.version > RECORD_VERSION:
        raise StorageError(f"the record of {record.sandbox} is of version {record.version}, newer than this program")
    return record


def names_of(records: Iterable[bytes]) -> frozenset[str]:
    """What their directories and sockets are called. Raises StorageError."""
    known = [parse_record(record) for record in records]
    return frozenset(Path(path).name for one in known for path in (one.directory, one.socket.removesuffix(".sock")))
