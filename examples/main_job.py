"""The main job: a real project's test suite, run in a sandbox without a network.

    .venv/bin/python examples/main_job.py [--project packaging] [--environment base] [--cache DIR] [--json]

On this machine: the service is started if it does not run, the environment is built if there is none, and pip
downloads the project's source with what its build and tests need (kept for the next run). In the sandbox, which has no
network: the project is built, installed, and tested with live output. Then its JUnit report is read back, the sandbox
is destroyed, and what happened is printed. The exit status is 0 when every test passed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import dsec

REPORT = "/work/report.xml"
REPORT_BYTES_MAX = 32 << 20


@dataclass(frozen=True)
class Project:
    """A source distribution with its own tests, and what building and testing it needs, pinned."""

    name: str
    version: str
    build: tuple[str, ...]
    test: tuple[str, ...]
    paths: tuple[str, ...] = ("tests",)
    options: tuple[str, ...] = ()

    @property
    def pin(self) -> str:
        return f"{self.name}=={self.version}"


PROJECTS = {
    project.name: project
    for project in (
        Project(
            "attrs",
            "25.4.0",
            build=("hatchling==1.27.0", "hatch-vcs==0.5.0", "hatch-fancy-pypi-readme==25.1.0"),
            test=("pytest==8.4.2", "hypothesis==6.140.2", "cloudpickle==3.1.1", "pympler==1.1"),
            # Fails on Python 3.11 wherever it runs.
            options=("--deselect", "source/tests/test_converters.py::TestPipe::test_wrapped_annotation"),
        ),
        Project(
            "packaging",
            "25.0",
            build=("flit_core==3.12.0",),
            test=("pytest==8.4.2", "pretend==1.0.9"),
        ),
    )
}


@dataclass
class Story:
    """What took how long, and what came of it."""

    timings: dict[str, float] = field(default_factory=dict)
    quiet: bool = False

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        self.say(f"{name} …")
        started = time.monotonic()
        try:
            yield
        finally:
            self.timings[name] = round(time.monotonic() - started, 3)

    def say(self, text: str) -> None:
        print(f"[main job] {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Counts:
    """Of a JUnit report."""

    tests: int
    failures: int
    errors: int
    skipped: int

    @property
    def passed(self) -> int:
        return self.tests - self.failures - self.errors - self.skipped


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # unwinds, which destroys the sandbox
    project, story = PROJECTS[options.project.partition("==")[0]], Story()
    with dsec.Client() as client:
        with story.step("service"):
            health = client.health()
        with story.step("environment"):
            ensure_environment(client, options.environment, story)
        with story.step("download"):
            downloads = download(project, Path(options.cache), story)
        with story.step("create"):
            sandbox = client.create(
                options.environment,
                cpu=2.0,
                memory="2GiB",
                pids=1_024,
                network="none",
                ttl_running_s=3_600,  # should we be killed, it goes by itself
                labels={"job": "main"},
            )
        with sandbox:
            result, counts = run_tests(sandbox, project, downloads, story)
            with story.step("destroy"):
                sandbox.destroy()
    _tell(project, health.node, sandbox.id, result, counts, story, as_json=options.json)
    return 0 if result.ok and counts is not None and counts.passed > 0 and not counts.failures + counts.errors else 1


def _options() -> argparse.Namespace:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsec" / "main-job"
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--project", default="packaging", choices=[*PROJECTS, *(p.pin for p in PROJECTS.values())])
    parser.add_argument("--environment", default="base", help="built from Debian packages when there is none")
    parser.add_argument("--cache", default=str(cache), help="where downloads are kept (%(default)s)")
    parser.add_argument("--json", action="store_true", help="the summary as JSON on stdout")
    return parser.parse_args()


def ensure_environment(client: dsec.Client, name: str, story: Story) -> None:
    if client.environments.exists(name):
        return

    def hear(event: dsec.BuildEvent) -> None:
        if event.kind == "progress":
            story.say(f"  {event.stage}: {event.message}")

    story.say(
        f"there is no environment {name}: it is built from {len(dsec.BASE_PACKAGES)} Debian packages, once "
        "(one to four minutes)"
    )
    client.environments.build(name, dsec.DebianSource(packages=dsec.BASE_PACKAGES), on_event=hear)


def download(project: Project, cache: Path, story: Story) -> Path:
    """A directory with the source at its top and wheels in `wheels`; whole, or not there."""
    target = cache / f"{project.name}-{project.version}-{sys.version_info[0]}.{sys.version_info[1]}"
    if target.is_dir():
        story.say(f"  found in {target}")
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as directory:
        partial = Path(directory) / "whole"
        # pip asks the source's own build backend for its metadata here, in an environment of its own.
        _pip_download(partial, "--no-deps", "--no-binary", project.name, project.pin)
        # Any Python 3 of the environment may read these: pure wheels only.
        wanted = [*project.build, *project.test, "pip", "setuptools", "wheel"]
        _pip_download(partial / "wheels", "--only-binary", ":all:", "--platform", "any", *wanted)
        try:
            partial.rename(target)
        except OSError:
            if not target.is_dir():  # another run was quicker
                raise
    return target


def _pip_download(target: Path, *arguments: str) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "download"]
    subprocess.run([*pip, "--dest", str(target), *arguments], check=True, timeout=1_200, stdin=subprocess.DEVNULL)


def run_tests(
    sandbox: dsec.Sandbox, project: Project, downloads: Path, story: Story
) -> tuple[dsec.ExecResult, Counts | None]:
    with story.step("upload"):
        sent = sandbox.upload(downloads, "/work")
        story.say(f"  {sent.entries} files, {sent.bytes >> 10} KiB")
    with story.step("install"):
        sandbox.exec(_install_script(project), cwd="/work", timeout_s=600, check=True)
    with story.step("test"):
        result = sandbox.exec(
            ["venv/bin/python", "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={REPORT}"]
            + [f"source/{path}" for path in project.paths]
            + list(project.options),
            cwd="/work",
            env={"PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "100"},
            timeout_s=1_800,
            stderr="merge",
            on_stdout=_live,
        )
    with story.step("report"):
        counts = read_report(sandbox)
    return result, counts


def _install_script(project: Project) -> str:
    return f"""
set -e
mkdir source
tar -xzf {project.name}-{project.version}.tar.gz --strip-components=1 -C source
python3 -m venv venv
install="venv/bin/python -m pip --disable-pip-version-check --quiet install --no-index --find-links wheels"
$install {" ".join(project.build)}
$install --no-build-isolation ./source
$install {" ".join(project.test)}
"""


def _live(text: str) -> None:
    # A sandbox's output is not trusted: nothing in it may steer the terminal.
    print(re.sub(r"[^\n\t -~\u00a0-\uffff]", "", text), end="", file=sys.stderr, flush=True)


def read_report(sandbox: dsec.Sandbox) -> Counts | None:
    try:
        raw = sandbox.files.read_bytes(REPORT, max_bytes=REPORT_BYTES_MAX)
    except dsec.errors.PathNotFoundError:
        return None
    if b"<!DOCTYPE" in raw or b"<!ENTITY" in raw:  # entities could be made to grow without bound
        return None
    try:
        root = ElementTree.fromstring(raw)
    except ElementTree.ParseError:
        return None
    suites = [root] if root.tag == "testsuite" else root.findall("testsuite")
    keys = ("tests", "failures", "errors", "skipped")
    try:
        return Counts(*(sum(int(suite.get(key, "0")) for suite in suites) for key in keys))
    except ValueError:
        return None


def _tell(
    project: Project,
    node: str,
    sandbox: str,
    result: dsec.ExecResult,
    counts: Counts | None,
    story: Story,
    *,
    as_json: bool,
) -> None:
    if as_json:
        summary = {"project": project.pin, "node": node, "sandbox": sandbox, "exit_code": result.exit_code}
        tests = None if counts is None else {**vars(counts), "passed": counts.passed}
        print(json.dumps({**summary, "tests": tests, "timings_s": story.timings}))
        return
    print(f"\n{project.pin} in {sandbox} (network none): the test run {result.summary()}")
    if counts is not None:
        print(
            f"  {counts.passed} passed, {counts.failures} failed, {counts.errors} errors, {counts.skipped} skipped"
            f" of {counts.tests}"
        )
    else:
        print("  there is no report")
    for name, seconds in story.timings.items():
        print(f"  {name:<12} {seconds:8.2f} s")
    print(f"  {'in all':<12} {sum(story.timings.values()):8.2f} s")


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except dsec.DsecError as error:
        print(f"[main job] failed: {error}", file=sys.stderr)
        if isinstance(error, dsec.CommandError):
            print(error.result.stdout[-2_000:], error.result.stderr[-4_000:], sep="\n", file=sys.stderr)
        raise SystemExit(1) from None
