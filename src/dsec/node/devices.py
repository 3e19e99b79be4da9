"""Devices of the host by the names of the Container Device Interface (CDI): `vendor.com/class=name`.

Descriptions are files of vendors' tools or of the operator, in the directories that the configuration names. They are
trusted as the configuration is, but read strictly: what cannot be given as it stands is refused. Programs that they
want run ("hooks") are never run.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from dsec.backends.base import DeviceNode, VolumeSource
from dsec.backends.fncall.config import DeviceMode, check_device_name
from dsec.core.errors import CapacityError, DsecError, InvalidArgumentError, UnsupportedError
from dsec.core.spec import check_env
from dsec.observe.logs import get_logger
from dsec.wire.codec import from_json, from_yaml

log = get_logger(__name__)

_FILE_BYTES_MAX: Final = 4 << 20
_FILES_MAX: Final = 256  # of one directory
_RETRY_S: Final = 1.0


class _Node(msgspec.Struct, frozen=True, rename="camel"):
    path: str
    host_path: str | None = None
    type: str | None = None
    major: int | None = None
    minor: int | None = None
    permissions: str | None = None


class _Mount(msgspec.Struct, frozen=True, rename="camel"):
    host_path: str
    container_path: str


class _Edits(msgspec.Struct, frozen=True, rename="camel"):
    env: list[str] | None = None
    device_nodes: list[_Node] | None = None
    mounts: list[_Mount] | None = None
    hooks: list[Any] | None = None


class _Device(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    container_edits: _Edits = _Edits()


class _Description(msgspec.Struct, frozen=True, rename="camel"):
    """As in SPEC.md of cncf-tags/container-device-interface; what is not here changes no container of ours."""

    kind: str
    devices: list[_Device] = []
    container_edits: _Edits = _Edits()


_READERS: Final[dict[str, Callable[[bytes, type[_Description]], _Description]]] = {
    ".json": from_json,
    ".yaml": from_yaml,
    ".yml": from_yaml,
}


@dataclass(frozen=True, slots=True)
class DeviceSet:
    """What a container gets of the host for some devices."""

    nodes: tuple[DeviceNode, ...] = ()
    mounts: tuple[VolumeSource, ...] = ()  # read-only
    env: tuple[tuple[str, str], ...] = ()


class Devices:
    """Which there are, and who has which. Descriptions are read anew each time: tools rewrite them."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self._directories = tuple(directories)
        self._shared: dict[str, int] = {}  # name → by how many
        self._exclusive: set[str] = set()

    def take(self, names: Sequence[str], mode: DeviceMode) -> tuple[str, ...]:
        """Those of `names` that are the caller's until `give_back`: all of them, or one that nobody else has.

        Raises CapacityError when others are in the way.
        """
        if mode is DeviceMode.SHARED:
            if taken := [name for name in names if name in self._exclusive]:
                raise _taken(taken)
            for name in names:
                self._shared[name] = self._shared.get(name, 0) + 1
            return tuple(names)
        free = next((name for name in names if name not in self._exclusive and not self._shared.get(name)), None)
        if free is None:
            raise _taken(names)
        self._exclusive.add(free)
        return (free,)

    def give_back(self, names: Sequence[str], mode: DeviceMode) -> None:
        for name in names:
            if mode is DeviceMode.EXCLUSIVE:
                self._exclusive.discard(name)
            elif (left := self._shared[name] - 1) > 0:
                self._shared[name] = left
            else:
                del self._shared[name]

    def find(self, names: Iterable[str]) -> DeviceSet:
        """Reads files: not for the event loop. Raises UnsupportedError (no such device, or one that cannot be given),
        InvalidArgumentError (a description that is none)."""
        known = self._read()
        edits: list[_Edits] = []
        for name in names:
            if name not in known:
                raise UnsupportedError(f"no description of a device {name!r} is in {self._where()}")
            for part in known[name]:
                if part not in edits:
                    edits.append(part)
        if any(part.hooks for part in edits):
            log.warning("hooks of device descriptions are not run", devices=list(names))
        nodes = {node.path: node for part in edits for node in map(_node, part.device_nodes or ())}
        mounts = {mount.path: mount for part in edits for mount in map(_mount, part.mounts or ())}
        env = [_pair(word) for part in edits for word in part.env or ()]
        check_env(dict(env))
        return DeviceSet(tuple(nodes.values()), tuple(mounts.values()), tuple(env))

    def kinds(self) -> tuple[str, ...]:
        """Of which there are any. Reads files; descriptions that are none have none."""
        try:
            return tuple(sorted({name.partition("=")[0] for name in self._read()}))
        except DsecError as error:
            log.warning("descriptions of devices cannot be read", error=error.message)
            return ()

    # -- inside ------------------------------------------------------------------------------------

    def _where(self) -> str:
        return ", ".join(map(str, self._directories))

    def _read(self) -> dict[str, tuple[_Edits, _Edits]]:
        """By full name: what all of its kind get, and what it gets alone. Later directories win."""
        found: dict[str, tuple[_Edits, _Edits]] = {}
        for directory in self._directories:
            here: dict[str, tuple[_Edits, _Edits]] = {}
            for path in _files(directory):
                description = _description(path)
                for device in description.devices:
                    name = f"{description.kind}={device.name}"
                    check_device_name(name)
                    if name in here:
                        raise InvalidArgumentError(f"{path}: another description beside it has {name!r}, too")
                    here[name] = (description.container_edits, device.container_edits)
            found |= here
        return found


def _taken(names: Sequence[str]) -> CapacityError:
    return CapacityError(f"others have {', '.join(names)}", hint="try again later", retry_after_s=_RETRY_S)


def _files(directory: Path) -> list[Path]:
    try:
        found = sorted(path for path in directory.iterdir() if path.suffix in _READERS)
    except (FileNotFoundError, NotADirectoryError):
        return []
    if len(found) > _FILES_MAX:
        raise InvalidArgumentError(f"{directory} has more than {_FILES_MAX} descriptions of devices")
    return found


def _description(path: Path) -> _Description:
    with path.open("rb") as file:
        data = file.read(_FILE_BYTES_MAX + 1)
    if len(data) > _FILE_BYTES_MAX:
        raise InvalidArgumentError(f"{path} is too large for a description of devices")
    try:
        return _READERS[path.suffix](data, _Description)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{path}: {error.message}") from error


def _node(node: _Node) -> DeviceNode:
    """By its number on the host: inside it is made anew, whatever is there by then."""
    source = node.host_path or node.path
    try:
        facts = Path(source).stat()
    except OSError as error:
        raise UnsupportedError(f"device {source}: {error.strerror}") from error
    number = (os.major(facts.st_rdev), os.minor(facts.st_rdev))
    said = (number[0] if node.major is None else node.major, number[1] if node.minor is None else node.minor)
    if not stat.S_ISCHR(facts.st_mode) or node.type not in (None, "", "c", "u"):
        raise UnsupportedError(f"{source} is no character device", hint="others are not given to containers")
    if said != number:
        raise UnsupportedError(f"{source} is device {number[0]}:{number[1]}, and its description says otherwise")
    return DeviceNode(path=node.path, major=number[0], minor=number[1], readonly="w" not in (node.permissions or "rw"))


def _mount(mount: _Mount) -> VolumeSource:
    """Read-only, whatever the description says: what one call would write there, the next would read."""
    try:
        facts = Path(mount.host_path).stat()
    except OSError as error:
        raise UnsupportedError(f"{mount.host_path} of a device: {error.strerror}") from error
    source = os.path.realpath(mount.host_path)
    return VolumeSource(
        path=os.path.normpath(mount.container_path),
        source=source,
        inode=facts.st_ino,
        readonly=True,
        file=not stat.S_ISDIR(facts.st_mode),
    )


def _pair(word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not equals:
        raise InvalidArgumentError(f"{word[:80]!r} of a device is no NAME=value")
    return name, value
