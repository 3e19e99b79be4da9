"""The node's end of dsec-launch, against a launcher that goes away when it should not."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from dsec.backends.container.launcher import Launcher
from dsec.core.errors import UnavailableError
from dsec.testing.waiting import eventually
from dsec.wire.codec import pack, unpack
from dsec.wire.launch import (
    LAUNCH_VERSION,
    MESSAGE_BYTES_MAX,
    LaunchOp,
    LaunchRequest,
    ListArgs,
    Listed,
    ListedSandbox,
)
from dsec.wire.node import Done


class DyingLauncher:
    """Answers hello; goes away under the first other request, and answers those of later connections."""

    def __init__(self, path: Path) -> None:
        self.seen: list[str] = []
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server.bind(str(path))
        self._server.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        for number in range(2):
            try:
                connection, _ = self._server.accept()
            except OSError:
                return  # it is being closed
            with connection:
                while message := connection.recv(MESSAGE_BYTES_MAX):
                    request = unpack(message, LaunchRequest)
                    self.seen.append(request.op)
                    if request.op != LaunchOp.HELLO and number == 0:
                        break
                    connection.send(pack({"id": request.id, "ok": _answer(request.op)}))

    def close(self) -> None:
        """The thread first: it would go on with whatever gets the descriptor's number next."""
        self._server.shutdown(socket.SHUT_RDWR)
        self._thread.join(60)
        self._server.close()


def _answer(op: str) -> dict[str, Any]:
    return {"version": LAUNCH_VERSION, "pid": 1, "agent_digest": ""} if op == LaunchOp.HELLO else {}


def launcher_of(run_dir: Path, program: Path = Path("/nonexistent")) -> Launcher:
    return Launcher(run_dir, launch_binary=program, agent_binary=program, start_s=60.0)


async def test_what_may_be_done_twice_is_asked_of_the_next_launcher(short_tmp: Path) -> None:
    dying = DyingLauncher(short_tmp / "launch.sock")
    launcher = launcher_of(short_tmp)

    await launcher.request(LaunchOp.DESTROY, {}, Done)

    assert dying.seen == ["hello", "destroy", "hello", "destroy"]
    await launcher.close()
    dying.close()


async def test_what_does_not_fit_one_answer_is_listed_in_pages(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"sbx_{number:04}" for number in range(2_000)]
    launcher, asked = launcher_of(short_tmp), []

    async def page(op: LaunchOp, args: ListArgs, answer: type[Listed]) -> Listed:
        asked.append(args.after)
        left = [name for name in names if args.after is None or name > args.after]
        layers = ["layer"] if args.after is None else []
        return Listed([ListedSandbox(name, 1, 2) for name in left[:800]], len(left) > 800, layers)

    monkeypatch.setattr(launcher, "request", page)
    listed = await launcher.listed()

    assert [one.sandbox for one in listed.sandboxes] == names
    assert (listed.layers, asked) == (["layer"], [None, "sbx_0799", "sbx_1599"])


async def test_a_launch_is_not_tried_again_behind_the_callers_back(short_tmp: Path) -> None:
    dying = DyingLauncher(short_tmp / "launch.sock")
    launcher = launcher_of(short_tmp)

    with pytest.raises(UnavailableError):
        await launcher.request(LaunchOp.LAUNCH, {}, Done)

    assert dying.seen == ["hello", "launch"]
    await launcher.close()
    dying.close()


async def test_a_run_directory_that_is_still_held_is_waited_for(short_tmp: Path) -> None:
    """What stands for dsec-launch says twice that another one holds the directory, then the socket is there."""
    program = short_tmp / "launch"
    program.write_text(
        f'#!/bin/sh\necho >> {short_tmp}/tries\n[ "$(wc -l < {short_tmp}/tries)" -lt 3 ] && exit 3\n'
        f"touch {short_tmp}/go\nwhile [ ! -S {short_tmp}/launch.sock ]; do sleep 0.01; done\n"
    )
    program.chmod(0o755)
    launcher = launcher_of(short_tmp, program)
    asking = asyncio.create_task(launcher.request(LaunchOp.LIST, {}, Done))
    await eventually(lambda: (short_tmp / "go").exists())
    served = DyingLauncher(short_tmp / "launch.sock")

    await asking

    assert (short_tmp / "tries").read_text() == "\n" * 3
    assert served.seen == ["hello", "list", "hello", "list"]
    await launcher.close()
    served.close()
