"""Chains of snapshots stay short: where a disk would stand on too many overlays, the oldest of them become one.

It happens to a saved machine that nobody has seen yet, in its unfinished directory: machines that run stand on what
they stood on, and whoever is killed leaves what the next collection removes.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from dsec.backends.vm.merging import merge
from dsec.backends.vm.saved import OVERLAY, SavedMachines, SavedManifest
from dsec.core import limits
from dsec.core.errors import StorageError
from dsec.observe.logs import get_logger
from dsec.storage.space import require_free

log = get_logger(__name__)

_MERGED: Final = "merged.qcow2"


def shortened(saved: SavedMachines, work: Path, manifest: SavedManifest) -> SavedManifest:
    """Of the machine whose files are in `work`. Blocking. Raises StorageError, CapacityError."""
    if manifest.overlays <= limits.MACHINE_OVERLAYS_MAX:
        return manifest
    run = manifest.overlays - limits.MACHINE_OVERLAYS_KEPT
    files = [work / OVERLAY.format(number) for number in range(1, run + 1)]
    target = work / _MERGED
    try:
        digest = hashlib.sha256(" ".join(saved.digest_of(file) for file in files).encode()).hexdigest()
        if not _found(saved, digest, target):
            require_free(work, sum(file.stat().st_blocks * 512 for file in files))
            merge(files, target)
            target.chmod(0o444)
        for file in files:
            file.unlink()
        target.rename(files[0])
        for number in range(run + 1, manifest.overlays + 1):
            (work / OVERLAY.format(number)).rename(work / OVERLAY.format(number - run + 1))
    except OSError as error:
        raise StorageError(
            f"snapshots below a disk could not be made one: {error.strerror}", hint="is the disk full?"
        ) from error
    log.info("snapshots below a disk were made one", sandbox=manifest.sandbox, snapshots=run)
    return msgspec.structs.replace(manifest, overlays=manifest.overlays - run + 1, merged=digest)


def _found(saved: SavedMachines, digest: str, target: Path) -> bool:
    """Another snapshot of the same machine has it."""
    for path, own in saved.merged(digest):
        with suppress(OSError):
            os.link(path, target, follow_symlinks=False)
            if saved.digest_of(target) == own:
                return True
            target.unlink()
    return False
