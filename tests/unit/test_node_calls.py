"""The service itself: every method, every right, every bad body."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from dsec.core.errors import (
    AuthError,
    DeadlineError,
    DsecError,
    EnvironmentNotFoundError,
    ForbiddenError,
    InvalidArgumentError,
    SandboxNotFoundError,
)
from dsec.testing.nodes import NodeClient, StreamEnd, caller_of, fake_node
from dsec.wire import records
from dsec.wire.codec import unpack
from dsec.wire.environments import (
    BuildEvent,
    BuildRequest,
    DebianSource,
    DirectorySource,
    EnvironmentInfo,
    EnvironmentPage,
    EnvironmentRef,
    EnvironmentStats,
    EnvironmentTrace,
    OciSource,
    PushRequest,
    StoreSource,
    TarSource,
)
from dsec.wire.node import (
    Done,
    Method,
    Nothing,
    Right,
)
from tests.node_calls import create, get, start


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[NodeClient]:
    async with fake_node(tmp_path) as client:
        yield client


async def test_every_method_is_served() -> None:
    from dsec.node.service import Service

    service = Service.__new__(Service)
    Service.__init__(service, None)  # type: ignore[arg-type]

    assert set(service._unary) | set(service._streaming) == set(Method)


@pytest.mark.parametrize("method", sorted(Method))
async def test_a_body_that_is_none_is_a_typed_error(client: NodeClient, method: Method) -> None:
    admin = client.of(caller_of(rights=frozenset({Right.ADMIN})))
    for body in (b"", b"\xc1", b"\x81\xa1x\x01", b"\x93\x01\x02\x03"):
        if method in admin.service._unary:
            with pytest.raises(DsecError):
                await admin.service.call(method, body, caller=admin.caller, key=None, timeout_s=5)
        else:
            with pytest.raises(DsecError):
                await admin.service.serve_stream(method, body, StreamEnd(), caller=admin.caller)


async def test_a_call_that_takes_too_long_is_a_typed_error(client: NodeClient) -> None:
    sandbox = await create(client)
    answer = await start(client, sandbox.id, "sleep", "60", wait_s=None)

    with pytest.raises(DeadlineError):
        await client.call(
            Method.EXEC_GET,
            records.ExecQuery(sandbox=sandbox.id, exec=answer.exec.id, wait_s=30),
            records.ExecInfo,
            timeout_s=0.05,
        )


async def test_expired_credentials_and_missing_rights_are_typed_errors(client: NodeClient) -> None:
    reader = client.of(caller_of(rights=frozenset({Right.READ})))
    expired = client.of(msgspec.structs.replace(caller_of(), expires_at=1.0))

    with pytest.raises(ForbiddenError):
        await create(reader)
    with pytest.raises(AuthError):
        await create(expired)
    with pytest.raises(ForbiddenError):
        await client.call(Method.DOCTOR, Nothing(), records.DoctorReport)
    await reader.call(Method.LIST, records.ListQuery(), records.SandboxPage)
    await reader.of(caller_of(rights=frozenset())).call(Method.HEALTH, Nothing(), records.Health)


async def test_only_a_caller_on_the_node_may_name_its_files(client: NodeClient) -> None:
    remote = client.of(caller_of(rights=frozenset({Right.ADMIN})))

    for source in (DirectorySource(path="/etc"), TarSource(path="/x.tar"), OciSource(path="/x")):
        async with remote.stream(Method.ENVIRONMENT_BUILD, BuildRequest(name="stolen", source=source)) as stream:
            with pytest.raises(ForbiddenError, match="its own socket"):
                await stream.all()
    packages = BuildRequest(name="packages", source=DebianSource(packages=("bash",)))
    async with remote.stream(Method.ENVIRONMENT_BUILD, packages) as stream:
        assert unpack((await stream.all())[-1].body, EnvironmentInfo).name == "packages"


async def test_only_a_caller_on_the_node_may_name_a_store_in_its_directories(client: NodeClient) -> None:
    admin = client.of(caller_of(rights=frozenset({Right.ADMIN})))
    local = client.of(msgspec.structs.replace(caller_of(rights=frozenset({Right.ADMIN})), local=True))
    user = client.of(msgspec.structs.replace(caller_of(rights=frozenset({Right.USE})), local=True))

    async def build(who: NodeClient, url: str) -> str:
        source = StoreSource(url=url, environment="base")
        async with who.stream(Method.ENVIRONMENT_BUILD, BuildRequest(name="mine", source=source)) as stream:
            return unpack((await stream.all())[-1].body, EnvironmentInfo).name

    async def push(who: NodeClient, url: str) -> str:
        async with who.stream(Method.ENVIRONMENT_PUSH, PushRequest(name="base", store=url)) as stream:
            return unpack((await stream.all())[-1].body, EnvironmentInfo).name

    for ask in (build, push):
        with pytest.raises(ForbiddenError, match="its own socket"):
            await ask(admin, "file:///srv/layers")
        with pytest.raises(ForbiddenError, match="right to admin"):
            await ask(user, "s3://bucket/layers")
    assert [await build(admin, "https://host/layers"), await build(local, "file:///srv/layers")] == ["mine", "mine"]
    assert [await push(admin, "s3://bucket/layers"), await push(local, "file:///srv/layers")] == ["base", "base"]


async def test_how_much_is_loaded_is_for_readers_and_traces_are_for_administrators(client: NodeClient) -> None:
    reader = client.of(caller_of(rights=frozenset({Right.READ})))

    stats = await reader.call(Method.ENVIRONMENT_STATS, EnvironmentRef("base"), EnvironmentStats)

    assert stats.name == "base"
    with pytest.raises(ForbiddenError):
        await reader.call(Method.ENVIRONMENT_TRACE, EnvironmentRef("base"), EnvironmentTrace)
    with pytest.raises(EnvironmentNotFoundError):
        await reader.call(Method.ENVIRONMENT_STATS, EnvironmentRef("none"), EnvironmentStats)


@pytest.mark.parametrize(
    "url",
    [
        "", "/srv", "file://host/x", "FILE:///x", " file:///x", "ftp://x/y", "http:///x", "https://u:p@host/x",
        "https://host/x?sig=1", "s3://", "s3://b/x#y", "file:///a b", "file:///a\n", "http://host:0/", "http://host:x/",
        "http://[::1/", "https://host/" + "x" * 5000,
    ],
)  # fmt: skip
def test_what_is_no_store_is_refused_before_anything_else(url: str) -> None:
    with pytest.raises(InvalidArgumentError):
        StoreSource(url=url, environment="base")
    with pytest.raises(InvalidArgumentError):
        PushRequest(name="base", store=url)


async def test_environments_are_listed_built_and_removed(client: NodeClient) -> None:
    admin = client.of(msgspec.structs.replace(caller_of(rights=frozenset({Right.ADMIN})), local=True))
    request = BuildRequest(name="more", source=DirectorySource(path="/nowhere"))

    async with admin.stream(Method.ENVIRONMENT_BUILD, request) as stream:
        frames = await stream.all()
    page = await admin.call(Method.ENVIRONMENT_LIST, Nothing(), EnvironmentPage)
    one = await admin.call(Method.ENVIRONMENT_GET, EnvironmentRef("more"), EnvironmentInfo)
    await admin.call(Method.ENVIRONMENT_REMOVE, EnvironmentRef("more"), Done)

    assert [unpack(frame.body, BuildEvent).kind for frame in frames[:-1]] == ["progress", "done"]
    assert unpack(frames[-1].body, EnvironmentInfo).name == "more"
    assert {info.name for info in page.environments} == {"base", "more"}
    assert one.name == "more"
    with pytest.raises(EnvironmentNotFoundError):
        await admin.call(Method.ENVIRONMENT_GET, EnvironmentRef("more"), EnvironmentInfo)


async def test_health_and_doctor_answer(client: NodeClient) -> None:
    admin = client.of(caller_of(rights=frozenset({Right.ADMIN})))
    await create(client)

    health = await client.call(Method.HEALTH, Nothing(), records.Health)
    report = await admin.call(Method.DOCTOR, Nothing(), records.DoctorReport)

    assert health.sandboxes == 1
    assert health.node == client.node.id
    assert report.substrates == {"fake": "ok"}
    named = {finding.what for finding in report.findings}
    assert {"kernel", "cgroups", "disk", "memory", "KVM", "fake: disk limit", "fake: resource view"} <= named
    assert {finding.status for finding in report.findings} <= {"ok", "degraded", "missing"}


async def test_metrics_count_what_was_recorded_and_what_was_dropped(client: NodeClient) -> None:
    sandbox = await create(client)
    await start(client, sandbox.id, "head", "-c", "3000000", "/dev/zero", record_bytes_max=1_000_000)

    metrics = await client.call(Method.METRICS, records.SandboxRef(sandbox.id), records.Metrics)

    assert metrics.output_recorded_bytes + metrics.output_dropped_bytes == 3_000_000
    assert metrics.output_recorded_bytes <= 1_000_000


async def test_sub_projects_are_reached_and_siblings_are_not(client: NodeClient) -> None:
    inner = await create(client.of(caller_of("/team/run-7")))
    similar = await create(client.of(caller_of("/team-two")))
    team = client.of(caller_of("/team"))

    page = await team.call(Method.LIST, records.ListQuery(), records.SandboxPage)

    assert [sandbox.id for sandbox in page.sandboxes] == [inner.id]
    assert (await get(team, inner.id)).id == inner.id
    with pytest.raises(SandboxNotFoundError):
        await get(team, similar.id)
    with pytest.raises(SandboxNotFoundError):
        await get(client.of(caller_of("/team/run-7/deeper")), inner.id)
