"""A tar file of this machine."""

from __future__ import annotations

import hashlib
import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from dsec.core.errors import InvalidArgumentError
from dsec.image.archive import unpack, unpack_upper
from dsec.image.recipes import RECIPE_VERSION
from dsec.image.stage import Stage
from dsec.wire.environments import TarSource


def build_key(source: TarSource) -> str:
    """Names the file's bytes and what is made of them."""
    with open_file(source.path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    kind = "tar layer" if source.layer else "tar"
    return hashlib.sha256(f"{kind} {RECIPE_VERSION} {source.owner} {digest}".encode()).hexdigest()


def fill(source: TarSource, stage: Stage) -> None:
    """Raises InvalidArgumentError or LimitError for an archive that an environment cannot be made of."""
    with open_file(source.path) as file:
        (unpack_upper if source.layer else unpack)(file, stage)


@contextmanager
def open_file(path: str) -> Iterator[io.BufferedReader]:
    try:
        # O_NONBLOCK: opening a FIFO would wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise InvalidArgumentError(f"cannot open {path!r}: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise InvalidArgumentError(f"{path!r} is not a file")
    with os.fdopen(fd, "rb") as file:
        yield file
