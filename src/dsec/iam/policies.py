"""Whether a sandbox is such as the policies of its project, and of those above it, want it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dsec.core.errors import ForbiddenError
from dsec.core.spec import SandboxSpec
from dsec.wire.iam import Policy


def check_policies(spec: SandboxSpec, policies: Iterable[tuple[str, Policy]]) -> None:
    """Raises ForbiddenError with the project and the rule that is broken: the highest project's first."""
    for project, policy in policies:
        for rule, allowed, asked in _broken(spec, policy):
            shown = ", ".join(map(str, allowed)) if isinstance(allowed, tuple) else allowed
            raise ForbiddenError(
                f"the policy of {project} wants {rule} to be {_words(allowed)}{shown}, and it is {asked}",
                hint=f"ask for less, or have the policy changed: dsec project show {project}",
                detail={"project": project, "rule": rule, "allowed": allowed, "asked": asked},
            )


def check_ttl(ttl_running_s: float | None, policies: Iterable[tuple[str, Policy]]) -> None:
    """Of a sandbox that is there already. Raises ForbiddenError."""
    for project, policy in policies:
        most = policy.ttl_running_s_max
        if most is not None and (ttl_running_s is None or ttl_running_s > most):
            raise ForbiddenError(
                f"the policy of {project} wants ttl_running_s to be at most {most:g}, and it is {ttl_running_s}",
                detail={"project": project, "rule": "ttl_running_s_max", "allowed": most, "asked": ttl_running_s},
            )


def _broken(spec: SandboxSpec, policy: Policy) -> Iterable[tuple[str, Any, Any]]:
    if policy.substrates is not None and spec.substrate not in policy.substrates:
        yield "substrate", tuple(map(str, policy.substrates)), str(spec.substrate)
    if policy.networks is not None and spec.network not in policy.networks:
        yield "network", tuple(map(str, policy.networks)), str(spec.network)
    if policy.environments is not None:
        for name in spec.environment.names():
            if not any(_matches(name, pattern) for pattern in policy.environments):
                yield "environment", policy.environments, name
    for rule, most, asked in (
        ("cpu", policy.cpu_max, spec.cpu),
        ("memory_bytes", policy.memory_bytes_max, spec.memory_bytes),
        ("disk_bytes", policy.disk_bytes_max, spec.disk_bytes),
        ("ttl_running_s", policy.ttl_running_s_max, spec.ttl_running_s),
    ):
        if most is not None and (asked is None or asked > most):
            yield rule, most, asked
    if not policy.privilege_gain and spec.privilege_gain:
        yield "privilege_gain", False, True


def _matches(reference: str, pattern: str) -> bool:
    """A reference is NAME, NAME:TAG or NAME@DIGEST; a pattern without tag or digest is of every one of that name."""
    if pattern.endswith("*"):
        return reference.startswith(pattern[:-1])
    return pattern in (reference, reference.partition(":")[0].partition("@")[0])


def _words(allowed: Any) -> str:
    if isinstance(allowed, tuple):
        return "one of "
    return "" if isinstance(allowed, bool) else "at most "
