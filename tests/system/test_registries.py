"""Images between dsec and a real registry (docker-registry), and tools that others use (skopeo, buildah)."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import os
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard

from dsec.core.errors import DsecError, InvalidArgumentError, StorageError
from dsec.core.image_names import parse_image_name
from dsec.image.build import build
from dsec.image.environments import EnvironmentStore
from dsec.image.export.run import export_now
from dsec.image.imported import Importer
from dsec.image.registry.accounts import Accounts
from dsec.image.registry.client import DEFAULT_SETTINGS, Registry, RegistrySettings
from dsec.image.registry.push import upload
from dsec.image.stack import CannotStackError
from dsec.image.worker import build_now
from dsec.testing.waiting import eventually
from dsec.wire.environments import (
    BuildEvent,
    BuildRequest,
    BuildSource,
    DockerArchiveSource,
    DockerfileSource,
    EnvironmentInfo,
    OciSource,
    Ownership,
    RegistrySource,
)
from dsec.wire.images import ArchiveTarget, Compression, ExportedImage, ExportRequest, LayoutTarget, RegistryTarget
from tests.images import Layout, directory, gzipped, hardlink, member, symlink, tar_of
from tests.registries import PASSWORD, USER, Fault, Front, need, registry, skopeo, write_login

pytestmark = pytest.mark.root  # layers and owners

BASE = tar_of([
    directory("bin", mode=0o755, mtime=1_700_000_000), member("bin/tool", b"#!/bin/sh\n" * 9_000, mode=0o4755),
    member("bin/old", b"old"), symlink("bin/link", "tool"), hardlink("bin/same", "bin/tool"),
    directory("data", uid=33, gid=44), member("data/a", b"a" * 70_000, mtime=1_600_000_000.25), member("data/b", b"b"),
    directory("gone"), member("gone/x", b"x"),
])  # fmt: skip
ABOVE = tar_of([
    member("bin/.wh.old"), directory("data"), member("data/.wh..wh..opq"), member("data/c", b"c"), member(".wh.gone"),
])  # fmt: skip
RUN = {
    "Env": ["PATH=/bin", "A=b"],
    "User": "33:44",
    "WorkingDir": "/data",
    "Entrypoint": ["/bin/tool"],
    "Cmd": ["run", "all"],
}


class Place:
    """A store of environments, and a registry's host if there is one."""

    def __init__(self, root: Path, environ: dict[str, str] | None = None) -> None:
        self.root = root
        self.store = EnvironmentStore(root / "state")
        self.environ = environ or {"DOCKER_CONFIG": str(root / "none"), "PATH": os.environ["PATH"]}
        self.events: list[BuildEvent] = []

    def build(
        self, name: str, source: BuildSource, settings: RegistrySettings = DEFAULT_SETTINGS, **more: Any
    ) -> EnvironmentInfo:
        importer = Importer(self.store.state, settings, self.environ)
        request = BuildRequest(name=name, source=source, **more)
        return build_now(self.store, request, self.events.append, importer=importer)

    def export(self, name: str, target: Any) -> ExportedImage:
        request = ExportRequest(name=name, target=target)
        return export_now(
            self.store, request, self.events.append, settings=DEFAULT_SETTINGS, environ=self.environ, data={}
        )

    def said(self, stage: str) -> list[str]:
        return [event.message for event in self.events if event.stage == stage]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with registry(tmp_path_factory.mktemp("registry")) as found:
        yield found


def layout_of(root: Path, *layers: bytes, **more: Any) -> Path:
    layout = Layout(root)
    layout.image(list(layers), name="one", run=RUN, **more)
    return root


def put(source: Path, host: str, name: str, *more: str) -> str:
    """By skopeo; what it is called there."""
    skopeo(
        "copy", "--insecure-policy", "--dest-tls-verify=false", *more, f"oci:{source}:one", f"docker://{host}/{name}"
    )
    return f"{host}/{name}"


# ---- pulling ---------------------------------------------------------------------------------------


def test_an_image_that_skopeo_has_pushed_is_pulled_with_all_that_it_says(
    place: Place, host: str, tmp_path: Path
) -> None:
    layout = layout_of(tmp_path / "l", gzipped(BASE), ABOVE)
    image = put(layout, host, "pull/one:1")

    info = place.build("one", RegistrySource(image))

    assert (info.env, info.user, info.workdir) == ({"PATH": "/bin", "A": "b"}, "33:44", "/data")
    assert (info.entrypoint, info.command) == (("/bin/tool",), ("run", "all"))
    assert info.digest == place.build("same", OciSource(str(layout))).digest
    assert info.source == f"image {image}"


def test_layers_of_every_compression_are_pulled(place: Place, host: str, tmp_path: Path) -> None:
    plain = place.build("plain", OciSource(str(layout_of(tmp_path / "l", BASE, ABOVE))))
    digests = set()
    for number, pack in enumerate((bytes, gzip.compress, zstandard.compress)):
        layout = layout_of(tmp_path / f"l{number}", pack(BASE), pack(ABOVE))
        with Front() as front:
            blobs = {path.name: path.read_bytes() for path in (layout / "blobs/sha256").iterdir()}
            for name, data in blobs.items():
                for kind in ("blobs", "manifests"):
                    front.content[f"/v2/x/{kind}/sha256:{name}"] = ("application/octet-stream", data)
            manifest = json.loads((layout / "index.json").read_text())["manifests"][0]
            front.content["/v2/x/manifests/1"] = (
                manifest["mediaType"],
                blobs[manifest["digest"].removeprefix("sha256:")],
            )
            digests.add(place.build(f"packed{number}", RegistrySource(f"{front.host}/x:1")).digest)

    assert digests == {plain.digest}


def test_a_tag_that_has_moved_is_other_content_and_a_digest_is_not(place: Place, host: str, tmp_path: Path) -> None:
    image = put(layout_of(tmp_path / "a", gzipped(BASE)), host, "pull/moved:1")
    first = place.build("moved", RegistrySource(image))
    pinned = json.loads(skopeo("inspect", "--tls-verify=false", f"docker://{image}"))["Digest"]
    put(layout_of(tmp_path / "b", gzipped(ABOVE)), host, "pull/moved:1")

    with pytest.raises(DsecError, match="exists"):
        place.build("moved", RegistrySource(image))
    assert place.build("moved", RegistrySource(image), replace=True).digest != first.digest
    assert place.build("pinned", RegistrySource(f"{host}/pull/moved@{pinned}")).digest == first.digest


async def test_a_pull_that_is_killed_leaves_nothing_but_what_the_next_goes_on_with(
    place: Place, tmp_path: Path
) -> None:
    large = tar_of([member("large", os.urandom(3 << 20))])
    with Front() as front:
        front.put_image("one", [large])
        digest = hashlib.sha256(large).hexdigest()
        front.faults = [Fault(digest, cut=2 << 20, hang=True)]
        request = BuildRequest(name="one", source=RegistrySource(f"{front.host}/one:1"))
        partial = place.store.state / "oci" / "partial" / f"sha256-{digest}"
        task = asyncio.create_task(build(place.store, request))

        await eventually(lambda: partial.exists() and partial.stat().st_size == 2 << 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        left = list((place.store.state / "staging").iterdir())
        info = await build(place.store, request)

        ranges = [headers.get("Range") for _, path, headers in front.requests if digest in path]
    assert left == []
    assert ranges == [None, f"bytes={2 << 20}-"]
    assert info.name == "one"
    assert list((place.store.state / "oci" / "partial").iterdir()) == []


def test_layers_that_are_here_are_not_fetched_even_when_their_blobs_are_gone(place: Place, tmp_path: Path) -> None:
    base, above, more = gzip.compress(BASE), gzip.compress(ABOVE), gzip.compress(tar_of([member("more", b"m")]))
    with Front() as front:
        front.put_image("one", [base, above])
        front.put_image("two", [base, above, more])
        place.build("one", RegistrySource(f"{front.host}/one:1"))
        for blob in (place.store.state / "oci/blobs/sha256").iterdir():
            blob.unlink()
        before = len(front.requests)

        two = place.build("two", RegistrySource(f"{front.host}/two:1"))

        asked = {path.rpartition(":")[2] for _, path, _ in front.requests[before:] if "/blobs/" in path}
        assert hashlib.sha256(more).hexdigest() in asked
        assert len(asked) == 2  # and the configuration
        again = place.build("two", RegistrySource(f"{front.host}/two:1"), refresh=True)
        assert (again.digest, len(two.layers)) == (two.digest, 3)


def test_on_a_host_that_cannot_stack_all_layers_are_fetched_for_one(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*_: object) -> None:
        raise CannotStackError("not here")

    with Front() as front:
        front.put_image("one", [gzip.compress(BASE)])
        front.put_image("two", [gzip.compress(BASE), gzip.compress(ABOVE)])
        place.build("one", RegistrySource(f"{front.host}/one:1"))
        shutil.rmtree(place.store.state / "oci")
        monkeypatch.setattr("dsec.image.worker.unpack_stack", cannot)

        two = place.build("two", RegistrySource(f"{front.host}/two:1"))

    assert len(two.layers) == 1


def test_the_same_image_is_built_once_wherever_it_comes_from(place: Place, host: str, tmp_path: Path) -> None:
    layout = layout_of(tmp_path / "l", gzipped(BASE))
    image = put(layout, host, "pull/same:1")
    one = place.build("one", RegistrySource(image))
    copied = tmp_path / "copied"
    skopeo("copy", "--insecure-policy", "--src-tls-verify=false", f"docker://{image}", f"oci:{copied}:one")

    assert place.build("one", OciSource(str(copied))) == one


def test_the_account_of_docker_is_used_and_is_nowhere_else(tmp_path: Path) -> None:
    with registry(tmp_path / "registry", accounts=True) as host:
        creds = f"--dest-creds={USER}:{PASSWORD}"
        image = put(layout_of(tmp_path / "l", gzipped(BASE)), host, "closed/one:1", creds)
        without = Place(tmp_path / "without")
        with pytest.raises(StorageError, match=r"without an account.*docker login"):
            without.build("one", RegistrySource(image))
        environ = {"DOCKER_CONFIG": str(write_login(tmp_path / "docker", host))}
        place = Place(tmp_path / "with", environ)

        place.build("one", RegistrySource(image))
        place.export("one", RegistryTarget(f"{host}/closed/two:1"))

        for path in (tmp_path / "with" / "state").rglob("*"):
            assert not path.is_file() or PASSWORD.encode() not in path.read_bytes()
        assert PASSWORD not in repr(place.events)


def test_a_registry_behind_tokens_that_breaks_all_the_time_is_pulled_from_and_pushed_to(
    host: str, tmp_path: Path
) -> None:
    put(layout_of(tmp_path / "l", gzipped(BASE), gzipped(ABOVE)), host, "broken/one:1")
    with Front(host, users={USER: PASSWORD}) as front:
        place = Place(tmp_path, {"DOCKER_CONFIG": str(write_login(tmp_path / "docker", front.host))})
        front.faults = [
            Fault("/manifests/", status=503, headers={"Retry-After": "0"}),
            Fault("/blobs/", cut=50, times=2),
            Fault("/blobs/", status=429, headers={"Retry-After": "0"}, times=2),
            Fault("/token", status=502),
            Fault("/blobs/", status=500, method="HEAD"),
            Fault("/uploads/", status=503, method="POST"),
            Fault("/uploads/", status=504, method="PUT", times=2),
            Fault("/manifests/", status=502, method="PUT"),
        ]

        pulled = place.build("one", RegistrySource(f"{front.host}/broken/one:1"))
        place.export("one", RegistryTarget(f"{front.host}/broken/two:1"))

        assert [fault for fault in front.faults if fault.times] == []
        assert place.build("two", RegistrySource(f"{front.host}/broken/two:1")).digest == pulled.digest
        scopes = [path for _, path, _ in front.requests if path.startswith("/token")]
        assert any("pull%2Cpush" in path for path in scopes)


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (tar_of([member("../evil", b"x")]), "leads out"),
        (tar_of([hardlink("evil", "../../../etc/passwd")]), "leads out"),
        (tar_of([hardlink("evil", "/etc/shadow")]), "not in the archive|no directory"),
        (tar_of([symlink("a", "/etc"), member("a/.wh...", b"")]), "hides a file called"),
        (tar_of([member("d/" * 300 + "x", b"x")]), "deeper than"),
        (tar_of([member("x", b"x", uid=2_000_000)]), "has no ids above"),
        (b"\x1f\x8b" + b"junk" * 100, "damaged"),
        (b"not a tar" * 1_000, "archive"),
        (gzip.compress(tar_of([member("x", b"x" * 50_000)]))[:-40], "damaged|ends"),
    ],
)
def test_a_layer_that_means_harm_is_refused_and_leaves_nothing(place: Place, layer: bytes, said: str) -> None:
    with Front() as front:
        front.put_image("evil", [gzip.compress(BASE), layer])

        with pytest.raises(InvalidArgumentError, match=said):
            place.build("evil", RegistrySource(f"{front.host}/evil:1"))

    assert place.store.names() == []
    assert list((place.store.state / "staging").iterdir()) == []


def test_links_devices_and_marks_of_a_hostile_image_stay_inside(place: Place, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("x")
    out = tar_of([
        symlink("abs", str(precious)), symlink("up", "../" * 20 + str(precious)),
        symlink("host", "/etc"), directory("etc"),
        member("dev", type=tarfile.BLKTYPE, devmajor=8, devminor=0), member("twice", b"1"), member("twice", b"2"),
    ])  # fmt: skip
    marks = tar_of([
        member("abs/.wh.file"), member("up/.wh..wh..opq"), member("host/passwd", b"mine"),
    ])  # fmt: skip
    with Front() as front:
        front.put_image("evil", [gzip.compress(out), gzip.compress(marks)])

        place.build("evil", RegistrySource(f"{front.host}/evil:1"))
        back = place.export("evil", LayoutTarget(str(tmp_path / "layout"), compression=Compression.NONE))

    assert [path.name for path in precious.iterdir()] == ["file"]
    assert Path("/etc/passwd").read_text() != "mine"
    names = set()
    for blob in (tmp_path / "layout/blobs/sha256").iterdir():
        if tarfile.is_tarfile(blob):
            with tarfile.open(blob) as archive:
                names |= set(archive.getnames())
                assert not any(member.isdev() for member in archive)
    assert "twice" in names
    assert back.size_bytes > 0


# ---- pushing and exporting ------------------------------------------------------------------------


@pytest.fixture
def built(place: Place, tmp_path: Path) -> EnvironmentInfo:
    return place.build("built", OciSource(str(layout_of(tmp_path / "source", gzipped(BASE), ABOVE))))


@pytest.mark.parametrize("compression", list(Compression))
def test_what_is_pushed_comes_back_the_same(
    place: Place, built: EnvironmentInfo, host: str, compression: Compression
) -> None:
    image = f"{host}/push/{compression}:1"

    done = place.export("built", RegistryTarget(image, compression))

    assert done.reference == f"{host}/push/{compression}@{done.digest}"
    assert place.build("back", RegistrySource(done.reference)).digest == built.digest
    told = json.loads(skopeo("inspect", "--tls-verify=false", f"docker://{image}"))
    assert (told["Digest"], told["Architecture"], told["Os"]) == (done.digest, "amd64", "linux")
    config = json.loads(skopeo("inspect", "--tls-verify=false", "--config", f"docker://{image}"))["config"]
    assert config == RUN


def test_what_is_there_is_not_sent_again_and_other_repositories_are_asked_for_it(
    place: Place, built: EnvironmentInfo, host: str
) -> None:
    first = place.export("built", RegistryTarget(f"{host}/again/one:1"))
    again = place.export("built", RegistryTarget(f"{host}/again/one:2"))
    mounted = place.export("built", RegistryTarget(f"{host}/again/two:1"))

    assert first.digest == again.digest == mounted.digest
    assert first.sent_bytes > again.sent_bytes == 0
    assert 0 < mounted.sent_bytes < 1_000  # the configuration
    assert len(place.said("pack")) == len(built.layers)


def test_a_large_layer_goes_in_pieces_and_goes_on_where_it_broke(host: str, tmp_path: Path) -> None:
    content = tmp_path / "blob"
    content.write_bytes(os.urandom(40 << 20))
    digest = f"sha256:{hashlib.sha256(content.read_bytes()).hexdigest()}"
    with Front(host) as front:
        front.faults = [
            Fault("/uploads/", status=503, method="PATCH", times=1),
            Fault("/uploads/", cut=0, method="PATCH", times=1),
        ]
        client = Registry(
            parse_image_name(f"{front.host}/large/one:1"), Accounts({"DOCKER_CONFIG": str(tmp_path)}), push=True,
            sleep=lambda _: None,
        )  # fmt: skip

        upload(client, digest, content)

        assert client.has_blob(digest)
        assert [m for m, path, _ in front.requests if m == "PATCH" and "/uploads/" in path]


def test_an_archive_is_what_other_tools_load(place: Place, built: EnvironmentInfo, tmp_path: Path) -> None:
    archive = tmp_path / "built.tar"

    place.export("built", ArchiveTarget(str(archive), "example.org/built:7"))

    need("skopeo")
    copied = tmp_path / "copied"
    skopeo("copy", "--insecure-policy", f"docker-archive:{archive}:example.org/built:7", f"oci:{copied}:one")
    assert place.build("copied", OciSource(str(copied))).digest == built.digest
    assert place.build("own", DockerArchiveSource(str(archive))).digest == built.digest
    with tarfile.open(archive) as opened:
        assert sorted(opened.getnames())[-3:] == ["index.json", "manifest.json", "oci-layout"]


def test_a_layout_takes_several_images(place: Place, built: EnvironmentInfo, tmp_path: Path) -> None:
    other = place.build("other", OciSource(str(layout_of(tmp_path / "o", gzipped(ABOVE)))))
    layout = str(tmp_path / "layout")
    for name in ("built", "other", "built"):
        place.export(name, LayoutTarget(layout, compression=Compression.ZSTD))

    assert len(json.loads((tmp_path / "layout/index.json").read_text())["manifests"]) == 2
    assert place.build("one", OciSource(layout, "built")).digest == built.digest
    assert place.build("two", OciSource(layout, "other")).digest == other.digest


@pytest.mark.parametrize("path", ["missing/directory/image.tar", "file/image.tar"])
def test_a_place_that_cannot_be_written_is_named(
    place: Place, built: EnvironmentInfo, tmp_path: Path, path: str
) -> None:
    (tmp_path / "file").write_text("x")

    with pytest.raises(DsecError, match="cannot write the image"):
        place.export("built", ArchiveTarget(str(tmp_path / path)))


def test_a_directory_with_other_things_is_left_alone(place: Place, built: EnvironmentInfo, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter").write_text("x")

    with pytest.raises(DsecError, match="neither empty nor an image layout"):
        place.export("built", LayoutTarget(str(tmp_path / "home")))

    assert [path.name for path in (tmp_path / "home").iterdir()] == ["letter"]


# ---- archives that others have made ---------------------------------------------------------------


@pytest.mark.parametrize("kind", ["docker-archive", "oci-archive"])
def test_archives_of_other_tools_are_taken(place: Place, built: EnvironmentInfo, tmp_path: Path, kind: str) -> None:
    need("skopeo")
    archive = tmp_path / "image.tar"
    skopeo("copy", "--insecure-policy", f"oci:{tmp_path / 'source'}:one", f"{kind}:{archive}:tools:one")

    assert place.build("taken", DockerArchiveSource(str(archive))).digest == built.digest
    with gzip.open(tmp_path / "image.tar.gz", "wb", 1) as packed:
        packed.write(archive.read_bytes())
    assert place.build("packed", DockerArchiveSource(str(tmp_path / "image.tar.gz"))).digest == built.digest


# ---- buildah --------------------------------------------------------------------------------------


def test_a_dockerfile_is_built_by_buildah(place: Place, host: str, tmp_path: Path) -> None:
    need("buildah")
    image = put(layout_of(tmp_path / "l", gzipped(BASE)), host, "from/one:1")
    context = tmp_path / "context"
    context.mkdir()
    (context / "added").write_text("added")
    (context / "Dockerfile").write_text(
        f'FROM {image} AS first\nARG WHO=nobody\nCOPY added /added\nENV WHO=$WHO\nUSER 7\nENTRYPOINT ["/x"]\nCMD []\n'
        "FROM first\nENV NEVER=1\n"
    )
    settings = RegistrySettings(insecure=(host,))
    source = DockerfileSource(str(context), target="first", arguments={"WHO": "me"}, owner=Ownership.SQUASH)

    info = place.build("made", source, settings)

    assert (info.env["WHO"], info.user, info.entrypoint, "NEVER" in info.env) == ("me", "7", ("/x",), False)
    assert place.build("made", source, settings) == info
    assert info.layers[0] == place.build("base", RegistrySource(image)).layers[0]
    assert list((place.store.state / "staging").iterdir()) == []


def test_a_dockerfile_that_fails_says_why_and_leaves_nothing(place: Place, tmp_path: Path) -> None:
    need("buildah")
    (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY nowhere /\n")

    with pytest.raises(DsecError, match=r"buildah failed.*nowhere"):
        place.build("made", DockerfileSource(str(tmp_path)))

    assert list((place.store.state / "staging").iterdir()) == []


def test_without_buildah_it_is_said(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Dockerfile").write_text("FROM scratch\n")
    monkeypatch.setattr("dsec.image.sources.dockerfile.buildah_program", lambda: None)

    with pytest.raises(DsecError, match=r"buildah is not installed \(apt install buildah"):
        place.build("made", DockerfileSource(str(tmp_path)))
