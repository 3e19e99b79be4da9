"""Log lines: their form, the ids in them, and what a hostile value cannot do to them."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from dsec.core.errors import InvalidArgumentError
from dsec.observe import logs
from dsec.observe.context import current_ids, ids, new_request_id
from dsec.observe.logs import configure_logs, get_logger, span


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    config = structlog.get_config()
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    structlog.configure(**config)
    root.handlers, root.level = handlers, level


@pytest.fixture
def out() -> io.StringIO:
    return io.StringIO()


def lines_of(out: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_a_line_is_one_json_object_with_time_level_and_part(out: io.StringIO) -> None:
    configure_logs(stream=out)

    get_logger("dsec.node.supervisor").info("sandbox created", sandbox="sbx_a", took_s=0.012)

    (line,) = lines_of(out)
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "info", "event": "sandbox created", "part": "node.supervisor", "sandbox": "sbx_a", "took_s": 0.012,
    }  # fmt: skip


def test_lines_below_the_level_are_not_written(out: io.StringIO) -> None:
    configure_logs(level="warning", stream=out)
    log = get_logger("dsec.x")

    log.info("quiet")
    log.warning("loud")

    assert [line["event"] for line in lines_of(out)] == ["loud"]


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="log level"):
        configure_logs(level="verbose")


def test_a_logger_made_before_the_configuration_follows_it(out: io.StringIO) -> None:
    log = get_logger("dsec.x")
    configure_logs(stream=out)

    log.info("hello")

    assert [line["event"] for line in lines_of(out)] == ["hello"]


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_sandbox_cannot_forge_a_line(out: io.StringIO, form: logs.Form) -> None:
    configure_logs(form=form, stream=out)
    forged = 'x\n{"level":"error","event":"forged"}\r\x1b[2K\u2028\x85 12:00:00.000 error forged'

    get_logger("dsec.x").info("agent said", message=forged, **{"a\nb": 1})

    assert len(out.getvalue().splitlines()) == 1
    assert "\x1b" not in out.getvalue()


def test_a_forged_message_in_an_exception_stays_behind_its_bar(out: io.StringIO) -> None:
    configure_logs(form="text", stream=out)

    try:
        raise ValueError("first\n12:00:00.000 error   forged")
    except ValueError:
        get_logger("dsec.x").error("failed", exc_info=True)

    head, *rest = out.getvalue().splitlines()
    assert head.endswith("failed part=x")
    assert rest
    assert all(line.startswith("    | ") for line in rest)


def test_a_traceback_is_a_list_in_json_and_its_end_is_kept(out: io.StringIO) -> None:
    configure_logs(stream=out)

    def dig(depth: int) -> None:
        if depth == 0:
            raise ValueError("the bottom " + "\n".join(f"line {number}" for number in range(200)))
        dig(depth - 1)

    try:
        dig(50)
    except ValueError as error:
        get_logger("dsec.x").error("failed", exc_info=error)

    (line,) = lines_of(out)
    assert len(line["traceback"]) == logs.TRACEBACK_LINES_MAX
    assert line["traceback"][-1] == "line 199"


@pytest.mark.parametrize(
    "fields",
    [
        {"token": "CANARY"},
        {"user_password": "CANARY"},
        {"headers": {"Authorization": "Bearer CANARY", "Cookie": "CANARY"}},
        {"secrets": {"KEY": "CANARY"}},
        {"environment": [{"API_KEY": "CANARY"}]},
        {"said": "Authorization: Bearer CANARYCANARY"},
        {"said": "authorization=Basic CANARY"},
        {"url": "https://someone:CANARY@example.org/x"},
        {"query": "?access_token=CANARY&x=1"},
        {"said": "password: CANARY"},
        {"api_key": b"CANARY"},
    ],
    ids=str,
)
def test_secrets_are_hidden(out: io.StringIO, fields: dict[str, Any]) -> None:
    configure_logs(stream=out)

    get_logger("dsec.x").info("request", **fields)

    assert "CANARY" not in out.getvalue()
    assert "[hidden]" in out.getvalue()


def test_fields_are_bounded_in_number_and_the_rest_is_counted(out: io.StringIO) -> None:
    configure_logs(stream=out)

    get_logger("dsec.x").info("many", **{f"f{number}": number for number in range(100)})

    (line,) = lines_of(out)
    assert line["fields_dropped"] == 100 - logs.FIELDS_MAX


def test_a_value_that_cannot_be_shown_does_not_fail_the_caller(out: io.StringIO) -> None:
    class Broken:
        def __str__(self) -> str:
            raise RuntimeError("no")

    configure_logs(stream=out)

    get_logger("dsec.x").info("odd", value=Broken())

    assert "cannot be shown" in lines_of(out)[0]["value"]


def test_a_stream_that_cannot_be_written_does_not_fail_the_caller() -> None:
    class Closed(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError

    configure_logs(stream=Closed())

    get_logger("dsec.x").info("lost")


def test_lines_of_libraries_go_the_same_way(out: io.StringIO) -> None:
    configure_logs(stream=out)

    logging.getLogger("library.part").warning("listening on %s\n%s", "here", "forged")
    logging.getLogger("library.part").debug("not shown")

    (line,) = lines_of(out)
    assert (line["event"], line["level"], line["part"]) == (r"listening on here\nforged", "warning", "library.part")


def test_ids_are_in_every_line_of_their_block_only(out: io.StringIO) -> None:
    configure_logs(stream=out)
    log = get_logger("dsec.x")

    with ids(request="req_1", sandbox=None):
        with ids(sandbox="sbx_a"):
            log.info("inner")
        log.info("outer")
    log.info("after")

    inner, outer, after = lines_of(out)
    assert (inner["request"], inner["sandbox"]) == ("req_1", "sbx_a")
    assert outer["request"] == "req_1"
    assert "sandbox" not in outer
    assert "request" not in after
    assert dict(current_ids()) == {}


def test_a_field_of_the_line_wins_over_an_id(out: io.StringIO) -> None:
    configure_logs(stream=out)

    with ids(sandbox="sbx_a"):
        get_logger("dsec.x").info("about another", sandbox="sbx_b")

    assert lines_of(out)[0]["sandbox"] == "sbx_b"


def test_a_span_logs_its_length_and_outcome(out: io.StringIO) -> None:
    configure_logs(level="debug", stream=out)

    with span("create", sandbox="sbx_a"):
        pass
    with pytest.raises(KeyError), span("create", sandbox="sbx_b"):
        raise KeyError

    done, failed = lines_of(out)
    assert (done["event"], done["outcome"], done["sandbox"]) == ("create", "done", "sbx_a")
    assert failed["outcome"] == "failed"
    assert done["took_s"] >= 0


def test_request_ids_differ() -> None:
    assert len({new_request_id() for _ in range(100)}) == 100
