"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

Environment = Annotated[str, typer.Option("--environment", "-E", help="What it starts from.")]
Substrate = Annotated[str, typer.Option("--backend", help="container, microvm, fullvm …")]
Cpu = Annotated[float, typer.Option(help="Cores.")]
Memory = Annotated[str, typer.Option(help='Such as "512MiB".')]
Disk = Annotated[str | None, typer.Option(help='Such as "10GiB". Refused where it cannot be enforced.')]
Pids = Annotated[int, typer.Option(help="Processes at once.")]
Env = Annotated[list[str] | None, typer.Option("--env", "-e", help="KEY=VALUE; KEY alone takes it from here.")]
Labels = Annotated[list[str] | None, typer.Option("--label", "-l", help="KEY=VALUE.")]
Name = Annotated[str | None, typer.Option("--name", "-n", show_default=False)]
TtlRunning = Annotated[float | None, typer.Option(help="Seconds from now until it is destroyed.", show_default=False)]
TtlIdle = Annotated[float | None, typer.Option(help="Seconds without use until it is destroyed.", show_default=False)]
