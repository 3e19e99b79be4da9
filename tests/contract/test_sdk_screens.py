"""`sandbox.screen`, `client.machines` and their commands where there are none: refused in words, by all who ask.

What they do where there are machines is tests/system/test_fullvm.py.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import dsec
from tests.contract.sdk_service import RunningService


@pytest.fixture
def sb(service: RunningService) -> Iterator[dsec.Sandbox]:
    with dsec.Client(service.url) as client, client.create("base", backend="fake", name="screenless") as found:
        yield found


@pytest.mark.parametrize(
    "use",
    [
        lambda screen: screen.screenshot(),
        lambda screen: screen.size(),
        lambda screen: screen.click(1, 2, button="right"),
        lambda screen: screen.double_click(1, 2),
        lambda screen: screen.move(1, 2),
        lambda screen: screen.drag(1, 2, 3, 4),
        lambda screen: screen.scroll(dy=-1),
        lambda screen: screen.type("x"),
        lambda screen: screen.key("enter"),
        lambda screen: screen.view(),
    ],
)
def test_a_sandbox_without_a_screen_says_so(sb: dsec.Sandbox, use: Callable[[dsec.Screen], object]) -> None:
    with pytest.raises(dsec.errors.UnsupportedError, match="no screen"):
        use(sb.screen)


@pytest.mark.parametrize(
    "use",
    [
        lambda screen: screen.click(-1, 0),
        lambda screen: screen.click(0, 0, button="fourth"),
        lambda screen: screen.type("x" * 100_000),
        lambda screen: screen.act(),
    ],
)
def test_what_is_no_action_is_told_before_anything_is_sent(
    sb: dsec.Sandbox, use: Callable[[dsec.Screen], object]
) -> None:
    with pytest.raises(dsec.errors.InvalidArgumentError):
        use(sb.screen)


def test_a_service_without_full_machines_says_so(service: RunningService, tmp_path: Path) -> None:
    (tmp_path / "disk").write_bytes(bytes(512))
    with dsec.Client(service.url) as client:
        for use in (
            lambda: client.machines.list(),
            lambda: client.machines.import_disk("x", tmp_path / "disk", format="raw"),
            lambda: client.machines.build("x"),
            lambda: client.machines.remove("x"),
        ):
            with pytest.raises(dsec.errors.UnsupportedError):
                use()
        for wrong in ({"format": "vmdk"}, {"format": "raw", "bus": "ide"}, {"format": "raw", "boot_wait_s": -1}):
            with pytest.raises((dsec.errors.InvalidArgumentError, dsec.errors.UnsupportedError)):
                client.machines.import_disk("x", tmp_path / "disk", **wrong)  # type: ignore[arg-type]


def dsec_(service: RunningService, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dsec", *arguments],
        env=service.environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("screen", "shot", "screenless", "x.png"), 125, "no screen"),
        (("screen", "key", "screenless", "ctrl+l", "enter"), 125, "no screen"),
        (("screen", "click", "screenless", "1", "x"), 2, "x"),
        (("vm", "ls"), 125, "no full machines"),
        (("vm", "import", "x", "/nowhere", "--format", "vmdk"), 2, "raw, qcow2"),
        (("vm", "build", "x"), 2, "--debian"),
    ],
)
def test_commands_tell_it_by_their_exit_status(
    service: RunningService, sb: dsec.Sandbox, arguments: tuple[str, ...], status: int, said: str
) -> None:
    done = dsec_(service, *arguments)

    assert done.returncode == status, done.stderr
    assert said in done.stderr
