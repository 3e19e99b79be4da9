"""Descriptions of devices (CDI) as tools write them, and who has which device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsec.backends.base import DeviceNode
from dsec.backends.fncall.config import DeviceMode
from dsec.core.errors import CapacityError, DsecError, InvalidArgumentError, UnsupportedError
from dsec.node.devices import Devices

A, B = "dsec.test/card=a", "dsec.test/card=b"
YAML = """
cdiVersion: "0.5.0"
kind: dsec.test/card
annotations: {what: ever}
containerEdits:
  env: ["CARDS=yes"]
  deviceNodes: [{path: /dev/cards/control, hostPath: /dev/zero}]
devices:
  - name: a
    containerEdits:
      deviceNodes: [{path: /dev/cards/a, hostPath: /dev/full, type: c, major: 1, minor: 7, permissions: r}]
      hooks: [{hookName: createContainer, path: /usr/bin/tool, args: [tool, chmod]}]
  - name: all
    containerEdits:
      deviceNodes: [{path: /dev/cards/a, hostPath: /dev/full}, {path: /dev/null}]
"""


def described(**edits: Any) -> bytes:
    devices = [{"name": "a", "containerEdits": edits}]
    return json.dumps({"cdiVersion": "0.6.0", "kind": "dsec.test/card", "devices": devices}).encode()


def test_a_description_says_what_a_container_gets(tmp_path: Path) -> None:
    (tmp_path / "cards.yaml").write_text(YAML)

    found = Devices([tmp_path, tmp_path / "absent"]).find([A, "dsec.test/card=all"])

    assert found.env == (("CARDS", "yes"),)
    assert set(found.nodes) == {
        DeviceNode("/dev/cards/control", 1, 5),
        DeviceNode("/dev/cards/a", 1, 7),
        DeviceNode("/dev/null", 1, 3),
    }


def test_mounts_are_read_only_and_files_or_directories_as_on_the_host(tmp_path: Path) -> None:
    (tmp_path / "real.so").write_text("x")
    (tmp_path / "link.so").symlink_to("real.so")
    mounts = [
        {"hostPath": str(tmp_path / "link.so"), "containerPath": "/usr/lib/link.so", "options": ["rw", "bind"]},
        {"hostPath": str(tmp_path), "containerPath": "/opt/x/"},
    ]
    (tmp_path / "cards.json").write_bytes(described(mounts=mounts))

    found = Devices([tmp_path]).find([A])

    assert [(m.path, m.source, m.file, m.readonly) for m in found.mounts] == [
        ("/usr/lib/link.so", str(tmp_path / "real.so"), True, True),
        ("/opt/x", str(tmp_path), False, True),
    ]
    assert found.mounts[0].inode == (tmp_path / "real.so").stat().st_ino


def test_a_later_directory_wins_and_two_in_one_do_not_agree(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for directory, name in ((first, "/dev/null"), (second, "/dev/full")):
        directory.mkdir()
        (directory / "cards.json").write_bytes(described(deviceNodes=[{"path": "/dev/x", "hostPath": name}]))

    assert Devices([first, second]).find([A]).nodes == (DeviceNode("/dev/x", 1, 7),)
    assert Devices([second, first]).find([A]).nodes == (DeviceNode("/dev/x", 1, 3),)

    (first / "others.json").write_bytes(described())
    with pytest.raises(InvalidArgumentError, match=r"others\.json"):
        Devices([first]).find([A])


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", InvalidArgumentError),
        (b"[]", InvalidArgumentError),
        (b'{"kind": 5}', InvalidArgumentError),
        (b'{"kind": "no vendor", "devices": [{"name": "a"}]}', InvalidArgumentError),
        (described(env=["no pair"]), InvalidArgumentError),
        (described(mounts=[{"hostPath": "/none/such", "containerPath": "/x"}]), UnsupportedError),
        (described(deviceNodes=[{"path": "/dev/x", "hostPath": "/none/such"}]), UnsupportedError),
        (described(deviceNodes=[{"path": "/dev/x", "hostPath": "/"}]), UnsupportedError),
        (described(deviceNodes=[{"path": "/dev/x", "hostPath": "/dev/null", "type": "b"}]), UnsupportedError),
        (described(deviceNodes=[{"path": "/dev/x", "hostPath": "/dev/null", "minor": 9}]), UnsupportedError),
        (b'{"kind": "dsec.test/card", "devices": []}', UnsupportedError),
        (b"x" * (5 << 20), InvalidArgumentError),
    ],
)
def test_what_cannot_be_given_is_an_error(tmp_path: Path, content: bytes, error: type[DsecError]) -> None:
    (tmp_path / "cards.json").write_bytes(content)

    with pytest.raises(error):
        Devices([tmp_path]).find([A])


def test_an_exclusive_device_is_taken_once_and_a_shared_one_by_many() -> None:
    devices = Devices([])

    own = devices.take([A, B], DeviceMode.EXCLUSIVE)
    other = devices.take([A, B], DeviceMode.EXCLUSIVE)
    with pytest.raises(CapacityError):
        devices.take([A, B], DeviceMode.EXCLUSIVE)
    with pytest.raises(CapacityError):
        devices.take([A], DeviceMode.SHARED)
    devices.give_back(own, DeviceMode.EXCLUSIVE)
    shared = [devices.take([A], DeviceMode.SHARED) for _ in range(3)]
    for names in shared:
        with pytest.raises(CapacityError):
            devices.take([A], DeviceMode.EXCLUSIVE)
        devices.give_back(names, DeviceMode.SHARED)

    assert {own, other} == {(A,), (B,)}
    assert devices.take([A], DeviceMode.EXCLUSIVE) == (A,)
