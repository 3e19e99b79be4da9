"""Settings from file, environment and flags; the lock of a run directory; the log of a detached service."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsec.api.server import TcpAddress
from dsec.core.errors import ConflictError, DsecError, InvalidArgumentError
from dsec.core.limits import GIB
from dsec.core.spec import Substrate
from dsec.serve.config import load_config
from dsec.serve.lock import RunLock, holder_of

BASE = {"DSEC_RUN_DIR": "/run/x", "DSEC_STATE_DIR": "/var/x"}


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "dsec.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        'run_dir = "/run/file"\n[api]\nlisten = "127.0.0.1:1"\ngrace_s = 3\n[node]\nsubstrates = ["fake"]\n'
        'disk_free_bytes_min = "2GiB"\n[log]\nlevel = "debug"\n',
    )
    environ = {"DSEC_STATE_DIR": "/var/env", "DSEC_LISTEN": "127.0.0.1:2", "DSEC_CONFIG": str(file)}

    config = load_config({"api.listen": "127.0.0.1:3", "run_dir": None}, environ)

    assert (config.run_dir, config.state_dir) == ("/run/file", "/var/env")
    assert config.api.address() == TcpAddress("127.0.0.1", 3)
    assert (config.api.grace_s, config.log.level) == (3.0, "debug")
    node = config.node.config(state_dir=Path("/s"), run_dir=Path("/r"))
    assert (node.substrates, node.disk_free_bytes_min) == (frozenset({Substrate.FAKE}), 2 * GIB)


def test_what_variables_name_lies_where_the_caller_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, '[log]\nlevel = "debug"\n')
    monkeypatch.chdir(tmp_path)

    config = load_config({}, {"DSEC_CONFIG": "dsec.toml", "DSEC_RUN_DIR": "/run/x", "DSEC_STATE_DIR": "state"})

    assert config.state_dir == f"{tmp_path}/state"
    assert config.log.level == "debug"


def test_the_defaults_are_a_users_own_or_the_systems() -> None:
    config = load_config({}, {"HOME": "/srv/u", "XDG_RUNTIME_DIR": "/run/user/1"}, file=Path("/dev/null"))

    expected = ("/run/dsec", "/var/lib/dsec") if os.geteuid() == 0 else ("/run/user/1/dsec", "/srv/u/.local/state/dsec")
    assert (config.run_dir, config.state_dir) == expected
    assert config.api.address() is None
    assert config.node.substrates == (Substrate.CONTAINER, Substrate.MICROVM, Substrate.FULLVM)


def test_substrates_come_as_a_list_from_the_environment() -> None:
    config = load_config({}, {**BASE, "DSEC_SUBSTRATES": "container,fake"}, file=Path("/dev/null"))

    assert config.node.substrates == (Substrate.CONTAINER, Substrate.FAKE)


@pytest.mark.parametrize(
    "text",
    [
        "colour = 1",
        "[api]\ncolour = 1",
        "[node]\nsandboxes_max = 0",
        '[node]\nsubstrates = ["cloud"]',
        "[node]\nsubstrates = []",
        '[node]\ndisk_free_bytes_min = "much"',
        "[container]\ncolour = 1",
        '[container]\ndisk = "floppy"',
        '[log]\nlevel = "loud"',
        "[log]\nfile_bytes_max = 1",
        '[api]\nlisten = "nowhere"',
        '[api]\nlisten = "127.0.0.1:99999"',
        '[api]\ntls_key = "k"',
        "[api]\ngrace_s = -1",
        "api = 1",
        'run_dir = "relative"',
        'run_dir = "/' + "r" * 100 + '"',
        "not toml",
        "[node]\nsandboxes_max = true",
    ],
)
def test_what_is_unknown_or_wrong_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidArgumentError):
        load_config({"api.insecure": None}, {}, file=written(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('[log]\nlevel = "loud"', ["log.level"]),
        ('[container]\ndisk = "floppy"', ["container.disk"]),
        ("[node.idle]\nsleep_s = 3\npause_s = 50", ["node.idle.sleep_s", "node.idle.pause_s"]),
        ('[api]\nlisten = "nowhere"', []),
    ],
)
def test_what_is_wrong_is_told_with_where_it_was_set(tmp_path: Path, text: str, named: list[str]) -> None:
    file = written(tmp_path, text)

    with pytest.raises(InvalidArgumentError) as raised:
        load_config({}, BASE, file=file)

    said = raised.value.message
    assert str(file) in said
    assert all(f"{name} (from {file})" in said for name in named)


def test_a_file_that_is_named_must_be_there(tmp_path: Path) -> None:
    for flags, environ, file in (({}, BASE, tmp_path / "a"), ({}, {**BASE, "DSEC_CONFIG": str(tmp_path / "a")}, None)):
        with pytest.raises(InvalidArgumentError, match="there is no configuration"):
            load_config(flags, environ, file=file)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("localhost:80", TcpAddress("localhost", 80)),
        ("[::1]:0", TcpAddress("::1", 0)),
        ("0.0.0.0:8080", TcpAddress("0.0.0.0", 8080)),
    ],
)
def test_addresses_are_read(text: str, address: TcpAddress) -> None:
    assert load_config({"api.listen": text}, BASE, file=Path("/dev/null")).api.address() == address


# ---- the lock ------------------------------------------------------------------------------------


def test_a_run_directory_has_one_holder_who_is_named(tmp_path: Path) -> None:
    assert holder_of(tmp_path) is None
    lock = RunLock.acquire(tmp_path)

    assert holder_of(tmp_path) == os.getpid()
    with pytest.raises(ConflictError, match=f"process {os.getpid()}"):
        RunLock.acquire(tmp_path)
    lock.release()
    lock.release()
    assert holder_of(tmp_path) is None
    RunLock.acquire(tmp_path).release()


def test_a_lock_ends_with_its_holder(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib; from dsec.serve.lock import RunLock; lock = RunLock.acquire(pathlib.Path(sys.argv[1]));"
        "print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        assert holder_of(tmp_path) == process.pid
        process.kill()
        process.wait(60)

    assert holder_of(tmp_path) is None
    RunLock.acquire(tmp_path).release()


def test_a_lock_file_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "dsec.pid").symlink_to(tmp_path / "victim")

    with pytest.raises(DsecError):
        RunLock.acquire(tmp_path)

    assert (tmp_path / "victim").read_text() == "precious"


# ---- the log -------------------------------------------------------------------------------------


def test_the_log_of_a_detached_service_is_bounded_and_takes_what_python_writes(tmp_path: Path) -> None:
    program = (
        "import os, sys, pathlib; from dsec.serve.logfile import RotatingLog;"
        "log = RotatingLog(pathlib.Path(sys.argv[1]), bytes_max=10_000);"
        "[log.write(f'{number:099d}\\n') for number in range(1_000)];"
        "os.write(2, b'a crash\\n')"
    )
    path = tmp_path / "dsec.log"
    subprocess.run([sys.executable, "-c", program, str(path)], check=True, timeout=60)

    new, old = path.read_bytes(), (tmp_path / "dsec.log.1").read_bytes()
    assert sorted(item.name for item in tmp_path.iterdir()) == ["dsec.log", "dsec.log.1"]
    assert len(new) + len(old) <= 20_100
    assert new.endswith(b"0999\na crash\n")
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_sandboxes_with_a_network_reach_besides_is_set_and_checked(tmp_path: Path) -> None:
    text = '[node.egress]\nprivate = ["10.1.0.0/16", "fd00::/8"]\nresolvers = ["9.9.9.9:5353", "[fd00::2]:53", "::1"]'
    config = load_config({}, BASE, file=written(tmp_path, text))

    egress = config.node.config(state_dir=Path("/s"), run_dir=Path("/r")).egress
    assert egress.private == ("10.1.0.0/16", "fd00::/8")
    assert egress.offered
    assert config.containers()["proxied"] is True
    off = load_config({}, BASE, file=written(tmp_path, "[node.egress]\noffered = false"))
    assert off.containers()["proxied"] is False


@pytest.mark.parametrize(
    "line",
    [
        'private = ["10.1.2.3/8"]',
        'private = ["db.example"]',
        'private = ["10.0.0.0/255.0.0.0"]',  # the forwarder knows one spelling of each
        'private = ["::ffff:10.0.0.0/104"]',
        'private = ["fe80::%eth0/64"]',
        'resolvers = ["fe80::1%eth0"]',
        'resolvers = ["9.9.9.9:\uff15\uff13"]',
        'resolvers = ["dns.example"]',
        'resolvers = ["9.9.9.9:0"]',
        'resolvers = ["[fd00::2]"]',
        'resolvers = ["1.1.1.1", "1.1.1.2", "1.1.1.3", "1.1.1.4", "1.1.1.5"]',
    ],
)
def test_what_is_no_network_or_resolver_of_egress_is_refused(tmp_path: Path, line: str) -> None:
    with pytest.raises(InvalidArgumentError, match="egress"):
        load_config({}, BASE, file=written(tmp_path, f"[node.egress]\n{line}"))
