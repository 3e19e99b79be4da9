"""`dsec doctor`: what works here, what does not, what that costs, and how to get it."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, Final

import typer

from dsec.cli.console import Json, clean, client, put_json, run_async, settings
from dsec.cli.pages import command

if TYPE_CHECKING:
    from dsec.wire.records import DoctorReport, Finding

EXIT_LACKING: Final = 1
_GROUPS: Final = (
    ("needed", "Needed: without it no sandbox can be made"),
    ("advised", "Advised: it works without, but less well"),
    ("optional", "Optional"),
)
_MACHINES: Final = ("microvm", "fullvm")
# Of the host, what they need, and what it costs them where it is missing.
_OF_HOST: Final = frozenset({"service", "root", "programs", "kernel", "KVM", "block devices", "Debian packages"})
_EXAMINE_TIMEOUT_S: Final = 150.0


def register(app: typer.Typer) -> None:
    command(app, doctor)


def doctor_of_machines(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Also the details of what is fine.")] = False,
    json: Json = False,
) -> None:
    """Say what this machine can do for virtual machines, what it lacks, what that costs, and how to get it."""
    from msgspec.structs import replace

    report = run_async(_ask())
    substrates = {name: state for name, state in report.substrates.items() if name in _MACHINES}
    report = replace(
        report, substrates=substrates, findings=[found for found in report.findings if _is_of_machines(found)]
    )
    if settings.json:
        put_json(report)
    else:
        _show(report, verbose=verbose)
    if "ok" not in substrates.values():
        raise typer.Exit(EXIT_LACKING)


def _is_of_machines(found: Finding) -> bool:
    return found.what in _OF_HOST or found.what.removeprefix("substrate ").partition(":")[0] in _MACHINES


def doctor(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Also the details of what is fine.")] = False,
    json: Json = False,
) -> None:
    """Say what this machine can do, what it lacks, what that costs, and how to get it."""
    from msgspec.structs import replace

    report = run_async(_ask())
    report = replace(report, findings=[*report.findings, *_of_client(report)])
    if settings.json:
        put_json(report)
    else:
        _show(report, verbose=verbose)
    if any(f.need == "needed" and f.status == "missing" for f in report.findings):
        raise typer.Exit(EXIT_LACKING)


async def _ask() -> DoctorReport:
    """Of the service that answers. When none does on this machine, none is started: it is examined from outside."""
    from dsec.sdk.autostart import answers
    from dsec.sdk.endpoint import find_endpoint

    endpoint = find_endpoint(settings.url, settings.token)
    if endpoint.autostart and endpoint.socket is not None and not await answers(endpoint.socket):
        return _examine()
    async with client() as c:
        return await c.doctor()


def _examine() -> DoctorReport:
    import subprocess

    from dsec import __version__
    from dsec.core.errors import DsecError, HostError
    from dsec.wire.codec import from_json
    from dsec.wire.records import DoctorReport, Finding

    words = [sys.executable, "-m", "dsec.serve", "doctor", "--json"]
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, timeout=_EXAMINE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HostError(f"this machine cannot be examined: {error}") from error
    try:
        if done.returncode == 0:
            return from_json(done.stdout, DoctorReport)
    except DsecError as error:
        raise HostError(f"this machine cannot be examined: {error}") from error
    return DoctorReport(node="", version=__version__, findings=[_broken(done.stdout, done.stderr, Finding)])


def _broken(out: bytes, err: bytes, finding: type[Finding]) -> Finding:
    """The service's own programs do not even begin: that is the finding."""
    from dsec.core.errors import DsecError
    from dsec.wire.codec import from_json
    from dsec.wire.errors import ErrorBody

    try:
        said = from_json(out, dict[str, ErrorBody])["error"]
        detail, hint = said.message, said.hint
    except (DsecError, KeyError):
        detail = (err.decode("utf-8", "replace").strip().splitlines() or ["no word"])[-1]
        hint = "install dsec again: pip install --force-reinstall dsec"
    return finding(
        what="service", status="missing", detail=detail, hint=hint, need="needed", cost="the service does not start"
    )


def _of_client(report: DoctorReport) -> list[Finding]:
    """What only this side can see."""
    from dsec import __version__
    from dsec.core.variables import unknown_variables
    from dsec.wire.records import Finding

    python = f"Python {sys.version.split()[0]} at {sys.executable}"
    found = [Finding(what="client", status="ok", detail=f"dsec {__version__}, {python}")]
    if report.version != __version__:
        found = [
            Finding(
                what="client",
                status="degraded",
                detail=f"dsec {__version__}, and the service is {report.version}",
                hint="install one version on both sides; `dsec down` and `dsec up --detach` restart a local service",
                cost="what only one of both knows is refused",
            )
        ]
    for name, meant in unknown_variables(os.environ).items():
        found.append(
            Finding(
                what=name,
                status="degraded",
                detail="no variable of dsec",
                hint=f"did you mean {meant}?" if meant else "`dsec help` lists those that there are",
                cost="it is ignored",
            )
        )
    return found


def _show(report: DoctorReport, *, verbose: bool) -> None:
    usable = [name for name, state in sorted(report.substrates.items()) if state == "ok"]
    where = f"node {report.node}" if report.node else "this machine, on which no service answers"
    able = f"can make sandboxes: {', '.join(usable)}" if usable else "can make no sandboxes"
    print(f"dsec {report.version}, {where}: {able}.")
    for need, heading in _GROUPS:
        group = [f for f in report.findings if (f.need if f.need in dict(_GROUPS) else "advised") == need]
        lacking = [f for f in group if f.status != "ok"]
        fine = [f for f in group if f.status == "ok"]
        if not group:
            continue
        print(f"\n{heading}")
        for finding in lacking:
            _tell(finding)
        if verbose:
            for finding in fine:
                print(f"  ok        {finding.what}: {_line(finding.detail)}")
        elif fine:
            _wrapped("  ok        ", ", ".join(f.what for f in fine))


def _tell(finding: Finding) -> None:
    print(f"  {finding.status:<9} {finding.what}: {_line(finding.detail)}")
    if finding.cost:
        print(f"            costs: {_line(finding.cost)}")
    if finding.hint:
        print(f"            do:    {_line(finding.hint)}")


def _wrapped(head: str, text: str) -> None:
    import textwrap

    print(textwrap.fill(text, width=100, initial_indent=head, subsequent_indent=" " * len(head)))


def _line(text: str) -> str:
    return " ".join(clean(text).split())
