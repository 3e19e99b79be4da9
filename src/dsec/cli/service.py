"""`dsec up`, `dsec down`: the service of this machine. What they do is in `dsec.serve`."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from dsec.cli.completion import LEVELS, SUBSTRATES, one_of
from dsec.cli.console import Json, settings
from dsec.cli.pages import command

Config = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Settings (default: DSEC_CONFIG, or /etc/dsec/dsec.toml where there is one)."),
]
LogLevel = Annotated[
    str | None,
    typer.Option(metavar="LEVEL", help="debug, info, warning or error.", autocompletion=one_of(*LEVELS)),
]
RunDir = Annotated[str | None, typer.Option(metavar="DIR", help="For its socket; one service each.")]
StateDir = Annotated[str | None, typer.Option(metavar="DIR", help="For environments, the journal and logs.")]


def register(app: typer.Typer) -> None:
    command(app, up)
    command(app, down)


def up(
    detach: Annotated[bool, typer.Option("--detach", help="Return when it answers, and leave it running.")] = False,
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Also on TCP, where every request needs a token.")
    ] = None,
    tls_certificate: Annotated[str | None, typer.Option(metavar="FILE", help="With --listen: PEM.")] = None,
    tls_key: Annotated[str | None, typer.Option(metavar="FILE", help="With --tls-certificate: PEM.")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Let --listen go beyond loopback without TLS, on a network of yours.")
    ] = False,
    substrate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="What it offers (default: container). May be repeated.",
            autocompletion=one_of(*SUBSTRATES),
        ),
    ] = None,
    log_level: LogLevel = None,
    config: Config = None,
    run_dir: RunDir = None,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Start the service of this machine: node and API in one process."""
    arguments = ["--detach"] if detach else []
    arguments += ["--insecure"] if insecure else []
    arguments += [part for name in substrate or () for part in ("--substrate", name)]
    become(
        "up",
        arguments,
        {
            "--listen": listen,
            "--tls-certificate": tls_certificate,
            "--tls-key": tls_key,
            "--log-level": log_level,
            "--config": config,
            "--run-dir": run_dir,
            "--state-dir": state_dir,
        },
    )


def down(
    destroy: Annotated[
        bool, typer.Option("--destroy", help="Destroy all sandboxes first; otherwise they run on.")
    ] = False,
    launcher: Annotated[
        bool, typer.Option("--launcher", help="End dsec-launch although sandboxes run on: nobody notes their end then.")
    ] = False,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="To wait for its end.")] = 30.0,
    config: Config = None,
    run_dir: RunDir = None,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Stop the service of this machine. Its sandboxes run on, and the next `dsec up` takes them over."""
    arguments = ["--destroy"] if destroy else []
    arguments += ["--launcher"] if launcher else []
    given = {"--timeout": f"{timeout:g}", "--config": config, "--run-dir": run_dir, "--state-dir": state_dir}
    become("down", arguments, given)


def become(name: str, arguments: list[str], given: dict[str, str | None]) -> None:
    # The service belongs to another layer, which the command line does not import: it becomes that program.
    words = [*arguments, *(word for option, value in given.items() if value is not None for word in (option, value))]
    words += ["--json"] if settings.json else []
    words += ["--quiet"] if settings.quiet else []
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "dsec.serve", name, *words])
