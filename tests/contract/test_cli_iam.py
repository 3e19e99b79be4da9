"""Projects, quotas, grants and tokens by command and by SDK, against the real service."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

import dsec
from dsec.core.errors import ForbiddenError, NotFoundError, QuotaError
from tests.contract.sdk_service import RunningService

DSEC = [sys.executable, "-m", "dsec"]


def run(service: RunningService, *arguments: str, status: int = 0) -> str:
    done = subprocess.run([*DSEC, *arguments], capture_output=True, env=service.environment, timeout=200)
    assert done.returncode == status, done.stderr.decode()
    return done.stdout.decode() if status == 0 else done.stderr.decode()


def test_a_team_is_set_up_by_commands(service: RunningService) -> None:
    def cli(*arguments: str, status: int = 0) -> str:
        return run(service, *arguments, status=status)

    cli("project", "create", "/team")
    cli("quota", "set", "/team", "--sandboxes", "1", "--memory", "2GiB")
    cli("quota", "set", "/team", "--backend", "fake", "--cpu", "4")
    cli("project", "policy", "/team", "--memory", "1GiB", "--environment", "ba*")
    token = cli("token", "create", "lead", "--project", "/team", "--right", "manage").strip()
    url = f"http://127.0.0.1:{service.tcp_port}"
    remote = ("--url", url, "--token", token)

    cli(*remote, "project", "create", "/team/run")
    made = cli(*remote, "--project", "/team/run", "create", "--backend", "fake").strip()
    full = cli(*remote, "create", "--backend", "fake", status=125)
    policy = cli(*remote, "create", "--backend", "fake", "--memory", "2GiB", status=125)
    shown = cli(*remote, "quota", "show", "/team/run")
    grant = json.loads(cli(*remote, "grant", "add", "p", "/team/run", "--right", "read", "--json"))
    listed = cli(*remote, "grant", "ls")
    who = cli(*remote, "whoami")
    cli(*remote, "grant", "rm", grant["id"])
    cli(*remote, "principal", "rm", "p@/team/run")
    new = cli(*remote, "token", "rotate", "--overlap", "0").strip()
    old = cli(*remote, "whoami", status=125)
    log = cli("--url", url, "--token", new, "audit", "--limit", "5")
    cli("rm", made)
    cli("--url", url, "--token", new, "project", "rm", "/team/run")

    assert "/team has a cap of 1 on sandboxes: 1 are used" in full
    assert "policy of /team wants memory_bytes" in policy
    assert "fake.cpu" in shown
    assert "2.0 GiB" in shown
    assert "p@/team/run" in listed
    assert "lead@/team, acting in /team" in who
    assert "expired" in old
    assert "rotate_token" in log
    assert [line.split()[0] for line in cli("project", "ls", "/team").splitlines()] == ["PATH", "/team"]
    cli("quota", "set", "/team", "--sandboxes", "none", "--memory", "none")
    cli("quota", "set", "/team", "--backend", "fake", "--cpu", "none")
    cli("project", "policy", "/team", "--memory", "none", "--environment", "none")
    assert "none of its own" in cli("project", "show", "/team")


def test_a_team_is_set_up_by_the_sdk(service: RunningService, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"http://127.0.0.1:{service.tcp_port}"
    with dsec.Client(service.url) as root:
        root.projects.create("/sdk")
        root.projects.set_quota("/sdk", dsec.Quota(sandboxes=1))
        root.projects.set_policy("/sdk", dsec.Policy(cpu_max=2))
        token = root.tokens.create("lead", project="/sdk", rights=["manage"]).token
    options: dict[str, Any] = {"backend": "fake"}

    with dsec.Client(url, token) as lead:
        made = lead.projects.create("/sdk/run")
        with dsec.Client(url, token, project="/sdk/run") as inside:
            sandbox = inside.create("base", **options)
            assert (sandbox.info.project, inside.whoami().project) == ("/sdk/run", "/sdk/run")
            with pytest.raises(NotFoundError):
                inside.projects.get("/sdk")
        with pytest.raises(QuotaError) as refused:
            lead.create("base", **options)
        with pytest.raises(ForbiddenError):
            lead.create("base", cpu=3, **options)
        with pytest.raises(ForbiddenError):
            lead.projects.set_quota("/sdk", dsec.Quota())
        binding = lead.projects.quota("/sdk/run").binding
        grant = lead.grants.create("agent", project="/sdk/run", right="manage")
        assert {found.id: found.in_force for found in lead.grants.list()}[grant.id]
        assert "agent@/sdk/run" in {found.id for found in lead.grants.principals()}
        lead.grants.revoke(grant.id)
        lead.grants.remove_principal("agent@/sdk/run")
        assert [entry.action for entry in lead.audit(limit=2).entries] == ["remove_principal", "revoke_grant"]
        sandbox.destroy()
        monkeypatch.setitem(os.environ, "DSEC_PROJECT", "/sdk/run")
        with dsec.Client(url, token) as there:
            assert there.whoami().project == "/sdk/run"
        monkeypatch.undo()
        lead.projects.remove("/sdk/run")
        again = lead.tokens.rotate(overlap_s=0)

    assert made.path == "/sdk/run"
    assert refused.value.detail["cap"] == "sandboxes"
    assert [(use.project, use.cap, use.used, use.limit) for use in binding] == [("/sdk", "sandboxes", 1, 1)]
    with dsec.Client(url, again.token) as lead:
        assert [project.path for project in lead.projects.list()] == ["/sdk"]
