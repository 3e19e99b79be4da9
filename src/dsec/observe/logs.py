"""Structured logs: JSON lines for machines, one readable line for people, the same rules of safety for both.

log = get_logger(__name__)
log.info("sandbox created", sandbox=sandbox_id, took_s=0.012)
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import traceback
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import lru_cache
from time import perf_counter
from typing import Any, Final, Literal, TextIO

import structlog

from dsec.core.errors import InvalidArgumentError
from dsec.observe.context import current_ids, ids
from dsec.observe.redact import safe_text, safe_value

Form = Literal["auto", "json", "text"]

LEVELS: Final = ("debug", "info", "warning", "error")
FIELDS_MAX: Final = 64  # of one line; keeps a line within some 100 KiB whatever is passed
TRACEBACK_LINES_MAX: Final = 60  # the end is kept: it names what failed

# ASCII only: whatever got as far as this still cannot break a line.
_JSON: Final = json.JSONEncoder(ensure_ascii=True, allow_nan=True, separators=(",", ":"))

_Event = MutableMapping[str, Any]


def get_logger(name: str) -> structlog.typing.FilteringBoundLogger:
    """A logger whose lines carry `name` as `part`. May be made at import: it follows what is configured later."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(part=name.removeprefix("dsec."))
    return logger


def configure_logs(*, level: str = "info", form: Form = "auto", stream: TextIO | None = None) -> None:
    """Send everything logged in this process to `stream` (stderr), libraries' lines too. "auto": text on a terminal.

    Called once, at start, by whoever owns the process. Until then only warnings and errors are shown, as text.
    """
    if level not in LEVELS:
        raise InvalidArgumentError(f"log level must be one of {', '.join(LEVELS)}, and is {level!r}")
    out = stream if stream is not None else sys.stderr
    as_json = form == "json" or (form == "auto" and not out.isatty())
    number = getattr(logging, level.upper())
    _configure(number, _json_line if as_json else _text_line, out)
    root = logging.getLogger()
    root.handlers = [_LibraryHandler()]
    root.setLevel(max(number, logging.INFO))  # libraries' debug lines are not ours to show


@contextmanager
def span(what: str, **more: str | None) -> Iterator[None]:
    """A piece of work with ids: its lines carry them, and at debug level its length and outcome are logged."""
    log = get_logger("span")
    started = perf_counter()
    outcome = "failed"
    with ids(**more):
        try:
            yield
            outcome = "done"
        finally:
            log.debug(what, outcome=outcome, took_s=round(perf_counter() - started, 6))


def _configure(level: int, render: Any, stream: TextIO | None) -> None:
    structlog.configure(
        processors=[_add_ids, structlog.processors.add_log_level, _add_time, _safe_fields, render],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *_: _Writer(stream),
        # Loggers are made at import and must follow what is configured later.
        cache_logger_on_first_use=False,
    )


class _Writer:
    """Writes whole lines. A log that cannot be written never fails what is being logged."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream  # None: whatever sys.stderr is when the line is written

    def msg(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # a closed pipe, a full disk, a stream closed at exit
            stream = self._stream or sys.stderr
            stream.write(line + "\n")
            stream.flush()

    debug = info = warning = error = critical = msg


class _LibraryHandler(logging.Handler):
    """Lines of the standard library's logging, through the same processors."""

    def emit(self, record: logging.LogRecord) -> None:
        level = "error" if record.levelno >= logging.ERROR else record.levelname.lower()
        write = getattr(get_logger(record.name), level if level in LEVELS else "info")
        try:
            text = record.getMessage()
        except Exception:  # arguments that do not fit their format: a library's fault, and no reason to fail
            text = str(record.msg)
        write(text, **({"exc_info": record.exc_info} if record.exc_info else {}))


def _add_ids(_: Any, __: str, event: _Event) -> _Event:
    for name, value in current_ids().items():
        event.setdefault(name, value)
    return event


def _add_time(_: Any, __: str, event: _Event) -> _Event:
    event["time"] = datetime.now(UTC).isoformat(timespec="milliseconds")[:-6] + "Z"
    return event


def _safe_fields(_: Any, __: str, event: _Event) -> _Event:
    failure = event.pop("exc_info", None)
    if "traceback" in event:  # that name is for our own list of lines
        event["traceback_"] = event.pop("traceback")
    safe: _Event = {"time": event.pop("time", "")}
    for name in ("level", "event", "part"):
        safe[name] = _safe_word(str(event.pop(name, "")))
    for name, value in list(event.items())[:FIELDS_MAX]:
        safe[_safe_word(name)] = safe_value(name, value)
    if len(event) > FIELDS_MAX:
        safe["fields_dropped"] = len(event) - FIELDS_MAX
    if failure:
        safe["traceback"] = _traceback(failure)
    return safe


@lru_cache(1_024)
def _safe_word(text: str) -> str:
    """Of what the program itself says, which is always the same few texts."""
    return safe_text(text)


def _traceback(failure: Any) -> list[str]:
    if isinstance(failure, BaseException):
        failure = (type(failure), failure, failure.__traceback__)
    elif not isinstance(failure, tuple):
        failure = sys.exc_info()
    if failure[0] is None:
        return []
    lines = "".join(traceback.format_exception(*failure)).splitlines()
    return [safe_text(line) for line in lines[-TRACEBACK_LINES_MAX:]]


def _json_line(_: Any, __: str, event: _Event) -> str:
    return _JSON.encode(event)


def _text_line(_: Any, __: str, event: _Event) -> str:
    lines = event.pop("traceback", [])
    head = f"{event.pop('time')[11:23]} {event.pop('level'):<7} {event.pop('event')}"
    fields = "".join(f" {name}={_shown(value)}" for name, value in event.items() if value != "")
    # A bar before each line, so that none can be taken for a line of the log.
    return "\n".join([head + fields, *(f"    | {line}" for line in lines)])


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return value if value and not any(c in value for c in " ='\"") else json.dumps(value, ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False, allow_nan=True)


_configure(logging.WARNING, _text_line, None)
