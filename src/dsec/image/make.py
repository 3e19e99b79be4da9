"""A finished tree becomes a layer: an EROFS image where this host can use one, else the tree itself."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dsec.core.errors import DsecError, NotFoundError, StorageError
from dsec.core.limits import BUILD_LOG_LINE_BYTES_MAX
from dsec.core.units import format_size
from dsec.image import erofs
from dsec.image.scan import TreeDigest, tree_digest
from dsec.image.upper import mark_whiteouts
from dsec.storage.layers import BLOB_NAME, META_NAME, TREE_NAME, LayerKind, LayerRecord, LayerStore, Lease
from dsec.storage.space import FULL, require_free, store_full
from dsec.storage.trees import tree_size
from dsec.wire.environments import BuildEvent

Report = Callable[[BuildEvent], None]

_USABLE: Final[dict[Path, erofs.Verdict]] = {}  # of state directories that this process has made images in


def make_layer(layers: LayerStore, tree: Path, work: Path, report: Report) -> Lease:
    """Publish `tree` (in the staging directory `work`) as a layer, unless its content is one already; held.

    Nothing collects it before the lease is released; name it before that, inside `layers.publishing()`.
    `tree` may be gone afterwards. Raises StorageError, CapacityError, LimitError.
    """
    as_root = os.geteuid() != 0
    found = _digest(tree, as_root, report)
    try:
        return layers.lease([found.digest])
    except NotFoundError:
        pass
    layer = work / f"layer-{found.digest[:12]}"
    layer.mkdir()
    kind = _convert(layers, tree, layer, found, as_root, report)
    size_bytes = tree_size(layer).disk_bytes
    progress(report, "publish", f"publishing layer {found.digest[:12]}, {format_size(size_bytes)}")
    record = LayerRecord(
        digest=found.digest, kind=kind, size_bytes=size_bytes, entries=found.entries, created_at=time.time()
    )
    with layers.publishing():
        layers.publish(layer, record)
        return layers.lease([found.digest])


def _digest(tree: Path, as_root: bool, report: Report) -> TreeDigest:
    progress(report, "digest", "computing the digest")
    fd = os.open(tree, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return tree_digest(fd, as_root=as_root)
    finally:
        os.close(fd)


def _convert(
    layers: LayerStore, tree: Path, layer: Path, found: TreeDigest, as_root: bool, report: Report
) -> LayerKind:
    """Fill `layer` with an image, or with the tree itself where an image would be of no use; says which and why."""
    verdict = _verdict(layers)
    if verdict.usable:
        require_free(layers.state, found.content_bytes)
        progress(report, "convert", f"making an image of {found.entries} entries, {format_size(found.content_bytes)}")
        try:
            erofs.make_image(tree, layer, digest=found.digest)
            progress(report, "verify", "comparing the image with the tree")
            erofs.verify_image(layer, digest=found.digest, as_root=as_root)
            return LayerKind.EROFS
        except (StorageError, OSError) as error:
            require_free(layers.state)  # a full disk is no reason for another format
            verdict = erofs.Verdict(False, typed(error).message)
        for name in (META_NAME, BLOB_NAME):
            (layer / name).unlink(missing_ok=True)
    log(report, f"kept as a plain directory: {verdict.reason}")
    if not as_root:
        mark_whiteouts(tree)
    tree.rename(layer / TREE_NAME)
    return LayerKind.DIRECTORY


def _verdict(layers: LayerStore) -> erofs.Verdict:
    """Found out once for the layers of one build: it takes as long as a small layer does."""
    found = _USABLE.get(layers.state)
    if found is None:
        found = erofs.probe_erofs(layers)
        if found.usable:
            _USABLE[layers.state] = found
    return found


def progress(report: Report, stage: str, message: str) -> None:
    report(BuildEvent(kind="progress", stage=stage, message=message))


def log(report: Report, line: str) -> None:
    text = line.encode("utf-8", "backslashreplace").decode()
    report(BuildEvent(kind="log", message=text[:BUILD_LOG_LINE_BYTES_MAX]))


def typed(error: BaseException) -> DsecError:
    """What the machine refused, as an error of ours."""
    if isinstance(error, DsecError):
        return error
    if isinstance(error, OSError):
        if error.errno in FULL:
            return store_full()
        return StorageError(f"the build failed on the disk: {error.strerror or error}")
    return StorageError(f"the build failed: {type(error).__name__}: {error}")
