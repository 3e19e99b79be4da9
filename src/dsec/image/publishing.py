"""A snapshot becomes a workspace or toolkit: its layers above the environment's made one, without residue, and named.

    python -m dsec.image.publishing     reads one PublishJob as a line of JSON from stdin, writes one PublishAnswer

The process ends at once when its stdin closes, so it never outlives the node that asked for it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import ExitStack
from typing import Final

import msgspec

from dsec.core.errors import ConflictError, EnvironmentNotFoundError
from dsec.image.collapse import Merge, merged_below, opened_top
from dsec.image.environments import EnvironmentStore, environment_info
from dsec.image.make import make_layer, typed
from dsec.image.records import BuildRecord, EnvironmentRecord
from dsec.image.residue import find_residue, remove_residue
from dsec.storage.space import require_free
from dsec.wire import codec
from dsec.wire.environments import BuildEvent, EnvironmentInfo
from dsec.wire.errors import ErrorBody, body_of
from dsec.wire.snapshots import Published

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NICENESS: Final = 5  # running sandboxes come first


class PublishJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    state: str
    name: str
    source: str  # for people
    base: tuple[str, ...]  # digests of the environment, lowest first
    run: tuple[str, ...]  # what lies above it
    rules: dict[str, tuple[str, ...]]
    replace: bool = False
    dry_run: bool = False


class PublishAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two."""

    published: Published | None = None
    error: ErrorBody | None = None


def publish_now(store: EnvironmentStore, job: PublishJob) -> Published:
    """Blocking. The layers of the job are held by who asks. Raises ConflictError, CannotStackError, StorageError …"""
    if not job.replace and not job.dry_run:
        _check_free(store, job.name)
    with store.layers.staging() as work, ExitStack() as opened:
        tree = work / "tree"
        tree.mkdir(mode=0o755)
        run = [store.layers.get(digest) for digest in job.run]
        require_free(store.state, sum(store.layers.record(digest).size_bytes for digest in job.run))
        tops = [opened_top(layer, opened) for layer in reversed(run)]
        Merge(tops, merged_below([store.layers.get(digest) for digest in job.base], opened), tree).run()
        top = os.open(tree, _DIRECTORY)
        opened.callback(os.close, top)
        residue = find_residue(top, job.rules)
        if job.dry_run:
            return Published(removed=residue.report())
        remove_residue(top, residue)
        with make_layer(store.layers, tree, work, _quiet) as held, store.layers.publishing():
            if not job.replace:
                _check_free(store, job.name)
            built = BuildRecord(layers=held.digests, source=job.source)
            info = environment_info(job.name, store.layers, built, created_at=time.time())
            store.put(EnvironmentRecord(build_key="", info=info))
            return Published(environment=info, removed=residue.report())


def _check_free(store: EnvironmentStore, name: str) -> None:
    try:
        present: EnvironmentInfo = store.get(name)
    except EnvironmentNotFoundError:
        return
    raise ConflictError(
        f"environment {name!r} exists, made from {present.source}", hint="choose another name or tag, or --replace"
    )


def _quiet(event: BuildEvent) -> None:
    """Nobody watches."""


def main() -> int:
    job = codec.from_json(sys.stdin.buffer.readline(), PublishJob)
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    os.nice(_NICENESS)
    try:
        answer = PublishAnswer(published=publish_now(EnvironmentStore(job.state), job))
    except Exception as error:
        known = typed(error)
        known.message = known.message.encode("utf-8", "backslashreplace").decode()
        answer = PublishAnswer(error=body_of(known))
    sys.stdout.buffer.write(codec.to_json(answer) + b"\n")
    sys.stdout.buffer.flush()
    return 0 if answer.error is None else 1


def _end_with_stdin() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)  # init of its process namespace: the kernel kills all the others with it


if __name__ == "__main__":
    sys.exit(main())
