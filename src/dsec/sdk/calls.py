"""Calls: arguments become a request, an answer becomes a result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from dsec.core import limits
from dsec.core.errors import InvalidArgumentError
from dsec.core.spec import Environment
from dsec.core.units import parse_size
from dsec.sdk.requests import as_bytes, as_list, as_mapping, as_text
from dsec.sdk.transport import Transport
from dsec.wire.calls import (
    CallAnswer,
    CallCase,
    CallFile,
    CallRequest,
    CallStatus,
    CaseResult,
    Checker,
    Compare,
    PhaseLimits,
    PhaseResult,
    check_call_memory,
    check_queue_s,
    check_wall_s,
    time_allowed_s,
)

_MARGIN_S = 30.0  # beyond what the call may take: making a place for it, clean-up, the way back


@dataclass(frozen=True, slots=True)
class CallResult:
    """What came of a call. Code that fails is a result, not an exception.

    `status`: finished, error, time_limit, memory_limit, output_limit, killed, wrong_answer and checker_error (a
    case's), or platform_failure (ours: it says nothing about the code). `compile`, `run` and `cases` hold status,
    exit_code, signal, stdout and stderr (bytes), wall_s, cpu_s and memory_peak_bytes of each phase that was reached.
    """

    status: CallStatus
    compile: PhaseResult | None = None
    run: PhaseResult | None = None
    cases: list[CaseResult] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    queued_s: float = 0.0
    took_s: float = 0.0
    worker: str = ""

    @property
    def ok(self) -> bool:
        """Everything that was asked for has finished with 0, and every case was right."""
        return self.status is CallStatus.FINISHED

    @property
    def stdout(self) -> str:
        """Of the run, or of the compiler where that failed, as text; what is not UTF-8 becomes U+FFFD."""
        return self._decisive().stdout.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        """As `stdout`."""
        return self._decisive().stderr.decode("utf-8", "replace")

    @property
    def exit_code(self) -> int | None:
        """Of the run, or of the compiler where that failed; None: a signal, or a limit, ended it."""
        return self._decisive().exit_code

    def _decisive(self) -> PhaseResult:
        last = self.cases[-1].run if self.cases else None
        return self.run or last or self.compile or PhaseResult(status=self.status)


class CallOptions(TypedDict, total=False):
    """What may be said of a call besides its code. `Client.call` documents each."""

    environment: str | Environment
    stdin: str | bytes
    args: Sequence[str]
    env: Mapping[str, str] | None
    files: Mapping[str, str | bytes] | None
    run_timeout_s: float
    compile_timeout_s: float
    cpu_s: float | None
    memory: int | str | None
    output_bytes: int
    pids: int
    file_bytes: int | str
    cases: Iterable[CallCase | tuple[str | bytes, str | bytes | None]]
    compare: str | None
    checker: Checker | str | None
    stop_early: bool
    collect: Sequence[str]
    queue_timeout_s: float


def make_call(
    type: str,
    code: str,
    *,
    environment: str | Environment = "base",
    stdin: str | bytes = b"",
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    files: Mapping[str, str | bytes] | None = None,
    run_timeout_s: float = limits.CALL_WALL_S_DEFAULT,
    compile_timeout_s: float = limits.CALL_COMPILE_S_DEFAULT,
    cpu_s: float | None = None,
    memory: int | str | None = None,
    output_bytes: int = limits.CALL_OUTPUT_BYTES_DEFAULT,
    pids: int = limits.CALL_PIDS_DEFAULT,
    file_bytes: int | str = limits.CALL_FILE_BYTES_DEFAULT,
    cases: Iterable[CallCase | tuple[str | bytes, str | bytes | None]] = (),
    compare: str | None = None,
    checker: Checker | str | None = None,
    stop_early: bool = True,
    collect: Sequence[str] = (),
    queue_timeout_s: float = limits.CALL_QUEUE_S_DEFAULT,
) -> CallRequest:
    """A request for `client.call_many`; arguments as those of `client.call`, which also says what is raised."""
    judged = tuple(_case(case) for case in cases)
    if compare is not None and compare not in tuple(Compare):
        raise InvalidArgumentError(f"compare is one of {', '.join(Compare)}, not {compare!r}")
    if compare is not None and (not judged or checker is not None):
        raise InvalidArgumentError("compare is for cases without a checker")
    memory_bytes = None if memory is None else parse_size(memory, "memory")
    # Here the caller's own names are known.
    check_wall_s("run_timeout_s", run_timeout_s)
    check_wall_s("compile_timeout_s", compile_timeout_s)
    check_queue_s("queue_timeout_s", queue_timeout_s)
    check_call_memory("memory", memory_bytes)
    run = PhaseLimits(
        wall_s=run_timeout_s,
        cpu_s=cpu_s,
        memory_bytes=memory_bytes,
        output_bytes=output_bytes,
        pids=pids,
        file_bytes=parse_size(file_bytes, "file_bytes"),
    )
    return CallRequest(
        type=type,
        code=as_text(code, "code"),
        environment=environment if isinstance(environment, Environment) else Environment(environment),
        stdin=as_bytes(stdin, "stdin"),
        args=tuple(as_list(args, "args")),
        env=as_mapping(env, "env"),
        files=tuple(
            CallFile(path, as_bytes(data, f"file {path!r}")) for path, data in as_mapping(files, "files").items()
        ),
        compile=PhaseLimits(wall_s=compile_timeout_s),
        run=run,
        cases=judged,
        compare=Compare.LINES if compare is None else Compare(compare),
        checker=Checker(code=checker) if isinstance(checker, str) else checker,
        stop_early=stop_early,
        collect=tuple(as_list(collect, "collect")),
        queue_s=queue_timeout_s,
    )


async def send_call(transport: Transport, request: CallRequest) -> CallResult:
    answer = await transport.call(
        "POST",
        "/calls",
        CallAnswer,
        body=request,
        long=True,
        timeout_s=time_allowed_s(request) + _MARGIN_S,
    )
    return CallResult(
        status=answer.status,
        compile=answer.compile,
        run=answer.run,
        cases=answer.cases,
        files={file.path: file.data for file in answer.files},
        missing=answer.missing,
        queued_s=answer.queued_s,
        took_s=answer.took_s,
        worker=answer.worker,
    )


def _case(case: CallCase | tuple[str | bytes, str | bytes | None]) -> CallCase:
    if isinstance(case, CallCase):
        return case
    if not isinstance(case, (tuple, list)) or len(case) != 2:
        raise InvalidArgumentError(f"a case is (stdin, expected output or None), not {str(case)[:40]!r}")
    stdin, expected = case
    return CallCase(
        stdin=as_bytes(stdin, "stdin of a case"),
        expected=None if expected is None else as_bytes(expected, "what is expected"),
    )
