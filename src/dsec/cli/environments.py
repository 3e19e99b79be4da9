"""`dsec env`: what sandboxes start from."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsec.cli.completion import complete_environment, one_of
from dsec.cli.console import (
    Json,
    OnNode,
    age,
    clean,
    client,
    for_each,
    of_cluster,
    put_json,
    run_async,
    say,
    settings,
    table,
    warn_of,
    when,
)
from dsec.cli.options import Owner
from dsec.cli.pages import command

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from dsec.sdk.client import AsyncClient
    from dsec.wire.environments import BuildEvent, EnvironmentInfo, EnvironmentTrace, LayerUse

app = typer.Typer(help="Environments: what sandboxes start from.", no_args_is_help=True)
Name = Annotated[
    str,
    typer.Argument(metavar="NAME", help="Of the environment.", show_default=False, autocompletion=complete_environment),
]


def build(
    name: Name,
    packages: Annotated[list[str] | None, typer.Argument(metavar="[PACKAGE…]", help="With --debian.")] = None,
    debian: Annotated[
        bool, typer.Option("--debian", help="From Debian packages; without any named, the usual ones for Python work.")
    ] = False,
    suite: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --debian: such as bookworm.", show_default=False)
    ] = None,
    directory: Annotated[
        Path | None, typer.Option("--directory", "--dir", metavar="DIR", help="From a directory.", show_default=False)
    ] = None,
    tar: Annotated[
        Path | None, typer.Option(metavar="FILE", help="From a tar file: plain, gzip, xz or zstd.", show_default=False)
    ] = None,
    oci: Annotated[
        Path | None, typer.Option(metavar="DIR", help="From an OCI image layout directory.", show_default=False)
    ] = None,
    layer: Annotated[
        bool, typer.Option("--layer", help="With --tar: a layer of an image, whose .wh. marks hide what lies below.")
    ] = False,
    registry: Annotated[
        str | None, typer.Option(metavar="IMAGE", help="From an image of a registry.", show_default=False)
    ] = None,
    docker_archive: Annotated[
        Path | None, typer.Option(metavar="FILE", help="From a tar file of `docker save`.", show_default=False)
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(metavar="REF", help="With --oci, --docker-archive: which image.", show_default=False),
    ] = None,
    dockerfile: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="From a directory with a Dockerfile, by buildah.", show_default=False),
    ] = None,
    git: Annotated[
        str | None,
        typer.Option(metavar="URL@COMMIT", help="From a commit of a git repository.", show_default=False),
    ] = None,
    place: Annotated[
        str | None,
        typer.Option("--at", metavar="PATH", help="With --git: where it is inside (/workspace).", show_default=False),
    ] = None,
    history: Annotated[
        str | None,
        typer.Option(
            metavar="WHAT",
            help="With --git: ancestors (default), none or keep.",
            show_default=False,
            autocompletion=one_of("ancestors", "none", "keep"),
        ),
    ] = None,
    file: Annotated[
        str | None, typer.Option(metavar="FILE", help="With --dockerfile: which one.", show_default=False)
    ] = None,
    target: Annotated[
        str | None, typer.Option(metavar="STAGE", help="With --dockerfile: where to stop.", show_default=False)
    ] = None,
    build_arg: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="With --dockerfile: for its ARG.", show_default=False)
    ] = None,
    store: Annotated[
        str | None, typer.Option(metavar="URL", help="From a store that it was pushed to.", show_default=False)
    ] = None,
    environment: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --store: its name there.", show_default=False)
    ] = None,
    owner: Owner = "keep",
    replace: Annotated[bool, typer.Option("--replace", help="Give the name to other content.")] = False,
    refresh: Annotated[bool, typer.Option("--refresh", help="Build even what was built before.")] = False,
    node: OnNode = None,
    json: Json = False,
) -> None:
    """Build an environment. Exactly one option says what from."""
    from dsec.cli.sources import SourceOptions

    source = SourceOptions(
        owner=owner,
        debian=debian,
        packages=packages or (),
        suite=suite,
        registry=registry,
        oci=oci,
        docker_archive=docker_archive,
        reference=reference,
        layer=layer,
        dockerfile=dockerfile,
        file=file,
        target=target,
        arguments=build_arg or (),
        git=git,
        place=place,
        history=history,
        directory=directory,
        tar=tar,
        store=store,
        environment=environment,
    ).source(name)

    async def work() -> None:
        async with client() as c:
            with Progress() as progress:
                info = await c.environments.build(
                    name, source, replace=replace, refresh=refresh, on_event=progress.hear
                )
        if settings.json:
            put_json(info)
        else:
            print(info.name)

    run_async(work())


class Progress:
    """The story of a build or push on stderr: one moving line on a terminal, a line each elsewhere; not with --json."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._last = ""
        self._live = sys.stderr.isatty() and not settings.json and not settings.quiet

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self._live and self._last:
            sys.stderr.write("\r\x1b[K")

    def hear(self, event: BuildEvent) -> None:
        if settings.json or event.kind not in ("progress", "log"):
            return
        text = clean(event.message if event.kind == "log" else f"{event.stage or ''}: {event.message}".strip(": "))
        line = f"[{time.monotonic() - self._started:5.1f} s] {' '.join(text.split())}"
        if not self._live:
            if event.kind == "progress":
                say(line)
            return
        self._last = line
        sys.stderr.write(f"\r\x1b[K{line[: _width()]}")
        sys.stderr.flush()


def _width() -> int:
    import shutil

    return max(shutil.get_terminal_size().columns - 1, 20)


def list_(node: OnNode = None, json: Json = False) -> None:
    """List the environments."""
    from dsec.core.units import format_size

    async def work() -> None:
        silent: set[str] = set()
        async with client() as c:
            found = await c.environments.list(missing=silent)
            several = bool(silent) or len({node for e in found for node in e.nodes}) > 1 or await of_cluster(c)
        warn_of(silent)
        if settings.json:
            put_json(found)
            return
        rows = [
            (
                e.name,
                *([",".join(e.nodes)] if several else []),
                format_size(e.size_bytes),
                age(time.time() - e.created_at),
                e.source,
            )
            for e in found
        ]
        table(("NAME", *(["NODES"] if several else []), "SIZE", "AGE", "SOURCE"), rows)

    run_async(work())


def show(name: Name, json: Json = False) -> None:
    """Show one environment: NAME, NAME:TAG or NAME@DIGEST."""

    async def work() -> None:
        async with client() as c:
            info = await c.environments.get(name)
        if settings.json:
            put_json(info)
        else:
            _show(info)

    run_async(work())


def _show(info: EnvironmentInfo) -> None:
    import msgspec

    from dsec.core.units import format_size

    shown = msgspec.structs.asdict(info) | {"size": format_size(info.size_bytes)}
    shown["created_at"] = when(info.created_at)
    for key in ("layers", "layer_bytes", "parts", "size_bytes", "env"):
        del shown[key]
    for key, value in shown.items():
        if value not in (None, "", ()):
            print(f"{key}: {clean(' '.join(value) if isinstance(value, tuple) else str(value))}")
    for key, value in info.env.items():
        print(clean(f"env: {key}={value}"))
    for part in info.parts:
        below = "1 layer" if len(part.layers) == 1 else f"{len(part.layers)} layers"
        print(clean(f"{part.role}: {part.reference} ({part.digest[:12]}, {below})"))
    sizes = info.layer_bytes or (0,) * len(info.layers)
    for digest, size in zip(info.layers, sizes, strict=True):
        print(f"layer: {digest[:12]} {format_size(size)}")


def push(
    name: Name,
    store: Annotated[str, typer.Argument(metavar="STORE", help="file:///directory, or s3://bucket/prefix.")],
    json: Json = False,
) -> None:
    """Put an environment into a store, for other nodes to build from."""

    async def work() -> None:
        async with client() as c:
            with Progress() as progress:
                info = await c.environments.push(name, store, on_event=progress.hear)
        if settings.json:
            put_json(info)
        else:
            print(info.name)
            say(f"it is {info.digest} there: `dsec env pull --digest` takes nothing else")

    run_async(work())


def stats(name: Name, json: Json = False) -> None:
    """Show how much of an environment has been loaded from its store."""

    async def work() -> None:
        async with client() as c:
            found = await c.environments.stats(name)
        if settings.json:
            put_json(found)
            return
        show_use(found.layers)

    run_async(work())


def _rate(layer: LayerUse) -> str:
    """Of the reads that came to the loader, how many found what they wanted."""
    reads = layer.hits + layer.misses
    return f"{layer.hits / reads:.0%}" if reads else "-"


def show_use(layers: Iterable[LayerUse]) -> None:
    """What is here of layers, and why their stores failed last."""
    from dsec.core.units import format_size

    found = list(layers)
    rows = [
        (
            layer.digest[:12],
            *map(format_size, (layer.size_bytes, layer.present_bytes, layer.touched_bytes, layer.fetched_bytes)),
            *map(str, (layer.hits, layer.misses, _rate(layer), layer.errors)),
            layer.store or "local",
        )
        for layer in found
    ]
    table(("LAYER", "SIZE", "PRESENT", "TOUCHED", "FETCHED", "HITS", "MISSES", "HIT RATE", "ERRORS", "STORE"), rows)
    for layer in found:
        if layer.failure is not None:
            say(clean(f"layer {layer.digest[:12]}: {layer.failure.cause}: {layer.failure.detail}"))


def trace(name: Name, json: Json = False) -> None:
    """Record in the store what has been read of an environment, for other nodes to load first."""

    put_trace(lambda c: c.environments.trace(name))


def put_trace(ask: Callable[[AsyncClient], Awaitable[EnvironmentTrace]]) -> None:
    async def work() -> None:
        async with client() as c:
            found = await ask(c)
        if settings.json:
            put_json(found)
            return
        for layer in found.layers:
            print(f"{layer.digest[:12]}: {layer.chunks} chunks")

    run_async(work())


def rm(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME…", help="Of environments.", autocompletion=complete_environment)
    ],
    json: Json = False,
) -> None:
    """Remove environments. Sandboxes that run keep what they use."""

    for_each(names, lambda c, name: c.environments.remove(name))


command(app, build, of="env")
command(app, list_, "ls", of="env")
command(app, show, of="env")
command(app, push, of="env")
command(app, stats, of="env")
command(app, trace, of="env")
command(app, rm, of="env")
