"""`dsec image`: environments from and to registries, image layouts and docker's archives."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsec.cli.completion import complete_environment, one_of
from dsec.cli.console import Json, client, put_json, run_async, settings
from dsec.cli.environments import Progress
from dsec.cli.options import Owner
from dsec.cli.pages import command

if TYPE_CHECKING:
    from dsec.wire.images import Compression, ExportTarget

app = typer.Typer(help="Images of registries, layouts and archives, to and from environments.", no_args_is_help=True)
Name = Annotated[
    str,
    typer.Argument(metavar="NAME", help="Of the environment.", show_default=False, autocompletion=complete_environment),
]
Packing = Annotated[
    str,
    typer.Option(
        metavar="HOW", help="Of its layers: gzip, zstd or none.", autocompletion=one_of("gzip", "zstd", "none")
    ),
]


def pull(
    image: Annotated[str, typer.Argument(metavar="IMAGE", help="NAME:TAG, HOST/PATH:TAG or HOST/PATH@DIGEST.")],
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]", help="Of the environment; as the image is called without it.", show_default=False
        ),
    ] = None,
    owner: Owner = "keep",
    replace: Annotated[bool, typer.Option("--replace", help="Give the name to other content.")] = False,
    refresh: Annotated[bool, typer.Option("--refresh", help="Build even what was built before.")] = False,
    json: Json = False,
) -> None:
    """Make an environment of an image in a registry."""

    async def work() -> None:
        from dsec.cli.sources import parse_owner
        from dsec.wire.environments import RegistrySource

        called = name or _called(image)
        source = RegistrySource(image, parse_owner(owner))
        async with client() as c:
            with Progress() as progress:
                info = await c.environments.build(
                    called, source, replace=replace, refresh=refresh, on_event=progress.hear
                )
        if settings.json:
            put_json(info)
        else:
            print(info.name)

    run_async(work())


def push(
    name: Name,
    image: Annotated[str, typer.Argument(metavar="IMAGE", help="HOST/PATH:TAG.")],
    compression: Packing = "gzip",
    json: Json = False,
) -> None:
    """Push an environment to a registry, as an image for any tool."""
    from dsec.wire.images import RegistryTarget

    _export(name, RegistryTarget(image, _packing(compression)))


def export(
    name: Name,
    oci: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Into an OCI image layout directory, new or not.", show_default=False),
    ] = None,
    docker_archive: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Into a tar file for `docker load`.", show_default=False)
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(metavar="REF", help="What the image is called there; default: as here.", show_default=False),
    ] = None,
    compression: Packing = "gzip",
    json: Json = False,
) -> None:
    """Write an environment as an image into a directory or file of the node."""
    from dsec.wire.images import ArchiveTarget, LayoutTarget

    if (oci is None) == (docker_archive is None):
        raise typer.BadParameter("give one of --oci and --docker-archive")
    if oci is not None:
        _export(name, LayoutTarget(str(oci.absolute()), reference, _packing(compression)))
    else:
        assert docker_archive is not None
        _export(name, ArchiveTarget(str(docker_archive.absolute()), reference))


def _export(name: str, target: ExportTarget) -> None:
    async def work() -> None:
        async with client() as c:
            with Progress() as progress:
                done = await c.environments.export(name, target, on_event=progress.hear)
        if settings.json:
            put_json(done)
        else:
            print(done.reference)

    run_async(work())


def _called(image: str) -> str:
    """The last part of an image's name, with its tag."""
    from dsec.core.image_names import parse_image_name

    parsed = parse_image_name(image)
    tag = parsed.tag or (parsed.digest or "").partition(":")[2][:12]
    last = parsed.path.rpartition("/")[2]
    return f"{last}:{tag}" if tag else last


def _packing(text: str) -> Compression:
    from dsec.core.errors import InvalidArgumentError
    from dsec.wire.images import Compression

    if text not in list(Compression):
        raise InvalidArgumentError(f"there is no compression {text[:40]!r}", hint="gzip, zstd or none")
    return Compression(text)


command(app, pull, of="image")
command(app, push, of="image")
command(app, export, of="image")
