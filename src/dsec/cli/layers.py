"""`dsec layer`, and those of `dsec env` that put environments together from others."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from dsec.cli import environments
from dsec.cli.completion import complete_environment
from dsec.cli.console import Json, age, clean, client, for_each, put_json, run_async, say, settings, table
from dsec.cli.environments import Name, Progress, show_use
from dsec.cli.pages import command

if TYPE_CHECKING:
    from dsec.wire.layers import EnvironmentDiff, LayerInfo

app = typer.Typer(help="Layers: what environments are made of.", no_args_is_help=True)
_BUILD = "Build what environments are made of. Exactly one option says what from."
Digest = Annotated[str, typer.Argument(metavar="DIGEST", help="Of the layer, or 12 digits of it.", show_default=False)]


def create(
    name: Name,
    base: Annotated[
        str,
        typer.Option(metavar="REF", help="What lies lowest: NAME, NAME:TAG or NAME@DIGEST.", show_default=False),
    ],
    workspace: Annotated[str | None, typer.Option(metavar="REF", help="Above the base.", show_default=False)] = None,
    toolkit: Annotated[
        list[str] | None, typer.Option(metavar="REF", help="Above those, in this order.", show_default=False)
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Look the parts up at each create; not locked.")] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Give the name to other content.")] = False,
    json: Json = False,
) -> None:
    """Put an environment together from others."""

    async def work() -> None:
        async with client() as c:
            info = await c.environments.create(
                name, base, workspace=workspace, toolkits=toolkit or (), follow=follow, replace=replace
            )
        if settings.json:
            put_json(info)
        else:
            print(info.name)

    run_async(work())


def update(name: Name, json: Json = False) -> None:
    """Lock an environment to what its parts are now."""

    async def work() -> None:
        async with client() as c:
            before = await c.environments.get(name)
            info = await c.environments.update(name)
        if settings.json:
            put_json(info)
        elif before.digest == info.digest:
            say(f"{info.name} is up to date")
        else:
            print(f"{info.name}@{info.digest[:12]}" if ":" not in info.name else f"{info.name} {info.digest[:12]}")

    run_async(work())


def diff(
    name: Name,
    other: Annotated[str, typer.Argument(metavar="OTHER", help="NAME, NAME:TAG or NAME@DIGEST.", show_default=False)],
    json: Json = False,
) -> None:
    """Show what another environment, or an earlier lock, has more, less and otherwise."""

    async def work() -> None:
        async with client() as c:
            found = await c.environments.diff(name, other)
        if settings.json:
            put_json(found)
        else:
            _show_diff(found)

    run_async(work())


def _show_diff(found: EnvironmentDiff) -> None:
    from dsec.core.units import format_size

    for part in found.parts:
        print(clean(f"{part.role}: {part.one or 'none'} -> {part.other or 'none'}"))
    for sign, changes in (("-", found.removed), ("+", found.added)):
        for layer in changes:
            print(f"{sign} layer {layer.digest[:12]} {format_size(layer.size_bytes)}")
    for change in found.config:
        print(clean(f"{change.what}: {change.one!r} -> {change.other!r}"))
    moved = ", in another order" if found.moved else ""
    say(f"{found.same} layers are the same{moved}")


def pull(
    store: Annotated[str, typer.Argument(metavar="STORE", help="file:///directory, https://… or s3://bucket/prefix.")],
    name: Name,
    as_: Annotated[
        str | None, typer.Option("--as", metavar="NAME", help="What it is called here.", show_default=False)
    ] = None,
    digest: Annotated[
        str | None,
        typer.Option("--digest", metavar="DIGEST", help="Take no other: as the push told it.", show_default=False),
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Give the name to other content.")] = False,
    json: Json = False,
) -> None:
    """Take an environment from a store; its content is loaded as it is read."""

    async def work() -> None:
        from dsec.wire.environments import StoreSource

        async with client() as c:
            with Progress() as progress:
                source = StoreSource(url=store, environment=name, digest=digest)
                info = await c.environments.build(as_ or name, source, replace=replace, on_event=progress.hear)
        if settings.json:
            put_json(info)
        else:
            print(info.name)

    run_async(work())


def list_(json: Json = False) -> None:
    """List the layers on the node."""
    from dsec.core.units import format_size

    async def work() -> None:
        async with client() as c:
            found = await c.layers.list()
        if settings.json:
            put_json(found)
            return
        rows = [
            (layer.digest[:12], format_size(layer.size_bytes), age(time.time() - layer.created_at), _used_by(layer))
            for layer in found
        ]
        table(("LAYER", "SIZE", "AGE", "USED BY"), rows)

    run_async(work())


def _short(reference: str) -> str:
    """A record by as many digits of its digest as people need."""
    name, at, digest = reference.partition("@")
    return f"{name}{at}{digest[:12]}"


def _used_by(layer: LayerInfo) -> str:
    if layer.collapsed:
        return f"instead of {len(layer.collapsed)} layers"
    return ", ".join(map(_short, layer.environments[:4])) + (", ..." if len(layer.environments) > 4 else "")


def show(digest: Digest, json: Json = False) -> None:
    """Show one layer."""

    async def work() -> None:
        import msgspec

        async with client() as c:
            info = await c.layers.get(digest)
        if settings.json:
            put_json(info)
            return
        for key, value in msgspec.structs.asdict(info).items():
            print(f"{key}: {clean(', '.join(value) if isinstance(value, tuple) else str(value))}")

    run_async(work())


def stats(
    digests: Annotated[
        list[str] | None, typer.Argument(metavar="[DIGEST...]", help="Of layers; without, all.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Show how much of layers has been loaded from their stores."""

    async def work() -> None:
        async with client() as c:
            wanted = digests or [layer.digest for layer in await c.layers.list()]
            found = [await c.layers.stats(digest) for digest in wanted]
        if settings.json:
            put_json(found)
        else:
            show_use(found)

    run_async(work())


def rm(
    digests: Annotated[list[str], typer.Argument(metavar="DIGEST...", help="Of layers.", show_default=False)],
    json: Json = False,
) -> None:
    """Remove layers that no environment and no sandbox has."""

    for_each(digests, lambda c, digest: c.layers.remove(digest))


def collapse(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="Of an environment.", show_default=False, autocompletion=complete_environment
        ),
    ],
    json: Json = False,
) -> None:
    """Make one layer of runs of an environment's lower layers."""

    async def work() -> None:
        async with client() as c:
            with Progress() as progress:
                info = await c.layers.collapse(name, on_event=progress.hear)
        if settings.json:
            put_json(info)
        else:
            print(info.name)

    run_async(work())


command(environments.app, create, of="env")
command(environments.app, update, of="env")
command(environments.app, diff, of="env")
command(environments.app, pull, of="env")
command(app, environments.build, of="layer", help=_BUILD)
command(app, list_, "ls", of="layer")
command(app, show, of="layer")
command(app, stats, of="layer")
command(app, rm, of="layer")
command(app, collapse, of="layer")
