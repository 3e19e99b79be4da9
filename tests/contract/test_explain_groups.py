"""What would become of a group: where its members would go, or which of them goes nowhere, and why."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import dsec
from dsec.api.explaining import caps_of_levels, caps_together, group_places
from dsec.core.limits import GIB
from dsec.core.spec import Environment, Place, SandboxSpec
from dsec.sdk.compose import read_compose
from dsec.wire.errors import ErrorBody
from dsec.wire.peers import RELAYS
from dsec.wire.plans import CapVerdict, CreatePlan, NodeFacts
from tests.contract.sdk_service import RunningService

FAKE = {"backend": "fake", "memory": "64MiB"}
APART = Place(group="db", apart=True)


def plan(node: str, spec: SandboxSpec, gib: int = 4, refused: str | None = None, *, relays: bool = True) -> CreatePlan:
    facts = NodeFacts(
        substrates=("container",),
        networks=("none",),
        features=(RELAYS,) if relays else (),
        has_environment=True,
        used={"memory_bytes": 0},
        room={"memory_bytes": gib * GIB},
    )
    body = None if refused is None else ErrorBody(code="no_capacity", message=refused)
    return CreatePlan(node=node, project="/", spec=spec, refused=body, facts=facts)


def member(gib: int = 1, place: Place | None = None) -> SandboxSpec:
    return SandboxSpec(environment=Environment("base"), memory_bytes=gib * GIB, place=place)


def test_it_says_where_each_would_go_or_which_has_no_node() -> None:
    one, large, apart = member(), member(3), member(place=APART)

    def places(
        members: dict[str, SandboxSpec], *nodes: str, linked: bool = True, **more: object
    ) -> tuple[dict[str, str], str | None, str | None]:
        plans = {name: [plan(node, spec, **more) for node in nodes] for name, spec in members.items()}  # type: ignore[arg-type]
        return group_places(plans, {name: found[0].spec for name, found in plans.items()}, "/", linked=linked)

    found, missing, why = places({"a": one, "b": large}, "n1", "n2")
    assert (len(set(found.values())), missing, why) == (1, None, None)
    found, missing, why = places({"a": large, "b": large}, "n1", "n2")
    assert (set(found.values()), missing) == ({"n1", "n2"}, None)

    assert places({"a": apart, "b": apart}, "n1")[0] == {}
    _, missing, why = places({"a": apart, "b": apart}, "n1")
    assert missing in ("a", "b")
    assert why is not None
    assert "one of the group 'db' is there already" in why
    _, missing, why = places({"a": large, "b": large}, "n1")
    assert missing in ("a", "b")
    assert why is not None
    assert "memory_bytes are taken" in why  # by the other one
    _, _, why = places({"a": large, "b": large}, "n1", "n2", relays=False)
    assert why is not None
    assert "it lacks relays" in why
    _, _, why = places({"a": one}, "n1", refused="its disk is full")
    assert why is not None
    assert "its disk is full" in why


def test_caps_are_of_all_members_together() -> None:
    def cap(asked: float, *, fits: bool = True, limit: float = 3.0) -> CapVerdict:
        return CapVerdict(project="/a", cap="cpu", limit=limit, used=1.0, reserved=0.0, asked=asked, fits=fits)

    (one,) = caps_together([cap(1.0), cap(1.0)])
    assert (one.asked, one.fits) == (2.0, True)
    assert not caps_together([cap(1.0), cap(1.5)])[0].fits
    assert not caps_together([cap(0.0, fits=False), cap(1.0)])[0].fits  # one that does not say how much
    assert caps_together([cap(0.0, limit=0.5)])[0].fits


def test_creations_a_second_are_counted_of_those_that_start_together() -> None:
    def caps(limit: float) -> list[CapVerdict]:
        return [
            CapVerdict(project="/a", cap=cap, limit=limit, used=0.0, reserved=0.0, asked=1.0, fits=True)
            for cap in ("sandboxes", "container.creates_per_s")
        ]

    found = {cap.cap: (cap.asked, cap.fits) for cap in caps_of_levels([[*caps(2), *caps(2)], caps(2)])}
    assert found == {"sandboxes": (3.0, False), "container.creates_per_s": (2.0, True)}
    found = {cap.cap: (cap.asked, cap.fits) for cap in caps_of_levels([caps(1), [*caps(1), *caps(1)]])}
    assert found["container.creates_per_s"] == (2.0, False)


def test_by_sdk_and_command_it_is_what_a_start_would_meet(service: RunningService, tmp_path: Path) -> None:
    with dsec.Client(service.url) as client:
        good = client.groups.explain({"a": FAKE, "b": FAKE}, links=["a:7"], name="plan")
        apart = {**FAKE, "place": APART}
        bad = client.groups.explain({"a": apart, "b": apart}, name="plan")
        large = client.groups.explain({"a": FAKE, "b": {**FAKE, "network": "routed"}}, name="plan")

        assert good.would_be_made
        assert set(good.nodes) == {"a", "b"}
        assert not bad.would_be_made
        assert bad.missing in ("a", "b")
        assert (large.would_be_made, large.missing) == (False, "b")
        assert [node.fits for node in large.members["b"].nodes] == [False]
        assert client.list(job="plan") == []

    file = tmp_path / "compose.yaml"
    file.write_text("services: {web: {image: nowhere, expose: [80]}}")
    done = subprocess.run(
        [sys.executable, "-m", "dsec", "group", "explain", str(file), "--name", "plan"],
        capture_output=True, text=True, env=service.environment, timeout=200,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "it would be refused" in done.stdout
    assert "none for web" in done.stdout


def test_a_volume_that_up_would_make_keeps_no_member_from_a_node(tmp_path: Path) -> None:
    text = "services: {web: {image: base, volumes: ['kept:/data', 'there:/old']}}\nvolumes: {kept: {}, there: {}}"
    (tmp_path / "compose.yaml").write_text(text)
    read = read_compose(tmp_path / "compose.yaml", name="plan", variables={})

    asked = read.without(frozenset({"plan-kept"})).request(timeout_s=5)

    assert [mount.name for mount in read.members["web"].spec.volumes] == ["plan-kept", "plan-there"]
    assert [mount.name for mount in asked.members["web"].spec.volumes] == ["plan-there"]
