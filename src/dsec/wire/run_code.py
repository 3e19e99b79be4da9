"""`POST /run_code` as SandboxFusion has it, so that its clients work unchanged: bodies, and what they stand for."""

from __future__ import annotations

import base64
from typing import Final

import msgspec

from dsec.core import limits
from dsec.core.errors import InvalidArgumentError
from dsec.core.spec import Environment
from dsec.wire.calls import (
    CallAnswer,
    CallFile,
    CallRequest,
    CallStatus,
    PhaseLimits,
    PhaseResult,
    check_call_memory,
    check_wall_s,
)

# Their words for languages that task types call otherwise.
LANGUAGES: Final = {"nodejs": "node", "javascript": "node", "python3": "python", "c++": "cpp", "golang": "go"}


class RunCodeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that are not here are ignored, as that server does."""

    code: str
    language: str
    compile_timeout: float = 10.0  # seconds
    run_timeout: float = 10.0  # seconds
    memory_limit_MB: int = -1
    stdin: str | None = None
    files: dict[str, str | None] = {}  # path → content in base64
    fetch_files: list[str] = []


class CommandRunResult(msgspec.Struct, frozen=True, kw_only=True):
    status: str  # Finished | Error | TimeLimitExceeded
    execution_time: float | None = None
    cpu_time: float | None = None
    return_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None


class RunCodeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    status: str  # Success | Failed | SandboxError
    message: str = ""
    compile_result: CommandRunResult | None = None
    run_result: CommandRunResult | None = None
    executor_pod_name: str | None = None
    files: dict[str, str] = {}


def request_of(body: RunCodeRequest, environment: str) -> CallRequest:
    """Raises InvalidArgumentError or LimitError."""
    memory = None if body.memory_limit_MB < 0 else body.memory_limit_MB * limits.MIB
    check_wall_s("compile_timeout", body.compile_timeout)
    check_wall_s("run_timeout", body.run_timeout)
    check_call_memory("memory_limit_MB", memory)
    return CallRequest(
        type=LANGUAGES.get(body.language, body.language),
        code=body.code,
        environment=Environment(environment),
        stdin=(body.stdin or "").encode(),
        files=tuple(CallFile(_relative(path), _content(path, text)) for path, text in body.files.items() if text),
        compile=PhaseLimits(wall_s=body.compile_timeout, memory_bytes=memory),
        run=PhaseLimits(wall_s=body.run_timeout, memory_bytes=memory),
        collect=tuple(_relative(path) for path in body.fetch_files),
    )


def answer_of(answer: CallAnswer, body: RunCodeRequest) -> RunCodeAnswer:
    asked = {_relative(path): path for path in body.fetch_files}
    ours = next(
        (part for part in (answer.compile, answer.run) if part and part.status is CallStatus.PLATFORM_FAILURE), None
    )
    if ours is not None:
        return RunCodeAnswer(status="SandboxError", message=ours.detail)
    return RunCodeAnswer(
        status="Success" if answer.status is CallStatus.FINISHED else "Failed",
        message=_message(answer),
        compile_result=_result(answer.compile),
        run_result=_result(answer.run),
        executor_pod_name=answer.worker or None,
        files={asked[file.path]: base64.b64encode(file.data).decode() for file in answer.files},
    )


def _message(answer: CallAnswer) -> str:
    """For limits that their schema has no word for."""
    told = (CallStatus.MEMORY_LIMIT, CallStatus.OUTPUT_LIMIT, CallStatus.KILLED)
    return str(answer.status) if answer.status in told else ""


def _result(phase: PhaseResult | None) -> CommandRunResult | None:
    if phase is None:
        return None
    status = {CallStatus.TIME_LIMIT: "TimeLimitExceeded"}.get(phase.status, "Finished")
    return CommandRunResult(
        status=status,
        execution_time=phase.wall_s,
        cpu_time=phase.cpu_s,
        return_code=None if phase.status is CallStatus.TIME_LIMIT else _code(phase),
        stdout=phase.stdout.decode("utf-8", "replace"),
        stderr=phase.stderr.decode("utf-8", "replace"),
    )


def _code(phase: PhaseResult) -> int | None:
    """As Python's subprocess tells a signal."""
    return -phase.signal if phase.signal is not None else phase.exit_code


def _relative(path: str) -> str:
    return path.removeprefix("./")


def _content(path: str, text: str | None) -> bytes:
    try:
        return base64.b64decode(text or "", validate=True)
    except ValueError as error:  # of binascii, or for what is not ASCII
        raise InvalidArgumentError(f"the content of {path[:100]!r} is not base64: {error}") from error
