"""Images that lack what others have, or have it where it is not expected."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dsec.core.errors import ConflictError, DsecError, LaunchError
from dsec.core.spec import Environment
from dsec.sdk.client import AsyncClient
from dsec.wire.environments import DirectorySource
from tests.system.container_images import make_root
from tests.system.container_place import ENVIRONMENT, Place

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

Change = Callable[[Path], None]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_root(tmp_path / "root", python=False)


async def build(client: AsyncClient, root: Path) -> str:
    """As a caller would: copied, made an image, mounted."""
    name = f"variant-{os.urandom(4).hex()}"
    await client.environments.build(name, DirectorySource(path=str(root)))
    return name


async def test_an_image_of_one_static_program_and_nothing_else(
    node: tuple[Place, AsyncClient], tmp_path: Path, native_binaries: dict[str, Path]
) -> None:
    """No shell, no C library, no /etc, no /tmp, no /bin."""
    _, client = node
    (tmp_path / "root").mkdir()
    shutil.copy2(native_binaries["dsec-launch"], tmp_path / "root" / "program")
    async with await client.create(await build(client, tmp_path / "root")) as sandbox:
        result = await sandbox.exec(["/program", "--nonsense"])

        assert result.exit_code == 2
        assert "usage" in result.stderr
        await sandbox.files.write("/data/file", b"content")
        assert await sandbox.files.read_bytes("/data/file") == b"content"
        assert (await sandbox.files.read("/etc/hosts")).startswith("127.0.0.1")
        with pytest.raises(DsecError):
            await sandbox.exec("echo there is no shell")
        with pytest.raises(DsecError):
            await sandbox.session("s").exec("true")
        assert (await sandbox.exec(["/program"], user="1234:1234")).exit_code == 2
        with pytest.raises(DsecError, match="user"):
            await sandbox.exec(["/program"], user="somebody")


async def test_an_environment_without_any_file(node: tuple[Place, AsyncClient], tmp_path: Path) -> None:
    _, client = node
    (tmp_path / "root").mkdir()
    async with await client.create(await build(client, tmp_path / "root")) as sandbox:
        names = {entry.name for entry in await sandbox.files.list("/")}
        assert {"dev", "etc", "proc", "sys", "tmp"} <= names
        await sandbox.upload(__file__, "/tmp/")
        with pytest.raises(DsecError, match="cannot run"):
            await sandbox.exec(["/bin/true"])


def _no_users(root: Path) -> None:
    (root / "etc/passwd").unlink()
    (root / "etc/group").unlink()


def _no_temporary(root: Path) -> None:
    shutil.rmtree(root / "tmp")


def _links_in_etc(root: Path) -> None:
    (root / "run/systemd").mkdir(parents=True)
    (root / "etc/hosts").symlink_to("/run/systemd/hosts")
    (root / "etc/hostname").symlink_to("../../../../../etc/passwd")
    (root / "etc/resolv.conf").symlink_to("../run/systemd/resolve/stub-resolv.conf")


def _links_to_the_host(root: Path) -> None:
    for name in ("hosts", "hostname", "resolv.conf"):
        (root / "etc" / name).symlink_to("/proc/1/root/etc/passwd")


def _directories_in_etc(root: Path) -> None:
    for name in ("hosts", "hostname", "resolv.conf"):
        (root / "etc" / name).mkdir()


def _links_for_mount_points(root: Path) -> None:
    for name in ("dev", "proc", "sys"):
        shutil.rmtree(root / name, ignore_errors=True)
        (root / name).symlink_to("/tmp")


def _etc_is_a_link(root: Path) -> None:
    shutil.move(root / "etc", root / "usr" / "etc")
    (root / "etc").symlink_to("usr/etc")


def _etc_is_a_link_to_the_host(root: Path) -> None:
    shutil.rmtree(root / "etc")
    (root / "etc").symlink_to("/proc/1/root/etc")


def _etc_is_a_file(root: Path) -> None:
    shutil.rmtree(root / "etc")
    (root / "etc").write_text("a file")


def _proc_is_a_file(root: Path) -> None:
    shutil.rmtree(root / "proc", ignore_errors=True)
    (root / "proc").write_text("a file")


def _read_only_root(root: Path) -> None:
    root.chmod(0o555)
    (root / "etc").chmod(0o555)
    (root / "tmp").chmod(0o000)


def _content_in_mount_points(root: Path) -> None:
    for name in ("dev", "proc", "sys"):
        (root / name / "fake").mkdir(parents=True)
    (root / "dev/null").write_text("not a device")


def _hostile_users(root: Path) -> None:
    (root / "etc/passwd").write_bytes(
        b"root:x:0:0::/root:/bin/sh\n" + b"\xff\0:::\n" + b"a" * 200_000 + b"\nuser:x:-1:x\n"
    )


CHANGES: list[Change] = [
    _no_users,
    _no_temporary,
    _links_in_etc,
    _links_to_the_host,
    _directories_in_etc,
    _links_for_mount_points,
    _etc_is_a_link,
    _etc_is_a_link_to_the_host,
    _etc_is_a_file,
    _proc_is_a_file,
    _read_only_root,
    _content_in_mount_points,
    _hostile_users,
]


# Nothing could be mounted where there is no directory.
REFUSED: tuple[Change, ...] = (
    _directories_in_etc,
    _links_for_mount_points,
    _etc_is_a_link,
    _etc_is_a_link_to_the_host,
    _etc_is_a_file,
    _proc_is_a_file,
)


def _name(change: Change) -> str:
    return change.__name__.strip("_")


@pytest.mark.parametrize("change", [change for change in CHANGES if change not in REFUSED], ids=_name)
async def test_an_odd_image_works_and_never_reaches_the_host(
    node: tuple[Place, AsyncClient], root: Path, change: Change
) -> None:
    place, client = node
    hosts = _files_of_the_host()
    change(root)
    name = await build(client, root)
    await (await client.create(name)).destroy()  # its layer stays mounted
    async with place.no_leaks(), await client.create(name) as sandbox:
        result = await sandbox.exec("echo works; id -u; cat /proc/self/comm; echo x > /dev/null && echo written")
        assert result.stdout == "works\n0\ncat\nwritten\n", result.stderr
        mounted = await sandbox.exec("cat /proc/self/mountinfo")
        points = [line.split()[4] for line in mounted.stdout.splitlines()]
        assert {"/proc", "/sys", "/dev"} <= set(points)
        shown = await sandbox.exec("cat /etc/hosts /etc/hostname; touch /tmp/file && echo touched")
        assert "touched" in shown.stdout
        assert hosts["/etc/passwd"].decode() not in shown.stdout
        await sandbox.exec("for f in hosts hostname resolv.conf; do echo owned > /etc/$f; done")
    assert _files_of_the_host() == hosts


@pytest.mark.parametrize("change", REFUSED, ids=_name)
async def test_an_image_that_cannot_be_one_is_refused_with_the_step_and_leaves_nothing(
    node: tuple[Place, AsyncClient], root: Path, change: Change
) -> None:
    place, client = node
    change(root)
    name = await build(client, root)
    with pytest.raises(LaunchError):  # its layer stays mounted
        await client.create(name)
    async with place.no_leaks():
        with pytest.raises(LaunchError) as caught:
            await client.create(name)
    assert caught.value.step in ("overlay", "etc", "binds", "proc", "mounts")


def _files_of_the_host() -> dict[str, bytes]:
    paths = ("/etc/hosts", "/etc/hostname", "/etc/passwd", "/etc/resolv.conf")
    return {path: Path(path).read_bytes() for path in paths if Path(path).exists()}


async def test_a_removed_environment_holds_no_room_on_the_disk(node: tuple[Place, AsyncClient], root: Path) -> None:
    place, client = node
    (root / "unique").write_text(os.urandom(8).hex())
    name = await build(client, root)
    (digest,) = (await client.environments.get(name)).layers
    async with await client.create(name):
        assert digest in _mounted(place)
        with pytest.raises(ConflictError):
            await client.environments.remove(name)
        assert digest in _mounted(place)

    await client.environments.remove(name)

    assert digest not in _mounted(place)
    again = await build(client, root)
    async with await client.create(again) as sandbox:
        assert (await sandbox.exec("echo works")).stdout == "works\n"


def _mounted(place: Place) -> str:
    return Path(f"/proc/{place.launcher_pid()}/mountinfo").read_text()


async def test_layers_of_an_environment_are_stacked(node: tuple[Place, AsyncClient], tmp_path: Path) -> None:
    _, client = node
    names = []
    for number in range(5):
        tree = tmp_path / f"layer-{number}"
        (tree / "opt").mkdir(parents=True)
        (tree / "opt" / f"file-{number}").write_text(str(number))
        (tree / "opt" / "same").write_text(str(number))
        names.append(await build(client, tree))

    environment = Environment(base=ENVIRONMENT, workspace=names[0], toolkits=tuple(names[1:]))
    async with await client.create(environment) as sandbox:
        result = await sandbox.exec(
            "cat /opt/file-* /opt/same; rm /opt/file-1; echo 9 > /opt/same; cat /opt/same; ls /opt | wc -l"
        )
        assert result.stdout.split() == ["012344" + "9", "5"], result
    async with await client.create(environment) as again:
        assert (await again.exec("cat /opt/file-1 /opt/same")).stdout == "14"


async def test_what_one_sandbox_writes_no_other_sees(node: tuple[Place, AsyncClient]) -> None:
    _, client = node
    async with await client.create(ENVIRONMENT) as one, await client.create(ENVIRONMENT) as other:
        await one.exec("echo mine > /bin/true; rm -rf /usr; echo x > /tmp/x; mkdir /new")
        assert (await other.exec("/bin/true; ls /tmp; ls /usr | head -1; ls -d /new")).stdout == "bin\n"
        assert (await asyncio.gather(one.files.exists("/usr"), other.files.exists("/usr"))) == [False, True]
