"""What is said to try next."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec import __version__
from dsec.cli.console import fail, settings
from dsec.cli.hints import _DEFAULT, _NEXT, next_step
from dsec.cli.processes import _not_there
from dsec.core import errors

ROOT = Path(__file__).resolve().parents[2]


class Health(http.server.BaseHTTPRequestHandler):
    version = "99.0.0"

    def do_GET(self) -> None:
        body = b'{"version": "%s"}' % self.version.encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing."""


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Health]]:
    with http.server.HTTPServer(("127.0.0.1", 0), Health) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("DSEC_URL", f"http://127.0.0.1:{server.server_address[1]}")
        yield Health
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("error", [errors.ProtocolError("strange"), errors.NotFoundError("no such route")])
def test_a_service_of_another_version_is_told(service: type[Health], error: errors.DsecError) -> None:
    assert next_step(error).startswith(f"the service is dsec 99.0.0 and this is {__version__}")


def test_one_of_the_same_version_is_no_cause(service: type[Health], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "version", __version__)

    assert next_step(errors.ProtocolError("strange")) == _NEXT["protocol"]


def test_an_errors_own_hint_comes_first_then_its_reason_then_its_kind() -> None:
    assert next_step(errors.CapacityError("full", hint="later")) == "later"
    missing = errors.FileError("x", detail={"code": "path_not_found"})
    assert next_step(missing) == _NEXT["path_not_found"]
    assert next_step(errors.CapacityError("full")) == _NEXT["no_capacity"]
    assert next_step(errors.FreezeTimeoutError("slow")) == _DEFAULT


def test_programs_are_told_in_json_what_people_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "json", True)

    fail(errors.FileError("x", detail={"code": "path_not_found"}))

    assert json.loads(capsys.readouterr().out)["error"]["hint"] == _NEXT["path_not_found"]


def test_of_a_command_that_is_not_there_the_hint_names_its_environment() -> None:
    assert "`dsec run -E tools -- ls /usr/bin`" in _not_there(["nosuch", "-v"], "tools")
    assert _not_there(["tools", "--", "make"], "base") == "is tools an environment? dsec run -E tools -- make"


def test_hints_are_for_codes_that_there_are() -> None:
    from dsec.agent.errors import _CLASSES

    assert set(_NEXT) - set(errors._by_code()) - set(_CLASSES) == set()


def test_an_older_python_is_told_which_it_needs() -> None:
    code = (
        "import sys; sys.version_info = (3, 9, 0)\n"
        f"try:\n    exec(open({str(ROOT / 'src/dsec/__init__.py')!r}).read())\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout.startswith("dsec needs Python 3.11 or newer, and this is ")
