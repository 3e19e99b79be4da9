"""Projects, grants, tokens, quotas and policies over HTTP, with a node behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from dsec.api.routes import ROUTES
from tests.contract.served import Served, serve_fake

SPEC: dict[str, Any] = {"environment": {"base": "base"}, "substrate": "fake", "memory_bytes": 64 << 20}
Headers = dict[str, str]


@pytest.fixture
async def api(short_tmp: Path) -> AsyncIterator[Served]:
    async with serve_fake(short_tmp) as served:
        yield served


async def ask(
    api: Served,
    method: str,
    path: str,
    body: Any = None,
    /,
    *,
    by: Headers | None = None,
    status: int = 200,
    **more: str,
) -> Any:
    """By root of the machine, or by who has these headers."""
    session = api.local if by is None else api.remote
    async with session.request(method, path, json=body, params=more, headers=by) as answer:
        assert answer.status == status, await answer.text()
        return await answer.json()


async def create(
    api: Served, by: Headers | None = None, *, status: int = 201, key: str | None = None, **spec: Any
) -> Any:
    by = by if key is None else {**(by or {}), "Idempotency-Key": key}
    return await ask(api, "POST", "/v1/sandboxes", {"spec": {**SPEC, **spec}}, by=by, status=status)


async def set_quota(api: Served, path: str, **quota: Any) -> None:
    await ask(api, "PUT", "/v1/project/quota", quota, path=path)


async def test_an_agent_makes_a_project_hands_it_on_and_takes_it_back(api: Served) -> None:
    agent = await api.token("/team/run", "manage")

    await ask(api, "POST", "/v1/projects", {"path": "/team/run/sub"}, by=agent, status=201)
    made = await ask(
        api, "POST", "/v1/tokens", {"principal": "worker", "project": "/team/run/sub"}, by=agent, status=201
    )
    worker = {"Authorization": f"Bearer {made['token']}"}
    sandbox = await create(api, worker)
    who = await ask(api, "GET", "/v1/whoami", by=worker)
    paths = [p["path"] for p in (await ask(api, "GET", "/v1/projects", by=agent))["projects"]]
    busy = await ask(api, "DELETE", "/v1/project", by=agent, status=409, path="/team/run/sub")
    await ask(api, "DELETE", f"/v1/sandboxes/{sandbox['id']}", by=agent)
    await ask(api, "DELETE", "/v1/project", by=agent, path="/team/run/sub")

    assert sandbox["project"] == who["project"] == "/team/run/sub"
    assert (who["id"], who["rights"]) == ("worker@/team/run/sub", ["read", "use"])
    assert paths == ["/team/run", "/team/run/sub"]
    assert "sandboxes" in busy["message"]
    await ask(api, "GET", "/v1/whoami", by=worker, status=401)


async def test_a_refusal_says_which_right_over_which_project_is_missing(api: Served) -> None:
    user = await api.token("/team", "use")

    refused = await ask(api, "POST", "/v1/projects", {"path": "/team/x"}, by=user, status=403)

    assert refused["code"] == "forbidden"
    assert refused["detail"] == {"right": "manage", "project": "/team", "held": "use"}
    assert refused["hint"]


async def test_a_token_is_rotated_by_its_holder_and_the_old_one_ends(api: Served) -> None:
    old = await api.token("/team", "use")

    new = await ask(api, "POST", "/v1/tokens/self:rotate", {"overlap_s": 0}, by=old, status=201)

    await ask(api, "GET", "/v1/whoami", by=old, status=401)
    assert (await ask(api, "GET", "/v1/whoami", by={"Authorization": f"Bearer {new['token']}"}))["project"] == "/team"


async def test_a_caller_may_act_within_a_project_below_their_own(api: Served) -> None:
    lead = await api.token("/team", "manage")
    await ask(api, "POST", "/v1/projects", {"path": "/team/run"}, by=lead, status=201)
    inside = {**lead, "Dsec-Project": "/team/run"}

    made = await create(api, inside)
    above = await create(api, lead)

    listed = (await ask(api, "GET", "/v1/sandboxes", by=inside))["sandboxes"]
    assert [sandbox["id"] for sandbox in listed] == [made["id"]]
    await ask(api, "GET", f"/v1/sandboxes/{above['id']}", by=inside, status=404)
    for project in ("/team/none", "/other", "/"):
        await ask(api, "GET", "/v1/sandboxes", by={**lead, "Dsec-Project": project}, status=404)
    await ask(api, "GET", "/v1/sandboxes", by={**lead, "Dsec-Project": "team"}, status=400)
    root = await ask(api, "GET", "/v1/whoami", by=None)
    assert root["rights"] == ["admin", "manage", "read", "use"]


async def test_a_cap_counts_the_sandboxes_of_all_projects_below(api: Served) -> None:
    one, other = await api.token("/team/a", "use"), await api.token("/team/b", "use")
    await set_quota(api, "/team", sandboxes=3)
    await set_quota(api, "/team/a", sandboxes=2)

    first = await create(api, one)
    await create(api, one)
    full = await create(api, one, status=429)
    await create(api, other)
    above = await create(api, other, status=429)
    await ask(api, "DELETE", f"/v1/sandboxes/{first['id']}", by=one)
    await create(api, other)

    assert (full["code"], full["outcome"]) == ("quota_exceeded", "unchanged")
    assert full["detail"] == {
        "project": "/team/a", "cap": "sandboxes", "limit": 2, "used": 2, "reserved": 0, "asked": 1,
    }  # fmt: skip
    assert above["detail"]["project"] == "/team"
    quota = await ask(api, "GET", "/v1/project/quota", by=one, path="/team/a")
    shown = {(use["project"], use["cap"]): (use["used"], use["limit"]) for use in quota["binding"]}
    assert shown == {("/team", "sandboxes"): (3, 3), ("/team/a", "sandboxes"): (1, 2)}


async def test_a_burst_stops_at_the_cap(api: Served) -> None:
    user = await api.token("/team", "use")
    await set_quota(api, "/team", sandboxes=5, memory_bytes=4 * (64 << 20), substrates={"fake": {"cpu": 10}})

    answers = await asyncio.gather(
        *(api.remote.post("/v1/sandboxes", json={"spec": SPEC}, headers=user) for _ in range(30))
    )

    assert sorted(answer.status for answer in answers) == [201] * 4 + [429] * 26
    caps = {(await answer.json())["detail"]["cap"] for answer in answers if answer.status == 429}
    assert caps <= {"memory_bytes", "sandboxes"}


async def test_a_create_that_fails_gives_its_share_back(api: Served) -> None:
    user = await api.token("/team", "use")
    await set_quota(api, "/team", sandboxes=1)

    for _ in range(3):
        await create(api, user, status=501, substrate="container")
    await create(api, user)


async def test_a_create_that_was_answered_is_answered_again_at_the_cap(api: Served) -> None:
    user = await api.token("/team", "use")
    await set_quota(api, "/team", sandboxes=1)

    first = await create(api, user, key="k")
    again = await create(api, user, key="k")
    await create(api, user, key="other", status=429)
    await ask(api, "PUT", "/v1/project/policy", {"substrates": ["container"]}, path="/team")
    still = await create(api, user, key="k")
    await create(api, user, key="k", cpu=0.5, status=409)

    assert first["id"] == again["id"] == still["id"]


async def test_snapshots_and_forks_count_as_what_they_become(api: Served) -> None:
    user = await api.token("/team", "use")
    await set_quota(api, "/team", sandboxes=4, cpu=7)
    sandbox = await create(api, user, cpu=2.0)
    base = f"/v1/sandboxes/{sandbox['id']}"
    await ask(api, "POST", f"{base}:snapshot", {"name": "s"}, by=user, status=201)
    from_snapshot = {"spec": SPEC, "snapshot": "s"}

    await ask(api, "POST", "/v1/sandboxes", from_snapshot, by=user, status=201)
    many = await ask(api, "POST", f"{base}:fork", {"count": 3}, by=user, status=429)
    dear = await ask(api, "POST", f"{base}:fork", {"count": 2}, by=user, status=429)
    await ask(api, "POST", f"{base}:fork", {"count": 1}, by={**user, "Idempotency-Key": "f"}, status=201)
    await ask(api, "POST", f"{base}:fork", {"count": 1}, by={**user, "Idempotency-Key": "f"}, status=201)
    last = await ask(api, "POST", "/v1/sandboxes", from_snapshot, by=user, status=429)

    assert (many["detail"]["cap"], many["detail"]["asked"]) == ("sandboxes", 3)
    assert dear["detail"] == {
        "project": "/team", "cap": "cpu", "limit": 7, "used": 4, "reserved": 0, "asked": 4,
    }  # fmt: skip
    assert (last["detail"]["cap"], last["detail"]["used"]) == ("cpu", 6)


async def test_a_batch_stops_at_the_cap_and_says_so_for_each(api: Served) -> None:
    user = await api.token("/team", "use")
    await set_quota(api, "/team", sandboxes=3)

    async with api.remote.post("/v1/sandboxes:batch", json={"spec": SPEC, "count": 8}, headers=user) as answer:
        text = await answer.text()

    assert text.count('"quota_exceeded"') == 5
    assert text.count('"sandbox":{') == 3


async def test_policies_bind_all_that_is_below(api: Served) -> None:
    user = await api.token("/team/run", "use")
    policy = {"memory_bytes_max": 128 << 20, "ttl_running_s_max": 60, "environments": ["ba*"], "privilege_gain": False}
    await ask(api, "PUT", "/v1/project/policy", policy, path="/team")

    made = await create(api, user, ttl_running_s=30)
    refusals = [
        await create(api, user, status=403, **spec)
        for spec in (
            {},
            {"ttl_running_s": 61},
            {"ttl_running_s": 9, "memory_bytes": 256 << 20},
            {"ttl_running_s": 9, "environment": {"base": "other"}},
            {"ttl_running_s": 9, "privilege_gain": True},
        )
    ]
    longer = await ask(api, "PUT", f"/v1/sandboxes/{made['id']}/ttl", {"ttl_running_s": 600}, by=user, status=403)
    await ask(api, "PUT", f"/v1/sandboxes/{made['id']}/ttl", {"ttl_running_s": 60}, by=user)

    rules = [refusal["detail"]["rule"] for refusal in refusals]
    assert rules == ["ttl_running_s", "ttl_running_s", "memory_bytes", "environment", "privilege_gain"]
    assert {refusal["detail"]["project"] for refusal in refusals} == {"/team"}
    assert longer["code"] == "forbidden"


async def test_who_changed_what_is_told_to_who_manages_it(api: Served) -> None:
    user, lead = await api.token("/team/run", "use"), await api.token("/team", "manage")
    elsewhere = await api.token("/other", "manage")
    made = await create(api, user)
    await create(api, user, status=413, cpu=-1)
    await ask(api, "GET", f"/v1/sandboxes/{made['id']}", by=user)
    await ask(api, "DELETE", f"/v1/sandboxes/{made['id']}", by=lead)

    seen = (await ask(api, "GET", "/v1/audit", by=lead))["entries"]
    page = await ask(api, "GET", "/v1/audit", by=lead, limit="1")
    rest = await ask(api, "GET", "/v1/audit", by=lead, cursor=page["next"])

    assert [(e["principal"], e["action"], e["status"]) for e in seen] == [
        ("test@/team", "destroy_sandbox", 200),
        ("test@/team/run", "create_sandbox", 413),
        ("test@/team/run", "create_sandbox", 201),
    ]
    assert seen[0]["target"] == f"/v1/sandboxes/{made['id']}"
    assert page["entries"] + rest["entries"] == seen
    assert (await ask(api, "GET", "/v1/audit", by=elsewhere))["entries"] == []
    await ask(api, "GET", "/v1/audit", by=user, status=403)


async def test_grants_and_principals_are_listed_and_taken_back(api: Served) -> None:
    lead = await api.token("/team", "manage")
    grant = await ask(
        api, "POST", "/v1/grants", {"principal": "p", "project": "/team", "right": "read"}, by=lead, status=201
    )

    grants = (await ask(api, "GET", "/v1/grants", by=lead))["grants"]
    principals = (await ask(api, "GET", "/v1/principals", by=lead))["principals"]
    await ask(api, "DELETE", f"/v1/grants/{grant['id']}", by=lead)
    await ask(api, "DELETE", "/v1/principals", by=lead, id="p@/team")

    assert {g["principal"]: (g["right"], g["in_force"]) for g in grants} == {
        "p@/team": ("read", True), "test@/team": ("manage", True),
    }  # fmt: skip
    assert {p["id"]: (p["tokens"], p["grants"]) for p in principals} == {"p@/team": (0, 1), "test@/team": (1, 1)}
    await ask(api, "DELETE", "/v1/principals", by=lead, id="p@/team", status=404)


_NAMED = {"token": "tok_0123456789abcdef", "grant": "grt_0123456789abcdef"}
_BODIES: dict[str, Any] = {
    "create_project": {"path": "/theirs/x"},
    "create_token": {"principal": "x", "project": "/theirs"},
    "create_grant": {"principal": "x", "project": "/theirs"},
}
_OURS = [
    route
    for route in ROUTES
    if route.path.startswith(("/v1/project", "/v1/token", "/v1/grant", "/v1/principal")) and route.method != "GET"
] + [route for route in ROUTES if route.path in ("/v1/project", "/v1/project/quota") and route.method == "GET"]


@pytest.mark.parametrize("route", _OURS, ids=lambda route: route.name)
async def test_another_project_looks_as_one_that_is_not_there(api: Served, route: Any) -> None:
    """Whether it exists or not, and whatever is known of it."""
    us, them = await api.token("/ours", "manage"), await api.token("/theirs", "manage")
    theirs = (await ask(api, "GET", "/v1/grants", by=them))["grants"][0]["id"]
    token = (await ask(api, "GET", "/v1/whoami", by=them))["token"]
    answers = []

    for real in (True, False):
        names = {"token": token, "grant": theirs} if real else _NAMED
        path = route.path
        for name, value in names.items():
            path = path.replace(f"{{{name}}}", value)
        query = {"path": "/theirs" if real else "/nowhere"} if "/v1/project" in path and path != "/v1/projects" else {}
        query |= {"id": "test@/theirs" if real else "x@/nowhere"} if "/v1/principals" in path else {}
        body = _BODIES.get(route.name, {})
        body = body if real else {key: str(value).replace("theirs", "nowhere") for key, value in body.items()}
        answer = await ask(api, route.method, path, body or {}, by=us, status=404, **query)
        text = str({name: answer[name] for name in ("code", "message")})
        for word in (*names.values(), "test@/theirs", "x@/nowhere", "/theirs/x", "/theirs", "/nowhere/x", "/nowhere"):
            text = text.replace(word, "IT")
        answers.append(text)

    assert answers[0] == answers[1]
    await ask(api, "GET", "/v1/whoami", by=them)
