"""Entry of the `dsec` command: its parts, and what becomes of errors.

Exit status: the command's own for `exec` and `run` (128 + n when signal n ended it), 124 when its timeout ended it,
125 when dsec failed, 126 and 127 when the command cannot be run or is not there, 2 for wrong usage, 130 after Ctrl-C,
129 and 143 after SIGHUP and SIGTERM, 141 when who reads its output has gone.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer.core import TyperGroup

from dsec.cli import (
    calls,
    cluster,
    completion,
    doctor,
    egress,
    environments,
    events,
    explain,
    files,
    gc,
    grants,
    groups,
    images,
    jobs,
    layers,
    lists,
    logs,
    machines,
    manual,
    processes,
    projects,
    screens,
    service,
    shell,
    snapshots,
    tokens,
    top,
    usage,
    volumes,
)
from dsec.cli.console import EndedError, complain, fail, settings
from dsec.core.variables import unknown_variables

if TYPE_CHECKING:
    from dsec.core.errors import DsecError

EXIT_USAGE: Final = 2
EXIT_PLATFORM: Final = 125
EXIT_INTERRUPTED: Final = 130
EXIT_UNREAD: Final = 141  # as of a program that SIGPIPE has ended
_STATUS: Final = {"not_executable": 126, "command_not_found": 127}  # as shells have it


class _Root(TyperGroup):
    """Typer itself ends with 1 when a pipe is closed, which looks as if the command inside had."""

    def make_context(self, *args: Any, **more: Any) -> Any:
        with _unread():
            return super().make_context(*args, **more)

    def invoke(self, ctx: Any) -> Any:
        with _unread():
            return super().invoke(ctx)


class _UnreadError(Exception):
    """The reader of our output has gone (`dsec ls | head -1`)."""


@contextlib.contextmanager
def _unread() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as error:
        raise _UnreadError from error


app = typer.Typer(
    name="dsec",
    cls=_Root,
    help="Sandboxes for AI agents: create them, run commands in them, move files, throw them away.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: rich's takes twice the time
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        from dsec import __version__

        print(f"dsec {__version__}")
        raise typer.Exit


@app.callback()
def options(
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="The service: http(s)://… or unix:///… (default: DSEC_URL, or this machine's)."
        ),
    ] = None,
    token: Annotated[str | None, typer.Option(metavar="TOKEN", help="Default: DSEC_TOKEN.", show_default=False)] = None,
    project: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Act in this project (default: DSEC_PROJECT, or the token's own)."),
    ] = None,
    node: Annotated[
        str | None,
        typer.Option(metavar="NODE", help="Of a cluster: on this node (default: DSEC_NODE; `dsec cluster nodes`)."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing on stderr but errors.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Say the version and end.", is_eager=True, callback=_version)
    ] = False,
) -> None:
    settings.url, settings.token, settings.project, settings.quiet = url, token, project, quiet
    settings.node = node
    if not quiet:
        _warn()


def _warn() -> None:
    """A variable that nobody reads is most often one with a letter wrong."""
    for name, meant in unknown_variables(os.environ).items():
        complain(f"warning: {name} is no variable of dsec{f'; did you mean {meant}?' if meant else ' and is ignored'}")


for part in (
    service,
    doctor,
    processes,
    calls,
    logs,
    top,
    lists,
    egress,
    shell,
    files,
    gc,
    snapshots,
    projects,
    explain,
    usage,
    events,
):
    part.register(app)
cluster.register(app)
app.add_typer(calls.app, name="calls")
app.add_typer(environments.app, name="env")
app.add_typer(jobs.app, name="job")
app.add_typer(groups.app, name="group")
app.add_typer(layers.app, name="layer")
app.add_typer(images.app, name="image")
app.add_typer(snapshots.app, name="snapshot")
app.add_typer(volumes.app, name="volume")
app.add_typer(machines.app, name="vm")
app.add_typer(screens.app, name="screen")
app.add_typer(tokens.app, name="token")
app.add_typer(cluster.app, name="cluster")
app.add_typer(projects.app, name="project")
app.add_typer(projects.quota_app, name="quota")
app.add_typer(grants.app, name="grant")
app.add_typer(grants.principal_app, name="principal")
for part in (completion, manual):
    part.register(app)


def main() -> None:
    """Runs the command line. Never shows a traceback for what can be said in words."""
    from dsec.core.errors import DsecError

    try:
        try:
            app(prog_name="dsec")  # also as `python -m dsec`
        except DsecError as error:
            fail(error)
            raise SystemExit(_status(error)) from None
        except EndedError as error:
            raise SystemExit(128 + error.signal) from None
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise SystemExit(EXIT_INTERRUPTED) from None
        finally:
            with _unread():
                sys.stdout.flush()
    except _UnreadError:
        # Nothing to say, and nobody to say it to; nor is there at the end, when Python writes what is left.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(EXIT_UNREAD) from None


def _status(error: DsecError) -> int:
    """What the agent says no to has a code, and is not about how we were called."""
    from dsec.core.errors import InvalidArgumentError

    if "code" not in error.detail and isinstance(error, InvalidArgumentError):
        return EXIT_USAGE
    return _STATUS.get(str(error.detail.get("code")), EXIT_PLATFORM)


if __name__ == "__main__":
    main()
