"""Collections on a real directory: what goes, what stays, and what becomes of one that is cut off."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec.core import faults
from dsec.core.clock import SystemClock
from dsec.core.ids import new_node_id, new_sandbox_id
from dsec.image.environments import EnvironmentStore
from dsec.image.records import BuildRecord, EnvironmentRecord
from dsec.node.census import Known, Places, take_census
from dsec.node.collecting import Collector
from dsec.node.config import CollectConfig
from dsec.storage.layers import LayerKind, LayerRecord
from dsec.storage.volumes import VolumeRecord, VolumeStore
from dsec.wire.collect import GcReport
from dsec.wire.environments import EnvironmentInfo

OLD = time.time() - 30 * 86_400.0
NODE = new_node_id()


class Site:
    """A state directory with an environment that was replaced, and remains of all kinds."""

    def __init__(self, directory: Path) -> None:
        self.places = Places(directory / "s", directory / "r")
        self.store = EnvironmentStore(self.places.state)
        for path in (self.places.run, self.places.sandboxes, self.places.records, self.places.sockets):
            path.mkdir(parents=True)
        self.live_layers: set[str] = set()
        self.live_sandboxes: set[str] = set()
        self.first, self.second = self.layer("1"), self.layer("2")
        self.name("base", self.first)
        self.name("base", self.second)
        self.store.put_built("0" * 64, BuildRecord(layers=(self.first,), source="test"))
        self.replaced = self.aged(next(self.places.environments.glob("base@*.json")))

    def layer(self, digit: str) -> str:
        digest = digit * 64
        with self.store.layers.staging() as work:
            draft = work / "draft"
            (draft / "tree").mkdir(parents=True)
            (draft / "tree" / "file").write_bytes(bytes(8192))
            record = LayerRecord(digest=digest, kind=LayerKind.DIRECTORY, size_bytes=8192, entries=1, created_at=0.0)
            self.store.layers.publish(draft, record)
        return digest

    def name(self, name: str, layer: str) -> None:
        info = EnvironmentInfo(name=name, digest=layer, layers=(layer,), size_bytes=1, created_at=0.0, source="test")
        self.store.put(EnvironmentRecord(build_key="", info=info))

    def aged(self, path: Path) -> Path:
        os.utime(path, (OLD, OLD))
        return path

    def strays(self) -> list[Path]:
        """Of a sandbox that nobody knows, and half made things, all old."""
        id = new_sandbox_id(NODE)
        for path in (
            self.places.sandboxes / id / "upper",
            self.places.records / id,
            self.places.volumes / ".making-1",
            self.places.state / ".quota-1",
        ):
            path.mkdir(parents=True)
        (self.places.sockets / f"{id}.sock").touch()
        (self.places.blobs / "sha256").mkdir(parents=True)
        (self.places.blobs / "sha256" / ("a" * 64)).write_bytes(bytes(4096))
        found = [
            self.places.sandboxes / id,
            self.places.records / id,
            self.places.sockets / f"{id}.sock",
            self.places.volumes / ".making-1",
            self.places.state / ".quota-1",
            self.places.blobs / "sha256" / ("a" * 64),
        ]
        return [self.aged(path) for path in found]

    def collector(self, **config: float) -> Collector:
        async def tidy() -> None:
            self.store.layers.clean()
            self.store.collect(live=self.live_layers)

        return Collector(
            self.places,
            CollectConfig(**config),  # type: ignore[arg-type]
            clock=SystemClock(),
            known=lambda: Known(frozenset(self.live_sandboxes), frozenset(self.live_layers)),
            tidy=tidy,
        )


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.fixture
def hook() -> Iterator[None]:
    yield
    faults.install_hook(None)


def told(report: GcReport) -> set[tuple[str, str]]:
    return {(item.kind, item.name) for item in report.items}


async def test_what_was_replaced_long_ago_goes_with_its_layer_and_what_a_name_stands_for_stays(site: Site) -> None:
    report = await site.collector().collect()

    assert told(report) == {
        ("record", site.replaced.name.removesuffix(".json")),
        ("build", "0" * 64),
        ("layer", site.first),
    }
    assert report.bytes >= 8192
    assert site.store.layers.digests() == [site.second]
    assert site.store.get("base").layers == (site.second,)
    assert (await site.collector().collect()).items == []


async def test_a_dry_run_says_the_same_and_does_nothing(site: Site) -> None:
    site.strays()
    before = take_census(site.places, Known((), ()))

    planned = await site.collector().collect(dry_run=True)
    assert take_census(site.places, Known((), ())) == before

    done = await site.collector().collect()
    assert (told(done), done.bytes) == (told(planned), planned.bytes)


async def test_what_was_replaced_just_now_stays(site: Site) -> None:
    os.utime(site.replaced)

    assert (await site.collector().collect()).items == []


async def test_remains_of_sandboxes_that_nobody_knows_go_and_young_or_known_ones_stay(site: Site) -> None:
    strays = site.strays()
    mine = new_sandbox_id(NODE)
    site.live_sandboxes.add(mine)
    known = site.places.sandboxes / mine
    young = site.places.sandboxes / new_sandbox_id(NODE)
    for path in (known, young):
        path.mkdir()
    site.aged(known)

    await site.collector().collect()

    assert [path for path in strays if path.exists()] == []
    assert sorted(site.places.sandboxes.iterdir()) == sorted([known, young])


async def test_volumes_never_go(site: Site) -> None:
    volumes = VolumeStore(site.places.state)
    volumes.create(VolumeRecord(project="/", name="a", mechanism="", size_bytes=None, created_at=0.0))
    for path in [site.places.volumes, *site.places.volumes.iterdir()]:
        site.aged(path)

    await site.collector().collect(want_bytes=1 << 60)

    assert [record.name for record in volumes.list()] == ["a"]


@pytest.mark.parametrize("how", ["a sandbox", "a lease", "another process"])
async def test_a_layer_in_use_stays_with_what_it_needs(site: Site, how: str) -> None:
    fd = os.open(site.places.layers / site.first, os.O_RDONLY | os.O_DIRECTORY)
    lease = None
    try:
        match how:
            case "a sandbox":
                site.live_layers.add(site.first)
            case "a lease":
                lease = site.store.layers.lease([site.first])
            case _:
                fcntl.flock(fd, fcntl.LOCK_SH)
        report = await site.collector().collect()

        assert told(report) == {("record", site.replaced.name.removesuffix(".json"))}
        assert site.store.layers.has(site.first)
    finally:
        os.close(fd)
        if lease is not None:
            lease.release()


async def test_a_census_is_in_nobodys_way(site: Site) -> None:
    """To try a lock would be to have it for a moment: a create that needs the layer just then would fail."""
    for _ in range(50):
        take_census(site.places, Known((), ()))
        site.store.layers.lease([site.first, site.second]).release()
    fd = os.open(site.places.layers / site.first, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(fd)


@pytest.mark.usefixtures("hook")
async def test_cut_off_at_any_step_the_next_one_does_the_rest(site: Site, tmp_path: Path) -> None:
    class KilledError(BaseException):
        pass

    done = 0
    while True:
        place = Site(tmp_path / str(done))
        place.strays()
        whole = told(await place.collector().collect(dry_run=True))
        steps = 0

        def stop(name: str) -> None:
            nonlocal steps
            if name.startswith("collect."):
                steps += 1
                if steps > done:  # noqa: B023
                    raise KilledError

        faults.install_hook(stop)
        try:
            await place.collector().collect()
            finished = True
        except KilledError:
            finished = False
        faults.install_hook(None)

        assert place.store.get("base").layers == (place.second,)
        assert place.store.layers.has(place.second)
        rest = told(await place.collector().collect())
        assert rest <= whole
        assert (await place.collector().collect(dry_run=True)).items == []
        if finished:
            break
        done += 1
    assert done >= len(whole)


async def test_when_room_is_needed_caches_go_before_their_time(site: Site) -> None:
    os.utime(site.replaced)
    (site.places.blobs / "sha256").mkdir(parents=True)
    blob = site.places.blobs / "sha256" / ("b" * 64)
    blob.write_bytes(bytes(1 << 20))

    report = await site.collector().collect(want_bytes=1 << 19)

    assert [(item.kind, item.reason) for item in report.items] == [("blob", "room is needed")]
    assert not blob.exists()
    await site.collector(free_bytes_min=1 << 60).relieve()
    assert site.store.layers.digests() == [site.second]
