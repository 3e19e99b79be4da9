"""Volumes and datasets in real containers."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from dsec.core.errors import ConflictError, LaunchError, VolumeNotFoundError
from dsec.core.spec import VolumeMount
from dsec.sdk.client import AsyncClient
from dsec.sdk.sandbox import AsyncSandbox
from dsec.storage.quota.choose import find_mechanism
from dsec.testing.waiting import eventually
from dsec.wire.environments import DirectorySource
from tests.system.container_place import Place, private_place, served

SMALL = {"memory": "64MiB", "pids": 64}

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def node(
    small_store: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Place, AsyncClient, Path]]:
    dataset = tmp_path_factory.mktemp("dataset")
    (dataset / "one.txt").write_text("first\n")
    (dataset / "one.txt").chmod(0o644)
    dataset.chmod(0o755)
    settings = {"node": {"datasets": {"numbers": str(dataset)}}}
    with private_place(small_store, settings=settings) as place:
        async with served(place) as (_, client):
            async with box(client):  # the launcher comes with the first
                pass
            yield place, client, dataset


@contextlib.asynccontextmanager
async def box(client: AsyncClient, *volumes: str | VolumeMount, **more: object) -> AsyncIterator[AsyncSandbox]:
    sandbox = await client.create("small", volumes=volumes, **{**SMALL, **more})  # type: ignore[arg-type]
    try:
        yield sandbox
    finally:
        await sandbox.destroy()


async def said(sandbox: AsyncSandbox, command: str, *, user: str | None = None) -> str:
    result = await sandbox.exec(command, user=user)
    return (result.stdout + result.stderr).strip()


@pytest.mark.parametrize("size", [None, "32MiB"], ids=["without a size", "with a size"])
async def test_what_one_sandbox_writes_the_next_one_reads_as_whose_it_was(
    node: tuple[Place, AsyncClient, Path], size: str | None
) -> None:
    place, client, _ = node
    if size is not None and find_mechanism(place.state).mechanism is None:
        pytest.skip(find_mechanism(place.state).reason)
    await client.volumes.create("kept", size=size)
    async with place.no_leaks():
        async with box(client, "kept:/data/deep") as first:
            await first.exec("echo hello > /data/deep/file; cp /data/deep/file /data/deep/own", check=True)
            await first.exec("chown 1000:1000 /data/deep/own; chmod 4755 /data/deep/own", check=True)
        async with box(client, "kept:/elsewhere") as second:
            assert await said(second, "cat /elsewhere/file") == "hello"
            assert await said(second, "ls -ln /elsewhere/own | { read m n u g r; echo $m $u $g; }") == (
                "-rwsr-xr-x 1000 1000"
            )

    info = await client.volumes.get("kept")
    assert info.used_by == ()
    assert (info.used_bytes or 0) > 0
    await client.volumes.remove("kept")
    with pytest.raises(VolumeNotFoundError):
        await client.volumes.get("kept")
    await eventually(lambda: not any((place.state / "volumes").iterdir()))


async def test_a_volume_is_full_at_its_size_and_the_sandbox_is_not(node: tuple[Place, AsyncClient, Path]) -> None:
    place, client, _ = node
    found = find_mechanism(place.state)
    if found.mechanism is None:
        pytest.skip(found.reason)
    await client.volumes.create("narrow", size="16MiB")
    async with box(client, "narrow:/data") as sandbox:
        result = await sandbox.exec("head -c 64000000 /dev/zero > /data/big; echo $?; echo x > /tmp/x && cat /tmp/x")

        assert result.stdout.split() == ["1", "x"], result
        size = (await sandbox.files.stat("/data/big")).size
        assert 15 << 20 <= size <= 17 << 20
        await sandbox.exec("rm /data/big && head -c 8000000 /dev/zero > /data/again", check=True)
    await client.volumes.remove("narrow")


async def test_one_writes_and_many_read(node: tuple[Place, AsyncClient, Path]) -> None:
    _, client, _ = node
    await client.volumes.create("shared")
    async with box(client, "shared:/w") as writer, box(client, "shared:/r:ro") as reader:
        await writer.exec("echo news > /w/file", check=True)
        assert await said(reader, "cat /r/file") == "news"
        assert "Read-only" in await said(reader, "echo x > /r/file")
        with pytest.raises(ConflictError, match="only one can") as refused:
            await client.create("small", volumes=["shared:/w"], **SMALL)  # type: ignore[arg-type]
        assert refused.value.sandbox == writer.id
        with pytest.raises(ConflictError, match="is used by"):
            await client.volumes.remove("shared")
        assert {(user.sandbox, user.readonly) for user in (await client.volumes.get("shared")).used_by} == {
            (writer.id, False),
            (reader.id, True),
        }
    async with box(client, "shared:/w") as again:
        assert await said(again, "cat /w/file") == "news"
    await client.volumes.remove("shared")


async def test_a_dataset_is_read_and_nothing_else(node: tuple[Place, AsyncClient, Path]) -> None:
    _, client, dataset = node
    mount = VolumeMount("numbers", "/sets/numbers", dataset=True)
    async with box(client, mount, privilege_gain=True) as sandbox:
        assert await said(sandbox, "cat /sets/numbers/one.txt") == "first"
        for attempt in (
            "echo x > /sets/numbers/one.txt",
            "echo x > /sets/numbers/new",
            "rm /sets/numbers/one.txt",
            "chmod 777 /sets/numbers/one.txt",
            "mount -o remount,rw /sets/numbers",
            "umount /sets/numbers",
        ):
            assert (await sandbox.exec(attempt)).exit_code != 0, attempt
        (dataset / "two.txt").write_text("second\n")
        assert await said(sandbox, "cat /sets/numbers/two.txt") == "second"
    assert (dataset / "one.txt").read_text() == "first\n"
    assert [volume.kind for volume in await client.volumes.list() if volume.name == "numbers"] == ["dataset"]


async def test_mounts_carry_no_rights(node: tuple[Place, AsyncClient, Path]) -> None:
    _, client, _ = node
    await client.volumes.create("plain")
    async with box(client, "plain:/data", VolumeMount("numbers", "/sets", dataset=True)) as sandbox:
        lines = (await said(sandbox, "cat /proc/self/mountinfo")).splitlines()
        options = {fields[4]: set(fields[5].split(",")) for line in lines if (fields := line.split(" "))}
        assert options["/data"] >= {"rw", "nosuid", "nodev"}
        assert options["/sets"] >= {"ro", "nosuid", "nodev"}
    await client.volumes.remove("plain")


async def test_nothing_in_the_image_redirects_a_volume(node: tuple[Place, AsyncClient, Path], tmp_path: Path) -> None:
    _, client, _ = node
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to("/etc")
    (root / "file").write_text("x")
    await client.environments.build("redirecting", DirectorySource(path=str(root)), replace=True)
    await client.volumes.create("redirected")
    for path, why in (("/link/data", "ELOOP"), ("/link", "ENOTDIR"), ("/file", "ENOTDIR"), ("/file/below", "ENOTDIR")):
        with pytest.raises(LaunchError) as refused:
            await client.create("redirecting", volumes=[f"redirected:{path}"], **SMALL)  # type: ignore[arg-type]
        assert (refused.value.step, refused.value.detail["errno"]) == ("volumes", why)
    await client.volumes.remove("redirected")


async def test_a_dataset_that_went_is_said(node: tuple[Place, AsyncClient, Path], tmp_path: Path) -> None:
    _, client, dataset = node
    away = dataset.with_name("away")
    dataset.rename(away)
    try:
        with pytest.raises(LaunchError, match="is not there"):
            await client.create(
                "small",
                volumes=[VolumeMount("numbers", "/sets", dataset=True)],
                **SMALL,  # type: ignore[arg-type]
            )
    finally:
        away.rename(dataset)


async def test_a_node_that_was_killed_knows_who_writes(small_store: Path, short_tmp: Path) -> None:
    with private_place(small_store) as place:
        place.start_process()
        async with AsyncClient(place.url) as client:
            await place.ready(client)
            sized = "32MiB" if find_mechanism(place.state).mechanism is not None else None
            await client.volumes.create("kept", size=sized)
            sandbox = await client.create("small", volumes=["kept:/data"], **SMALL)  # type: ignore[arg-type]
            await sandbox.exec("echo before > /data/file", check=True)
            left = place.state / "volumes" / ".making-0123"
            left.mkdir()

            place.kill_node()
            place.start_process()
            await place.ready(client)

            assert (await sandbox.exec("cat /data/file; echo after >> /data/file")).stdout == "before\n"
            with pytest.raises(ConflictError):
                await client.create("small", volumes=["kept:/data"], **SMALL)  # type: ignore[arg-type]
            with pytest.raises(ConflictError):
                await client.volumes.remove("kept")
            await eventually(lambda: not left.exists())
            await sandbox.destroy()
            async with box(client, "kept:/data") as second:
                assert await said(second, "cat /data/file") == "before\nafter"


async def test_two_sandboxes_on_one_image_have_one_device(node: tuple[Place, AsyncClient, Path]) -> None:
    place, client, _ = node
    if find_mechanism(place.state).mechanism != "image":
        pytest.skip("sizes are kept by other means here")
    await client.volumes.create("once", size="16MiB")

    def devices() -> list[str]:
        mine = str(place.state)
        return [str(f) for f in Path("/sys/block").glob("loop*/loop/backing_file") if mine in f.read_text()]

    async with box(client, "once:/a"):
        async with box(client, "once:/b:ro"), box(client, "once:/c:ro"):
            assert len(devices()) == 1
        assert len(devices()) == 1
    await eventually(lambda: not devices())
    await client.volumes.remove("once")
