"""`dsec vm`: images that full machines begin as."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsec.cli.completion import check_words, one_of
from dsec.cli.console import Json, age, client, for_each, put_json, run_async, settings, table
from dsec.cli.doctor import doctor_of_machines
from dsec.cli.environments import put_trace
from dsec.cli.pages import command
from dsec.cli.service import become

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dsec.sdk.client import AsyncClient
    from dsec.wire.machines import DiskFile, MachineInfo

app = typer.Typer(help="Images that full machines begin as.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(metavar="NAME", help="Of the image.", show_default=False)]


def import_(
    name: Name,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A disk; a file of the node.", show_default=False)],
    format: Annotated[
        str,
        typer.Option(metavar="NAME", help="raw or qcow2.", show_default=False, autocompletion=one_of("raw", "qcow2")),
    ],
    firmware: Annotated[
        str, typer.Option(metavar="NAME", help="bios or uefi.", autocompletion=one_of("bios", "uefi"))
    ] = "bios",
    agent: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="What runs inside: dsec, qga or none.", autocompletion=one_of("dsec", "qga", "none")
        ),
    ] = "none",
    bus: Annotated[
        str, typer.Option(metavar="NAME", help="virtio or sata.", autocompletion=one_of("virtio", "sata"))
    ] = "virtio",
    boot_wait: Annotated[
        float, typer.Option(metavar="SECONDS", help="It is saved so long after power on, or its agent's answer.")
    ] = 0.0,
    state_dir: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Of a node on this machine: no service is asked.", show_default=False),
    ] = None,
    json: Json = False,
) -> None:
    """Copy a disk as an image."""
    for option, given, choices in (
        ("--format", format, ("raw", "qcow2")),
        ("--firmware", firmware, ("bios", "uefi")),
        ("--agent", agent, ("dsec", "qga", "none")),
        ("--bus", bus, ("virtio", "sata")),
    ):
        check_words([given], choices, option)
    if state_dir is not None:
        words = ["--format", format, "--firmware", firmware, "--agent", agent, "--bus", bus]
        become("import", [name, str(file), *words, "--boot-wait", str(boot_wait)], {"--state-dir": state_dir})

    async def work() -> None:
        async with client() as c:
            info = await c.machines.import_disk(
                name, file, format=format, firmware=firmware, agent=agent, bus=bus, boot_wait_s=boot_wait
            )
        if settings.json:
            put_json(info)
        else:
            print(info.name)

    run_async(work())


def build(
    name: Name,
    packages: Annotated[list[str] | None, typer.Argument(metavar="[PACKAGE…]", help="More Debian packages.")] = None,
    debian: Annotated[bool, typer.Option("--debian", help="From Debian packages: what there is today.")] = False,
    desktop: Annotated[bool, typer.Option("--desktop", help="With X, a window manager and a terminal.")] = False,
    suite: Annotated[str | None, typer.Option(metavar="NAME", help="Such as bookworm.", show_default=False)] = None,
    disk: Annotated[str, typer.Option(metavar="SIZE", help="Of a machine that asks for no other.")] = "10GiB",
    json: Json = False,
) -> None:
    """Install a system with our agent as an image."""
    if not debian:
        raise typer.BadParameter("say what from: --debian")
    from dsec.cli.environments import Progress

    async def work() -> None:
        async with client() as c:
            with Progress() as progress:
                info = await c.machines.build(
                    name, packages or (), desktop=desktop, suite=suite, disk=disk, on_event=progress.hear
                )
        if settings.json:
            put_json(info)
        else:
            print(info.name)

    run_async(work())


def list_(json: Json = False) -> None:
    """List the images."""

    async def work() -> None:
        from dsec.core.units import format_size

        async with client() as c:
            found = await c.machines.list()
        if settings.json:
            put_json(found)
            return
        rows = [
            (
                image.name,
                image.firmware,
                image.agent,
                format_size(image.disk_bytes),
                format_size(image.used_bytes),
                age(time.time() - image.created_at),
            )
            for image in found
        ]
        table(("NAME", "FIRMWARE", "AGENT", "DISK", "USED", "AGE"), rows)

    run_async(work())


def push(
    name: Name,
    store: Annotated[str, typer.Argument(metavar="STORE", help="URL of a store.", show_default=False)],
    json: Json = False,
) -> None:
    """Put an image into a store."""

    async def work() -> None:
        async with client() as c:
            info = await c.machines.push(name, store)
        if settings.json:
            put_json(info)
        else:
            print(info.digest)

    run_async(work())


def pull(
    name: Name,
    store: Annotated[str, typer.Argument(metavar="STORE", help="URL of a store.", show_default=False)],
    image: Annotated[
        str | None, typer.Option(metavar="NAME", help="As it is called there.", show_default=False)
    ] = None,
    digest: Annotated[
        str | None, typer.Option(metavar="HEX", help="As a push has told it: no other is taken.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Take an image of a store, whose disk is loaded as it is read."""

    async def work() -> None:
        async with client() as c:
            info = await c.machines.pull(name, store, image=image, digest=digest)
        _put(info)

    run_async(work())


def commit(
    name: Name,
    sandbox: Annotated[str, typer.Argument(metavar="SANDBOX", help="A full machine.", show_default=False)],
    json: Json = False,
) -> None:
    """Make the disk of a machine an image."""

    async def work() -> None:
        async with client() as c:
            found = await c.connect(sandbox)
            info = await c.machines.commit(name, found.id)
        _put(info)

    run_async(work())


def collapse(name: Name, json: Json = False) -> None:
    """Make the layers of an image's disk one."""

    async def work() -> None:
        async with client() as c:
            info = await c.machines.collapse(name)
        _put(info)

    run_async(work())


def export(
    name: Name,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="New, on the node.", show_default=False)],
    format: Annotated[str, typer.Option(metavar="NAME", help="raw or qcow2.")] = "raw",
    json: Json = False,
) -> None:
    """Write the disk of an image into a file."""
    export_disk(lambda c: c.machines.export(name, file, format=format), format)


def export_disk(ask: Callable[[AsyncClient], Awaitable[DiskFile]], format: str) -> None:
    if format not in ("raw", "qcow2"):
        raise typer.BadParameter("is one of raw, qcow2", param_hint="--format")

    async def work() -> None:
        from dsec.core.units import format_size

        async with client() as c:
            made = await ask(c)
        if settings.json:
            put_json(made)
        else:
            print(f"{made.path}: {format_size(made.disk_bytes)}, takes {format_size(made.used_bytes)}")

    run_async(work())


def trace(name: Name, json: Json = False) -> None:
    """Record in the store what has been read of an image's disk, for other nodes to load first."""

    put_trace(lambda c: c.machines.trace(name))


def _put(info: MachineInfo) -> None:
    if settings.json:
        put_json(info)
    else:
        print(info.name)


def rm(
    names: Annotated[list[str], typer.Argument(metavar="NAME…", help="Of images.")],
    json: Json = False,
) -> None:
    """Remove images. Machines of them run on."""

    for_each(names, lambda c, name: c.machines.remove(name))


command(app, build, of="vm")
command(app, import_, "import", of="vm")
command(app, list_, "ls", of="vm")
command(app, push, of="vm")
command(app, pull, of="vm")
command(app, commit, of="vm")
command(app, collapse, of="vm")
command(app, export, of="vm")
command(app, trace, of="vm")
command(app, rm, of="vm")
command(app, doctor_of_machines, "doctor", of="vm")
