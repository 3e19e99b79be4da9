"""Environments of few and many layers, put together and changed part by part, with real containers."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

import dsec
from dsec.core import limits
from dsec.core.errors import ConflictError, EnvironmentNotFoundError, LimitError, NotFoundError
from dsec.core.spec import Environment
from dsec.sdk.client import AsyncClient
from dsec.wire.environments import DirectorySource, EnvironmentInfo, OciSource
from tests.images import Layout, directory, member, tar_of
from tests.system.container_place import ENVIRONMENT, Place

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

SHOW = "cat /tool/*; ls /tool /tool/deep; find / -xdev -type f -path '/tool/*' | sort"


def fresh(name: str) -> str:
    return f"{name}-{os.urandom(4).hex()}"


async def stacked(client: AsyncClient, path: Path, count: int) -> str:
    """An image of `count` layers, each of which hides a file of the one below."""
    layout = Layout(path)
    layers = []
    for number in range(count):
        mine = [
            directory("tool", mtime=5),
            member(f"tool/{number}", b"%d\n" % number),
            member(f"tool/deep/{number % 3}"),
        ]
        layers.append(tar_of(mine + ([member(f"tool/.wh.{number - 1}")] if number else [])))
    layout.image(layers, run={"Env": [f"DEEP={count}"]})
    name = fresh("stack")
    info = await client.layers.build(name, OciSource(str(path)))
    assert len(info.layers) == count
    return name


async def tool(client: AsyncClient, path: Path, name: str, content: str, *, replace: bool = False) -> EnvironmentInfo:
    (path / "tool").mkdir(parents=True)
    (path / "tool/version").write_text(content)
    return await client.environments.build(name, DirectorySource(str(path)), replace=replace)


@pytest.mark.parametrize("count", [1, 5, 17, pytest.param(61, marks=pytest.mark.slow)])
async def test_any_number_of_layers_makes_a_sandbox_and_collapsing_changes_nothing_inside(
    node: tuple[Place, AsyncClient], tmp_path: Path, count: int
) -> None:
    place, client = node
    name = fresh("env")
    toolkits = [await stacked(client, tmp_path / "layout", count - 1)] if count > 1 else []
    await client.environments.create(name, ENVIRONMENT, toolkits=toolkits)
    assert len((await client.environments.get(name)).layers) == count
    await (await client.create(name)).destroy()  # layers stay mounted

    async with place.no_leaks(), await client.create(name) as sandbox:
        before = await sandbox.exec(SHOW)
        if count > 1:
            assert before.stdout.startswith(f"{count - 2}\n")
            assert (await sandbox.exec("echo $DEEP")).stdout == f"{count - 1}\n"
    await client.layers.collapse(name)
    found = [layer for layer in await client.layers.list() if layer.collapsed]
    assert any(len(layer.collapsed) == count - 8 for layer in found) is (count > 16)

    async with await client.create(name) as sandbox:
        after = await sandbox.exec(SHOW)
        await sandbox.exec("rm -r /tool; echo x > /etc/new", check=count > 1)
    assert (after.stdout, after.exit_code) == (before.stdout, before.exit_code)
    await client.environments.remove(name)


@pytest.mark.parametrize("count", [24, pytest.param(100, marks=pytest.mark.slow)])
async def test_an_image_of_more_layers_than_a_sandbox_can_have_becomes_fewer(
    node: tuple[Place, AsyncClient], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    if count < limits.LOWERS_MAX:
        monkeypatch.setattr(limits, "LOWERS_MAX", 20)
        monkeypatch.setattr("dsec.node.node.LOWERS_MAX", 20)
    _, client = node
    name = fresh("env")
    toolkit = await stacked(client, tmp_path / "layout", count)
    with pytest.raises(LimitError) as refused:  # nobody has made fewer of these parts
        await client.create(Environment(ENVIRONMENT, toolkits=(toolkit,)))
    assert refused.value.hint is not None
    made = await client.environments.create(name, ENVIRONMENT, toolkits=[toolkit])
    assert len(made.layers) == count + 1

    async with await client.create(name) as sandbox:
        assert (await sandbox.exec("ls /tool | grep -v deep; ls /tool/deep")).stdout == f"{count - 1}\n0\n1\n2\n"
    await client.environments.remove(name)


async def test_a_new_version_of_a_toolkit_is_one_layer_and_nothing_else(
    node: tuple[Place, AsyncClient], tmp_path: Path
) -> None:
    _, client = node
    kit, locked, follows = fresh("kit"), fresh("locked"), fresh("follows")
    await tool(client, tmp_path / "one", kit, "one")
    first = await client.environments.create(locked, ENVIRONMENT, toolkits=[kit])
    await client.environments.create(follows, ENVIRONMENT, toolkits=[kit], follow=True)
    running = await client.create(locked)
    known = {layer.digest for layer in await client.layers.list()}

    second = await tool(client, tmp_path / "two", kit, "two", replace=True)

    assert {layer.digest for layer in await client.layers.list()} - known == set(second.layers)
    for name, version in ((locked, "one"), (follows, "two")):
        async with await client.create(name) as sandbox:
            assert (await sandbox.exec("cat /tool/version")).stdout == version
    updated = await client.environments.update(locked)
    assert updated.layers == (*first.layers[:-1], *second.layers)
    found = await client.environments.diff(f"{locked}@{first.digest}", locked)
    assert ([c.digest for c in found.added], [c.digest for c in found.removed]) == (
        [*second.layers], [first.layers[-1]],
    )  # fmt: skip
    async with await client.create(locked) as sandbox:
        assert (await sandbox.exec("cat /tool/version")).stdout == "two"
    assert (await running.exec("cat /tool/version")).stdout == "one"  # it keeps what it was made from
    with pytest.raises(ConflictError, match=f"part of {follows}, {locked}"):
        await client.environments.remove(kit)
    await running.destroy()


async def test_parts_are_named_at_create_and_their_order_decides(
    node: tuple[Place, AsyncClient], tmp_path: Path
) -> None:
    _, client = node
    one, two = fresh("one"), fresh("two") + ":dev"
    await tool(client, tmp_path / "one", one, "one")
    exact = await tool(client, tmp_path / "two", two, "two")
    pinned = f"{two.partition(':')[0]}@{exact.digest[:12]}"

    for toolkits, version in (([one, two], "two"), ([two, one], "one"), ([one, pinned], "two")):
        environment = dsec.Environment(base=ENVIRONMENT, toolkits=toolkits)  # type: ignore[arg-type]
        async with await client.create(environment) as sandbox:
            assert (await sandbox.exec("cat /tool/version")).stdout == version
    with pytest.raises(EnvironmentNotFoundError):
        await client.create(dsec.Environment(base=ENVIRONMENT, workspace="nothing-here"))


async def test_layers_and_environments_are_managed_by_the_command_line(
    node: tuple[Place, AsyncClient], tmp_path: Path
) -> None:
    place, client = node
    kit, env = fresh("kit"), fresh("env")
    (tmp_path / "kit").mkdir()
    (tmp_path / "kit/file").write_text("1")

    async def run(*words: str, code: int = 0) -> str:
        # Not in threads: the service runs in this process, and needs them.
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "dsec", "--url", place.url, *words),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, error = await process.communicate()
        assert process.returncode == code, error.decode()
        return (out if code == 0 else error).decode()

    assert (await run("layer", "build", f"{kit}:1", "--dir", str(tmp_path / "kit"))).strip() == f"{kit}:1"
    assert (await run("env", "create", env, "--base", ENVIRONMENT, "--toolkit", f"{kit}:1")).strip() == env
    digest = json.loads(await run("env", "show", f"{kit}:1", "--json"))["layers"][0]

    shown = await asyncio.gather(
        run("env", "show", env),
        run("layer", "ls"),
        run("layer", "show", digest[:12], "--json"),
        run("layer", "stats", digest[:12]),
        run("env", "diff", env, ENVIRONMENT),
        run("env", "update", env),
        run("env", "rm", f"{kit}:1", code=125),
        run("layer", "rm", digest[:12], code=125),
        run("layer", "collapse", env),
    )
    assert f"toolkit: {kit}:1" in shown[0]
    assert env in shown[1]
    assert env in json.loads(shown[2])["environments"]
    assert "local" in shown[3]
    assert f"- layer {digest[:12]}" in shown[4]
    assert shown[5] == ""
    assert f"part of {env}" in shown[6]
    assert "part of" in shown[7]
    await run("env", "rm", env, f"{kit}:1")
    with pytest.raises(NotFoundError):
        await client.layers.get(digest)
