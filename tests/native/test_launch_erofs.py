"""Layers as EROFS images: mounted from files, without a loop device."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from pathlib import Path

import pytest

from dsec.wire.launch import LayerMount, LayerRef
from tests.native import launch_wire as wire
from tests.native.launch_wire import ask, destroy_args

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(shutil.which("mkfs.erofs") is None, reason="mkfs.erofs is not installed"),
]


@pytest.mark.parametrize("apart", [False, True], ids=["one file", "blob apart"])
def test_a_sandbox_on_an_erofs_layer(tmp_path: Path, apart: bool) -> None:
    image, meta, blob = wire.make_image(tmp_path / "root"), tmp_path / "meta.erofs", tmp_path / "blob"
    blob.touch()
    options = ["--chunksize=4096", f"--blobdev={blob}"] if apart else []
    subprocess.run(["mkfs.erofs", "--quiet", *options, meta, image], check=True, stdout=subprocess.DEVNULL)

    def loops() -> list[Path]:
        """Of this test: others of the machine come and go."""
        found = []
        for file in Path("/sys/block").glob("loop*/loop/backing_file"):
            with contextlib.suppress(OSError):
                if file.read_text().startswith(str(tmp_path)):
                    found.append(file)
        return found

    with wire.running_host(tmp_path / "host") as host:
        client = host.start()
        layer = LayerMount(digest="image", kind="erofs", meta=str(meta), blob=str(blob) if apart else None)
        client.call("layer_mount", layer)
        plan = host.plan()
        launched = client.launch(plan)

        assert ask(plan, "cat /answers/key; id -u; rm /answers/key; cat /answers/key").splitlines()[:2] == [
            "secret",
            "0",
        ]
        assert loops() == []
        client.destroy(destroy_args(plan, launched))
        client.wait_event(plan.sandbox)
        client.call("layer_unmount", LayerRef(digest="image"))
        assert client.list().layers == []
