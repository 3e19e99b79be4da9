"""Staged trees become EROFS images by the system's mkfs.erofs, where this host can mount the result."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import uuid
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from dsec.binaries import find_binary
from dsec.core.errors import HostError, StorageError
from dsec.image.scan import tree_digest
from dsec.image.stage import TIME_S_MAX
from dsec.storage.layers import BLOB_NAME, META_NAME, LayerStore
from dsec.storage.mounts import mount_erofs

CHUNK_BYTES: Final = 1 << 20
_VERSION: Final = re.compile(r"mkfs\.erofs (?:\(erofs-utils\) )?(\d[\w.+~-]*)")
_PROBE_TEXT: Final = b"probe\n" * 1000
_ENVIRONMENT: Final = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C", "SOURCE_DATE_EPOCH": str(TIME_S_MAX)}
_REASONS: Final = {
    errno.ENOTBLK: "the kernel mounts EROFS only from block devices (before 6.12), or the state directory is on tmpfs",
    errno.ENODEV: "the kernel has no EROFS",
    errno.EPERM: "mounting needs root",
    errno.ENOSYS: "the kernel has no new mount API",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether layers of this host are EROFS images, and if not, why, in words for a person."""

    usable: bool
    reason: str = ""


def probe_erofs(store: LayerStore) -> Verdict:
    """By trial: make a small image in the store's own file system, mount it, read it."""
    program = mkfs_program()
    if program is None:
        return Verdict(False, "mkfs.erofs is not installed (package erofs-utils)")
    if "--blobdev" not in features(program):
        return Verdict(False, "mkfs.erofs is too old: it has no --blobdev")
    with store.staging() as work:
        tree = work / "tree"
        tree.mkdir()
        (tree / "file").write_bytes(_PROBE_TEXT)
        try:
            make_image(tree, work, digest="0" * 64)
            return _read_probe(work)
        except StorageError as error:
            return Verdict(False, error.message)


def _read_probe(work: Path) -> Verdict:
    try:
        top = mount_erofs(work / META_NAME, work / BLOB_NAME)
    except OSError as error:
        return Verdict(False, _REASONS.get(error.errno or 0, f"a trial mount failed: {error.strerror}"))
    try:
        fd = os.open("file", os.O_RDONLY | os.O_CLOEXEC, dir_fd=top)
        try:
            whole = os.read(fd, len(_PROBE_TEXT) + 1) == _PROBE_TEXT
        finally:
            os.close(fd)
    except OSError as error:
        return Verdict(False, f"a trial image cannot be read: {error.strerror}")
    finally:
        os.close(top)
    return Verdict(whole, "" if whole else "a trial image read back wrongly")


def make_image(tree: Path, into: Path, *, digest: str) -> None:
    """`into`/meta.erofs and data.blob from the directory `tree`, the same bytes for the same tree and digest.

    Raises StorageError with the words of mkfs.erofs.
    """
    program = mkfs_program()
    if program is None:
        raise StorageError("mkfs.erofs is not installed", hint="install the package erofs-utils")
    # 1.9 creates the blob, 1.8 wants it to be there.
    (into / BLOB_NAME).touch()
    command = [
        program,
        *_options(features(program), digest),
        f"--blobdev={into / BLOB_NAME}",
        os.fspath(into / META_NAME),
    ]
    done = subprocess.run(
        [*command, os.fspath(tree)], stdin=subprocess.DEVNULL, capture_output=True, check=False, env=_ENVIRONMENT
    )
    if done.returncode != 0:
        words = (done.stderr or done.stdout).decode(errors="replace").strip()[-500:]
        raise StorageError(f"mkfs.erofs failed with {done.returncode}: {words or 'no message'}")


def verify_image(image: Path, *, digest: str, as_root: bool = False) -> None:
    """Mount `image` and compare its tree with `digest`. Raises StorageError when they differ, OSError for the mount."""
    top = mount_erofs(image / META_NAME, image / BLOB_NAME)
    try:
        found = tree_digest(top, as_root=as_root).digest
    finally:
        os.close(top)
    if found != digest:
        raise StorageError(f"the image made by mkfs.erofs does not hold the tree {digest[:12]}")


def mkfs_program() -> str | None:
    """The mkfs.erofs that set-up has built, else the system's."""
    try:
        return os.fspath(find_binary("mkfs.erofs"))
    except HostError:
        return shutil.which("mkfs.erofs")


@dataclass(frozen=True, slots=True)
class Maker:
    """The mkfs.erofs of this host, for people."""

    program: str
    version: str  # "?" when it does not say
    images: bool  # whether it makes images whose data is a file of its own; otherwise layers are directories
    exact_times: bool  # and keeps the times of files whatever that of the image (1.9)


def maker() -> Maker | None:
    """None where there is none."""
    program = mkfs_program()
    if program is None:
        return None
    known = features(program)
    return Maker(program, _version(program), "--blobdev" in known and "--chunksize" in known, "--mkfs-time" in known)


def _version(program: str) -> str:
    """1.5 writes it only when it makes an image, and before 1.8 there is no option for it."""
    for words in ([program, "--version"], [program, "-V"]):
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        if found := _VERSION.search((done.stdout + done.stderr).decode(errors="replace")):
            return found[1]
    return "?"


@cache
def features(program: str) -> frozenset[str]:
    """The long options that this mkfs.erofs knows, from its own help."""
    done = subprocess.run([program, "--help"], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    words = (done.stdout + done.stderr).decode(errors="replace").split()
    return frozenset(word.split("=")[0].split("[")[0].rstrip(",;") for word in words if word.startswith("--"))


def _options(known: frozenset[str], digest: str) -> list[str]:
    options = ["--quiet"] if "--quiet" in known else []
    # A fixed time for the image itself, and each file's own time kept. Before 1.9, -T means all files as well, and
    # SOURCE_DATE_EPOCH is the way: files are clamped to it, and it lies beyond all of them.
    options += ["-T0", "--mkfs-time"] if "--mkfs-time" in known else ["--preserve-mtime"]
    options += ["-U", str(uuid.UUID(digest[:32])), f"--chunksize={CHUNK_BYTES}"]
    if os.geteuid() != 0:
        options.append("--all-root")
    return options
