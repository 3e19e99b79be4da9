"""Another project's sandbox does not exist: for every method, and whatever is known of it (ruling 2)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dsec.core.errors import ForbiddenError, SandboxNotFoundError
from dsec.core.ids import new_exec_id
from dsec.node.rights import REQUIRED
from dsec.testing.nodes import FAKE_SPEC, NodeClient, StreamEnd, caller_of, fake_node
from dsec.wire import agent, records
from dsec.wire.codec import pack
from dsec.wire.node import (
    AGENT_ARGS,
    ExecResize,
    ExecSignal,
    ExecStart,
    FileCall,
    Method,
    OutputQuery,
    Right,
    SessionStart,
    SessionStop,
    SetEgress,
    SetTtl,
    StdinWrite,
)
from dsec.wire.plans import PlanRequest
from dsec.wire.screens import PressKey, ScreenInput, ScreenRequest
from dsec.wire.snapshots import Fork, ForkRequest, Rollback, RollbackRequest, SnapshotRequest, SnapshotTake

# Methods that name no sandbox: nothing of another project can be reached by them, or they are for administrators.
NO_SANDBOX = {
    Method.HOLDINGS,
    Method.EVENTS,  # tests/unit/test_node_events.py has what other projects see
    # tests/unit/test_node_jobs.py has what other projects see of these.
    Method.JOB_COUNT,
    Method.JOB_ACT,
    Method.USAGE,  # tests/unit/test_node_usage.py has what other projects see
    Method.CREATE,
    Method.CREATE_MANY,
    Method.LIST,
    Method.HEALTH,
    Method.DOCTOR,
    Method.GC,
    Method.CALL,
    Method.CALL_TYPES,
    Method.CALL_POOLS,
    Method.ENVIRONMENT_LIST,
    Method.ENVIRONMENT_GET,
    Method.ENVIRONMENT_REMOVE,
    Method.ENVIRONMENT_BUILD,
    Method.ENVIRONMENT_PUSH,
    Method.ENVIRONMENT_EXPORT,
    Method.ENVIRONMENT_STATS,
    Method.ENVIRONMENT_TRACE,
    Method.ENVIRONMENT_COMPOSE,
    Method.ENVIRONMENT_UPDATE,
    Method.ENVIRONMENT_DIFF,
    Method.ENVIRONMENT_COLLAPSE,
    Method.LAYER_LIST,
    Method.LAYER_GET,
    Method.LAYER_STATS,
    Method.LAYER_REMOVE,
    Method.MACHINE_LIST,
    Method.MACHINE_IMPORT,
    Method.MACHINE_REMOVE,
    Method.MACHINE_BUILD,
    Method.MACHINE_PUSH,
    Method.MACHINE_PULL,
    Method.MACHINE_COLLAPSE,
    Method.MACHINE_EXPORT,
    Method.MACHINE_TRACE,
    Method.MACHINE_COMMIT,  # for administrators, who see all
    Method.VOLUME_CREATE,
    Method.VOLUME_LIST,
    Method.VOLUME_GET,
    Method.VOLUME_REMOVE,
    # tests/unit/test_node_snapshots.py has what other projects see of these.
    Method.SNAPSHOT_LIST,
    Method.SNAPSHOT_GET,
    Method.SNAPSHOT_REMOVE,
    Method.SNAPSHOT_PUBLISH,
}
_FILE_ARGS: dict[type, Any] = {
    agent.PathArgs: agent.PathArgs(path=b"/tmp"),
    agent.ListArgs: agent.ListArgs(path=b"/tmp"),
    agent.MkdirArgs: agent.MkdirArgs(path=b"/tmp/x"),
    agent.MoveArgs: agent.MoveArgs(source=b"/tmp/x", target=b"/tmp/y"),
    agent.RemoveArgs: agent.RemoveArgs(path=b"/tmp", recursive=True),
    agent.ChmodArgs: agent.ChmodArgs(path=b"/tmp", mode=0),
    agent.ChownArgs: agent.ChownArgs(path=b"/tmp", owner="1"),
    agent.SymlinkArgs: agent.SymlinkArgs(path=b"/tmp/l", target=b"x"),
    agent.ReadArgs: agent.ReadArgs(path=b"/etc/hostname"),
    agent.WriteArgs: agent.WriteArgs(path=b"/tmp/w"),
    agent.ExtractArgs: agent.ExtractArgs(path=b"/tmp/e"),
    agent.WatchArgs: agent.WatchArgs(path=b"/tmp"),
    agent.ConnectArgs: agent.ConnectArgs(port=80),
}


def request_for(method: Method, sandbox: str, exec: str) -> Any:
    """A request that would be granted to the owner."""
    if method in AGENT_ARGS:
        return FileCall(sandbox, msgspec.Raw(pack(_FILE_ARGS[AGENT_ARGS[method]])))
    match method:
        case Method.GET | Method.DESTROY | Method.PAUSE | Method.RESUME | Method.METRICS:
            return records.SandboxRef(sandbox)
        case Method.SCREEN_PICTURE | Method.SCREEN_VIEW:
            return records.SandboxRef(sandbox)
        case Method.SCREEN_ACT:
            return ScreenInput(sandbox, ScreenRequest([PressKey(key="enter")]))
        case Method.EXEC_LIST | Method.SESSION_LIST:
            return records.SandboxRef(sandbox)
        case Method.SNAPSHOT_TAKE:
            return SnapshotTake(sandbox, SnapshotRequest())
        case Method.CREATE_PLAN:
            return PlanRequest(fork=Fork(sandbox, ForkRequest()))
        case Method.FORK:
            return Fork(sandbox, ForkRequest())
        case Method.ROLLBACK:
            return Rollback(sandbox, RollbackRequest("snap"))
        case Method.SET_TTL:
            return SetTtl(sandbox, records.TtlRequest(ttl_running_s=1.0))
        case Method.SET_EGRESS:
            return SetEgress(sandbox, records.EgressRequest(egress=["a.example"]))
        case Method.EXEC_START:
            return ExecStart(sandbox, records.ExecRequest(id=new_exec_id(), argv=["true"]))
        case Method.EXEC_GET | Method.EXEC_KILL:
            return records.ExecQuery(sandbox=sandbox, exec=exec)
        case Method.EXEC_STDIN:
            return StdinWrite(sandbox=sandbox, exec=exec, data=b"x")
        case Method.EXEC_SIGNAL:
            return ExecSignal(sandbox, exec, records.SignalRequest())
        case Method.EXEC_RESIZE:
            return ExecResize(sandbox, exec, records.TtySize())
        case Method.EXEC_OUTPUT | Method.EXEC_ATTACH:
            return OutputQuery(sandbox=sandbox, exec=exec)
        case Method.SESSION_OPEN:
            return SessionStart(sandbox, records.SessionRequest(name="s"))
        case Method.SESSION_CLOSE:
            return SessionStop(sandbox, "s")
    raise AssertionError(f"no request for {method}: a new method belongs in this test")


@pytest.fixture
async def owner(tmp_path: Path) -> AsyncIterator[NodeClient]:
    async with fake_node(tmp_path) as client:
        yield client.of(caller_of("/owner"))


async def ask(client: NodeClient, method: Method, request: Any) -> None:
    if method in client.service._unary:
        await client.service.call(method, pack(request), caller=client.caller, key=None, timeout_s=10)
    else:
        await client.service.serve_stream(method, pack(request), StreamEnd(), caller=client.caller)


@pytest.mark.parametrize("ended", [False, True], ids=["living", "ended"])
@pytest.mark.parametrize("method", sorted(set(Method) - NO_SANDBOX))
async def test_another_project_is_told_that_there_is_no_such_sandbox(
    owner: NodeClient, method: Method, ended: bool
) -> None:
    create = records.CreateRequest(spec=FAKE_SPEC)
    sandbox = await owner.call(Method.CREATE, create, records.Sandbox)
    exec = records.ExecRequest(id=new_exec_id(), argv=["sleep", "60"], stdin=True, tty=records.TtySize())
    await owner.call(Method.EXEC_START, ExecStart(sandbox.id, exec), records.ExecAnswer)
    if ended:
        await owner.call(Method.DESTROY, records.SandboxRef(sandbox.id), records.Sandbox)
    unknown = f"{sandbox.id[:-4]}aaaa"
    errors = []

    for project in ("/other", "/own", "/owner-two", "/owner/child", "/ownerx"):
        for id in (sandbox.id, unknown):
            other = owner.of(caller_of(project))
            with pytest.raises(SandboxNotFoundError) as refused:
                await ask(other, method, request_for(method, id, exec.id))
            errors.append(str(refused.value).replace(id, "ID"))

    assert len(set(errors)) == 1, "what exists and what does not must look the same"
    state = await owner.call(Method.GET, records.SandboxRef(sandbox.id), records.Sandbox)
    assert state.state == ("gone" if ended else "running")
    assert state.ttl_running_s is None


async def test_another_project_sees_none_of_them_in_listings(owner: NodeClient) -> None:
    sandbox = await owner.call(Method.CREATE, records.CreateRequest(spec=FAKE_SPEC), records.Sandbox)
    ended = await owner.call(Method.CREATE, records.CreateRequest(spec=FAKE_SPEC), records.Sandbox)
    await owner.call(Method.DESTROY, records.SandboxRef(ended.id), records.Sandbox)
    query = records.ListQuery(states=["running", "gone", "failed"])

    theirs = await owner.of(caller_of("/other")).call(Method.LIST, query, records.SandboxPage)
    own = await owner.call(Method.LIST, query, records.SandboxPage)

    assert theirs.sandboxes == []
    assert {found.id for found in own.sandboxes} == {sandbox.id, ended.id}


@pytest.mark.parametrize("method", sorted(Method))
async def test_no_method_is_served_without_its_right(owner: NodeClient, method: Method) -> None:
    need = REQUIRED[method]
    if need is None:
        assert method is Method.HEALTH
        return
    rights = frozenset(Right) - {need, Right.ADMIN}
    caller = owner.of(caller_of("/owner", rights=rights))

    with pytest.raises(ForbiddenError):
        await ask(caller, method, {})


async def test_an_administrator_reaches_every_project(owner: NodeClient) -> None:
    sandbox = await owner.call(Method.CREATE, records.CreateRequest(spec=FAKE_SPEC), records.Sandbox)
    admin = owner.of(caller_of("/", rights=frozenset({Right.ADMIN})))

    found = await admin.call(Method.GET, records.SandboxRef(sandbox.id), records.Sandbox)

    assert found.id == sandbox.id
