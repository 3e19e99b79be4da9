"""Exports of environments as images: over the API, by the rights of callers, from the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from dsec.cli.images import _called
from dsec.core.errors import ForbiddenError, InvalidArgumentError
from dsec.testing.nodes import NodeClient, caller_of, fake_node
from dsec.wire.codec import from_json, unpack
from dsec.wire.environments import (
    BuildRequest,
    DockerArchiveSource,
    DockerfileSource,
    EnvironmentInfo,
    RegistrySource,
)
from dsec.wire.images import (
    ArchiveTarget,
    Export,
    ExportedImage,
    ExportRequest,
    ExportTarget,
    LayoutTarget,
    RegistryTarget,
)
from dsec.wire.node import Method, Right
from tests.contract.node_double import NODE, NodeDouble
from tests.contract.sdk_service import RunningService
from tests.contract.served import Served, serve

TARGET = {"kind": "registry", "image": "example.org/team/tools:1"}


@pytest.fixture
def node() -> NodeDouble:
    return NodeDouble()


@pytest.fixture
async def api(node: NodeDouble, short_tmp: Path) -> AsyncIterator[Served]:
    async with serve(node, NODE, short_tmp) as served:
        yield served


async def test_an_export_tells_its_story_and_what_has_become_of_it(api: Served, node: NodeDouble) -> None:
    async with api.local.post("/v1/environments/base:export", json={"target": TARGET}) as answer:
        lines = [json.loads(line) for line in (await answer.read()).splitlines()]

    assert [line["kind"] for line in lines] == ["progress", "done"]
    assert lines[-1]["exported"]["digest"] == "sha256:1"
    assert [args for method, args in node.args if method == Method.ENVIRONMENT_EXPORT] == [
        ExportRequest(name="base", target=RegistryTarget("example.org/team/tools:1"))
    ]


@pytest.mark.parametrize(
    "target",
    [
        {}, {"kind": "registry"}, {"kind": "registry", "image": "A"}, {"kind": "other", "image": "a"},
        {"kind": "registry", "image": f"a@sha256:{'0' * 64}"}, {**TARGET, "compression": "lzma"}, {**TARGET, "more": 1},
        {"kind": "docker-archive", "path": "/"}, {"kind": "docker-archive", "path": "/a/../"},
        {"kind": "oci", "path": "relative"}, {"kind": "oci", "path": "/a\0"}, {"kind": "docker-archive", "path": ""},
        {"kind": "oci", "path": "/a", "reference": ""}, {"kind": "oci", "path": "/a", "reference": "a\nb"},
        {"kind": "oci", "path": "/a", "reference": "r" * 300}, {"kind": "docker-archive", "path": "/" + "p" * 5_000},
    ],
)  # fmt: skip
async def test_a_target_that_cannot_be_is_refused(api: Served, target: object) -> None:
    async with api.local.post("/v1/environments/base:export", json={"target": target}) as answer:
        assert answer.status in (400, 413)


@pytest.mark.parametrize(
    "fields",
    [{"path": "x"}, {"path": "/x", "target": "-a"}, {"path": "/x", "arguments": {"a b": ""}},
     {"path": "/x", "arguments": {"A": "\0"}}, {"path": "/x", "arguments": {"A": "x" * 2_000_000}},
     {"path": "/x", "file": "\0"}],
)  # fmt: skip
def test_a_dockerfile_that_cannot_be_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidArgumentError):
        msgspec.convert(fields, DockerfileSource)


def test_targets_and_sources_are_told_apart_on_the_wire() -> None:
    for target in (RegistryTarget("a/b:1"), LayoutTarget("/a", "b"), ArchiveTarget("/a")):
        assert from_json(msgspec.json.encode(Export(target)), Export).target == target
    request = BuildRequest(name="a", source=RegistrySource("debian:12"))
    assert from_json(msgspec.json.encode(request), BuildRequest) == request


async def test_files_of_the_node_are_written_for_callers_on_it_only(tmp_path: Path) -> None:
    admin = caller_of(rights=frozenset({Right.ADMIN}))

    async def export(who: NodeClient, target: ExportTarget) -> str:
        async with who.stream(Method.ENVIRONMENT_EXPORT, ExportRequest(name="base", target=target)) as stream:
            return unpack((await stream.all())[-1].body, ExportedImage).reference

    async with fake_node(tmp_path) as client:
        remote, local = client.of(admin), client.of(msgspec.structs.replace(admin, local=True))
        user = client.of(msgspec.structs.replace(caller_of(rights=frozenset({Right.USE})), local=True))
        for target in (LayoutTarget("/srv/layout"), ArchiveTarget("/srv/image.tar")):
            with pytest.raises(ForbiddenError, match="its own socket"):
                await export(remote, target)
            assert await export(local, target) == "fake"
        assert await export(remote, RegistryTarget("a/b:1")) == "fake"
        with pytest.raises(ForbiddenError, match="right to admin"):
            await export(user, RegistryTarget("a/b:1"))


async def test_images_of_registries_are_built_for_administrators_anywhere(tmp_path: Path) -> None:
    request = BuildRequest(name="tools", source=RegistrySource("example.org/tools:1"))
    async with fake_node(tmp_path) as client:
        remote = client.of(caller_of(rights=frozenset({Right.ADMIN})))
        async with remote.stream(Method.ENVIRONMENT_BUILD, request) as stream:
            assert unpack((await stream.all())[-1].body, EnvironmentInfo).name == "tools"
        for source in (DockerArchiveSource("/srv/image.tar"), DockerfileSource("/srv")):
            request = BuildRequest(name="stolen", source=source)
            with pytest.raises(ForbiddenError, match="its own socket"):
                async with remote.stream(Method.ENVIRONMENT_BUILD, request) as stream:
                    await stream.all()


@pytest.mark.parametrize(
    ("image", "name"),
    [
        ("debian", "debian"), ("debian:12", "debian:12"), ("example.org/a/b_c:1.4", "b_c:1.4"),
        (f"example.org/a@sha256:{'0123456789abcdef' * 4}", "a:0123456789ab"),
    ],
)  # fmt: skip
def test_an_environment_is_called_as_its_image_is(image: str, name: str) -> None:
    assert _called(image) == name


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("image", "export", "base"), b"give one of --oci and --docker-archive"),
        (("image", "export", "base", "--oci", "a", "--docker-archive", "b"), b"give one of"),
        (("image", "pull"), b"Missing argument"),
        (("env", "build", "x", "--registry", "a", "--tar", "b"), b"give exactly one of"),
        (("env", "build", "x", "--oci", "a", "--target", "b"), b"--target goes with --dockerfile"),
        (("env", "build", "x", "--debian", "--reference", "b"), b"--reference goes with --oci and --docker-archive"),
        (("env", "build", "x", "--dockerfile", ".", "--build-arg", "A"), b"--build-arg is NAME=VALUE"),
        (("image", "pull", "A/b:c:d"), b"is not the name of an image"),
        (("image", "push", "base", "example.org/a:1", "--compression", "lzma"), b"no compression 'lzma'"),
    ],
)
def test_wrong_usage_is_told(service: RunningService, arguments: tuple[str, ...], said: bytes) -> None:
    done = dsec(service, *arguments)

    assert done.returncode == 2
    assert said in b" ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("image", "push", "base", "example.org/a:1"), b"fake substrate"),
        (("image", "pull", "example.org/a:1"), b"fake substrate"),
        (("image", "export", "base", "--oci", "a"), b"fake substrate"),
    ],
)
def test_what_cannot_be_done_is_told(service: RunningService, arguments: tuple[str, ...], said: bytes) -> None:
    done = dsec(service, *arguments)

    assert (done.returncode, said in done.stderr) == (125, True), done.stderr


def dsec(service: RunningService, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "dsec", *arguments]
    return subprocess.run(command, capture_output=True, env=service.environment, timeout=200, check=False)
