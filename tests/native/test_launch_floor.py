"""dsec-floor measures what it says, and leaves nothing."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.native import launch_wire as wire

pytestmark = [pytest.mark.root]


def test_the_floor_is_measured_and_nothing_is_left(native_binaries: dict[str, Path], tmp_path: Path) -> None:
    image = wire.make_image(tmp_path / "image")
    (tmp_path / "state").mkdir()
    command = [native_binaries["dsec-launch"].with_name("dsec-floor"), "--rootfs", image, "--state", tmp_path / "state"]

    done = subprocess.run([*command, "-n", "5"], capture_output=True, text=True, check=True, timeout=60)

    measured = json.loads(done.stdout)
    assert {len(times) for times in measured.values()} == {5}
    assert min(measured["create_us"]) > 100
    assert list((tmp_path / "state").iterdir()) == []
    assert list(Path("/sys/fs/cgroup").glob("*/dsec-floor-*")) == []
