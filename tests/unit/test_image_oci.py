"""OCI image layouts: layers over each other, whiteouts, choice of the image, digests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import zstandard

from dsec.core.errors import DsecError, InvalidArgumentError, LimitError, UnsupportedError
from dsec.image.records import ImageConfig
from dsec.image.sources import oci
from dsec.image.stage import Stage
from dsec.wire.environments import OciSource
from tests.images import Layout, directory, gzipped, hardlink, listing, member, symlink, tar_of

BASE = tar_of([
    directory("dir"), member("dir/old", b"1"), member("dir/kept", b"2"), directory("dir/sub"),
    member("dir/sub/x", b"3"), member("top", b"4"), symlink("link", "dir"),
])  # fmt: skip


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "layout")


def filled(layout: Layout, tmp_path: Path, reference: str | None = None) -> tuple[dict[str, str], ImageConfig]:
    with Stage(tmp_path / "tree") as stage:
        config = oci.fill(OciSource(str(layout.root), reference), stage)
        stage.finish()
    return listing(tmp_path / "tree"), config


def test_later_layers_cover_earlier_ones(layout: Layout, tmp_path: Path) -> None:
    layout.image([gzipped(BASE), zstandard.compress(tar_of([member("top", b"new"), member("more/file", b"5")]))])

    found, _ = filled(layout, tmp_path)

    assert found == {
        "dir": "/", "dir/old": "1", "dir/kept": "2", "dir/sub": "/", "dir/sub/x": "3", "top": "new", "link": "-> dir",
        "more": "/", "more/file": "5",
    }  # fmt: skip


def test_a_whiteout_hides_a_file_or_a_whole_directory(layout: Layout, tmp_path: Path) -> None:
    layout.image(
        [BASE, tar_of([member("dir/.wh.old"), member("dir/.wh.sub"), member(".wh.link"), member(".wh.missing")])]
    )

    assert filled(layout, tmp_path)[0] == {"dir": "/", "dir/kept": "2", "top": "4"}


@pytest.mark.parametrize("first", [True, False], ids=["mark-first", "mark-last"])
def test_an_opaque_directory_hides_what_lies_below_but_not_its_own_files(
    layout: Layout, tmp_path: Path, first: bool
) -> None:
    mark, own = [member("dir/.wh..wh..opq")], [member("dir/new", b"9"), member("dir/sub/y", b"8")]
    layout.image([BASE, tar_of(mark + own if first else own + mark)])

    assert filled(layout, tmp_path)[0] == {
        "dir": "/", "dir/new": "9", "dir/sub": "/", "dir/sub/y": "8", "top": "4", "link": "-> dir",
    }  # fmt: skip


def test_a_whiteout_and_a_file_of_the_same_name_leave_the_file(layout: Layout, tmp_path: Path) -> None:
    layout.image([BASE, tar_of([member("top", b"again"), member(".wh.top")])])

    assert filled(layout, tmp_path)[0]["top"] == "again"


def test_the_whole_tree_may_be_hidden(layout: Layout, tmp_path: Path) -> None:
    layout.image([BASE, tar_of([member(".wh..wh..opq"), member("only", b"1")])])

    assert filled(layout, tmp_path)[0] == {"only": "1"}


def test_whiteouts_of_the_first_layer_hide_nothing(layout: Layout, tmp_path: Path) -> None:
    layout.image([tar_of([member("a", b"1"), member(".wh.a"), member(".wh..wh..opq")])])

    assert filled(layout, tmp_path)[0] == {"a": "1"}


@pytest.mark.parametrize("name", [".wh...", ".wh..", ".wh.", "link/../../.wh.evil"])
def test_whiteouts_that_lead_out_are_refused(layout: Layout, tmp_path: Path, name: str) -> None:
    layout.image([BASE, tar_of([member(name)])])

    with pytest.raises(InvalidArgumentError):
        filled(layout, tmp_path)


def test_whiteouts_through_links_stay_inside(layout: Layout, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("x")
    out = [symlink("out", str(precious)), symlink("up", "../../../../../../../.." + str(precious))]
    layout.image([tar_of(out), tar_of([member("out/.wh.file"), member("up/.wh..wh..opq"), member("out/.wh..wh..opq")])])

    filled(layout, tmp_path)

    assert (precious / "file").read_text() == "x"


def test_hard_links_reach_into_lower_layers(layout: Layout, tmp_path: Path) -> None:
    layout.image([BASE, tar_of([hardlink("same", "dir/old")])])

    assert filled(layout, tmp_path)[0]["same"] == "1"
    assert (tmp_path / "tree/same").stat().st_nlink == 2


def test_the_configuration_of_the_image_is_kept(layout: Layout, tmp_path: Path) -> None:
    run = {
        "Env": ["PATH=/bin", "EMPTY=", "EQUALS=a=b", "broken", "=x"],
        "User": "web:www",
        "WorkingDir": "/srv",
        "Entrypoint": ["/run"],
        "Cmd": ["serve", "--all"],
        "Labels": {"ignored": "yes"},
    }
    layout.image([BASE], run=run)

    assert filled(layout, tmp_path)[1] == ImageConfig(
        env={"PATH": "/bin", "EMPTY": "", "EQUALS": "a=b"},
        user="web:www",
        workdir="/srv",
        entrypoint=("/run",),
        command=("serve", "--all"),
    )


@pytest.mark.parametrize(
    "run",
    [
        {"Env": ["A=\0"]},
        {"Env": [f"V{number}=x" for number in range(10_000)]},
        {"User": "u" * 300},
        {"WorkingDir": "/" + "w" * 5_000},
        {"Cmd": ["x" * 600_000]},
        {"Entrypoint": ["a\0b"]},
    ],
)
def test_a_configuration_that_no_sandbox_can_start_with_is_refused(
    layout: Layout, tmp_path: Path, run: dict[str, Any]
) -> None:
    layout.image([BASE], run=run)

    with pytest.raises(InvalidArgumentError):
        filled(layout, tmp_path)


def test_one_of_several_images_is_chosen_by_its_reference(layout: Layout, tmp_path: Path) -> None:
    layout.image([tar_of([member("one")])], name="one")
    layout.image([tar_of([member("two")])], name="two")

    with pytest.raises(InvalidArgumentError, match="several") as error:
        filled(layout, tmp_path)
    assert "one, two" in (error.value.hint or "")
    with pytest.raises(InvalidArgumentError, match="no image"):
        filled(layout, tmp_path, "three")
    assert filled(layout, tmp_path, "two")[0] == {"two": ""}


def test_an_index_for_several_machines_gives_the_one_for_ours(layout: Layout, tmp_path: Path) -> None:
    inner = [
        layout.image([tar_of([member("arm")])], architecture="arm64", listed=False),
        layout.image([tar_of([member("amd")])], listed=False),
    ]
    index = layout.json_blob({"manifests": inner}, "application/vnd.oci.image.index.v1+json")
    layout.manifests = [{**index, "annotations": {"org.opencontainers.image.ref.name": "latest"}}]
    layout.write_index()

    assert filled(layout, tmp_path, "latest")[0] == {"amd": ""}


def test_an_image_for_another_machine_is_refused(layout: Layout, tmp_path: Path) -> None:
    layout.image([BASE], architecture="arm64")

    with pytest.raises(UnsupportedError, match="amd64"):
        filled(layout, tmp_path)


@pytest.mark.parametrize("damage", [lambda data: data + b"x", lambda data: data[:-1], lambda data: b"\0" + data[1:]])
@pytest.mark.parametrize("which", ["first layer", "second layer", "manifest"])
def test_a_damaged_blob_is_refused(layout: Layout, tmp_path: Path, which: str, damage) -> None:  # type: ignore[no-untyped-def]
    layers = [BASE, tar_of([member("more", os.urandom(100))])]
    manifest = layout.image(layers)
    blobs = {
        "manifest": manifest,
        **dict(zip(("first layer", "second layer"), (layout.blob(x, "") for x in layers), strict=True)),
    }
    path = layout.blob_path(blobs[which])
    path.write_bytes(damage(path.read_bytes()))

    with pytest.raises(InvalidArgumentError):
        filled(layout, tmp_path)


@pytest.mark.parametrize(
    "digest", ["sha256:../../../etc/passwd", "sha256:" + "a" * 63, "md5:" + "a" * 32, "", "sha256:" + "a" * 128]
)
def test_digests_never_become_other_paths(layout: Layout, tmp_path: Path, digest: str) -> None:
    manifest = layout.image([BASE])
    manifest["digest"] = digest
    layout.write_index()

    with pytest.raises(InvalidArgumentError):
        filled(layout, tmp_path)


def test_a_blob_that_is_a_link_out_of_the_layout_is_refused(layout: Layout, tmp_path: Path) -> None:
    path = layout.blob_path(layout.image([BASE]))
    path.rename(tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")

    with pytest.raises(InvalidArgumentError, match="readable"):
        filled(layout, tmp_path)


def test_too_many_layers_and_too_large_manifests_are_refused(layout: Layout, tmp_path: Path) -> None:
    layout.image([BASE] * 200)
    with pytest.raises(LimitError, match="layers"):
        filled(layout, tmp_path)

    layout.manifests[0]["size"] = 1 << 40
    layout.write_index()
    with pytest.raises(LimitError, match="manifest"):
        filled(layout, tmp_path)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"manifests": 7}', '{"manifests": []}', "{" * 100_000])
def test_an_index_that_is_none_is_a_typed_error(layout: Layout, tmp_path: Path, text: str) -> None:
    (layout.root / "index.json").write_text(text)

    with pytest.raises(DsecError):
        filled(layout, tmp_path)


def test_a_directory_that_is_no_layout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="oci-layout"):
        oci.build_key(OciSource(str(tmp_path)))
    with pytest.raises(InvalidArgumentError, match="cannot open"):
        oci.build_key(OciSource(str(tmp_path / "missing")))


def test_indexes_that_hold_each_other_end(layout: Layout, tmp_path: Path) -> None:
    inner = layout.image([BASE], listed=False)
    for _ in range(10):
        inner = layout.json_blob({"manifests": [inner]}, "application/vnd.oci.image.index.v1+json")
    layout.manifests = [inner]
    layout.write_index()

    with pytest.raises(LimitError):
        filled(layout, tmp_path)
