"""Environments of other environments: locks, tags, order, cycles, and what may be removed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dsec.core.errors import (
    ConflictError,
    EnvironmentNotFoundError,
    InvalidArgumentError,
    LimitError,
    NotFoundError,
)
from dsec.core.references import parse_reference, parse_tagged
from dsec.core.spec import Environment
from dsec.image.compose import compose, diff, update
from dsec.image.environments import EnvironmentStore
from dsec.image.inventory import get_layer, list_layers, remove_layer
from dsec.image.records import ImageConfig, merge_configs
from dsec.image.worker import build_now
from dsec.wire.environments import BuildRequest, DirectorySource, EnvironmentInfo, OciSource, Ownership, Role
from dsec.wire.layers import ComposeRequest, Composition
from tests.images import Layout, member, tar_of


@pytest.fixture
def store(tmp_path: Path) -> EnvironmentStore:
    return EnvironmentStore(tmp_path / "state")


def make(store: EnvironmentStore, name: str, content: str, **options: bool) -> EnvironmentInfo:
    source = store.state.parent / f"source-{content}"
    source.mkdir(exist_ok=True)
    if not (source / "file").exists():
        (source / "file").write_text(content)
    request = BuildRequest(name=name, source=DirectorySource(str(source), Ownership.ROOT), **options)
    return build_now(store, request, lambda event: None)


def put(store: EnvironmentStore, name: str, *names: str, **options: Any) -> EnvironmentInfo:
    """`names`: base, then toolkits."""
    of = Composition(base=names[0], toolkits=names[1:], **options)
    return compose(store, ComposeRequest(name=name, of=of))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("base", "base"), ("base:latest", "base"), ("py:3.12", "py:3.12"), ("a:_x", "a:_x"),
        ("py@0123456789ab", "py@0123456789ab"), ("py@" + "f" * 64, "py@" + "f" * 64),
    ],
)  # fmt: skip
def test_references_are_names_with_a_tag_or_a_digest(text: str, shown: str) -> None:
    assert str(parse_reference(text)) == shown
    assert parse_reference(shown) == parse_reference(text)


@pytest.mark.parametrize(
    "text",
    [
        "", ":x", "a:", "a:b:c", "a@", "a@123", "a@0123456789AB", "a:x@0123456789ab", "a/b", "a:../x", "a: b",
        "a@" + "0" * 65, "a:" + "x" * 129,
    ],
)  # fmt: skip
def test_what_is_no_reference_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError):
        parse_reference(text)
    with pytest.raises(InvalidArgumentError):
        Environment(text)


def test_a_digest_is_no_name_for_something_new() -> None:
    with pytest.raises(InvalidArgumentError):
        parse_tagged("base@0123456789ab")


def test_tags_of_one_name_are_different_environments(store: EnvironmentStore) -> None:
    old, new = make(store, "py:3.11", "1"), make(store, "py:3.12", "2")

    assert store.names() == ["py:3.11", "py:3.12"]
    assert store.resolve(Environment("py:3.11")).digests() == old.layers
    assert store.get("py:3.12") == new
    with pytest.raises(EnvironmentNotFoundError):
        store.get("py")


def test_what_a_tag_was_is_there_by_its_digest_until_it_is_collected(store: EnvironmentStore) -> None:
    first = make(store, "base", "1")
    second = make(store, "base", "2", replace=True)

    assert store.get(f"base@{first.digest[:12]}").layers == first.layers
    assert store.get(f"base@{second.digest}").layers == second.layers
    assert store.resolve(Environment(f"base@{first.digest[:12]}")).digests() == first.layers
    assert store.names() == ["base"]

    assert store.collect() == first.layers
    with pytest.raises(EnvironmentNotFoundError):
        store.get(f"base@{first.digest[:12]}")


def test_a_locked_environment_stays_what_it_is_and_one_that_follows_does_not(store: EnvironmentStore) -> None:
    base, first = make(store, "base", "b"), make(store, "tool", "1")
    put(store, "locked", "base", "tool")
    put(store, "follows", "base", "tool", follow=True)

    second = make(store, "tool", "2", replace=True)

    assert store.resolve(Environment("locked")).digests() == (*base.layers, *first.layers)
    assert store.resolve(Environment("follows")).digests() == (*base.layers, *second.layers)
    assert store.get("follows").layers == (*base.layers, *second.layers)
    assert {info.name: info.layers for info in store.list()}["follows"] == (*base.layers, *second.layers)
    assert store.collect() == ()  # the lock has what the tag was
    assert store.get(f"tool@{first.digest[:12]}").layers == first.layers

    updated = update(store, "locked")

    assert updated.layers == (*base.layers, *second.layers)
    assert store.resolve(Environment("locked")).digests() == updated.layers
    assert update(store, "locked") == updated
    assert store.collect() == first.layers


def test_an_exact_record_as_a_part_stays_whatever_is_updated(store: EnvironmentStore) -> None:
    first = make(store, "base", "1")
    put(store, "pinned", f"base@{first.digest[:16]}", follow=True)
    make(store, "base", "2", replace=True)

    assert update(store, "pinned").layers == first.layers
    assert store.collect() == ()
    with pytest.raises(ConflictError, match="part of pinned"):
        store.remove(f"base@{first.digest[:16]}")


def test_the_same_again_is_done_and_another_content_needs_replace(store: EnvironmentStore) -> None:
    make(store, "base", "b")
    make(store, "tool", "1")
    first = put(store, "env", "base", "tool")

    assert put(store, "env", "base", "tool") == first
    with pytest.raises(ConflictError):
        put(store, "env", "base")
    with pytest.raises(ConflictError):
        put(store, "base", "tool")
    assert store.get("env") == first

    assert put(store, "env", "base", replace=True).layers == store.get("base").layers
    assert store.get(f"env@{first.digest}").layers == first.layers
    with pytest.raises(InvalidArgumentError, match="not made of others"):
        update(store, "base")


def test_environments_may_be_parts_four_deep(store: EnvironmentStore) -> None:
    base = make(store, "e0", "0")
    for number in range(1, 5):
        make(store, f"t{number}", str(number))
        put(store, f"e{number}", f"e{number - 1}", f"t{number}")

    deep = store.get("e4")

    assert deep.layers == (*base.layers, *(layer for n in range(1, 5) for layer in store.get(f"t{n}").layers))
    with pytest.raises(LimitError, match="deep"):
        put(store, "e5", "e4")


@pytest.mark.parametrize("follow", [False, True])
def test_nothing_is_made_of_itself(store: EnvironmentStore, follow: bool) -> None:
    make(store, "a", "1")
    put(store, "b", "a", follow=follow)
    put(store, "c", "b", follow=follow)

    for name in ("a", "b", "c"):
        with pytest.raises(InvalidArgumentError, match="of itself"):
            put(store, name, "c", replace=True, follow=follow)
    assert store.get("c").layers == store.get("a").layers


def test_parts_that_are_missing_are_named(store: EnvironmentStore) -> None:
    make(store, "base", "1")

    with pytest.raises(EnvironmentNotFoundError, match="'bsae'"):
        put(store, "env", "bsae")
    assert store.names() == ["base"]


def test_a_part_cannot_be_removed_before_what_is_made_of_it(store: EnvironmentStore) -> None:
    make(store, "base", "1")
    make(store, "base:other", "2")
    put(store, "env", "base")

    with pytest.raises(ConflictError, match="part of env"):
        store.remove("base")
    store.remove("base:other")
    store.remove("env")
    store.remove("base")

    assert store.layers.digests() == []
    assert list((store.state / "environments").iterdir()) == []


def test_removing_a_name_removes_what_it_was_before(store: EnvironmentStore) -> None:
    first = make(store, "base", "1")
    make(store, "base", "2", replace=True)
    make(store, "base", "1", replace=True)

    store.remove("base")

    assert not store.layers.has(first.layers[0])
    assert store.names() == []


def test_the_configuration_is_merged_variable_by_variable() -> None:
    base = ImageConfig(env={"A": "1", "PATH": "/bin"}, user="a", entrypoint=("/run",), command=("all",))

    def merged(*configs: ImageConfig) -> ImageConfig:
        return merge_configs(configs)

    assert merged(base, ImageConfig(env={"PATH": "/opt/bin"}, workdir="/w")) == ImageConfig(
        env={"A": "1", "PATH": "/opt/bin"}, user="a", workdir="/w", entrypoint=("/run",), command=("all",)
    )
    assert merged(base, ImageConfig(command=("one",))).command == ("one",)
    # What was meant for another program goes with it.
    other = merged(base, ImageConfig(entrypoint=("/other",)))
    assert (other.entrypoint, other.command) == (("/other",), ())


def test_two_environments_or_locks_are_compared(store: EnvironmentStore, tmp_path: Path) -> None:
    layout = Layout(tmp_path / "layout")
    layout.image([tar_of([member("a")])], name="a", run={"Env": ["A=1", "B=1"], "User": "a"})
    layout.image([tar_of([member("b")])], name="b", run={"Env": ["B=2"]})
    for name in ("a", "b"):
        build_now(store, BuildRequest(name=name, source=OciSource(str(layout.root), name)), lambda event: None)
    tool = make(store, "tool", "1")
    first = put(store, "env", "a", "tool")
    make(store, "tool", "2", replace=True)
    second = update(store, "env")

    found = diff(store.get(f"env@{first.digest}"), second)

    assert [change.digest for change in found.added] == [*second.layers[1:]]
    assert [change.digest for change in found.removed] == [*tool.layers]
    assert (found.same, found.moved, found.config) == (1, False, ())
    assert [(part.role, part.one) for part in found.parts] == [(Role.TOOLKIT, f"tool@{tool.digest[:12]}")]
    assert found.one == f"env@{first.digest[:12]}"

    other = diff(store.get("a"), store.get("b"))
    assert {c.what: (c.one, c.other) for c in other.config} == {
        "user": ("a", None), "env.A": ("1", None), "env.B": ("1", "2"),
    }  # fmt: skip
    assert diff(second, second) == diff(store.get("env"), second)
    assert (diff(second, second).added, diff(second, second).parts) == ((), ())


def test_layers_say_who_has_them_and_go_when_nobody_has(store: EnvironmentStore) -> None:
    info = make(store, "base", "1")
    put(store, "env", "base")
    digest = info.layers[0]

    assert [layer.digest for layer in list_layers(store)] == [digest]
    assert get_layer(store, digest[:12]).environments == ("base", "env")
    with pytest.raises(ConflictError, match="part of base, env"):
        remove_layer(store, digest[:12], live=())
    with pytest.raises(NotFoundError):
        get_layer(store, "0" * 12)
    make(store, "left", "2")
    left = store.get("left").layers[0]
    (store.state / "environments" / "left.json").unlink()
    with pytest.raises(ConflictError):
        remove_layer(store, left, live={left})

    assert remove_layer(store, left[:20], live=()) == left
    assert store.layers.digests() == [digest]
