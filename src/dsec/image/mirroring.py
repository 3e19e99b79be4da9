"""A layer made of what a sandbox has written, in a process of its own: it can be killed at any time.

    python -m dsec.image.mirroring       reads a MirrorJob and then MirrorSteps as lines of JSON from stdin, and writes
                                         a MirrorAnswer as a line of JSON to stdout for each of them

The process ends at once when its stdin closes, so it never outlives the node that asked for it; until then it holds
the layer that it has made.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from dsec.core.errors import DsecError, InvalidArgumentError
from dsec.core.limits import COLLAPSE_BYTES_MAX
from dsec.image.collapse import Merge, opened_top
from dsec.image.make import make_layer, typed
from dsec.storage.layers import LayerStore
from dsec.storage.mirror import Mapped, Mirror, Pass
from dsec.storage.space import require_free
from dsec.wire import codec
from dsec.wire.environments import BuildEvent
from dsec.wire.errors import ErrorBody, body_of

LOOK: Final = "look"
TAKE: Final = "take"
KEEP: Final = "keep"
END: Final = "end"
_NOT_KEPT: Final = (b"run",)  # what holds for running processes only: they are gone in whatever begins with the layer


class MirrorJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first line."""

    state: str  # of the layer store
    source: int  # descriptor of the top of what is copied, inherited
    trust_times: bool = True


class MirrorStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`look`, any number of times, while the sandbox runs; `take` once, while it stands still; `keep`; `end`."""

    do: str
    mapped: list[bytes] = []  # look: paths that may be mapped for writing
    sure: bool = True  # look: nothing else is
    within_s: float = 0.0  # take
    run: tuple[str, ...] = ()  # keep: layers right below it, lowest first, that it is to be made one with


class MirrorAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Of one step; with `error` it is the last."""

    entries: int = 0
    copied_files: int = 0
    copied_bytes: int = 0
    content_bytes: int = 0
    digest: str = ""  # keep
    size_bytes: int = 0  # keep: of the layer on the disk
    notes: str = ""  # what a layer cannot hold
    merged: bool = False  # keep: it has what the run has, too
    error: ErrorBody | None = None


def main() -> int:
    steps, ends = os.pipe()
    threading.Thread(target=_pass_on, args=(ends,), daemon=True).start()
    try:
        with ExitStack() as stack, os.fdopen(steps, "rb") as lines:
            _serve(lines, stack)
    except Exception as error:
        known = typed(error)
        known.message = known.message.encode("utf-8", "backslashreplace").decode()
        _tell(MirrorAnswer(error=body_of(known)))
        return 1
    return 0


def _serve(lines: BinaryIO, stack: ExitStack) -> None:
    """1. read the job  2. do the steps  3. remove what was only on the way, and let go of the layer."""
    job = codec.from_json(lines.readline(), MirrorJob)
    os.set_inheritable(job.source, False)
    store = LayerStore(job.state)
    require_free(store.state)
    work = stack.enter_context(store.staging())
    mirror = Mirror(job.source, work / "mirror", trust_times=job.trust_times, emptied=_NOT_KEPT)
    for line in lines:
        step = codec.from_json(line, MirrorStep)
        if step.do == LOOK:
            _tell(_passed(mirror.look(Mapped(step.mapped, step.sure))))
        elif step.do == TAKE:
            _tell(_passed(mirror.take(within_s=step.within_s)))
        elif step.do == KEEP:
            _tell(_kept(mirror, store, work, step.run, stack))
        elif step.do == END:
            return
        else:
            raise InvalidArgumentError(f"there is no step {step.do[:40]!r}")


def _kept(mirror: Mirror, store: LayerStore, work: Path, run: tuple[str, ...], stack: ExitStack) -> MirrorAnswer:
    tree = mirror.build()
    merged = _merged(store, tree, run, work / "merged") if run else None
    lease = stack.enter_context(make_layer(store, merged or tree, work, _quiet))
    record = store.record(lease.digests[0])
    return MirrorAnswer(
        digest=record.digest,
        size_bytes=record.size_bytes,
        entries=record.entries,
        notes=str(mirror.dropped),
        merged=merged is not None,
    )


def _merged(store: LayerStore, tree: Path, run: tuple[str, ...], target: Path) -> Path | None:
    """The tree with what its run has below it; None when that is not possible, or too large to be worth it."""
    size = sum(store.record(digest).size_bytes for digest in run)
    if size > COLLAPSE_BYTES_MAX:
        return None
    try:
        require_free(store.state, 2 * size)
        with ExitStack() as opened:
            tops = [os.open(tree, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)]
            opened.callback(os.close, tops[0])
            tops += [opened_top(store.get(digest), opened) for digest in reversed(run)]
            target.mkdir(mode=0o755)
            Merge(tops, None, target, blind=True).run()
    except (DsecError, OSError) as error:
        print(f"{len(run)} layers stay as they are: {typed(error).message}", file=sys.stderr)
        return None
    return target


def _passed(done: Pass) -> MirrorAnswer:
    return MirrorAnswer(
        entries=done.entries,
        copied_files=done.copied_files,
        copied_bytes=done.copied_bytes,
        content_bytes=done.content_bytes,
    )


def _quiet(event: BuildEvent) -> None:
    """Nobody watches a layer in the making."""


def _tell(answer: MirrorAnswer) -> None:
    sys.stdout.buffer.write(codec.to_json(answer) + b"\n")
    sys.stdout.buffer.flush()


def _pass_on(ends: int) -> None:
    """Steps as they come; and the end of stdin is that of the process, in the middle of whatever it does."""
    while data := os.read(0, 65_536):
        view = memoryview(data)
        while view:
            view = view[os.write(ends, view) :]
    os._exit(1)  # init of its process namespace: the kernel kills mkfs.erofs with it


if __name__ == "__main__":
    sys.exit(main())
