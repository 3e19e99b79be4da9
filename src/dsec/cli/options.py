"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

from dsec.cli.completion import SUBSTRATES, complete_environment, one_of

Environment = Annotated[
    str,
    typer.Option(
        "--environment", "-E", metavar="NAME", help="What it starts from.", autocompletion=complete_environment
    ),
]
Substrate = Annotated[
    str,
    typer.Option(
        "--backend",
        metavar="SUBSTRATE",
        help="What it is made of; `dsec doctor` says what there is.",
        autocompletion=one_of(*SUBSTRATES),
    ),
]
Cpu = Annotated[
    float | None,
    typer.Option(metavar="CORES", help="Processor cores, such as 0.5 (default: 1).", show_default=False),
]
Memory = Annotated[str | None, typer.Option(metavar="SIZE", help="Such as 512MiB (default: 1GiB).", show_default=False)]
Disk = Annotated[str | None, typer.Option(metavar="SIZE", help="Such as 10GiB. Refused where it cannot be enforced.")]
Volumes = Annotated[
    list[str] | None,
    typer.Option("--volume", metavar="NAME:/PATH[:ro]", help="A volume to mount. May be repeated.", show_default=False),
]
Datasets = Annotated[
    list[str] | None,
    typer.Option(
        "--dataset", metavar="NAME:/PATH", help="A dataset of the node to mount. May be repeated.", show_default=False
    ),
]
Network = Annotated[
    str,
    typer.Option(
        "--network",
        metavar="MODE",
        help="none: loopback only; proxied: what --egress allows, by TCP.",
        autocompletion=one_of("none", "proxied"),
    ),
]
Egress = Annotated[
    list[str] | None,
    typer.Option(
        "--egress",
        metavar="HOST[:PORTS]",
        help="With --network proxied: this and no more, else all that is public. May be repeated; none: nothing.",
        show_default=False,
    ),
]
Pids = Annotated[
    int | None,
    typer.Option(metavar="COUNT", help="Processes and threads at once (default: 1024).", show_default=False),
]
Queue = Annotated[float, typer.Option("--queue", metavar="SECONDS", help="Where there is no room, wait for some.")]
Env = Annotated[
    list[str] | None,
    typer.Option("--env", "-e", metavar="KEY=VALUE", help="A variable; KEY alone takes it from here. May be repeated."),
]
Labels = Annotated[
    list[str] | None, typer.Option("--label", "-l", metavar="KEY=VALUE", help="To find it by. May be repeated.")
]
Name = Annotated[
    str | None, typer.Option("--name", "-n", metavar="NAME", help="Instead of its id, for people.", show_default=False)
]
Job = Annotated[str | None, typer.Option(metavar="NAME", help="Of this job.", show_default=False)]
TtlRunning = Annotated[
    float | None, typer.Option(metavar="SECONDS", help="From now until it is destroyed.", show_default=False)
]
TtlIdle = Annotated[
    float | None, typer.Option(metavar="SECONDS", help="Without use until it is destroyed.", show_default=False)
]
User = Annotated[
    str | None,
    typer.Option("--user", "-u", metavar="USER", help="Whose rights to use: name or number, with :group if wanted."),
]


def egress_of(given: list[str] | None) -> list[str] | None:
    """Of --egress and --allow. The word `none` is no rule, and none beside it."""
    if given and "none" in given and len(given) > 1:
        raise typer.BadParameter(
            "none is nothing at all, and cannot stand beside hosts", param_hint="--egress, --allow"
        )
    return [] if given == ["none"] else given or None


Owner = Annotated[
    str,
    typer.Option(
        metavar="HOW",
        help="keep, squash or root: whose the files become.",
        autocompletion=one_of("keep", "squash", "root"),
    ),
]
