"""The examples run as their texts say."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import dsec
from tests.contract.sdk_service import RunningService, running_service

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = {
    "quickstart": "['hello', 'from', 'Linux']\n3 trouble\n['3', '1', '2']\n1\n2\n3\n",
    "async_many": "".join(f"task {n} done\n" for n in range(8)),
    "sessions": "['hello', 'from', '/tmp']\nwritten through the second one\ntyped\n",
    "files": "b.txt\n['a.txt', 'b.txt'] []\n12\n",
}


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    with (
        tempfile.TemporaryDirectory(prefix="dsec-", dir="/tmp") as directory,
        running_service(Path(directory)) as found,
    ):
        yield found


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_prints_what_it_should_and_leaves_no_sandbox(service: RunningService, name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", ROOT / "examples" / f"{name}.py", "base", "fake"],
        env=service.environment,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert (done.stdout, done.stderr) == (EXAMPLES[name], "")
    with dsec.Client(service.url) as client:
        assert client.list() == []


def test_every_example_is_run_by_a_test() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == {*EXAMPLES, "main_job"}


@pytest.fixture
def main_job() -> ModuleType:
    spec = importlib.util.spec_from_file_location("main_job", ROOT / "examples" / "main_job.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["main_job"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("report", "counts"),
    [
        (b'<testsuites><testsuite tests="5" failures="1" errors="1" skipped="1"/></testsuites>', (5, 1, 1, 1, 2)),
        (b'<testsuite tests="2" failures="0" errors="0" skipped="0"/>', (2, 0, 0, 0, 2)),
        (b"<testsuites/>", (0, 0, 0, 0, 0)),
        (b"<testsuites>", None),
        (b'<!DOCTYPE x [<!ENTITY a "b">]><testsuites/>', None),
        (b'<testsuite tests="many"/>', None),
        (None, None),
    ],
)
def test_a_report_is_read_and_never_trusted(
    service: RunningService, main_job: ModuleType, report: bytes | None, counts: tuple[int, ...] | None
) -> None:
    with dsec.Client(service.url) as client, client.create("base", backend="fake") as sandbox:
        if report is not None:
            sandbox.files.write(main_job.REPORT, report)

        found = main_job.read_report(sandbox)

    assert (None if found is None else (*vars(found).values(), found.passed)) == counts


def test_downloads_are_whole_or_not_there(
    main_job: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Path] = []

    def pip(target: Path, *arguments: str) -> None:
        calls.append(target)
        target.mkdir(parents=True)
        if len(calls) == 2:
            raise subprocess.CalledProcessError(1, "pip")
        with zipfile.ZipFile(target / "some.whl", "w"):
            pass

    monkeypatch.setattr(main_job, "_pip_download", pip)
    project, story = main_job.PROJECTS["packaging"], main_job.Story()

    with pytest.raises(subprocess.CalledProcessError):
        main_job.download(project, tmp_path, story)
    assert list(tmp_path.iterdir()) == []

    first = main_job.download(project, tmp_path, story)
    asked = len(calls)
    assert main_job.download(project, tmp_path, story) == first
    assert len(calls) == asked
    assert list(tmp_path.iterdir()) == [first]


def test_the_summary_is_json_when_asked(main_job: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    result = dsec.ExecResult("exe_a", "exited", 0, None, None, b"", b"")

    main_job._tell(
        main_job.PROJECTS["packaging"],
        "n",
        "sbx_a",
        result,
        main_job.Counts(3, 0, 0, 1),
        main_job.Story(),
        as_json=True,
    )

    told = json.loads(capsys.readouterr().out)
    assert (told["exit_code"], told["tests"]["passed"], told["sandbox"]) == (0, 2, "sbx_a")
