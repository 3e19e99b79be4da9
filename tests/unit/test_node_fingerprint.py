"""`dsec doctor` tells of what a machine lacks how much it is needed: what works without is not called needed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsec.core.errors import HostError
from dsec.node import fingerprint as fingerprint_module
from dsec.node.config import NodeConfig
from dsec.node.fingerprint import block_devices, core_dumps, fingerprint, hierarchies, stores


def test_without_root_it_says_so_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1_000)

    found = {finding.what: finding for finding in fingerprint(NodeConfig(state_dir=tmp_path, run_dir=tmp_path))}

    assert (found["root"].status, found["root"].need) == ("missing", "needed")
    assert found["root"].hint == "run the service as root: sudo dsec up --detach"
    assert "no container can be made" in (found["root"].cost or "")


def test_each_kind_of_cgroups_is_told_by_what_it_lacks(tmp_path: Path) -> None:
    for name in ("cpu", "memory", "pids", "freezer"):
        (tmp_path / name).mkdir()
    only = hierarchies(tmp_path)
    (tmp_path / "unified").mkdir()
    (tmp_path / "unified/cgroup.procs").touch()
    hybrid = hierarchies(tmp_path)
    (tmp_path / "cgroup.controllers").write_text("cpu pids\n")
    without_memory = hierarchies(tmp_path)
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids\n")

    # Containers run on version 1 alone: tests/system/test_v2_guest.py.
    assert (only.status, only.detail) == ("degraded", "v1 only: cpu freezer memory pids")
    assert "cannot be paused" in (only.cost or "")
    assert "mount -t cgroup2" in (only.hint or "")
    assert hybrid.status == "ok"
    assert (without_memory.status, without_memory.detail) == ("degraded", "v2 without memory")
    assert hierarchies(tmp_path).status == "ok"


def test_the_mode_for_debugging_of_core_dumps_is_told(tmp_path: Path) -> None:
    mode = tmp_path / "suid_dumpable"
    found = {}
    for value in ("0", "1", "2"):
        mode.write_text(f"{value}\n")
        found[value] = core_dumps(mode)

    assert [found[value].status for value in ("0", "1", "2")] == ["ok", "degraded", "ok"]
    assert "suid_dumpable=2" in (found["1"].hint or "")


def test_stores_need_fuse_and_the_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(name: str) -> Path:
        raise HostError(f"{name} is nowhere", hint="tools/setup")

    monkeypatch.setattr(fingerprint_module, "find_binary", lambda name: tmp_path / name)
    (tmp_path / "fuse").touch()
    # The loader is no program, so there is no fanotify.
    assert stores(tmp_path / "fuse").detail.endswith("by FUSE")
    assert stores(tmp_path / "none").hint == "modprobe fuse"
    with monkeypatch.context() as patch:
        patch.setattr(fingerprint_module, "has_pre_content_events", lambda *_: True)
        assert (stores(tmp_path / "fuse").status, stores(tmp_path / "none").status) == ("ok", "degraded")
        assert "zeros" in (stores(tmp_path / "none").cost or "")
    monkeypatch.setattr(fingerprint_module, "find_binary", nowhere)
    assert stores(tmp_path / "fuse").detail == "dsec-loader is nowhere"


def test_block_devices_need_a_driver_and_the_reason_is_what_the_loader_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere(name: str) -> Path:
        raise HostError(f"{name} is nowhere", hint="tools/setup")

    def says(line: str) -> None:
        program = tmp_path / "dsec-loader"
        program.write_text(f'#!/bin/sh\n[ "$*" = --probe-blocks ] || exit 9\n{line}\n')
        program.chmod(0o755)

    monkeypatch.setattr(fingerprint_module, "find_binary", lambda name: tmp_path / name)
    says("exit 0")
    assert block_devices().status == "ok"
    says("echo dsec-loader: there is no driver >&2; exit 1")
    assert (block_devices().status, block_devices().detail) == ("missing", "there is no driver")
    assert "modprobe ublk_drv" in (block_devices().hint or "")
    says("exit 1")
    assert block_devices().detail == "the loader does not say"
    monkeypatch.setattr(fingerprint_module, "find_binary", nowhere)
    assert block_devices().detail == "dsec-loader is nowhere"
