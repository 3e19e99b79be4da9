"""Volumes and datasets give what was given, and no way further."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsec.core.spec import VolumeMount
from dsec.storage.quota.choose import find_mechanism
from tests.security import volume_attempts
from tests.system.container_place import private_place, served

pytestmark = pytest.mark.root
ATTEMPTS_MIN = 35


async def test_root_inside_gets_no_more_of_a_volume_than_was_given(small_store: Path, tmp_path: Path) -> None:
    dataset = tmp_path / "dataset"
    dataset.mkdir()
    (dataset / "one.txt").write_text("first\n")
    with private_place(small_store, settings={"node": {"datasets": {"set": str(dataset)}}}) as place:
        size = None if find_mechanism(place.state).mechanism is None else "32MiB"
        async with served(place) as (_, client):
            await client.volumes.create("volume")
            await client.volumes.create("image", size=size)
            mounts = ["volume:/v/volume", "image:/v/image", VolumeMount("set", "/v/set", dataset=True)]
            for gain in (False, True):
                sandbox = await client.create(
                    "small", memory="256MiB", pids=64, volumes=mounts, privilege_gain=gain, timeout_s=60
                )
                try:
                    await sandbox.upload(volume_attempts.__file__, "/attempts.py")
                    command = ["python3", "/attempts.py", "/v/volume", "/v/image", "/v/set"]
                    result = await sandbox.exec(command, timeout_s=60)
                finally:
                    await sandbox.destroy()

                assert result.exit_code == 0, result.stderr
                verdicts: dict[str, str] = json.loads(result.stdout)
                reached = {name: said for name, said in verdicts.items() if not said.startswith("refused: ")}
                assert reached == {}
                assert len(verdicts) >= ATTEMPTS_MIN
            assert sorted(path.name for path in dataset.iterdir()) == ["one.txt"]
            assert (dataset / "one.txt").read_text() == "first\n"
            for name in ("volume", "image"):
                await client.volumes.remove(name)
