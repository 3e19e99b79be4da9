"""What the SDK says of itself: docstrings, types, what is shown of its objects."""

from __future__ import annotations

import inspect
import pydoc
import typing

import pytest

import dsec
from dsec.sdk.endpoint import Endpoint

NAMES = [name for name in dir(dsec) if name[0].isupper()]
CLASSES = [name for name in NAMES if inspect.isclass(getattr(dsec, name))]


def _methods(cls: type) -> list[tuple[str, object]]:
    found = []
    for name, member in inspect.getmembers_static(cls):
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        own = inspect.isfunction(function) and function.__module__.startswith("dsec.")
        if own and not name.startswith("_"):
            found.append((name, function))
    return found


@pytest.mark.parametrize("name", CLASSES)
def test_every_public_class_and_method_says_what_it_does(name: str) -> None:
    cls = getattr(dsec, name)
    # Those that are derived for records have none: their class says what they hold.
    silent = [method for method, function in _methods(cls) if not inspect.getdoc(function)]

    assert cls.__doc__
    assert not cls.__doc__.startswith(f"{name}(")  # what dataclasses write by themselves
    assert silent == [] or name in ("Created", "AsyncCreated")


@pytest.mark.parametrize("name", CLASSES)
def test_every_public_method_is_typed(name: str) -> None:
    for method, function in _methods(getattr(dsec, name)):
        parameters = list(inspect.signature(function).parameters.values())  # type: ignore[arg-type]
        untyped = [p.name for p in parameters if p.annotation is p.empty and p.name not in ("self", "cls")]

        assert untyped == [], method
        assert "return" in typing.cast(typing.Any, function).__annotations__, method


@pytest.mark.parametrize("name", [name for name in CLASSES if f"Async{name}" in CLASSES])
def test_blocking_and_asynchronous_classes_offer_the_same(name: str) -> None:
    blocking = {method for method, _ in _methods(getattr(dsec, name))}
    asynchronous = {method for method, _ in _methods(getattr(dsec, f"Async{name}"))}

    sockets = {"recv", "sendall", "shutdown", "makefile"}  # of blocking code only
    fields = {"index", "sandbox", "error"}  # of a record, which are no methods there
    more = {"asynchronous"} | (sockets if name == "Connection" else fields if name == "Created" else set())
    assert blocking - asynchronous <= more
    assert asynchronous - blocking == set()


def test_help_of_the_package_says_where_to_begin() -> None:
    text = pydoc.plain(pydoc.render_doc(dsec))

    assert 'dsec.Sandbox.create("base")' in text
    assert all(word in text for word in ("ExecResult", "Client", "errors", "Async"))


def test_a_result_is_shown_short_whatever_it_holds() -> None:
    result = dsec.ExecResult("exe_a", "exited", 3, None, None, b"x" * 10_000_000, b"trouble\n")

    shown = repr(result)

    assert len(shown) < 300
    assert "exited with 3" in shown
    assert "trouble" in shown


def test_a_client_is_shown_by_its_address_and_never_by_its_token() -> None:
    client = dsec.AsyncClient("http://example.org:1", "dsec_secret")

    assert repr(client) == "<AsyncClient http://example.org:1>"
    assert "secret" not in repr(Endpoint(base="http://h", token="dsec_secret"))
