"""What a call may ask for, how outputs are compared, and what task types may be."""

from __future__ import annotations

from typing import Any

import pytest

from dsec.backends.fncall.compare import is_right
from dsec.backends.fncall.runner import Answer, Decoder, Order, Place, encode
from dsec.backends.fncall.tasks import TaskType, TaskTypes
from dsec.core.errors import DsecError, InvalidArgumentError, LimitError, ProtocolError, UnsupportedError
from dsec.core.limits import CALL_CASES_MAX, CALL_CODE_BYTES_MAX
from dsec.wire.calls import CallCase, CallFile, CallRequest, Checker, Compare, PhaseLimits, time_allowed_s
from dsec.wire.codec import pack
from dsec.wire.run_code import RunCodeRequest, request_of


@pytest.mark.parametrize(
    ("how", "output", "expected", "right"),
    [
        (Compare.EXACT, b"1 2\n", b"1 2\n", True),
        (Compare.EXACT, b"1 2", b"1 2\n", False),
        (Compare.LINES, b"1 2 \n3\n\n", b"1 2\n3", True),
        (Compare.LINES, b"1  2", b"1 2", False),
        (Compare.TOKENS, b"1  2\n\n3", b"1 2 3", True),
        (Compare.TOKENS, b"1 2", b"1 2 3", False),
        (Compare.NUMBERS, b"0.33333333 yes", b"0.333333333 yes", True),
        (Compare.NUMBERS, b"0.3334", b"0.3333", False),
        (Compare.NUMBERS, b"1", b"1 1", False),
        (Compare.NUMBERS, b"nan", b"NaN", False),
        (Compare.NUMBERS, b"1_0", b"10", False),
        (Compare.NUMBERS, b"1e999", b"inf", True),
        (Compare.NUMBERS, b"9" * 400, b"9" * 401, False),
        (Compare.LINES, b"\xff", b"\xff\n", True),
    ],
)
def test_outputs_are_compared_as_asked(how: Compare, output: bytes, expected: bytes, right: bool) -> None:
    assert is_right(output, expected, how) is right


@pytest.mark.parametrize(
    "fields",
    [
        {"code": "x" * (CALL_CODE_BYTES_MAX + 1)},
        {"type": "../sh"},
        {"files": (CallFile("a"), CallFile("a"))},
        {"collect": ("../x",)},
        {"collect": ("/etc/passwd",)},
        {"args": ("a\0b",)},
        {"env": {"A=B": "c"}},
        {"cases": (CallCase(),), "stdin": b"x"},
        {"cases": (CallCase(),) * (CALL_CASES_MAX + 1)},
        {"checker": Checker(code="")},
        {"compare": Compare.EXACT},
        {"compare": Compare.EXACT, "checker": Checker(code=""), "cases": (CallCase(),)},
        {"queue_s": -1.0},
        {"queue_s": float("nan")},
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError):
        CallRequest(**{"type": "python", "code": "", **fields})


@pytest.mark.parametrize("path", ["", "/a", "a//b", "./a", "a/..", "a\0", "a/" * 40 + "b", "x" * 2_000])
def test_paths_of_a_call_stay_in_its_directory(path: str) -> None:
    with pytest.raises(InvalidArgumentError):
        CallFile(path)


@pytest.mark.parametrize(
    "bounds",
    [{"wall_s": 0.0}, {"wall_s": 1e9}, {"cpu_s": -1.0}, {"memory_bytes": 1}, {"pids": 0}, {"output_bytes": -1}],
)
def test_limits_have_bounds(bounds: dict[str, Any]) -> None:
    with pytest.raises(LimitError):
        PhaseLimits(**bounds)


def test_a_call_may_take_what_all_its_phases_may() -> None:
    request = CallRequest(
        type="c", code="", cases=(CallCase(),) * 3, run=PhaseLimits(wall_s=2), compile=PhaseLimits(wall_s=5), queue_s=7
    )

    assert time_allowed_s(request) == 7 + 5 + 3 * 2


def test_the_shipped_task_types_are_sound_and_can_be_replaced() -> None:
    types = TaskTypes(
        {"python": TaskType(source="x.py", run=("python3.12", "x.py")), "r": TaskType(source="a.R", run=("R",))}
    )

    assert types.get("python").warm is None
    assert types.get("cpp").compile is not None
    assert {"python", "bash", "c", "cpp", "go", "rust", "java", "node", "r"} <= {type.name for type in types.list()}
    with pytest.raises(UnsupportedError, match="brainfuck"):
        types.get("brainfuck")


@pytest.mark.parametrize(
    "fields",
    [
        {"source": "../x", "run": ("x",)},
        {"source": "x", "run": ()},
        {"source": "x", "run": ("",)},
        {"source": "x", "run": ("x",), "compile": ()},
        {"source": "x", "run": ("python3",), "warm": "python3"},
        {"source": "x", "run": ("python3", "x"), "warm": "python2"},
    ],
)
def test_a_task_type_that_cannot_be_run_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError):
        TaskType(**fields)


def test_answers_come_in_any_pieces() -> None:
    message = encode(Order(place=Place(place=0, files=[])))
    body = pack(Answer(refused="no"))
    stream = len(body).to_bytes(4, "little") + body
    decoder = Decoder()

    found = []
    for byte in stream * 2:
        decoder.feed(bytes([byte]))
        if (answer := decoder.next()) is not None:
            found.append(answer.refused)

    assert found == ["no", "no"]
    assert int.from_bytes(message[:4], "little") == len(message) - 4


@pytest.mark.parametrize("stream", [b"\xff\xff\xff\xff", b"\x01\0\0\0\x01", b"\x03\0\0\0abc"])
def test_what_is_no_answer_is_an_error(stream: bytes) -> None:
    decoder = Decoder()
    decoder.feed(stream)

    with pytest.raises(ProtocolError):
        decoder.next()


def test_their_languages_become_ours() -> None:
    request = request_of(
        RunCodeRequest(code="x", language="nodejs", files={"./a/b": "aGk=", "none": None}, memory_limit_MB=64), "tools"
    )

    assert (request.type, request.environment.base) == ("node", "tools")
    assert (request.files[0].path, request.files[0].data, len(request.files)) == ("a/b", b"hi", 1)
    assert request.run.memory_bytes == 64 << 20


@pytest.mark.parametrize(
    "bounds", [{"run_timeout": 1e9}, {"compile_timeout": -1}, {"memory_limit_MB": 1}, {"run_timeout": float("nan")}]
)
def test_their_limits_are_refused_by_their_names(bounds: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(bounds))):
        request_of(RunCodeRequest(code="x", language="python", **bounds), "base")


@pytest.mark.parametrize("files", [{"a": "%%"}, {"a": "\u00e4"}, {"/etc/x": "aGk="}])
def test_their_files_are_checked(files: dict[str, str | None]) -> None:
    with pytest.raises(DsecError):
        request_of(RunCodeRequest(code="x", language="python", files=files), "base")
