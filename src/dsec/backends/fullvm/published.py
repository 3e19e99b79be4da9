"""Images of machines in stores: disks as layers, chunk by chunk; kernel and initrd whole; a record that names it all.

Blocking.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

import msgspec

from dsec.backends.fullvm.images import MachineImage, MachineImages, Manifest, chain_sha256, checked_size
from dsec.backends.vm.qcow2 import check_overlay, read_size
from dsec.core import limits
from dsec.core.errors import InvalidArgumentError, LimitError, NotFoundError, StorageError
from dsec.core.ids import parse_name
from dsec.core.machines import Firmware
from dsec.storage.disks import DiskLayers
from dsec.storage.store import format
from dsec.storage.store.places import Place
from dsec.wire.codec import from_json, to_json

_DIGEST_MIN: Final = 8


class StoredMachine(msgspec.Struct, frozen=True, kw_only=True):
    """`machines/<name>.json` of a store, published after all that it names. Its digest is the SHA-256 of this file."""

    version: int = format.STORE_VERSION
    name: str
    manifest: Manifest  # all of its disk are layers
    kernel: format.ObjectRef | None = None
    initrd: format.ObjectRef | None = None


def record_path(name: str) -> str:
    return f"machines/{parse_name(name, 'image name')}.json"


def push_image(image: MachineImage, disks: DiskLayers, url: str) -> str:
    """What is in the store already is left as it is: of an image above another only what lies above goes there.

    The digest of the record. After an error the store has whole layers that nothing names, at worst.
    """
    place = disks.store(url, write=True)
    layers: list[str] = []
    if image.disk.exists():
        size = _base_size(image.disk, image.manifest.format)
        layers.append(disks.push_file(image.disk, format.DiskMeta(format=image.manifest.format, size=size), place))
    for digest in image.manifest.layers:
        disks.push(digest, place)
        layers.append(digest)
    kernel, initrd = (_push_file(file, place) for file in (image.kernel, image.initrd))
    manifest = msgspec.structs.replace(
        image.manifest, layers=tuple(layers), sha256=chain_sha256(None, layers), base_sha256=None
    )
    content = to_json(StoredMachine(name=image.name, manifest=manifest, kernel=kernel, initrd=initrd))
    place.put(record_path(image.name), content)
    return hashlib.sha256(content).hexdigest()


def _base_size(file: Path, kind: str) -> int:
    return read_size(file) if kind == "qcow2" else file.stat().st_size


def _push_file(path: Path, place: Place) -> format.ObjectRef | None:
    if not path.exists():
        return None
    if path.stat().st_size > limits.STORE_OBJECT_BYTES_MAX:
        raise LimitError(f"the {path.name} of a machine has at most {limits.STORE_OBJECT_BYTES_MAX} bytes in a store")
    ref, packed = format.pack_object(path.read_bytes())
    place.put(format.object_path("meta", ref.sha256), packed)
    return ref


def pull_image(
    images: MachineImages,
    name: str,
    disks: DiskLayers,
    url: str,
    *,
    stored: str,
    digest: str | None = None,
) -> MachineImage:
    """The image `stored` of a store becomes `name` here: its disk comes as it is read.

    Raises NotFoundError, StorageError for one of another digest, or that cannot be used, and what a store raises.
    """
    place = disks.store(url)
    record = _read(place, stored, digest)
    work = images.begin(name)
    try:
        for name_there, ref in (("kernel", record.kernel), ("initrd", record.initrd)):
            if ref is not None:
                packed = place.get(format.object_path("meta", ref.sha256))
                (work / name_there).write_bytes(format.unpack_object(ref, packed))
        layers = record.manifest.layers
        with disks.attached(layers, place):
            manifest = msgspec.structs.replace(
                record.manifest,
                format=disks.what(layers[0]).format,
                disk_bytes=_checked_chain(disks, layers),
                sha256=chain_sha256(None, layers),
                base_sha256=None,
            )
            return images.finish(work, name, manifest)
    finally:
        images.give_up(work)


def _read(place: Place, stored: str, digest: str | None) -> StoredMachine:
    try:
        content = place.get(record_path(stored))
    except NotFoundError as error:
        raise NotFoundError(
            f"the store {place.url} has no machine {stored!r}",
            hint=f"push it from a node that has it: dsec vm push {stored} {place.url}",
        ) from error
    if len(content) > limits.STORE_RECORD_BYTES_MAX:
        raise StorageError(f"the record of a machine has at most {limits.STORE_RECORD_BYTES_MAX} bytes")
    found = hashlib.sha256(content).hexdigest()
    if digest is not None and (len(digest) < _DIGEST_MIN or not found.startswith(digest)):
        raise StorageError(
            f"machine {stored!r} of the store is {found[:12]}, and not {digest[:12]}",
            hint="it was pushed again, or somebody has changed it",
        )
    try:
        record = from_json(content, StoredMachine)
    except (InvalidArgumentError, LimitError) as error:
        raise StorageError(f"machine {stored!r} of the store is not understood: {error.message}") from error
    if record.version != format.STORE_VERSION or record.name != stored or not record.manifest.layers:
        raise StorageError(f"the store {place.url} has another machine, or version, as {stored!r}")
    if {record.kernel is not None, record.initrd is not None} != {record.manifest.firmware is Firmware.KERNEL}:
        raise StorageError(f"machine {stored!r} of the store lacks its kernel, or has one that it does not start")
    return record


def _checked_chain(disks: DiskLayers, layers: tuple[str, ...]) -> int:
    """How large the disk is. The first bytes of each layer are read: none may name other files to a monitor."""
    size = 0
    for number, digest in enumerate(layers):
        what, file = disks.what(digest), disks.file(digest)
        try:
            seen = check_overlay(file) if number else _base_size(file, what.format)
        except InvalidArgumentError as error:
            raise StorageError(f"layer {digest[:12]} of the store is of no use: {error.message}") from error
        except OSError as error:
            raise StorageError(f"layer {digest[:12]} cannot be read: {error.strerror}") from error
        if seen != what.size or (number and what.format != "qcow2"):
            raise StorageError(f"layer {digest[:12]} of the store is not the disk that it says")
        size = max(size, seen)
    return checked_size(size)
