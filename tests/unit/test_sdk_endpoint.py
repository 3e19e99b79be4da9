"""Where the service is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsec.core.errors import HostError, InvalidArgumentError, UnavailableError
from dsec.sdk import autostart
from dsec.sdk.endpoint import Endpoint, find_endpoint, parse_endpoint
from dsec.sdk.transport import Transport, encode_query


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DSEC_URL", raising=False)
    monkeypatch.delenv("DSEC_TOKEN", raising=False)
    monkeypatch.delenv("DSEC_RUN_DIR", raising=False)


def test_without_an_address_it_is_the_local_socket_and_may_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    root = find_endpoint()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
    user = find_endpoint()

    assert (root.socket, root.autostart) == ("/run/dsec/api.sock", True)
    assert (user.socket, user.autostart) == ("/run/user/1000/dsec/api.sock", True)


def test_a_service_with_a_run_directory_of_its_own_is_found_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSEC_RUN_DIR", "/somewhere")

    assert find_endpoint().socket == "/somewhere/api.sock"


def test_a_relative_run_directory_is_one_from_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DSEC_RUN_DIR", "own/run")

    assert find_endpoint().socket == f"{tmp_path}/own/run/api.sock"


async def test_a_service_that_is_started_finds_the_files_that_variables_name_from_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = ("DSEC_CONFIG", "DSEC_STATE_DIR", "DSEC_IDENTITY")
    tell = f"import json, os; said = {{'code': 'x', 'message': str([os.environ[name] for name in {names}])}}"
    monkeypatch.setattr(
        autostart, "_COMMAND", ("-c", f"{tell}; print(json.dumps({{'error': said}})); raise SystemExit(1)")
    )
    monkeypatch.chdir(tmp_path)
    for name in names:
        monkeypatch.setenv(name, "my/own")

    with pytest.raises(HostError) as told:
        await autostart.ensure_running(str(tmp_path / "run" / "api.sock"))

    assert told.value.message.count(f"'{tmp_path}/my/own'") == 3


async def test_a_service_that_has_died_is_not_started_and_the_error_says_so(tmp_path: Path) -> None:
    transport = Transport(Endpoint(socket=str(tmp_path / "none.sock"), autostart=True))
    transport._answered = True

    with pytest.raises(UnavailableError, match=r"any more; it has answered this client, .* not start it again") as told:
        await transport.call("GET", "/health", dict, timeout_s=0.05)

    assert "`dsec up --detach`" in str(told.value.hint)
    await transport.close()


def test_arguments_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSEC_URL", "https://there")
    monkeypatch.setenv("DSEC_TOKEN", "theirs")

    assert find_endpoint().base == "https://there"
    assert find_endpoint().token == "theirs"
    assert find_endpoint("http://here:1/", "mine").base == "http://here:1"
    assert find_endpoint("http://here:1", "mine").token == "mine"


def test_what_was_named_is_never_started() -> None:
    assert not find_endpoint("unix:///tmp/a%20b.sock").autostart
    assert find_endpoint("unix:///tmp/a%20b.sock").socket == "/tmp/a b.sock"


@pytest.mark.parametrize(
    "url",
    ["", "here", "ftp://here", "http://", "http://u:p@here", "http://here?x=1", "http://here:99999", "unix://rel/a"],
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgumentError):
        parse_endpoint(url)


def test_a_token_with_a_line_break_is_refused_and_not_shown() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        find_endpoint("http://here", "secret\n")

    assert "secret" not in str(caught.value)
    assert "canary" not in repr(find_endpoint("http://here", "canary"))


def test_queries_carry_any_bytes() -> None:
    text = encode_query({"path": b"/a b\xff+&", "n": 0, "none": None, "yes": True, "no": False, "t": "é"})

    assert text == "path=%2Fa%20b%FF%2B%26&n=0&yes=true&no=false&t=%C3%A9"
