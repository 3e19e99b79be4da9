"""Environments by name: resolving, replacing, removing."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from dsec.core.errors import ConflictError, EnvironmentNotFoundError, InvalidArgumentError, LimitError, StorageError
from dsec.core.spec import Environment
from dsec.image.environments import EnvironmentStore
from dsec.image.worker import build_now
from dsec.storage.layers import LayerKind
from dsec.wire import codec
from dsec.wire.environments import BuildRequest, DebianSource, DirectorySource, EnvironmentInfo, OciSource, Ownership
from tests.images import Layout, member, tar_of


@pytest.fixture
def store(tmp_path: Path) -> EnvironmentStore:
    return EnvironmentStore(tmp_path / "state")


def make(store: EnvironmentStore, name: str, content: str, **options: bool) -> EnvironmentInfo:
    source = store.state.parent / f"source-{content}"
    source.mkdir(exist_ok=True)
    file = source / "file"
    if not file.exists():
        file.write_text(content)
    return build_now(
        store,
        BuildRequest(name=name, source=DirectorySource(str(source), Ownership.ROOT), **options),
        lambda event: None,
    )


def test_a_built_environment_resolves_to_its_layer(store: EnvironmentStore) -> None:
    info = make(store, "base", "1")

    locked = EnvironmentStore(store.state).resolve(Environment("base"))

    assert locked.digests() == info.layers
    assert locked.layers[0].meta.exists()
    assert store.list() == [info]
    assert info.size_bytes > 0


def test_an_unknown_name_suggests_near_ones(store: EnvironmentStore) -> None:
    with pytest.raises(EnvironmentNotFoundError) as error:
        store.resolve(Environment("base"))
    assert "none yet" in (error.value.hint or "")
    make(store, "base", "1")

    with pytest.raises(EnvironmentNotFoundError) as error:
        store.resolve(Environment("bsae"))
    assert "base" in (error.value.hint or "")
    assert "did you mean base?" in (error.value.hint or "")


def test_parts_lie_over_each_other_and_later_configuration_wins(store: EnvironmentStore, tmp_path: Path) -> None:
    layout = Layout(tmp_path / "layout")
    layout.image(
        [tar_of([member("a")])], name="a", run={"Env": ["A=1", "B=1"], "User": "a", "WorkingDir": "/a", "Cmd": ["a"]}
    )
    layout.image([tar_of([member("b")])], name="b", run={"Env": ["B=2"], "User": "b"})
    for name in ("a", "b"):
        build_now(store, BuildRequest(name=name, source=OciSource(str(layout.root), name)), lambda event: None)
    tool = make(store, "tool", "1")

    locked = store.resolve(Environment("a", workspace="b", toolkits=("tool",)))

    assert locked.digests() == (*store.get("a").layers, *store.get("b").layers, *tool.layers)
    assert (locked.env, locked.user, locked.workdir, locked.command) == ({"A": "1", "B": "2"}, "b", "/a", ("a",))


def test_a_layer_that_comes_twice_keeps_its_highest_place(store: EnvironmentStore) -> None:
    one, two = make(store, "one", "1"), make(store, "two", "2")

    assert store.resolve(Environment("one", toolkits=("two", "one"))).digests() == (*two.layers, *one.layers)


def test_too_many_layers_are_refused(store: EnvironmentStore) -> None:
    info = make(store, "many", "1")
    many = msgspec.structs.replace(info, layers=tuple(f"{number:064x}" for number in range(65)))
    record = msgspec.structs.replace(store.record("many"), info=many)
    store.put(record)

    with pytest.raises(LimitError):
        store.resolve(Environment("many"))


def test_a_lost_layer_says_how_to_get_it_back(store: EnvironmentStore) -> None:
    info = make(store, "base", "1")
    store.layers.remove(info.layers[0])

    with pytest.raises(StorageError) as error:
        store.resolve(Environment("base"))
    assert "dsec env build base" in (error.value.hint or "")


def test_building_the_same_again_changes_nothing(store: EnvironmentStore) -> None:
    first = make(store, "base", "1")

    assert make(store, "base", "1") == first
    assert make(store, "other", "1").layers == first.layers


def test_another_content_needs_replace(store: EnvironmentStore) -> None:
    first = make(store, "base", "1")

    with pytest.raises(ConflictError) as error:
        make(store, "base", "2")
    assert "--replace" in (error.value.hint or "")
    assert store.get("base") == first
    assert store.layers.digests() == list(first.layers)  # nothing was built in vain

    assert make(store, "base", "2", replace=True).layers != first.layers


def test_replacing_keeps_what_running_sandboxes_use(store: EnvironmentStore) -> None:
    first = make(store, "base", "1")
    locked, lease = store.acquire(Environment("base"))
    second = make(store, "base", "2", replace=True)

    assert store.collect() == ()
    assert locked.layers[0].meta.exists()
    lease.release()
    assert store.collect(live=set(first.layers)) == ()
    assert store.collect() == first.layers
    assert store.layers.digests() == list(second.layers)


def test_an_environment_in_use_cannot_be_removed(store: EnvironmentStore) -> None:
    info = make(store, "base", "1")
    with store.layers.lease(info.layers), pytest.raises(ConflictError, match="in use"):
        store.remove("base")
    with pytest.raises(ConflictError, match="in use"):
        store.remove("base", live=set(info.layers))
    assert store.get("base") == info

    store.remove("base")

    assert store.list() == []
    assert store.layers.digests() == []
    with pytest.raises(EnvironmentNotFoundError):
        store.remove("base")


def test_a_layer_shared_by_two_names_goes_with_the_second(store: EnvironmentStore) -> None:
    info = make(store, "one", "1")
    make(store, "two", "1")

    store.remove("one")
    assert store.layers.has(info.layers[0])

    store.remove("two")
    assert not store.layers.has(info.layers[0])


def test_a_build_after_removal_builds_again(store: EnvironmentStore) -> None:
    first = make(store, "base", "1")
    store.remove("base")

    assert make(store, "base", "1").layers == first.layers
    assert store.resolve(Environment("base")).layers[0].meta.exists()


def test_a_record_that_is_damaged_is_a_storage_error(store: EnvironmentStore) -> None:
    make(store, "base", "1")
    (store.state / "environments" / "base.json").write_text("{")

    with pytest.raises(StorageError):
        store.resolve(Environment("base"))


def test_a_change_by_another_process_is_seen(store: EnvironmentStore) -> None:
    make(store, "base", "1")
    store.resolve(Environment("base"))

    second = make(EnvironmentStore(store.state), "base", "2", replace=True)

    assert store.resolve(Environment("base")).digests() == second.layers


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "x" * 64, "a\0"])
def test_names_that_are_none_are_refused(store: EnvironmentStore, name: str) -> None:
    with pytest.raises(InvalidArgumentError):
        store.get(name)
    with pytest.raises(InvalidArgumentError):
        BuildRequest(name=name, source=DebianSource(("git",)))


def test_the_store_is_not_copied_into_itself(store: EnvironmentStore) -> None:
    for path in (store.state.parent, store.state):
        with pytest.raises(InvalidArgumentError, match="store itself"):
            build_now(store, BuildRequest(name="x", source=DirectorySource(str(path))), lambda event: None)


def test_a_request_travels_as_json() -> None:
    for text in (
        b'{"name":"a","source":{"kind":"debian","packages":["git"]}}',
        b'{"name":"a","source":{"kind":"oci","path":"/x","reference":"r"},"replace":true}',
        b'{"name":"a","source":{"kind":"tar","path":"/x","owner":"squash"}}',
    ):
        request = codec.from_json(text, BuildRequest)
        assert codec.from_json(codec.to_json(request), BuildRequest) == request
    for text in (
        b'{"name":"a","source":{"kind":"magic"}}',
        b'{"name":"a","source":{"kind":"tar","path":"relative"}}',
        b'{"name":"a","source":{"kind":"tar","path":"/x","more":1}}',
        b'{"name":"a"}',
    ):
        with pytest.raises(InvalidArgumentError):
            codec.from_json(text, BuildRequest)


def test_the_store_describes_itself(store: EnvironmentStore) -> None:
    info = make(store, "base", "1")

    facts = store.describe()

    assert (facts.environments, facts.layers) == (1, 1)
    assert facts.layer_bytes == info.size_bytes
    assert (facts.kind is LayerKind.EROFS) == (facts.reason == "")
