"""What `dsec down --destroy` leaves in a run directory: locks, and what a log says."""

from __future__ import annotations

import fcntl
from pathlib import Path

from dsec.serve.lock import RunLock
from dsec.serve.retire import tidy


def filled(run: Path) -> None:
    for name in ("launch", "loader", "egress"):
        for kind in ("sock", "pid", "lock", "log"):
            (run / f"{name}.{kind}").touch()
    (run / "egress.log").write_text("it said something\n")
    for directory in ("sb", "layers", "launch.mnt"):
        (run / directory).mkdir()
    (run / "layers" / "pinned").touch()


def names(run: Path) -> set[str]:
    return {path.name for path in run.iterdir()}


def test_sockets_pids_empty_logs_and_directories_go(tmp_path: Path) -> None:
    filled(tmp_path)

    tidy(tmp_path)
    tidy(tmp_path)  # again is fine

    locks = {"launch.lock", "loader.lock", "egress.lock", "dsec.pid"}
    assert names(tmp_path) == {*locks, "egress.log", "layers"}
    assert (tmp_path / "layers" / "pinned").exists()


def test_what_somebody_holds_stays(tmp_path: Path) -> None:
    filled(tmp_path)
    with (tmp_path / "egress.lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        tidy(tmp_path)
    assert {"egress.sock", "egress.pid"} <= names(tmp_path)
    assert "launch.sock" not in names(tmp_path)


def test_beside_the_next_service_nothing_is_touched(tmp_path: Path) -> None:
    filled(tmp_path)
    held = RunLock.acquire(tmp_path)
    before = names(tmp_path)

    tidy(tmp_path)

    assert names(tmp_path) == before
    held.release()
