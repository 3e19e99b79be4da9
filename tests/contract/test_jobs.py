"""Jobs as callers have them: over HTTP, in the SDK, and by `dsec job`."""

from __future__ import annotations

import asyncio
import json
import secrets
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import dsec
from dsec import errors
from dsec.sdk.client import AsyncClient
from dsec.wire.usage import UsageRecord
from tests.contract.sdk_service import RunningService
from tests.contract.served import until


@pytest.fixture
def client(service: RunningService) -> Iterator[dsec.Client]:
    with dsec.Client(service.url) as found:
        yield found


@pytest.fixture
def name() -> str:
    return f"job-{secrets.token_hex(4)}"


def made(found: list[dsec.Sandbox | dsec.DsecError]) -> list[dsec.Sandbox]:
    assert all(isinstance(one, dsec.Sandbox) for one in found), found
    return [one for one in found if isinstance(one, dsec.Sandbox)]


def test_the_sandboxes_of_a_job_are_acted_on_together_and_end_with_it(client: dsec.Client, name: str) -> None:
    with client.job(name) as job:
        inside = made(client.create_many(3, "base", backend="fake", job=name))
        with client.create("base", backend="fake") as outside:
            assert sorted(one.id for one in job.list()) == sorted(one.id for one in inside)
            assert {one.info.job for one in inside} == {name}
            assert outside.info.job is None

            paused = job.pause()
            assert (paused.ok, paused.done, paused.job.state) == (True, 3, "paused")
            assert job.refresh().sandboxes == {"paused": 3}
            assert outside.refresh().state == "running"
            with pytest.raises(errors.ConflictError, match="takes no new"):
                client.create("base", backend="fake", job=name)

            assert job.resume().done == 3
            assert job.refresh().sandboxes == {"running": 3}

    assert [one.refresh().state for one in inside] == ["gone"] * 3
    assert client.jobs.get(name).info.state == "stopped"
    with pytest.raises(errors.ConflictError, match="takes no new"):
        client.create("base", backend="fake", job=name)


def test_a_job_that_is_not_there_takes_no_sandboxes(client: dsec.Client, name: str) -> None:
    with pytest.raises(errors.NotFoundError):
        client.create("base", backend="fake", job=name)
    with pytest.raises(errors.NotFoundError):
        client.jobs.get(name)


def test_an_error_leaves_the_job_to_its_lease(client: dsec.Client, name: str) -> None:
    with pytest.raises(RuntimeError, match="of the caller"), client.job(name):
        raise RuntimeError("of the caller")

    job = client.jobs.get(name)
    assert job.info.state == "running"
    assert job.stop().ok
    job.remove()
    assert name not in {one.name for one in client.jobs.list()}


async def test_the_lease_is_renewed_in_the_background_and_a_stop_is_told(service: RunningService, name: str) -> None:
    async with AsyncClient(service.url) as client, client.job(name, lease_s=2) as job:
        first = job.info.heartbeat_at
        await until(lambda: job.info.heartbeat_at > first)

        await (await client.jobs.get(name)).stop()
        await until(lambda: job.lost)

        assert isinstance(job.lost, errors.ConflictError)
        with pytest.raises(errors.ConflictError):
            await job.extend(60)


async def test_the_service_itself_watches_leases(service: RunningService, name: str) -> None:
    async with AsyncClient(service.url) as client:
        job = await client.jobs.create(name, lease_s=2)
        sandbox = await client.create("base", backend="fake", job=name)

        async def state() -> str:
            return (await sandbox.refresh()).state

        async with asyncio.timeout(60):
            while await state() != "paused":  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        assert (await job.refresh()).because == "lease"

        async with asyncio.timeout(60):
            await job.heartbeat()
            while await state() != "running":
                await asyncio.sleep(0.1)
                await job.heartbeat()  # or it is paused again meanwhile
        await job.stop()


def test_another_project_has_no_such_job(service: RunningService, client: dsec.Client, name: str) -> None:
    job = client.jobs.create(name)
    token = client.tokens.create("jobs-other", project="/jobs-other")

    with dsec.Client(f"http://127.0.0.1:{service.tcp_port}", token.token) as other:
        for work in (
            lambda: other.jobs.get(name),
            lambda: other.create("base", backend="fake", job=name),
            lambda: other.jobs.create(name).remove(),
        ):
            with pytest.raises((errors.NotFoundError, errors.ConflictError)):
                work()
        assert {(one.name, one.project) for one in other.jobs.list()} == {(name, "/jobs-other")}
        other.jobs.get(name).stop()
    assert job.refresh().state == "running"
    job.stop()


def test_forks_are_of_the_job_and_usage_is_told_by_job(client: dsec.Client, name: str) -> None:
    with client.job(name) as job:
        sandbox = client.create("base", backend="fake", job=name)
        (child,) = sandbox.fork()
        assert child.info.job == name
        assert {one.id for one in job.list()} == {sandbox.id, child.id}
        sandbox.destroy()

        (total,) = client.usage(by="job", job=name).totals
        assert (total.job, total.sandboxes) == (name, 2)

    records: list[UsageRecord] = client.usage(by="sandbox", job=name).records
    assert {record.sandbox for record in records} == {sandbox.id, child.id}


def test_terms_out_of_bounds_are_named(client: dsec.Client, name: str) -> None:
    with pytest.raises(errors.LimitError, match="lease_s"):
        client.jobs.create(name, lease_s=1)
    with pytest.raises(errors.InvalidArgumentError, match="on_missed"):
        client.jobs.create(name, on_missed="forget")
    with pytest.raises(errors.InvalidArgumentError, match="job name"):
        client.jobs.create("a/b")


def test_the_command_makes_shows_and_stops_jobs(service: RunningService, name: str) -> None:
    def cli(*arguments: str, status: int = 0) -> bytes:
        done = subprocess.run(
            [sys.executable, "-m", "dsec", *arguments], capture_output=True, env=service.environment, timeout=200
        )
        assert done.returncode == status, done.stderr.decode()
        return done.stdout

    assert cli("job", "create", name, "--lease", "3600").decode().strip() == name
    id = cli("create", "--backend", "fake", "--job", name).decode().strip()
    assert cli("ls", "-q", "--job", name).decode().split() == [id]
    assert "sandboxes running: 1" in cli("job", "show", name).decode()

    report: dict[str, Any] = json.loads(cli("job", "stop", name, "--json"))
    assert (report["done"], report["failed"], report["job"]["state"]) == (1, [], "stopped")
