"""`dsec volume`: directories that outlive sandboxes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from dsec.cli.console import (
    Json,
    age,
    clean,
    client,
    for_each,
    of_cluster,
    put_json,
    run_async,
    settings,
    table,
    warn_of,
    when,
)
from dsec.cli.pages import command

if TYPE_CHECKING:
    from dsec.core.spec import VolumeMount
    from dsec.wire.volumes import VolumeInfo

app = typer.Typer(help="Volumes: directories that outlive sandboxes.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(metavar="NAME", help="Of the volume.", show_default=False)]
Project = Annotated[
    str | None, typer.Option(metavar="PATH", help="Whose it is; without it, yours.", show_default=False)
]


def create(
    name: Name,
    size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Such as 10GiB; without it, as much as the disk has.", show_default=False),
    ] = None,
    owner: Annotated[str, typer.Option(metavar="UID[:GID]", help="Whose its top directory is.")] = "0",
    json: Json = False,
) -> None:
    """Make a volume."""
    uid, gid = _owner(owner)

    async def work() -> None:
        async with client() as c:
            info = await c.volumes.create(name, size=size, uid=uid, gid=gid)
        if settings.json:
            put_json(info)
        else:
            print(info.name)

    run_async(work())


def _owner(text: str) -> tuple[int, int]:
    uid, colon, gid = text.partition(":")
    if not uid.isdecimal() or (colon and not gid.isdecimal()):
        raise typer.BadParameter("is UID or UID:GID, in numbers", param_hint="--owner")
    return int(uid), int(gid if colon else uid)


def list_(json: Json = False) -> None:
    """List the volumes, and the node's datasets."""

    async def work() -> None:
        silent: set[str] = set()
        async with client() as c:
            found = await c.volumes.list(missing=silent)
            several = bool(silent) or len({volume.node for volume in found}) > 1 or await of_cluster(c)
        warn_of(silent)
        if settings.json:
            put_json(found)
            return
        rows = [(*_row(volume), *([volume.node or ""] if several else [])) for volume in found]
        table(("NAME", "KIND", "PROJECT", "SIZE", "USED", "AGE", "USED BY", *(["NODE"] if several else [])), rows)

    run_async(work())


def _row(volume: VolumeInfo) -> tuple[str, ...]:
    return (
        volume.name,
        volume.kind,
        volume.project or "",
        _size(volume.size_bytes),
        _size(volume.used_bytes),
        "" if volume.created_at is None else age(time.time() - volume.created_at),
        str(len(volume.used_by)) if volume.kind == "volume" else "",
    )


def _size(size_bytes: int | None) -> str:
    from dsec.core.units import format_size

    return "" if size_bytes is None else format_size(size_bytes)


def show(name: Name, project: Project = None, json: Json = False) -> None:
    """Show one volume, and which sandboxes have it."""

    async def work() -> None:
        import msgspec

        async with client() as c:
            info = await c.volumes.get(name, project=project)
        if settings.json:
            put_json(info)
            return
        shown = msgspec.structs.asdict(info) | {"size": _size(info.size_bytes), "used": _size(info.used_bytes)}
        del shown["size_bytes"], shown["used_bytes"], shown["used_by"]
        if info.created_at is not None:
            shown["created_at"] = when(info.created_at)
        for key, value in shown.items():
            if value not in (None, ""):
                print(f"{key}: {clean(str(value))}")
        for user in info.used_by:
            print(f"used by: {user.sandbox} ({'reads' if user.readonly else 'writes'})")

    run_async(work())


def rm(
    names: Annotated[list[str], typer.Argument(metavar="NAME…", help="Of volumes.")],
    project: Project = None,
    json: Json = False,
) -> None:
    """Remove volumes, with all that is in them."""

    for_each(names, lambda c, name: c.volumes.remove(name, project=project))


def mounts(volumes: list[str] | None, datasets: list[str] | None) -> list[VolumeMount]:
    """What --volume and --dataset say."""
    from dsec.core.spec import parse_volume

    found = [parse_volume(text) for text in volumes or []]
    return found + [parse_volume(text, dataset=True) for text in datasets or []]


command(app, create, of="volume")
command(app, list_, "ls", of="volume")
command(app, show, of="volume")
command(app, rm, of="volume")
