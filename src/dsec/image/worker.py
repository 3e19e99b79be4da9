"""One build or push, in a process of its own: it can be killed at any time, with everything that it has started.

    python -m dsec.image.worker          reads one Job as a line of JSON from stdin, writes BuildEvents as lines of JSON

The process ends at once when its stdin closes, so it never outlives the node that asked for it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from dsec.core.errors import ConflictError, DsecError, EnvironmentNotFoundError, InvalidArgumentError
from dsec.core.limits import COLLAPSE_ABOVE
from dsec.image import imported, published
from dsec.image.collapse import collapse_now
from dsec.image.environments import EnvironmentStore, environment_info
from dsec.image.export.run import export_now
from dsec.image.imported import Importer
from dsec.image.machines import build_machine
from dsec.image.make import Report, log, make_layer, progress, typed
from dsec.image.published import ImageRecord, read_image
from dsec.image.records import BuildRecord, EnvironmentRecord, ImageConfig
from dsec.image.registry.client import DEFAULT_SETTINGS, RegistrySettings
from dsec.image.sources import debian, directory, git, oci, tarball
from dsec.image.sources.apt import host_suite
from dsec.image.stack import CannotStackError, Unpacking, unpack_stack
from dsec.image.stage import Stage
from dsec.storage.layers import Lease
from dsec.storage.space import require_free
from dsec.wire import codec
from dsec.wire.environments import (
    BuildEvent,
    BuildRequest,
    BuildSource,
    DebianSource,
    DirectorySource,
    EnvironmentInfo,
    GitSource,
    ImageSource,
    MachineBuild,
    OciSource,
    Ownership,
    PushRequest,
    StoreSource,
    TarSource,
    TreeSource,
)
from dsec.wire.errors import body_of
from dsec.wire.images import ExportedImage, ExportRequest
from dsec.wire.layers import CollapseRequest
from dsec.wire.machines import MachineInfo

_NICENESS: Final = 5  # running sandboxes come first
_PROXIES: Final = ("http_proxy", "https_proxy", "no_proxy")


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the parent sends."""

    state: str
    build: BuildRequest | None = None  # one of these
    push: PushRequest | None = None
    export: ExportRequest | None = None
    collapse: CollapseRequest | None = None
    machine: MachineBuild | None = None
    target: str = ""  # machine: a directory for its files
    data: dict[str, str] = {}  # export: files with the data of layers that are loaded from stores
    registries: RegistrySettings = DEFAULT_SETTINGS


def build_now(
    store: EnvironmentStore,
    request: BuildRequest,
    report: Report,
    *,
    proxies: Mapping[str, str] | None = None,
    importer: Importer | None = None,
) -> EnvironmentInfo:
    """Build in this process, blocking. After an error every name stands for what it did before.

    A layer that was published just before the error has no name, and is left to `EnvironmentStore.collect`.
    """
    if isinstance(request.source, DirectorySource) and directory.contains(request.source, store.state):
        raise InvalidArgumentError(
            f"{request.source.path!r} contains the store itself", hint="choose a directory below it"
        )
    progress(report, "resolve", f"looking at {describe(request.source)}")
    image = read_image(request.source) if isinstance(request.source, StoreSource) else None
    importer = importer or Importer(store.state)
    key = build_key(request.source, image, importer)
    ready = ready_result(store, request, key)
    if ready is not None:
        return ready
    progress(report, "wait", "waiting for other builds of the same content, if there are any")
    with store.layers.single_flight(key):
        ready = ready_result(store, request, key)
        if ready is not None:
            return ready
        if image is not None:
            return _attach(store, request, image, key, report)
        return _build(store, request, key, report, proxies or {}, importer)


def build_key(source: BuildSource, image: ImageRecord | None = None, importer: Importer | None = None) -> str:
    """Equal for requests that lead to the same content. Raises what the source's own reading raises.

    `image` is what a store says of the environment, for a source that is one.
    """
    if isinstance(source, StoreSource):
        return published.build_key(source, image or read_image(source))
    if isinstance(source, DirectorySource):
        return directory.build_key(source)
    if isinstance(source, TarSource):
        return tarball.build_key(source)
    if isinstance(source, OciSource):
        return oci.build_key(source)
    if isinstance(source, GitSource):
        return git.build_key(source)
    if isinstance(source, ImageSource):
        return (importer or Importer(Path())).build_key(source)
    return debian.build_key(source)


def describe(source: BuildSource) -> str:
    """For people, in records and logs."""
    if isinstance(source, DirectorySource):
        return f"directory {source.path}"
    if isinstance(source, TarSource):
        return f"tar file {source.path}"
    if isinstance(source, OciSource):
        return f"OCI layout {source.path}" + (f" ({source.reference})" if source.reference else "")
    if isinstance(source, StoreSource):
        return f"environment {source.environment} of {source.url}"[:500]
    if isinstance(source, GitSource):
        return f"commit {source.commit} of {source.url}"[:500]
    if isinstance(source, ImageSource):
        return imported.describe(source)[:500]
    packages = ", ".join(sorted(set(source.packages))) or "no further packages"
    return f"debian {source.suite or host_suite()}: {packages}"[:500]


def ready_result(store: EnvironmentStore, request: BuildRequest, key: str) -> EnvironmentInfo | None:
    """The environment, if nothing has to be built. Raises ConflictError when the name stands for something else."""
    try:
        present = store.record(request.name)
    except EnvironmentNotFoundError:
        present = None
    if present is not None and not request.replace and present.build_key != key:
        raise ConflictError(
            f"environment {request.name!r} exists, made from {present.info.source}",
            hint="choose another name, or build with --replace",
        )
    if request.refresh:
        return None
    with store.layers.publishing():
        built = store.built(key)
        if built is None:
            return None
        if present is not None and present.build_key == key and present.info.layers == built.layers:
            return present.info
        return _name(store, request, key, built)


def _build(
    store: EnvironmentStore,
    request: BuildRequest,
    key: str,
    report: Report,
    proxies: Mapping[str, str],
    importer: Importer,
) -> EnvironmentInfo:
    require_free(store.state)
    assert not isinstance(request.source, StoreSource)
    with store.layers.staging() as work:
        config, lease = _layers(store, request, work, report, proxies, importer)
        with lease, store.layers.publishing():
            built = BuildRecord(layers=lease.digests, source=describe(request.source), config=config)
            store.put_built(key, built)
            return _name(store, request, key, built)


def _layers(
    store: EnvironmentStore,
    request: BuildRequest,
    work: Path,
    report: Report,
    proxies: Mapping[str, str],
    importer: Importer,
) -> tuple[ImageConfig, Lease]:
    """One layer for each of an image's where this host can do so, and one for everything else."""
    source = request.source
    assert not isinstance(source, StoreSource)
    if isinstance(source, ImageSource):
        with importer.layout(source, store, work, report, whole=request.refresh) as layout:
            if (stacked := _stacked(store, request, layout, work, report)) is not None:
                return stacked
        with importer.layout(source, store, work, report, whole=True) as layout:
            return _as_one(store, layout, work, report, proxies)
    if isinstance(source, OciSource) and (stacked := _stacked(store, request, source, work, report)) is not None:
        return stacked
    return _as_one(store, source, work, report, proxies)


def _stacked(
    store: EnvironmentStore, request: BuildRequest, source: OciSource, work: Path, report: Report
) -> tuple[ImageConfig, Lease] | None:
    """None where this host cannot unpack a layer over others."""
    try:
        with oci.opened(source) as (config, archives):
            unpacking = Unpacking(store, source.owner, work, report, refresh=request.refresh)
            return config, unpack_stack(unpacking, archives)
    except CannotStackError as error:
        log(report, f"all layers become one: {error.message}")
        return None


def _as_one(
    store: EnvironmentStore, source: TreeSource, work: Path, report: Report, proxies: Mapping[str, str]
) -> tuple[ImageConfig, Lease]:
    tree = work / "tree"
    config = _stage(source, tree, work, report, proxies)
    return config, make_layer(store.layers, tree, work, report)


def _attach(
    store: EnvironmentStore, request: BuildRequest, image: ImageRecord, key: str, report: Report
) -> EnvironmentInfo:
    assert isinstance(request.source, StoreSource)
    require_free(store.state)
    with published.attached(store.layers, image, request.source, report), store.layers.publishing():
        built = BuildRecord(layers=image.layers, source=describe(request.source), config=image.config)
        store.put_built(key, built)
        return _name(store, request, key, built)


def _name(store: EnvironmentStore, request: BuildRequest, key: str, built: BuildRecord) -> EnvironmentInfo:
    info = environment_info(request.name, store.layers, built, created_at=time.time())
    store.put(EnvironmentRecord(build_key=key, info=info))
    return info


def _stage(source: TreeSource, tree: Path, work: Path, report: Report, proxies: Mapping[str, str]) -> ImageConfig:
    progress(report, "stage", f"unpacking {describe(source)}")
    owner = Ownership.KEEP if isinstance(source, DebianSource) else source.owner
    config = ImageConfig()
    with Stage(tree, owner=owner) as stage:
        if isinstance(source, DirectorySource):
            directory.fill(source, stage)
        elif isinstance(source, TarSource):
            tarball.fill(source, stage)
        elif isinstance(source, OciSource):
            config = oci.fill(source, stage)
        elif isinstance(source, GitSource):
            config = git.fill(source, stage, work, log=lambda line: log(report, line), proxies=proxies)
        else:
            config = debian.fill(source, stage, work, log=lambda line: log(report, line), proxies=proxies)
        stage.finish()
        if dropped := str(stage.dropped):
            log(report, dropped)
        if os.geteuid() != 0:
            log(report, "built without root: every file belongs to root inside")
    return config


def error_event(error: BaseException) -> BuildEvent:
    """The last event of a build that failed."""
    known = typed(error)
    # Names in an archive need not be text, and JSON holds nothing else.
    known.message = known.message.encode("utf-8", "backslashreplace").decode()
    return BuildEvent(kind="error", message=str(known), error=body_of(known))


def main() -> int:
    """1. read the job  2. end with stdin  3. build or push  4. say how it went."""
    job = codec.from_json(sys.stdin.buffer.readline(), Job)
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    os.nice(_NICENESS)
    proxies = {name: os.environ[name] for name in _PROXIES if name in os.environ}
    try:
        store = EnvironmentStore(job.state)
        store.layers.clean()
        done = _run(store, job, proxies)
    except Exception as error:
        _write(error_event(error))
        return 1
    if isinstance(done, ExportedImage):
        _write(BuildEvent(kind="done", exported=done))
    elif isinstance(done, MachineInfo):
        _write(BuildEvent(kind="done", machine=done))
    else:
        _write(BuildEvent(kind="done", environment=done))
    return 0


def _run(
    store: EnvironmentStore, job: Job, proxies: Mapping[str, str]
) -> EnvironmentInfo | ExportedImage | MachineInfo:
    if job.push is not None:
        return published.push_now(store, job.push, _write)
    if job.export is not None:
        return export_now(store, job.export, _write, settings=job.registries, environ=os.environ, data=job.data)
    if job.build is not None:
        importer = Importer(store.state, job.registries, os.environ)
        return _collapsed(store, build_now(store, job.build, _write, proxies=proxies, importer=importer))
    if job.collapse is not None:
        return collapse_now(store, job.collapse, _write)
    if job.machine is not None:
        with store.layers.staging() as work:
            return build_machine(
                job.machine,
                Path(job.target),
                work,
                log=lambda line: log(_write, line),
                progress=lambda stage, message: progress(_write, stage, message),
                proxies=proxies,
            )
    raise InvalidArgumentError("a job without anything to do")


def _collapsed(store: EnvironmentStore, info: EnvironmentInfo) -> EnvironmentInfo:
    """What has been built is of use as it is; one with many layers is more so when runs of them are one."""
    if len(info.layers) > COLLAPSE_ABOVE:
        try:
            collapse_now(store, CollapseRequest(name=info.name), _write)
        except (DsecError, OSError) as error:
            log(_write, f"its layers stay as they are: {typed(error).message}")
    return info


def _write(event: BuildEvent) -> None:
    sys.stdout.buffer.write(codec.to_json(event) + b"\n")
    sys.stdout.buffer.flush()


def _end_with_stdin() -> None:
    # The buffer object is the main thread's no longer; os.read sees the pipe itself.
    while os.read(0, 4096):
        pass
    os._exit(1)  # init of its process namespace: the kernel kills all the others with it


if __name__ == "__main__":
    sys.exit(main())
