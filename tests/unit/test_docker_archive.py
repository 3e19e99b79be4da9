"""Archives with images, of `docker save` of every age and of people who mean harm."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from dsec.core import limits
from dsec.core.errors import DsecError, InvalidArgumentError, LimitError
from dsec.image.sources import docker_archive, oci
from dsec.image.stage import Stage
from dsec.wire.environments import DockerArchiveSource
from tests.images import Layout, directory, gzipped, hardlink, listing, member, symlink, tar_of

CONFIG = json.dumps({"os": "linux", "architecture": "amd64", "config": {"Env": ["A=b"]}}).encode()
LOWER = tar_of([member("a", b"1"), member("b", b"2")])
UPPER = tar_of([member(".wh.a"), member("c", b"3")])


def saved(*images: dict[str, Any]) -> tuple[Any, bytes]:
    return member("manifest.json", json.dumps(list(images)).encode())


def one(*layers: str, config: str = "config.json", tags: list[str] | None = None) -> dict[str, Any]:
    return {"Config": config, "RepoTags": tags, "Layers": list(layers)}


def filled(tmp_path: Path, members: list[tuple[Any, bytes]], reference: str | None = None) -> dict[str, str]:
    """What is in the image that the archive makes."""
    return filled_of(tmp_path, tar_of(members), reference)


def filled_of(tmp_path: Path, data: bytes, reference: str | None = None) -> dict[str, str]:
    archive = tmp_path / "image.tar"
    archive.write_bytes(data)
    layout = tmp_path / "layout"
    layout.mkdir()
    source = docker_archive.to_layout(DockerArchiveSource(str(archive), reference), layout)
    with Stage(tmp_path / "tree") as stage:
        config = oci.fill(source, stage)
        stage.finish()
    assert config.env == {"A": "b"}
    return listing(tmp_path / "tree")


ORDINARY = [member("config.json", CONFIG), member("one/layer.tar", LOWER), member("two/layer.tar", UPPER)]


def test_an_archive_of_an_old_docker_is_taken(tmp_path: Path) -> None:
    found = filled(tmp_path, [*ORDINARY, saved(one("one/layer.tar", "two/layer.tar"))])

    assert found == {"b": "2", "c": "3"}


def test_the_list_may_come_first_and_the_archive_may_be_packed(tmp_path: Path) -> None:
    found = filled_of(tmp_path, gzipped(tar_of([saved(one("one/layer.tar")), *ORDINARY])))

    assert found == {"a": "1", "b": "2"}


@pytest.mark.parametrize(
    "link", [symlink("again/layer.tar", "../one/layer.tar"), hardlink("again/layer.tar", "one/layer.tar")]
)
def test_a_layer_may_be_a_link_to_another(tmp_path: Path, link: tuple[Any, bytes]) -> None:
    found = filled(tmp_path, [*ORDINARY, link, saved(one("again/layer.tar", "two/layer.tar", "again/layer.tar"))])

    assert found == {"a": "1", "b": "2", "c": "3"}


@pytest.mark.parametrize("name", ["tools:1", "docker.io/library/tools:1"])
def test_one_of_several_images_is_named(tmp_path: Path, name: str) -> None:
    images = [one("one/layer.tar", tags=["tools:1", "tools:old"]), one("two/layer.tar", tags=["other:1"])]

    assert filled(tmp_path, [*ORDINARY, saved(*images)], name) == {"a": "1", "b": "2"}


def test_several_images_without_a_name_are_refused_with_their_names(tmp_path: Path) -> None:
    images = [one("one/layer.tar", tags=["tools:1"]), one("two/layer.tar", tags=["other:1"])]

    with pytest.raises(InvalidArgumentError, match=r"2 images.*other:1, tools:1"):
        filled(tmp_path, [*ORDINARY, saved(*images)])


def test_a_name_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"no image 'tools:2'.*tools:1"):
        filled(tmp_path, [*ORDINARY, saved(one("one/layer.tar", tags=["tools:1"]))], "tools:2")


def test_the_key_names_content_and_image(tmp_path: Path) -> None:
    archive = tmp_path / "image.tar"
    archive.write_bytes(tar_of(ORDINARY))
    keys = {docker_archive.build_key(DockerArchiveSource(str(archive), name)) for name in (None, "a", "b")}
    archive.write_bytes(tar_of(ORDINARY[:2]))
    keys.add(docker_archive.build_key(DockerArchiveSource(str(archive))))

    assert len(keys) == 4


# ---- harm -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layers",
    [
        ["missing.tar"], ["../../etc/passwd"], ["/etc/passwd"], [""], ["."], ["loop1"], ["self"], ["out"],
        ["config.json/x"], ["one"],
    ],
)  # fmt: skip
def test_a_layer_that_is_not_in_the_archive_is_refused(tmp_path: Path, layers: list[str]) -> None:
    links = [
        symlink("loop1", "loop2"), symlink("loop2", "loop1"), symlink("self", "self"),
        symlink("out", "../../../../etc/passwd"), directory("one"),
    ]  # fmt: skip

    with pytest.raises(InvalidArgumentError):
        filled(tmp_path, [*ORDINARY, *links, saved(one(*layers))])


@pytest.mark.parametrize("name", ["../evil", "a/../../evil"])
def test_names_that_lead_out_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="leads out"):
        filled(tmp_path, [*ORDINARY, member(name, b"x"), saved(one("one/layer.tar"))])

    assert not (tmp_path / "evil").exists()


def test_devices_and_other_things_in_the_archive_are_passed_over(tmp_path: Path) -> None:
    others = [member("dev", type=tarfile.CHRTYPE), member("fifo", type=tarfile.FIFOTYPE), directory("dir")]

    assert filled(tmp_path, [*others, *ORDINARY, saved(one("one/layer.tar"))]) == {"a": "1", "b": "2"}


def test_of_two_members_of_one_name_the_last_counts(tmp_path: Path) -> None:
    found = filled(tmp_path, [*ORDINARY, member("one/layer.tar", UPPER), saved(one("one/layer.tar"))])

    assert found == {"c": "3"}


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"{}", b"null", b'[{"Config": 5}]', b'[{"Config": "x", "Layers": "y"}]', b"[" * 100_000,
     b"\xff\xfe"],
)  # fmt: skip
def test_a_list_that_is_none_is_refused(tmp_path: Path, text: bytes) -> None:
    with pytest.raises(InvalidArgumentError):
        filled(tmp_path, [*ORDINARY, member("manifest.json", text)])


def test_lists_and_archives_without_end_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LimitError, match="10000 layers"):
        filled(tmp_path, [*ORDINARY, saved(one(*["one/layer.tar"] * 10_000))])
    (tmp_path / "many").mkdir()
    with pytest.raises(LimitError, match="files"):
        filled(tmp_path / "many", [member(f"f{number}") for number in range(16 * limits.IMAGE_LAYERS_MAX + 1)])
    (tmp_path / "long").mkdir()
    with pytest.raises(LimitError, match="more than"):
        filled(tmp_path / "long", [member("manifest.json", b" " * (limits.IMAGE_MANIFEST_BYTES_MAX + 1))])
    (tmp_path / "config").mkdir()
    large = member("config.json", b" " * (limits.IMAGE_MANIFEST_BYTES_MAX + 1))
    with pytest.raises(LimitError):
        filled(tmp_path / "config", [large, *ORDINARY[1:], saved(one("one/layer.tar"))])
    (tmp_path / "much").mkdir()
    monkeypatch.setattr(limits, "IMAGE_BYTES_MAX", 1_000)
    with pytest.raises(LimitError):
        filled(tmp_path / "much", [*ORDINARY, saved(one("one/layer.tar"))])


@pytest.mark.parametrize("data", [b"", b"x" * 5_000, b"\0" * 10_240, b"\x1f\x8b", gzipped(b"nothing")])
def test_what_is_no_archive_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(InvalidArgumentError):
        filled_of(tmp_path, data)


def test_an_archive_that_ends_early_is_refused(tmp_path: Path) -> None:
    whole = tar_of([saved(one("one/layer.tar")), *ORDINARY])

    with pytest.raises(DsecError):
        filled_of(tmp_path, whole[: len(whole) // 2])


def archive_of(layout: Layout) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for path in sorted(layout.root.rglob("*")):
            archive.add(path, path.relative_to(layout.root), recursive=False)
    return out.getvalue()


def test_a_layout_in_an_archive_is_taken_and_its_blobs_are_checked(tmp_path: Path) -> None:
    layout = Layout(tmp_path / "made")
    layout.image([gzipped(LOWER), UPPER], run={"Env": ["A=b"]}, name="one")
    (tmp_path / "good").mkdir()
    assert filled_of(tmp_path / "good", archive_of(layout), "one") == {"b": "2", "c": "3"}

    blob = layout.root / "blobs/sha256" / hashlib.sha256(UPPER).hexdigest()
    blob.write_bytes(UPPER[:-1] + b"x")
    (tmp_path / "bad").mkdir()
    with pytest.raises(InvalidArgumentError, match="damaged"):
        filled_of(tmp_path / "bad", archive_of(layout), "one")


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in ("fifo", "missing", "."):
        with pytest.raises(InvalidArgumentError):
            docker_archive.build_key(DockerArchiveSource(str(tmp_path / path)))
