"""`explain` says what a create would do: with the same checks, and nothing happens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import dsec
from dsec.api.explaining import cap_verdict, node_verdicts
from dsec.cluster.placement import Refusal
from dsec.core.ids import NodeId
from dsec.core.spec import Environment, Place, SandboxSpec
from dsec.wire.errors import ErrorBody
from dsec.wire.iam import CapUse
from dsec.wire.plans import CreatePlan, NodeFacts
from tests.contract.sdk_service import RunningService
from tests.contract.served import Served, serve_fake

SPEC: dict[str, Any] = {"environment": {"base": "base"}, "substrate": "fake", "memory_bytes": 64 << 20}


@pytest.fixture
async def api(short_tmp: Path) -> AsyncIterator[Served]:
    async with serve_fake(short_tmp, sandboxes_max=2, labels={"zone": "a"}) as served:
        yield served


async def ask(api: Served, path: str, body: Any, by: dict[str, str], *, status: int = 200) -> Any:
    async with api.remote.post(path, json=body, headers=by) as answer:
        assert answer.status == status, await answer.text()
        return await answer.json()


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"place": {"labels": {"zone": "b"}}}, "label"),
        ({"place": {"features": ["gpu"]}}, "feature"),
        ({"substrate": "microvm"}, "substrate"),
        ({"network": "routed"}, "network"),
        ({"name": "taken"}, "conflict"),
        ({"volumes": [{"name": "nowhere", "path": "/data"}]}, "feature"),
        ({"place": {"labels": {"zone": "a"}, "features": ["pause"]}}, None),
        ({}, None),
    ],
)
async def test_what_it_says_is_what_a_create_meets(api: Served, spec: dict[str, Any], reason: str | None) -> None:
    user = await api.token("/team", "use")
    await ask(api, "/v1/sandboxes", {"spec": {**SPEC, "name": "taken"}}, user, status=201)
    body = {"spec": {**SPEC, **spec}}

    told = await ask(api, "/v1/sandboxes:explain", body, user)
    async with api.remote.post("/v1/sandboxes", json=body, headers=user) as answer:
        came = answer.status

    (node,) = told["nodes"]
    assert (node["reason"], node["fits"], node["chosen"]) == (reason, reason is None, reason is None)
    assert told["would_be_made"] == (came == 201)
    assert reason is None or node["text"]


async def test_that_there_is_no_node_is_said(api: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api.fleet, "nodes", lambda: ())
    user = await api.token("/team", "use")

    refused = await ask(api, "/v1/sandboxes:explain", {"spec": SPEC}, user, status=503)

    assert refused["code"] == "unavailable"


async def test_nodes_that_cannot_be_asked_are_told_as_what_they_are(
    api: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = await api.token("/team", "use")
    monkeypatch.setattr(api.fleet, "nodes", lambda: ())
    monkeypatch.setattr(api.fleet, "closed", lambda: {NodeId("away"): Refusal("closed", "it is away", "look")})

    told = await ask(api, "/v1/sandboxes:explain", {"spec": SPEC}, user)
    group = await ask(api, "/v1/groups:explain", {"name": "g", "members": {"one": {"spec": SPEC}}}, user)

    assert not told["would_be_made"]
    assert [(one["node"], one["text"], one["hint"]) for one in told["nodes"]] == [("away", "it is away", "look")]
    assert (group["would_be_made"], group["missing"]) == (False, "one")
    assert "node away: it is away" in group["why"]


async def test_a_full_node_says_how_full_it_is(api: Served) -> None:
    user = await api.token("/team", "use")
    for _ in range(2):
        await ask(api, "/v1/sandboxes", {"spec": SPEC}, user, status=201)

    told = await ask(api, "/v1/sandboxes:explain", {"spec": SPEC}, user)

    assert not told["would_be_made"]
    assert told["nodes"][0]["reason"] == "sandboxes"
    assert told["nodes"][0]["fullness"] == 1.0
    assert told["nodes"][0]["hint"]


async def test_caps_and_policies_are_told_without_a_create(api: Served) -> None:
    user = await api.token("/team/run", "use")
    quota = {"sandboxes": 1, "substrates": {"fake": {"cpu": 0.5}, "container": {"sandboxes": 0}}}
    async with api.local.put("/v1/project/quota", params={"path": "/team"}, json=quota) as answer:
        assert answer.status == 200
    async with api.local.put("/v1/project/policy", params={"path": "/team/run"}, json={"cpu_max": 0.75}) as answer:
        assert answer.status == 200

    told = await ask(api, "/v1/sandboxes:explain", {"spec": SPEC}, user)
    async with api.remote.get("/v1/sandboxes", headers=user) as answer:
        there = (await answer.json())["sandboxes"]

    assert not told["would_be_made"]
    assert told["policy"]["detail"]["rule"] == "cpu"
    assert {cap["cap"]: (cap["asked"], cap["fits"]) for cap in told["caps"]} == {
        "sandboxes": (1, True), "fake.cpu": (1, False), "container.sandboxes": (0, True),
    }  # fmt: skip
    assert told["nodes"][0]["fits"]
    assert there == []


def test_of_several_nodes_the_least_loaded_that_can_is_chosen() -> None:
    spec = SandboxSpec(environment=Environment("base"), place=Place(labels={"zone": "a"}))

    def plan(name: str, used: int, refused: ErrorBody | None = None, **labels: str) -> CreatePlan:
        facts = NodeFacts(
            substrates=("container",),
            networks=("none",),
            labels={"zone": "a"} | labels,
            has_environment=True,
            used={"sandboxes": used},
            room={"sandboxes": 10},
        )
        return CreatePlan(node=name, project="/", spec=spec, refused=refused, facts=facts)

    refusal = ErrorBody(code="no_capacity", message="its disk is full", hint="make room")
    plans = [plan("busy", 8), plan("idle", 1), plan("veto", 0, refusal), plan("far", 0, zone="b"), plan("full", 10)]

    found = {verdict.node: verdict for verdict in node_verdicts(plans, spec)}

    assert [name for name, verdict in found.items() if verdict.chosen] == ["idle"]
    assert {name: verdict.reason for name, verdict in found.items()} == {
        "busy": None, "idle": None, "veto": "no_capacity", "far": "label", "full": "sandboxes",
    }  # fmt: skip
    assert (found["veto"].text, found["veto"].hint) == ("its disk is full", "make room")
    assert found["busy"].fullness == 0.8

    closed = {NodeId("idle"): Refusal("closed", "it is late", "look"), NodeId("away"): Refusal("closed", "it is away")}
    without = {one.node: one for one in node_verdicts(plans, spec, closed=closed)}
    assert [name for name, verdict in without.items() if verdict.chosen] == ["busy"]
    idle, away = without["idle"], without["away"]
    assert (idle.fits, idle.reason, idle.text, idle.hint) == (False, "closed", "it is late", "look")
    assert (away.fits, away.reason, away.text) == (False, "closed", "it is away")


def test_a_cap_on_disk_wants_a_sandbox_to_say_how_much() -> None:
    use = CapUse(project="/a", cap="disk_bytes", limit=100.0, used=0.0)

    assert not cap_verdict(use, SandboxSpec(environment=Environment("base"))).fits
    assert cap_verdict(use, SandboxSpec(environment=Environment("base"), disk_bytes=1 << 20)).asked == 1 << 20


def test_by_sdk_it_is_a_record(service: RunningService) -> None:
    with dsec.Client(service.url) as client:
        good = client.explain("base", backend="fake")
        bad = client.explain("base", backend="fake", place=dsec.Place(features=("gpu",)))

        assert good.would_be_made
        assert [node.reason for node in bad.nodes] == ["feature"]
        assert client.list() == []
