"""One call in one place: files, compile, runs, verdicts, files back, clean-up."""

from __future__ import annotations

import errno
import math
import signal
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from dsec.backends.fncall import runner
from dsec.backends.fncall.compare import is_right
from dsec.backends.fncall.tasks import TaskType
from dsec.backends.fncall.worker import Worker
from dsec.core import limits
from dsec.core.errors import InvalidArgumentError, Outcome, SandboxFaultError, UnsupportedError
from dsec.wire.calls import (
    CallAnswer,
    CallCase,
    CallFile,
    CallRequest,
    CallStatus,
    CaseResult,
    Checker,
    PhaseLimits,
    PhaseResult,
    check_beside,
)

_CALL: Final = 0
_CHECKER: Final = 1
_RIGHT, _WRONG = 0, 1  # exits of a checker
_ABSENT: Final = f"(os error {errno.ENOENT})"  # as dsec-call says it
_OF_WHY: Final = {"wall": CallStatus.TIME_LIMIT, "cpu": CallStatus.TIME_LIMIT, "output": CallStatus.OUTPUT_LIMIT}


@dataclass(slots=True)
class Performed:
    answer: CallAnswer
    end: Coroutine[Any, Any, str | None]  # until the place is clean again; why it is to be given up
    lacks: UnsupportedError | None = None  # nothing has run: this is what the caller gets
    for_all: bool = False  # and so would every other call here


@dataclass(slots=True)
class _Call:
    worker: Worker
    request: CallRequest
    type: TaskType
    checker_type: TaskType | None
    own_bytes: int = 0  # of the place, before anything of the call was there
    begun: bool = False  # some of its code has run, or been compiled
    crowded: bool = False  # what the code has left leaves no room to judge it
    lost: str | None = None  # the place broke down, or something of the call stays in it
    cases: list[CaseResult] = field(default_factory=list)
    kept_bytes: int = 0  # of output, in `cases`
    ending: bool = False  # it has been told that the call is over
    absent: bool = False  # a program of the task type is not in the environment
    finished: runner.Finished | None = None


def check_files(request: CallRequest, type: TaskType) -> None:
    """Raises InvalidArgumentError for files that cannot be beside the code's own; before a place is taken."""
    if any(file.path == type.source for file in request.files):
        raise InvalidArgumentError(
            f"{type.source!r} is the file of the code itself", hint="give that file another name"
        )
    check_beside([type.source, *(file.path for file in request.files)])


async def perform(
    worker: Worker, request: CallRequest, type: TaskType, checker_type: TaskType | None = None
) -> Performed:
    """Files are checked already. The answer does not wait for clean-up, unless files come with that.

    Raises SandboxFaultError when the place failed before the code was begun with: then it may be tried in another.
    """
    call = _Call(worker, request, type, checker_type)
    try:
        compiled, ran = await _phases(call)
    except UnsupportedError as error:
        return Performed(CallAnswer(status=CallStatus.PLATFORM_FAILURE), _end(call), lacks=error, for_all=call.absent)
    if request.collect:
        await _finish(call)
    try:
        answer = _answer(call, compiled, ran)
    except SandboxFaultError as error:  # its code has run: nobody may run it again
        call.finished, call.lost = None, str(error)
        answer = _answer(call, compiled, ran)
    return Performed(answer, _end(call))


async def _phases(call: _Call) -> tuple[PhaseResult | None, PhaseResult | None]:
    """What came of the compiler, and of the one run; of cases, that is in the call."""
    worker, request, type = call.worker, call.request, call.type
    place = runner.Order(place=runner.Place(place=_CALL, files=_files(request.files, type.source, request.code)))
    compiled = ran = None
    if type.compile is not None:
        compiled = await _phase(call, type, list(type.compile), request.compile, before=place)
    elif request.cases:
        _check_placed(call, (await worker.ask([place]))[0])
    if compiled is None or compiled.status is CallStatus.FINISHED:
        if request.cases:
            await _cases(call)
        else:
            ran = await _phase(
                call,
                type,
                [*type.run, *request.args],
                request.run,
                stdin=request.stdin,
                script=True,
                before=place if compiled is None else None,
                finish=True,
            )
    return compiled, ran


async def _end(call: _Call) -> str | None:
    """Why the place is to be given up."""
    await _finish(call)
    if call.finished is None:
        return call.lost or "it did not clean up"
    call.worker.done()
    return call.finished.dirty


async def _finish(call: _Call) -> None:
    """The end of the call in its place, once: files back, and nothing of it is there any more."""
    if call.finished is not None or call.lost is not None:
        return
    worker = call.worker
    try:
        answer = await worker.rest() if call.ending else (await worker.ask([_finish_order(call.request)]))[0]
    except SandboxFaultError as error:
        call.lost = str(error)
        return
    call.finished = answer.finished
    if answer.finished is None:
        call.lost = f"it did not clean up: {answer.refused}"


def _answer(call: _Call, compiled: PhaseResult | None, ran: PhaseResult | None) -> CallAnswer:
    status = next(
        (part.status for part in (compiled, ran, *call.cases) if part and part.status is not CallStatus.FINISHED),
        CallStatus.FINISHED,
    )
    files, missing = [], list(call.request.collect)
    if call.finished is not None:
        files = [_checked(file, call.request.collect) for file in call.finished.files]
        missing = [path.decode("utf-8", "surrogateescape") for path in call.finished.missing]
    elif call.lost is not None and call.request.collect and status is CallStatus.FINISHED:
        status = CallStatus.PLATFORM_FAILURE  # nobody knows which files there were
    return CallAnswer(
        status=status,
        compile=compiled,
        run=ran,
        cases=call.cases,
        files=files,
        missing=missing,
        worker=call.worker.id,
    )


def _finish_order(request: CallRequest) -> runner.Order:
    paths = [path.encode("utf-8", "surrogateescape") for path in request.collect]
    return runner.Order(finish=runner.Finish(collect=paths, bytes_max=limits.CALL_FILES_BYTES_MAX))


def _check_placed(call: _Call, answer: runner.Answer) -> None:
    if answer.placed is None:
        raise SandboxFaultError(f"no place for a call: {answer.refused}", sandbox=call.worker.id)


async def _cases(call: _Call) -> None:
    request = call.request
    checker = request.checker
    prepared = checker is None
    for index, case in enumerate(request.cases):
        words = [*call.type.run, *(request.args if case.args is None else case.args)]
        run = await _phase(call, call.type, words, request.run, stdin=case.stdin, script=True)
        status, verdict = run.status, None
        if status is CallStatus.FINISHED and checker is not None:
            if not prepared:
                verdict = await _prepare_checker(call, checker)
                prepared = True
            if verdict is None or verdict.status is CallStatus.FINISHED:
                verdict = await _check(call, checker, case, run)
                status = _verdict(call, verdict)
            else:
                status = _of_broken(call)
        elif status is CallStatus.FINISHED and not _expected(request, case, run):
            status = CallStatus.WRONG_ANSWER
        if verdict is not None:
            verdict = _kept(call, verdict)
        call.cases.append(CaseResult(index=index, status=status, run=_kept(call, run), checker=verdict))
        if call.lost is not None or (status is not CallStatus.FINISHED and request.stop_early):
            return


def _expected(request: CallRequest, case: CallCase, run: PhaseResult) -> bool:
    return case.expected is None or is_right(run.stdout, case.expected, request.compare)


def _kept(call: _Call, run: PhaseResult) -> PhaseResult:
    """All cases come back in one answer: output beyond its bound is left out, and that is said."""
    call.kept_bytes += len(run.stdout) + len(run.stderr)
    if call.kept_bytes <= limits.CALL_ANSWER_BYTES_MAX:
        return run
    return msgspec.structs.replace(run, stdout=b"", stderr=b"", detail="its output is left out: all are too long")


async def _prepare_checker(call: _Call, checker: Checker) -> PhaseResult | None:
    """Its place, and its program where there is one to be made."""
    type = call.checker_type
    if type is None:
        raise InvalidArgumentError("a checker without a task type")
    place = runner.Order(place=runner.Place(place=_CHECKER, files=_files((), type.source, checker.code)))
    if type.compile is None:
        try:
            (answer,) = await call.worker.ask([place])
        except SandboxFaultError as error:
            call.lost = str(error)
            return PhaseResult(status=CallStatus.PLATFORM_FAILURE, detail=call.lost)
        return None if answer.placed is not None else _no_place(call, answer)
    return await _phase(call, type, list(type.compile), checker.limits, place=_CHECKER, before=place)


async def _check(call: _Call, checker: Checker, case: CallCase, run: PhaseResult) -> PhaseResult:
    type = call.checker_type
    if type is None:
        raise InvalidArgumentError("a checker without a task type")
    shown = {b"input": case.stdin, b"output": run.stdout, b"expected": case.expected or b""}
    files = [runner.NewFile(path=path, data=data, mode=0o644) for path, data in shown.items()]
    place = runner.Order(place=runner.Place(place=_CHECKER, files=files))
    # Never the interpreter that is up for the code it judges: that may be of another type.
    judged = await _phase(call, type, list(type.check or type.run), checker.limits, place=_CHECKER, before=place)
    if judged.status is CallStatus.MEMORY_LIMIT:
        left, room = call.worker.own_bytes - call.own_bytes, call.worker.memory_bytes - call.own_bytes
        call.crowded = call.crowded or left > room // 2
    return judged


def _no_place(call: _Call, answer: runner.Answer) -> PhaseResult:
    """Code has run here, and what it left is in the way: to run it once more elsewhere would help nobody."""
    call.lost = f"no place for a program: {answer.refused}"
    call.crowded = True
    return PhaseResult(status=CallStatus.MEMORY_LIMIT, detail=call.lost)


def _verdict(call: _Call, checker: PhaseResult) -> CallStatus:
    """Who leaves no room for its judge has not passed, and the judge is not to blame."""
    if not call.crowded and checker.status in (CallStatus.FINISHED, CallStatus.ERROR):
        if checker.exit_code == _RIGHT:
            return CallStatus.FINISHED
        if checker.exit_code == _WRONG:
            return CallStatus.WRONG_ANSWER
    return _of_broken(call)


def _of_broken(call: _Call) -> CallStatus:
    """Of a case whose checker gave no verdict."""
    if call.crowded:
        return CallStatus.MEMORY_LIMIT
    return CallStatus.CHECKER_ERROR if call.lost is None else CallStatus.PLATFORM_FAILURE


async def _phase(
    call: _Call,
    type: TaskType,
    words: list[str],
    bounds: PhaseLimits,
    *,
    stdin: bytes = b"",
    place: int = _CALL,
    script: bool = False,
    before: runner.Order | None = None,
    finish: bool = False,
) -> PhaseResult:
    """Of a place that breaks down under it, a result says so; what the code did until then nobody knows."""
    worker = call.worker
    warm = script and type.warm is not None
    env = worker.environment(type, call.request.env if place == _CALL else {})
    order = runner.Run(
        place=place,
        argv=[word.encode("utf-8", "surrogateescape") for word in (words[1:] if warm else words)],
        env=env,
        warm=warm,
        stdin=stdin,
        wall_ms=math.ceil(bounds.wall_s * 1000),
        cpu_ms=math.ceil((bounds.cpu_s or 0) * 1000),
        output_bytes=bounds.output_bytes,
        pids=bounds.pids,
        file_bytes=bounds.file_bytes,
    )
    orders = [runner.Order(run=order)]
    if before is not None:
        orders.insert(0, before)
    if finish:
        orders.append(_finish_order(call.request))
    try:
        if call.begun:
            worker.weigh()
        await worker.bound(bounds.memory_bytes)
        call.own_bytes = call.own_bytes or worker.own_bytes
        call.ending = finish
        answers = await worker.ask(orders, later=int(finish))
    except SandboxFaultError as error:
        if error.outcome is Outcome.UNCHANGED and not call.begun:
            raise
        call.lost = str(error)
        status = CallStatus.MEMORY_LIMIT if worker.memory()[1] else CallStatus.PLATFORM_FAILURE
        return PhaseResult(status=status, detail=str(error))
    peak, for_memory = worker.memory()
    if before is not None:
        placed = answers.pop(0)
        if call.begun and placed.placed is None:
            return _no_place(call, placed)
        _check_placed(call, placed)
    ran = answers[0].ran
    if ran is None:
        call.lost = f"a program could not be run: {answers[0].refused}"
        return PhaseResult(status=CallStatus.PLATFORM_FAILURE, detail=call.lost)
    if ran.why == "lost" and not call.begun:
        raise SandboxFaultError(f"no interpreter for a call: {ran.detail}", sandbox=worker.id)
    if ran.why == "lost":
        call.lost = f"the interpreter is lost: {ran.detail}"
        return PhaseResult(status=CallStatus.PLATFORM_FAILURE, detail=call.lost)
    if ran.why == "start" and place == _CALL and call.begun:
        # It was compiled, or has run before: the code has made no program, or taken it away.
        return PhaseResult(status=CallStatus.ERROR, detail=ran.detail[:300])
    if ran.why == "start" and place == _CHECKER:
        return PhaseResult(status=CallStatus.ERROR, detail=f"the environment cannot run {ran.detail[:300]}")
    if ran.why == "start":
        # Anything else may come of this call's own limits, and where programs are looked for of its variables.
        call.absent = ran.detail.endswith(_ABSENT) and "PATH" not in call.request.env
        raise UnsupportedError(
            f"the environment cannot run {ran.detail[:300]}", hint="calls of this task type need it in the environment"
        )
    call.begun = True
    return PhaseResult(
        status=CallStatus.MEMORY_LIMIT if for_memory else _status(ran),
        exit_code=ran.code,
        signal=ran.signal,
        stdout=ran.out[: bounds.output_bytes],
        stderr=ran.err[: bounds.output_bytes],
        wall_s=ran.wall_us / 1e6,
        cpu_s=ran.cpu_us / 1e6,
        memory_peak_bytes=peak if peak is not None else ran.rss_bytes,
    )


def _status(ran: runner.Ran) -> CallStatus:
    if (status := _OF_WHY.get(ran.why)) is not None:
        return status
    if ran.code == 0:
        return CallStatus.FINISHED
    return CallStatus.KILLED if ran.signal in (signal.SIGKILL, signal.SIGTERM) else CallStatus.ERROR


def _files(files: tuple[CallFile, ...], source: str, code: str) -> list[runner.NewFile]:
    own = CallFile(source, code.encode("utf-8", "surrogateescape"))
    return [
        runner.NewFile(path=file.path.encode("utf-8", "surrogateescape"), data=file.data, mode=file.mode)
        for file in (own, *files)
    ]


def _checked(file: runner.NewFile, asked: tuple[str, ...]) -> CallFile:
    path = file.path.decode("utf-8", "surrogateescape")
    if path not in asked:
        raise SandboxFaultError(f"a place gave a file that nobody asked for: {path[:100]!r}")
    return CallFile(path, file.data, file.mode & 0o777)
