"""Volumes on the disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsec.core.errors import ConflictError, InvalidArgumentError, LimitError, UnsupportedError, VolumeNotFoundError
from dsec.core.spec import Environment, SandboxSpec, VolumeMount, parse_volume
from dsec.node.volumes import check_datasets
from dsec.storage import volumes
from dsec.storage.quota.choose import Found, Mechanism
from dsec.storage.volumes import VolumeRecord, VolumeStore
from dsec.wire.volumes import VolumeRequest


@pytest.fixture
def store(tmp_path: Path) -> VolumeStore:
    return VolumeStore(tmp_path, find=Found(None, {Mechanism.IMAGE: "this is a test"}))


def record(name: str = "a", *, project: str = "/", size: int | None = None) -> VolumeRecord:
    return VolumeRecord(project=project, name=name, mechanism="", size_bytes=size, created_at=1.0)


def test_a_volume_is_there_until_it_is_removed(store: VolumeStore) -> None:
    made = store.create(record())
    (Path(store.place("/", "a").source) / "file").write_text("x")

    assert store.create(record()) == made
    assert [found.name for found in store.list()] == ["a"]
    doomed = store.remove("/", "a")
    with pytest.raises(VolumeNotFoundError):
        store.place("/", "a")
    store.create(record())
    assert list(Path(store.place("/", "a").source).iterdir()) == []
    store.finish(doomed)
    assert not doomed.exists()


def test_names_are_of_their_project(store: VolumeStore) -> None:
    for project in ("/", "/team", "/team/a"):
        store.create(record(project=project))

    places = {store.place(project, "a").source for project in ("/", "/team", "/team/a")}
    assert len(places) == 3
    with pytest.raises(VolumeNotFoundError):
        store.get("/other", "a")


def test_another_size_under_the_same_name_is_a_conflict(store: VolumeStore) -> None:
    store.create(record())

    with pytest.raises(ConflictError):
        store.create(record(size=1 << 30))


def test_a_size_that_nobody_keeps_is_refused_and_nothing_is_left(store: VolumeStore, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="this is a test"):
        store.create(record(size=1 << 30))

    assert list((tmp_path / "volumes").iterdir()) == []


def test_there_are_only_so_many(store: VolumeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(volumes, "VOLUMES_MAX", 2)
    store.create(record("a"))
    store.create(record("b"))

    with pytest.raises(LimitError):
        store.create(record("c"))


def test_what_was_half_made_or_half_removed_goes_at_the_next_start(store: VolumeStore, tmp_path: Path) -> None:
    store.create(record())
    store.create(record("b"))
    (tmp_path / "volumes" / f"{volumes.MAKING}1").mkdir()
    store.remove("/", "b")

    assert store.clean() == 2
    assert [path.name[:1] != "." for path in (tmp_path / "volumes").iterdir()] == [True]


def test_a_volume_that_says_that_it_is_another_one_is_not_believed(store: VolumeStore, tmp_path: Path) -> None:
    store.create(record())
    (found,) = (tmp_path / "volumes").iterdir()
    found.rename(found.with_name("0" * 40))

    assert store.list() == []


def test_volumes_are_closed_to_users_of_the_host(store: VolumeStore, tmp_path: Path) -> None:
    store.create(record())

    assert (tmp_path / "volumes").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "text",
    [
        *("", "a", "a:", "a:data", ":/data", "../a:/data", "a:/", "a:/proc", "a:/sys/fs", "a:/dev/shm", "a:/etc"),
        *("a:/x/", "a:/x//y", "a:/x/../y", "a:/x/.", "a:/x:rx", "a:/x:ro:ro", "a:/x\0y", "a:/\ud800"),
        *("a:/" + "x" * 256, "a:/" + "x/" * 2100, "a" * 64 + ":/x"),
    ],
)
def test_what_is_no_mount_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError):
        parse_volume(text)


def test_mounts_as_people_write_them() -> None:
    assert parse_volume("a:/data") == VolumeMount("a", "/data")
    assert parse_volume("a:/data/x y:ro") == VolumeMount("a", "/data/x y", readonly=True)
    assert parse_volume("a:/etc/app", dataset=True) == VolumeMount("a", "/etc/app", dataset=True)


@pytest.mark.parametrize(("first", "second"), [("/a", "/a"), ("/a", "/a/b"), ("/a/b/c", "/a")])
def test_no_volume_lies_in_another(first: str, second: str) -> None:
    mounts = tuple(VolumeMount("a", path) for path in (first, "/a!", second))

    with pytest.raises(InvalidArgumentError, match="at or below"):
        SandboxSpec(environment=Environment("base"), volumes=mounts)


def test_a_sandbox_has_only_so_many() -> None:
    with pytest.raises(LimitError):
        SandboxSpec(
            environment=Environment("base"), volumes=tuple(VolumeMount("a", f"/v{number}") for number in range(17))
        )


@pytest.mark.parametrize(
    "fields", [{"name": "."}, {"name": "a/b"}, {"size_bytes": 1}, {"size_bytes": 1 << 60}, {"uid": -1}, {"gid": 65_535}]
)
def test_a_request_that_makes_no_sense_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidArgumentError):
        VolumeRequest(**{"name": "a", **fields})  # type: ignore[arg-type]


def test_a_dataset_shows_nothing_of_the_node(tmp_path: Path) -> None:
    state, data = tmp_path / "state", tmp_path / "data"
    state.mkdir()
    (tmp_path / "link").symlink_to(state)

    assert check_datasets({"a": str(data)}, own=(state,)) == {"a": data}
    for path in ("/", str(state), str(state / "volumes"), str(tmp_path), str(tmp_path / "link"), "data"):
        with pytest.raises(InvalidArgumentError):
            check_datasets({"a": path}, own=(state,))
    with pytest.raises(InvalidArgumentError):
        check_datasets({"a b": str(data)}, own=(state,))
