"""The tables of the API: statuses of errors, routes, and the document that is written from them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dsec.api import errors
from dsec.api.errors import STATUS, MethodError, RangeError, headers_of, status_of, told
from dsec.api.openapi import document
from dsec.api.routes import ROUTES
from dsec.api.routing import WEBSOCKET, RouteTable
from dsec.core.errors import CapacityError, DsecError, NotFoundError, StorageError
from dsec.wire.codec import to_json

ROOT = Path(__file__).resolve().parent.parent.parent
CONTRACT = (ROOT / "docs/internals/api.md").read_text(encoding="utf-8")


def all_codes() -> set[str]:
    classes = [DsecError]
    codes = set()
    while classes:
        cls = classes.pop()
        if cls.__module__ == "dsec.core.errors":
            codes.add(cls.code)
            classes.extend(cls.__subclasses__())
    return codes


def test_every_code_has_a_status_and_no_status_is_of_nothing() -> None:
    assert set(STATUS) == all_codes()


def test_statuses_are_those_of_the_contract() -> None:
    rows = re.findall(r"^\| ([0-9]{3}(?: / [0-9]{3})?) \| ([^|]+) *\|", CONTRACT, re.MULTILINE)
    stated = {}
    for statuses, codes in rows:
        numbers = [int(number) for number in statuses.split(" / ")]
        # What comes before a colon is part of a code's meaning, or "the rest".
        names = [code.strip() for code in re.split(r"[,/:]", codes)] if numbers[0] not in (405, 416) else []
        for position, name in enumerate(names):
            if name in STATUS:
                stated[name] = numbers[min(position, len(numbers) - 1)]

    assert stated
    assert {code: STATUS[code] for code in stated} == stated
    assert {code for code, status in STATUS.items() if status != 500} <= set(stated)


def test_errors_say_in_headers_what_they_say_in_their_body() -> None:
    full = CapacityError("full", retry_after_s=0.2)
    nowhere = MethodError("PATCH", ["GET", "PUT"])

    assert headers_of(full, told(full)) == [(b"retry-after", b"1")]
    assert (status_of(nowhere), headers_of(nowhere, told(nowhere))) == (405, [(b"allow", b"GET, PUT")])
    assert status_of(RangeError(3)) == 416
    assert headers_of(RangeError(3), told(RangeError(3))) == [(b"content-range", b"bytes */3")]


def test_what_is_not_ours_is_an_internal_error_without_its_text(capsys: pytest.CaptureFixture[str]) -> None:
    body = told(ValueError("secret"))

    assert (body.code, status_of(ValueError())) == ("internal", 500)
    assert "secret" not in to_json(body).decode()
    assert b"error" in errors.error_line(StorageError("x"))


@pytest.mark.parametrize(
    ("path", "name", "handler"),
    [
        (b"/v1/environments/py%3A3.12", "py:3.12", "get_environment"),
        (b"/v1/environments/py%3Apush", "py:push", "get_environment"),
        (b"/v1/environments/py@0123456789ab", "py@0123456789ab", "get_environment"),
        (b"/v1/environments/py%3Aupdate:update", "py:update", "update_environment"),
        (b"/v1/environments/py:3.12:update", "py:3.12", "update_environment"),
    ],
)
def test_the_colon_of_a_tag_is_not_that_of_a_verb(path: bytes, name: str, handler: str) -> None:
    found = RouteTable(ROUTES).find("POST" if handler.startswith("update") else "GET", path)

    assert (found.segments, found.route.name) == ({"name": name}, handler)


def test_every_route_is_found_with_its_segments() -> None:
    table = RouteTable(ROUTES)
    for route in ROUTES:
        path = route.path.replace("{id}", "I").replace("{exec}", "E").replace("{name}", "N").replace("{token}", "T")
        path = path.replace("{digest}", "D").replace("{grant}", "G")
        found = table.find(route.method, path.encode())
        assert found.route is route
        assert set(found.segments.values()) <= {"I", "E", "N", "T", "D", "G"}


@pytest.mark.parametrize(
    "path", [b"/", b"", b"/v1", b"/v1/sandboxes/", b"/v1//health", b"/v1/sandboxes//files", b"/V1/health"]
)
def test_other_paths_are_not_found(path: bytes) -> None:
    with pytest.raises(NotFoundError):
        RouteTable(ROUTES).find("GET", path)


def test_an_encoded_colon_is_a_colon() -> None:
    assert RouteTable(ROUTES).find("GET", b"/v1/sandboxes/x/files%3Astat").route.name == "stat_file"


def test_a_path_of_a_websocket_is_found_by_get_too() -> None:
    assert RouteTable(ROUTES).find("GET", b"/v1/sandboxes/x/connect").route.method == WEBSOCKET


def test_the_contract_and_the_table_have_the_same_routes() -> None:
    stated = set()
    for line in re.findall(r"^\| ((?:GET|POST|PUT|DELETE|WS)[^|]*) \|", CONTRACT, re.MULTILINE):
        method = ""
        last = ""
        for item in re.split(r",\s*", line):
            words = item.split("?")[0].split()
            if len(words) > 1 or "/" not in item:
                method = words[0]
            path = words[-1]
            if path.startswith("/v1") or path in ("/metrics", "/openapi.json"):
                last = path
            else:
                path = last.rpartition("/")[0] + path
            for one in method.split("/"):
                stated.add((one, path))

    assert {(route.method, route.path) for route in ROUTES} == stated


def test_operations_have_names_of_their_own() -> None:
    names = [route.name for route in ROUTES]

    assert len(set(names)) == len(names)
    assert all(names)


def test_the_document_describes_every_route_and_refers_to_nothing_that_is_not_there() -> None:
    written = document(ROUTES, version="1")
    text = to_json(written).decode()

    assert written["openapi"].startswith("3.1")
    assert set(written["paths"]) == {route.path for route in ROUTES}
    for name in re.findall(r'"#/components/schemas/([^"]+)"', text):
        assert name in written["components"]["schemas"]
    for route in ROUTES:
        operation: dict[str, Any] = written["paths"][route.path][
            "get" if route.method == WEBSOCKET else route.method.lower()
        ]
        named = {item["name"] for item in operation["parameters"] if item["in"] == "path"}
        assert named == set(re.findall(r"{(\w+)}", route.path))
        assert {item["name"] for item in operation["parameters"] if item["in"] == "query"} == {
            param.name for param in route.params
        }
        assert ("requestBody" in operation) == (route.body is not None)
        assert bool(operation["security"]) == (route.right is not None)
