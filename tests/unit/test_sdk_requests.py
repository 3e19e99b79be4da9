"""What callers write becomes records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dsec.core.errors import InvalidArgumentError, LimitError
from dsec.core.limits import SECRET_BYTES_MAX, SECRETS_MAX
from dsec.core.spec import Environment, Substrate
from dsec.sdk.calls import make_call
from dsec.sdk.process import signal_number
from dsec.sdk.requests import STDIN_INLINE_BYTES_MAX, make_exec, make_spec
from dsec.wire.layers import ComposeRequest, Composition
from dsec.wire.records import CreateRequest
from dsec.wire.snapshots import ForkRequest


def test_text_runs_in_a_shell_and_a_list_as_it_is() -> None:
    assert make_exec("a | b").shell == "a | b"
    assert make_exec(["a", "b c"]).argv == ["a", "b c"]
    assert make_exec(("a",)).argv == ["a"]


def test_arguments_that_are_not_text_are_sent_as_bytes() -> None:
    assert make_exec(["cat", b"\xff"]).argv_bytes == [b"cat", b"\xff"]


def test_in_a_session_a_list_is_quoted_for_its_shell() -> None:
    request = make_exec(["echo", "a b", "$x"], session="main")

    assert request.shell == "echo 'a b' '$x'"


@pytest.mark.parametrize(
    "own", [{"cwd": "/"}, {"env": {"A": "b"}}, {"secrets": {"A": "b"}}, {"user": "root"}, {"rlimits": {"core": 0}}]
)
def test_in_a_session_a_command_has_nothing_of_its_own(own: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match="in a session"):
        make_exec("true", session="main", **own)


def test_secrets_are_bounded() -> None:
    make_exec("true", secrets={"KEY": "x" * SECRET_BYTES_MAX})

    with pytest.raises(LimitError, match="KEY"):
        make_exec("true", secrets={"KEY": "x" * (SECRET_BYTES_MAX + 1)})
    with pytest.raises(LimitError):
        make_exec("true", secrets={f"K{n}": "" for n in range(SECRETS_MAX + 1)})


@pytest.mark.parametrize("command", [b"ls", 5, ["a", 5], [], [""], "a\0b", ["a\0"]])
def test_what_is_no_command_is_refused(command: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        make_exec(command)


def test_every_exec_has_an_id_of_its_own() -> None:
    assert make_exec("true").id != make_exec("true").id


def test_small_stdin_goes_along_and_large_is_streamed() -> None:
    small = make_exec("cat", stdin="é")
    large = make_exec("cat", stdin=bytes(STDIN_INLINE_BYTES_MAX + 1))
    empty = make_exec("cat", stdin=b"")

    assert (small.stdin, small.stdin_data) == (False, "é".encode())
    assert (large.stdin, large.stdin_data) == (True, None)
    assert (empty.stdin, empty.stdin_data) == (False, b"")
    assert (make_exec("cat").stdin, make_exec("cat").stdin_data) == (False, None)
    assert make_exec("cat", stdin=True).stdin


def test_sizes_are_read_once_at_the_border() -> None:
    spec = make_spec("base", memory="1.5GiB", disk=5 << 30, backend="fake")

    assert spec.memory_bytes == 3 << 29
    assert spec.disk_bytes == 5 << 30
    assert spec.substrate is Substrate.FAKE


def test_an_environment_may_have_parts() -> None:
    environment = Environment(base="base", workspace="repo", toolkits=("t1", "t2"))

    assert make_spec(environment).environment is environment


@pytest.mark.parametrize(
    "options", [{"backend": "podman"}, {"network": "host"}, {"memory": "lots"}, {"name": "a b"}, {"env": {"A=B": "c"}}]
)
def test_bad_options_are_refused_before_anything_is_sent(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError):
        make_spec("base", **options)


@pytest.mark.parametrize(("options", "offered"), [({"backend": "x"}, "fake"), ({"network": "x"}, "routed")])
def test_nobody_is_pointed_at_what_is_offered_nowhere(options: dict[str, Any], offered: str) -> None:
    with pytest.raises(InvalidArgumentError) as told:
        make_spec(**options)

    assert str(told.value.hint).startswith("one of ")
    assert offered not in str(told.value.hint)


def test_a_workspace_without_a_name_is_not_none() -> None:
    with pytest.raises(InvalidArgumentError, match="the workspace has no name"):
        CreateRequest(spec=make_spec(Environment("base", workspace="")))
    with pytest.raises(InvalidArgumentError, match="the workspace has no name"):
        ComposeRequest(name="own", of=Composition(base="base", workspace=""))


def test_a_bound_has_its_own_error() -> None:
    with pytest.raises(LimitError):
        make_spec("base", cpu=1e9)


def test_signals_go_by_number_or_name() -> None:
    assert [signal_number(s) for s in (9, "KILL", "sigint")] == [9, 9, 2]
    with pytest.raises(InvalidArgumentError):
        signal_number("NOPE")


@pytest.mark.parametrize(
    "options",
    [
        {"timeout_s": "5"},
        {"grace_s": True},
        {"output_bytes_max": 1.5},
        {"record_bytes_max": "1MiB"},
        {"rlimits": {"nofile": "64"}},
    ],
)
def test_a_number_of_the_wrong_type_is_told_by_its_name(options: dict[str, Any]) -> None:
    name = "nofile" if "rlimits" in options else next(iter(options))

    with pytest.raises(InvalidArgumentError, match=name):
        make_exec("true", **options)


@pytest.mark.parametrize(
    "make",
    [
        lambda: make_exec("cat", stdin=5),  # type: ignore[arg-type]
        lambda: make_exec("true", env=["A=b"]),  # type: ignore[arg-type]
        lambda: make_spec("base", labels=["a"]),  # type: ignore[arg-type]
        lambda: make_spec("base", volumes="data:/data"),
        lambda: ForkRequest(count="2"),  # type: ignore[arg-type]
        lambda: make_call("python", b"print(1)"),  # type: ignore[arg-type]
        lambda: make_call("python", "", stdin=5),  # type: ignore[arg-type]
        lambda: make_call("python", "", run_timeout_s="1"),  # type: ignore[arg-type]
        lambda: make_call("python", "", files=["a"]),  # type: ignore[arg-type]
        lambda: make_call("python", "", files={"a": 5}),  # type: ignore[dict-item]
        lambda: make_call("python", "", collect="out.png"),
        lambda: make_call("python", "", cases=["1"]),  # type: ignore[list-item]
    ],
)
def test_what_is_of_the_wrong_type_is_an_error_of_ours(make: Callable[[], Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=r" must be | is \(stdin"):
        make()


@pytest.mark.parametrize(
    "options",
    [
        {"run_timeout_s": 0},
        {"run_timeout_s": "1"},
        {"compile_timeout_s": 1e9},
        {"queue_timeout_s": -1},
        {"cpu_s": 0},
        {"memory": 5},
        {"output_bytes": -1},
        {"pids": 0},
        {"file_bytes": -1},
        {"compare": "tokens"},
        {"compare": "nonsense", "cases": [("", "")]},
        {"compare": "lines", "checker": "", "cases": [("", "")]},
        {"checker": "pass"},
    ],
)
def test_what_is_wrong_with_a_call_is_said_in_the_callers_words(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(options))):
        make_call("python", "", **options)


def test_large_bounds_are_shown_in_full() -> None:
    with pytest.raises(LimitError, match="between 4 and 4194304 processes, and is 0"):
        make_spec("base", pids=0)
    with pytest.raises(LimitError, match=r"between 8\.0 MiB and 16\.0 TiB, and is 100\.0 TiB"):
        make_call("python", "", memory="100TiB")
