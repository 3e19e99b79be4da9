"""Calls (fncall): one piece of code, run once in a place made before, and what came of it.

Requests refuse unknown fields; what comes back ignores them. Durations are seconds, sizes bytes; `bytes` fields are
base64 in JSON.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable

import msgspec

from dsec.core import limits
from dsec.core.errors import InvalidArgumentError, LimitError
from dsec.core.ids import parse_name
from dsec.core.spec import Environment, check_env
from dsec.core.units import format_number, format_size


def check_call_path(path: str) -> None:
    """Raises InvalidArgumentError or LimitError unless it is relative, plain and short."""
    raw = path.encode("utf-8", "surrogateescape") if isinstance(path, str) else b""
    parts = raw.split(b"/")
    if not raw or b"\0" in raw or any(part in (b"", b".", b"..") for part in parts):
        raise InvalidArgumentError(f"a file of a call has a relative path without '.' and '..', not {path!r}")
    if len(raw) > limits.CALL_PATH_BYTES_MAX or len(parts) > limits.CALL_PATH_PARTS_MAX:
        raise LimitError(
            f"a path of a call has at most {limits.CALL_PATH_BYTES_MAX} bytes and {limits.CALL_PATH_PARTS_MAX} parts"
        )


def check_beside(paths: Iterable[str]) -> None:
    """Raises InvalidArgumentError when one of these files would have to be a directory for another."""
    found = set(paths)
    for path in found:
        parts = path.split("/")
        for end in range(1, len(parts)):
            if (parent := "/".join(parts[:end])) in found:
                raise InvalidArgumentError(f"{parent!r} of the call is a file, and {path!r} is in it")


def check_args(args: tuple[str, ...]) -> None:
    """Raises InvalidArgumentError or LimitError unless these can be given to execve."""
    if any("\0" in word for word in args):
        raise InvalidArgumentError("arguments must not hold NUL")
    size = sum(len(word.encode("utf-8", "surrogateescape")) + 1 for word in args)
    if len(args) > limits.ARGV_ITEMS_MAX or size > limits.ARGV_BYTES_MAX:
        raise LimitError(f"the arguments of a call have more than {limits.ARGV_BYTES_MAX} bytes")


def _check_code(code: str) -> None:
    size = len(code.encode("utf-8", "surrogateescape"))
    if size > limits.CALL_CODE_BYTES_MAX:
        raise LimitError(f"code of {format_size(size)}; the most is {format_size(limits.CALL_CODE_BYTES_MAX)}")


def _at_most(what: str, count: int, most: int) -> None:
    if count > most:
        raise LimitError(f"a call has at most {most} {what}, not {count}")


def _within(what: str, value: float, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InvalidArgumentError(f"{what} must be a number, not {value!r}")
    if not low <= value <= high:
        show = _show_size if what.endswith("_bytes") or what.startswith("memory") else format_number
        raise LimitError(f"{what} must be between {show(low)} and {show(high)}, and is {show(value)}")


def check_wall_s(what: str, value: float) -> None:
    """Raises InvalidArgumentError or LimitError, by the name that the caller knows it by."""
    _within(what, value, 0.001, limits.CALL_WALL_S_MAX)


def check_queue_s(what: str, value: float) -> None:
    """As `check_wall_s`."""
    _within(what, value, 0, limits.CALL_QUEUE_S_MAX)


def check_call_memory(what: str, value: int | None) -> None:
    """As `check_wall_s`."""
    if value is not None:
        _within(what, value, limits.CALL_MEMORY_BYTES_MIN, limits.MEMORY_BYTES_MAX)


def _show_size(value: float) -> str:
    return format_size(int(value))


class CallStatus(enum.StrEnum):
    """How a phase of a call ended. A call has the status of the phase that decided it."""

    FINISHED = "finished"  # exit 0
    ERROR = "error"  # another exit, or ended by a signal such as SIGSEGV
    TIME_LIMIT = "time_limit"
    MEMORY_LIMIT = "memory_limit"
    OUTPUT_LIMIT = "output_limit"
    KILLED = "killed"  # by SIGKILL or SIGTERM that came of no limit
    WRONG_ANSWER = "wrong_answer"  # exit 0, and a case's output is not what was expected
    CHECKER_ERROR = "checker_error"  # the case's checker is broken: it says nothing about the code either
    PLATFORM_FAILURE = "platform_failure"  # ours; it says nothing about the code


class Compare(enum.StrEnum):
    """How the output of a case is held against what is expected."""

    EXACT = "exact"
    LINES = "lines"  # blanks at the ends of lines and empty lines at the end do not count
    TOKENS = "tokens"  # words, whatever is between them
    NUMBERS = "numbers"  # tokens; two numbers are equal within 1e-6, relative or absolute


class PhaseLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Bounds of one phase; each case of a run has them anew."""

    wall_s: float = limits.CALL_WALL_S_DEFAULT
    cpu_s: float | None = None  # of all its processes together; None: bounded by `wall_s` alone
    memory_bytes: int | None = None  # of all its processes and files; None: as much as the pool's places have
    output_bytes: int = limits.CALL_OUTPUT_BYTES_DEFAULT  # stdout and stderr, each
    pids: int = limits.CALL_PIDS_DEFAULT  # processes and threads
    file_bytes: int = limits.CALL_FILE_BYTES_DEFAULT  # the largest file that it can write

    def __post_init__(self) -> None:
        check_wall_s("wall_s", self.wall_s)
        if self.cpu_s is not None:
            check_wall_s("cpu_s", self.cpu_s)
        check_call_memory("memory_bytes", self.memory_bytes)
        _within("output_bytes", self.output_bytes, 0, limits.CALL_OUTPUT_BYTES_MAX)
        _within("pids", self.pids, 1, limits.CALL_PIDS_MAX)
        _within("file_bytes", self.file_bytes, 0, limits.DISK_BYTES_MAX)


class CallFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file beside the code. `path` is relative and stays below the call's own directory."""

    path: str
    data: bytes = b""
    mode: int = 0o644

    def __post_init__(self) -> None:
        check_call_path(self.path)
        _within("mode", self.mode, 0, 0o777)


class CallCase(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One run of code that is compiled once."""

    stdin: bytes = b""
    args: tuple[str, ...] | None = None  # None: those of the call
    expected: bytes | None = None  # None: any output will do


class Checker(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Code that judges a case's output instead of a comparison: a program of the call's environment, run as another
    user in a directory of its own with the files `input`, `output` and `expected`; it exits 0 for "right" and 1 for
    "wrong". What it prints comes with the verdict. All else, such as an exception in Python, is `checker_error`."""

    code: str
    type: str = "python"
    limits: PhaseLimits = PhaseLimits()

    def __post_init__(self) -> None:
        parse_name(self.type, "task type")
        _check_code(self.code)


class CallRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One call. With `cases`, the code is compiled once and run for each; without, it is run once with `stdin`."""

    type: str  # of the task: python, bash, c, cpp, go, rust, java, node, …: what the node's configuration describes
    code: str
    environment: Environment = Environment("base")
    stdin: bytes = b""
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    files: tuple[CallFile, ...] = ()
    compile: PhaseLimits = PhaseLimits(wall_s=limits.CALL_COMPILE_S_DEFAULT)
    run: PhaseLimits = PhaseLimits()
    cases: tuple[CallCase, ...] = ()
    compare: Compare = Compare.LINES
    checker: Checker | None = None
    stop_early: bool = True  # the first case that is not right is the last
    collect: tuple[str, ...] = ()  # files to give back, after the last run
    queue_s: float = limits.CALL_QUEUE_S_DEFAULT  # how long it may wait for a place

    def __post_init__(self) -> None:
        parse_name(self.type, "task type")
        _check_code(self.code)
        check_env(self.env)
        check_args(self.args)
        for case in self.cases:
            check_args(case.args or ())
        _at_most("cases", len(self.cases), limits.CALL_CASES_MAX)
        _at_most("files", len(self.files), limits.CALL_FILES_MAX)
        _at_most("files to collect", len(self.collect), limits.CALL_FILES_MAX)
        for path in self.collect:
            check_call_path(path)
        paths = [file.path for file in self.files]
        if len(set(paths)) < len(paths):
            raise InvalidArgumentError("two files of the call have the same path")
        check_beside(paths)
        check_queue_s("queue_s", self.queue_s)
        if self.cases and self.stdin:
            raise InvalidArgumentError("a call with cases takes stdin from each of them, not its own")
        if not self.cases and (self.checker is not None or self.compare is not Compare.LINES):
            raise InvalidArgumentError("a checker, and how to compare, are for cases, and there are none")
        if self.checker is not None and self.compare is not Compare.LINES:
            raise InvalidArgumentError("a case is judged by a checker or by comparison, not by both")


class PhaseResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one phase. Output above its limit is cut there, and the phase ended with `output_limit`."""

    status: CallStatus
    exit_code: int | None = None
    signal: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    memory_peak_bytes: int | None = None  # None: this host cannot tell
    detail: str = ""


class CaseResult(msgspec.Struct, frozen=True, kw_only=True):
    """`status` is that of the run, or `wrong_answer`, or `checker_error` when the checker gave no verdict."""

    index: int
    status: CallStatus
    run: PhaseResult
    checker: PhaseResult | None = None


class CallAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`status` is `finished` when every phase and case that was asked for is; else that of the first which is not."""

    status: CallStatus
    compile: PhaseResult | None = None  # None: the task type has no such phase
    run: PhaseResult | None = None  # None: not reached, or there are cases
    cases: list[CaseResult] = []  # in order, as far as they were run
    files: list[CallFile] = []  # of `collect`, as far as they are there
    missing: list[str] = []  # of `collect`: not there, no regular file, or too large
    queued_s: float = 0.0
    took_s: float = 0.0  # from a place's beginning with it to the answer
    worker: str = ""  # the container, for the operator's logs


class TaskTypeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A task type that can be asked for; whether an environment has its toolchain shows at the first use."""

    name: str
    source: str  # the file that the code becomes
    compiled: bool = False
    warm: bool = False  # an interpreter that is up already is forked for each call


class TaskTypePage(msgspec.Struct, frozen=True):
    types: list[TaskTypeInfo] = []


class CallPool(msgspec.Struct, frozen=True, kw_only=True):
    """The places of one environment and task type, now."""

    environment: str
    type: str
    idle: int = 0
    busy: int = 0
    starting: int = 0
    queued: int = 0
    calls: int = 0  # since the pool is there
    retired: int = 0  # places that were given up after a call, of these calls


class CallPoolPage(msgspec.Struct, frozen=True):
    pools: list[CallPool] = []


def time_allowed_s(request: CallRequest) -> float:
    """How long a call may take at most: waiting, every phase to its limit."""
    runs = max(1, len(request.cases))
    checks = request.checker.limits.wall_s * (runs + 1) if request.checker else 0.0
    return request.queue_s + request.compile.wall_s + runs * request.run.wall_s + checks
