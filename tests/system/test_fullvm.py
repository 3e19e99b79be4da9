"""Full machines through the whole of it: SDK, API, node, QEMU, a firmware; emulated where KVM is not."""

from __future__ import annotations

import asyncio
import os
import struct
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from dsec.backends.fullvm.backend import FullvmBackend
from dsec.core import errors
from dsec.core.errors import HostError
from dsec.core.spec import Substrate
from dsec.sdk.client import AsyncClient
from dsec.sdk.sandbox import AsyncSandbox
from dsec.serve.service import LocalService
from dsec.testing.machines import PROMPT, add_machine, boot_sector, cells_of
from dsec.testing.waiting import eventually
from dsec.wire.screens import Click, PressKey, TypeText
from tests.system.container_images import make_root
from tests.system.container_place import Place, private_place, served

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]
in_module = pytest.mark.asyncio(loop_scope="module")

Machines = tuple[Place, LocalService, AsyncClient]

ECHO = "echo"
SMALL = "small"
BLANK_S = 1.0  # between two looks at a screen
KEYS_QUEUED = 4  # with shift; a host that is so busy that its guest stands still loses none


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def machines() -> AsyncIterator[Machines]:
    """A service with an image of its own: nothing but a boot sector that echoes what is typed."""
    with private_place(None) as place:
        async with served(place) as (service, client):
            probe = await service.node.backends[Substrate.FULLVM].probe()
            if not probe.usable:
                pytest.skip(f"fullvm: {probe.reason}")
            disk = place.directory / "echo.img"
            disk.write_bytes(boot_sector() + bytes(1 << 20))
            await client.machines.import_disk(ECHO, disk, format="raw", boot_wait_s=2.0)
            yield place, service, client


@pytest_asyncio.fixture(loop_scope="module")
async def sb(machines: Machines) -> AsyncIterator[AsyncSandbox]:
    async with await create(machines[2]) as found:
        await shows_prompt(found)
        yield found


async def create(client: AsyncClient, image: str = ECHO, *, memory: str = "32MiB", **more: Any) -> AsyncSandbox:
    return await client.create(image, backend="fullvm", memory=memory, timeout_s=240, **more)


async def line_of(sandbox: AsyncSandbox) -> list[bytes]:
    return cells_of(await sandbox.screen.screenshot())


async def shows(sandbox: AsyncSandbox, count: int) -> list[bytes]:
    """The first line, once it has this many characters."""

    async def there() -> bool:
        nonlocal line
        line = [cell for cell in await line_of(sandbox) if any(cell)]
        return len(line) >= count

    line: list[bytes] = []
    await eventually(there)
    assert len(line) == count
    return line


async def shows_prompt(sandbox: AsyncSandbox) -> None:
    """A busy host has saved it before it was there; then it comes now."""

    async def there() -> bool:
        png = await sandbox.screen.screenshot()
        return struct.unpack_from(">II", png, 16) == (720, 400) and any(cells_of(png)[0])

    await eventually(there)


@in_module
async def test_what_is_typed_is_on_the_screen(sb: AsyncSandbox) -> None:
    await sb.screen.type(f"a{PROMPT}A{PROMPT}")

    prompt, *typed = await shows(sb, 5)
    assert [cell == prompt for cell in typed] == [False, True, False, True]
    assert typed[0] != typed[2], "capitals are not small letters"


@pytest.mark.slow
@in_module
async def test_every_character_of_the_keyboard_gets_through(sb: AsyncSandbox) -> None:
    # Without the underscore, which looks like a cursor.
    text = "abcXYZ0189-=[];'`\\,./!@#$%^&*()+{}:\"~<>?"
    for begin in range(0, len(text), KEYS_QUEUED):
        await sb.screen.type(text[begin : begin + KEYS_QUEUED])
        line = await shows(sb, 1 + len(text[: begin + KEYS_QUEUED]))

    assert len(set(line)) == len(text), "the prompt is one of them"


@in_module
async def test_forks_deep_pauses_and_rollbacks_have_what_the_screen_showed(sb: AsyncSandbox) -> None:
    await sb.screen.type("ab")
    before = await shows(sb, 3)

    (fork,) = await sb.fork(1)
    async with fork:
        assert await shows(fork, 3) == before
        await fork.screen.type("c")
        assert (await shows(fork, 4))[:3] == before
    await sb.pause(deep=True)
    assert await shows(sb, 3) == before  # the next use resumes it
    snapshot = await sb.snapshot()
    await sb.screen.type("d")
    await shows(sb, 4)
    await sb.rollback(snapshot)

    assert await shows(sb, 3) == before
    await sb.screen.type("e")
    assert (await shows(sb, 4))[:3] == before
    await sb.destroy()
    await snapshot.remove()


@in_module
async def test_a_key_may_be_pressed_by_its_name(sb: AsyncSandbox) -> None:
    size = await sb.screen.act(TypeText(text="a"), PressKey(key="shift+b"))
    prompt, a, b = await shows(sb, 3)

    await sb.screen.key("backspace")
    await sb.screen.key("c")

    async def written_over() -> bool:
        return (await shows(sb, 3))[2] not in (prompt, a, b)

    await eventually(written_over)
    assert (size.width, size.height) == (720, 400)


@in_module
async def test_clones_are_machines_of_their_own(machines: Machines, sb: AsyncSandbox) -> None:
    async with await create(machines[2]) as other:
        await shows_prompt(other)
        await sb.screen.type("one")
        await other.screen.type("others")

        assert len(await shows(sb, 4)) + len(await shows(other, 7)) == 11


@in_module
async def test_a_hand_that_reaches_outside_of_the_screen_does_nothing(sb: AsyncSandbox) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="720x400"):
        await sb.screen.act(TypeText(text="x"), Click(x=720, y=0))
    await sb.screen.click(719, 399, button="right")
    await sb.screen.double_click(0, 0)
    await sb.screen.drag(1, 1, 100, 100)
    await sb.screen.move(5, 5)
    await sb.screen.scroll(dy=3)

    await asyncio.sleep(BLANK_S)
    await shows(sb, 1)


@in_module
async def test_a_machine_without_an_agent_says_so(sb: AsyncSandbox) -> None:
    with pytest.raises(errors.UnsupportedError, match="no agent"):
        await sb.exec("true")
    with pytest.raises(errors.UnsupportedError, match="no agent"):
        await sb.files.read("/etc/passwd")


@in_module
async def test_a_pause_keeps_the_screen_and_its_use_ends_it(machines: Machines, sb: AsyncSandbox) -> None:
    await sb.screen.type("ab")
    await shows(sb, 3)

    await sb.pause()
    assert (await sb.refresh()).state == "paused"

    assert len(await shows(sb, 3)) == 3
    assert (await sb.refresh()).state == "running"


@in_module
async def test_the_screen_can_be_viewed_by_vnc(sb: AsyncSandbox) -> None:
    async with await sb.screen.view() as view:
        assert await handshake(view) == (720, 400)
        # One whole picture, in the format of the server.
        await view.write(struct.pack(">BBHHHH", 3, 0, 0, 0, 720, 400))
        kind, _, rectangles = struct.unpack(">BBH", await view.read_exactly(4))

    assert (kind, rectangles > 0) == (0, True)


@in_module
async def test_viewers_are_bounded_and_their_places_come_back(sb: AsyncSandbox) -> None:
    views = [await sb.screen.view() for _ in range(4)]
    for view in views:
        await handshake(view)
    async with await sb.screen.view() as fifth:
        with pytest.raises(EOFError):
            await handshake(fifth)
    for view in views:
        await view.close()

    async def free() -> bool:
        async with await sb.screen.view() as view:
            with suppress(EOFError):
                return await handshake(view) == (720, 400)
        return False

    await eventually(free)


async def handshake(view: Any) -> tuple[int, int]:
    """RFB 3.8 (RFC 6143, section 7) without a password. The size of the screen."""
    assert await view.read_exactly(12) == b"RFB 003.008\n"
    await view.write(b"RFB 003.008\n")
    kinds = await view.read_exactly((await view.read_exactly(1))[0])
    assert b"\x01" in kinds
    await view.write(b"\x01")
    assert await view.read_exactly(4) == bytes(4)
    await view.write(b"\x01")
    width, height = struct.unpack(">HH", await view.read_exactly(4))
    await view.read_exactly(16)
    await view.read_exactly(struct.unpack(">I", await view.read_exactly(4))[0])
    return width, height


@in_module
async def test_a_machine_leaves_nothing(machines: Machines) -> None:
    place, _, client = machines
    await (await create(client)).destroy()

    async with place.no_leaks():
        async with await create(client) as sandbox:
            await sandbox.screen.screenshot()
            view = await sandbox.screen.view()
            await view.read_exactly(12)
        await view.close()


@in_module
async def test_the_monitor_s_end_is_the_sandbox_s(machines: Machines) -> None:
    _, service, client = machines
    sandbox = await create(client)
    backend = service.node.backends[Substrate.FULLVM]
    assert isinstance(backend, FullvmBackend)

    os.kill(backend.instances[sandbox.id].pid, 9)

    async def failed() -> bool:
        return (await sandbox.refresh()).state == "failed"

    await eventually(failed)
    with pytest.raises(errors.GoneError):
        await sandbox.screen.screenshot()


@in_module
async def test_an_image_may_be_removed_while_a_machine_of_it_runs(machines: Machines) -> None:
    place, _, client = machines
    await client.machines.import_disk("twin", place.directory / "echo.img", format="raw", boot_wait_s=2.0)
    async with await create(client, "twin") as sandbox:
        await shows_prompt(sandbox)

        await client.machines.remove("twin")

        assert [image.name for image in await client.machines.list()] == [ECHO]
        await sandbox.screen.type("on")
        await shows(sandbox, 3)
    with pytest.raises(errors.EnvironmentNotFoundError):
        await create(client, "twin")


@in_module
async def test_what_cannot_be_is_refused_before_anything_is_made(machines: Machines) -> None:
    place, _, client = machines
    for wrong, error in (
        ({"network": "routed"}, errors.UnsupportedError),
        ({"memory": "8MiB"}, errors.InvalidArgumentError),
        ({"disk": "1MiB"}, errors.InvalidArgumentError),
        ({"image": "nowhere"}, errors.EnvironmentNotFoundError),
        ({"image": f"{ECHO}:other"}, errors.InvalidArgumentError),
    ):
        with pytest.raises(error):
            await create(client, **wrong)  # type: ignore[arg-type]
    with pytest.raises(errors.ConflictError):
        await client.machines.import_disk(ECHO, place.directory / "echo.img", format="raw")
    with pytest.raises(errors.InvalidArgumentError, match="no qcow2"):
        await client.machines.import_disk("other", place.directory / "echo.img", format="qcow2")

    assert [image.name for image in await client.machines.list()] == [ECHO]
    assert sorted(path.name for path in (place.state / "fullvm" / "images").iterdir()) == [ECHO]


@in_module
async def test_a_machine_with_our_agent_is_as_every_sandbox(machines: Machines, tmp_path: Path) -> None:
    """And its clock, its randomness and its name are its own."""
    _, service, client = machines
    backend = service.node.backends[Substrate.FULLVM]
    assert isinstance(backend, FullvmBackend)
    root = make_root(tmp_path / "root", python=False)
    try:
        cache = Path(service.config.microvm.cache_dir)
        await asyncio.to_thread(add_machine, backend.images, SMALL, root, cache)
    except HostError as error:
        pytest.skip(error.message)
    command = "bash -c 'printf \"%(%s)T\\n\" -1'; cat /etc/hostname /etc/machine-id"

    names, ids = set(), set()
    for name in ("first", "second"):
        async with await create(client, SMALL, memory="192MiB", name=name, env={"X": "7"}) as sandbox:
            before = time.time()
            result = await sandbox.exec(f'{command}; echo "$X"; echo oops >&2; exit 3')
            lines = result.stdout.split()
            assert (result.exit_code, result.stderr, lines[-1]) == (3, "oops\n", "7")
            assert -2 < int(lines[0]) - before < 60.0, "its clock stood still since its template was saved"
            names.add(lines[-3])
            ids.add(lines[-2])
            await sandbox.files.write("/root/x", b"content")
            assert await sandbox.files.read("/root/x") == "content"

    assert names == {"first", "second"}
    assert len(ids) == 2
    await client.machines.remove(SMALL)


def program(code: str, *, size: int = 1 << 20) -> bytes:
    """A disk whose boot sector is this machine code."""
    return bytes.fromhex(code).ljust(510, b"\0") + b"\x55\xaa" + bytes(size - 512)


@in_module
async def test_its_monitor_has_no_right_and_sees_its_own_files_only(machines: Machines, sb: AsyncSandbox) -> None:
    backend = machines[1].node.backends[Substrate.FULLVM]
    assert isinstance(backend, FullvmBackend)
    pid = backend.instances[sb.id].pid

    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
    )
    root = {path.name for path in Path(f"/proc/{pid}/root").iterdir()}

    ids = {status["Uid"], status["Gid"]}
    assert len(ids) == 1
    assert "0" not in ids.pop().split()
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(status[name], 16) == 0
    assert (status["NoNewPrivs"], status["Seccomp"], status["Groups"].strip()) == ("1", "2", "")
    assert root <= {"usr", "lib", "lib32", "lib64", "bin", "sbin", "etc", "dev", "vm", "disk", "base", "template"}
    for name in ("net", "mnt", "ipc", "uts"):
        assert os.readlink(f"/proc/{pid}/ns/{name}") != os.readlink(f"/proc/self/ns/{name}")  # noqa: PTH115


def kept_bytes(place: Place) -> int:
    """On the disk, without memory of templates."""
    kept = [path for path in (place.state / "fullvm").rglob("*") if path.is_file() and path.name != "ram.img"]
    return sum(path.stat().st_blocks * 512 for path in kept)


@in_module
async def test_a_system_that_floods_its_serial_port_fills_nothing(machines: Machines) -> None:
    place, _, client = machines
    disk = place.directory / "flood.img"
    disk.write_bytes(program("baf803 b041 ee ebfd"))  # out 0x3f8, 'A', for ever
    await client.machines.import_disk("flood", disk, format="raw", boot_wait_s=1.0)
    before = kept_bytes(place)

    async with await create(client, "flood") as sandbox:
        await asyncio.sleep(BLANK_S)
        assert len(await sandbox.screen.screenshot()) > 0
        assert kept_bytes(place) - before < 32 << 20
        assert ((await sandbox.metrics()).memory_bytes or 0) < 300 << 20
    await client.machines.remove("flood")


@in_module
async def test_a_system_that_does_not_come_up_is_told_and_leaves_nothing(machines: Machines) -> None:
    place, _, client = machines
    disk = place.directory / "reset.img"
    disk.write_bytes(program("ea0000ffff"))  # jmp ffff:0, which is a reset
    await client.machines.import_disk("reset", disk, format="raw", agent="dsec")

    async with place.no_leaks():
        with pytest.raises(errors.LaunchError):
            await create(client, "reset")

    assert not list((place.state / "fullvm" / "templates").glob("new-*"))
    await client.machines.remove("reset")


@in_module
async def test_a_first_boot_goes_on_for_the_next_one_who_asks(machines: Machines) -> None:
    place, _, client = machines
    await client.machines.import_disk("slow", place.directory / "echo.img", format="raw", boot_wait_s=4.0)
    templates = place.state / "fullvm" / "templates"
    before = set(templates.iterdir())

    with pytest.raises((errors.DeadlineError, errors.LaunchError)):
        await client.create("slow", backend="fullvm", memory="32MiB", timeout_s=1.0)

    async def saved() -> bool:
        return any((path / "manifest.json").exists() for path in set(templates.iterdir()) - before)

    await eventually(saved)
    async with await create(client, "slow") as sandbox:
        await shows_prompt(sandbox)
    await client.machines.remove("slow")


@in_module
async def test_uefi_shows_itself_where_there_is_its_firmware(machines: Machines) -> None:
    place, service, client = machines
    disk = place.directory / "empty.img"
    disk.write_bytes(bytes(1 << 20))
    await client.machines.import_disk("uefi", disk, format="raw", firmware="uefi", boot_wait_s=1.0)
    try:
        if not list(Path(service.config.fullvm.uefi_dir).glob("OVMF_CODE*.fd")):
            with pytest.raises(errors.LaunchError, match="no firmware for UEFI") as refused:
                await create(client, "uefi", memory="128MiB")
            assert "ovmf" in (refused.value.hint or "")
            return
        async with await create(client, "uefi", memory="128MiB") as sandbox:

            async def in_graphics() -> bool:
                return (await sandbox.screen.size()).width > 720

            await eventually(in_graphics)
            assert (place.state / "fullvm" / "sandboxes" / sandbox.id / "variables.fd").exists()
    finally:
        await client.machines.remove("uefi")
