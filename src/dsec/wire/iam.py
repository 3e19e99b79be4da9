"""Records of projects, grants, quotas and policies: what managers ask for and see."""

from __future__ import annotations

import math

import msgspec

from dsec.core import limits
from dsec.core.errors import InvalidArgumentError, LimitError
from dsec.core.spec import NetworkMode, SandboxSpec, Substrate
from dsec.wire.node import Right

CAPS = ("sandboxes", "creates_per_s", "cpu", "memory_bytes", "disk_bytes")


class Caps(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """What all sandboxes of a project and of those below it may have together. None: no cap here."""

    sandboxes: int | None = None  # that live
    creates_per_s: int | None = None
    cpu: float | None = None  # cores, as asked for
    memory_bytes: int | None = None  # as asked for
    disk_bytes: int | None = None  # as asked for; a sandbox must say how much then

    def __post_init__(self) -> None:
        for name in CAPS:
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not math.isfinite(value) or not 0 <= value < 1 << 62):
                raise InvalidArgumentError(f"the cap on {name} must be a number of 0 or more, not {value!r}")


class Quota(Caps, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """`substrates`: caps on those of one substrate, beside the caps on all."""

    substrates: dict[Substrate, Caps] = {}


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """What each sandbox of a project, and of those below it, must be like. None: no rule here."""

    substrates: tuple[Substrate, ...] | None = None  # one of these
    networks: tuple[NetworkMode, ...] | None = None  # one of these
    environments: tuple[str, ...] | None = (
        None  # all its parts are of these names; a `*` at the end stands for anything
    )
    cpu_max: float | None = None
    memory_bytes_max: int | None = None
    disk_bytes_max: int | None = None  # a sandbox must say how much then
    ttl_running_s_max: float | None = None  # a sandbox must have an end then
    privilege_gain: bool = True  # False: refused

    def __post_init__(self) -> None:
        for name in ("cpu_max", "memory_bytes_max", "disk_bytes_max", "ttl_running_s_max"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not math.isfinite(value) or value < 0):
                raise InvalidArgumentError(f"{name} must be a number of 0 or more, not {value!r}")
        if self.environments is not None:
            if len(self.environments) > limits.LABELS_MAX:
                raise LimitError(f"a policy names at most {limits.LABELS_MAX} environments")
            for pattern in self.environments:
                if not pattern or "*" in pattern[:-1] or len(pattern) > limits.NAME_BYTES_MAX:
                    raise InvalidArgumentError(
                        f"{pattern[:40]!r} is no name of environments", hint="such as 'python-*'; '*' is at the end"
                    )


class ProjectRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    path: str  # "/team/run-7"; its parent must be there


class ProjectInfo(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    created_at: float
    created_by: str
    quota: Quota = Quota()
    policy: Policy = Policy()


class ProjectPage(msgspec.Struct, frozen=True):
    projects: list[ProjectInfo] = []
    next: str | None = None  # cursor for the next page


class CapUse(msgspec.Struct, frozen=True, kw_only=True):
    """One cap that binds a project: its own, or one of a project above it."""

    project: str  # that has the cap
    cap: str  # "sandboxes", "container.cpu"
    limit: float
    used: float  # by sandboxes that live
    reserved: float = 0.0  # for creates that are under way, and by replicas


class QuotaInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`quota` is what the project has been given; `binding` what counts, with every project above it."""

    project: str
    quota: Quota
    binding: list[CapUse] = []


class GrantRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    principal: str  # "name@/team", or a name in the project granted
    project: str
    right: Right = Right.USE
    ttl_s: float | None = None

    def __post_init__(self) -> None:
        check_principal_name(self.principal.rpartition("@/")[0] or self.principal)
        check_ttl(self.ttl_s)


class GrantInfo(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    principal: str  # "name@/team"
    project: str
    right: str
    created_at: float
    created_by: str
    expires_at: float | None = None
    parent: str | None = None  # the grant that its giver had it by; with that one it goes
    in_force: bool = True


class GrantPage(msgspec.Struct, frozen=True):
    grants: list[GrantInfo] = []


class PrincipalInfo(msgspec.Struct, frozen=True, kw_only=True):
    id: str  # "name@/team"
    name: str
    project: str
    created_at: float
    created_by: str
    tokens: int = 0
    grants: int = 0


class PrincipalPage(msgspec.Struct, frozen=True):
    principals: list[PrincipalInfo] = []


class HeldInfo(msgspec.Struct, frozen=True, kw_only=True):
    project: str
    right: str
    expires_at: float | None = None


class WhoAmI(msgspec.Struct, frozen=True, kw_only=True):
    """Who the service takes the caller for."""

    principal: str
    id: str
    project: str  # that it acts in
    rights: list[str]
    expires_at: float | None = None
    token: str | None = None  # id
    held: list[HeldInfo] = []


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Something that somebody changed, or tried to."""

    seq: int = 0
    at: float
    principal: str  # "name@/team"; "uid:0@/"
    project: str  # that they acted in
    action: str  # operation of the API, such as create_sandbox
    target: str = ""  # path of the request
    status: int = 0
    request: str = ""  # id, as in logs
    token: str | None = None  # id


class AuditPage(msgspec.Struct, frozen=True):
    entries: list[AuditEntry] = []
    next: str | None = None  # cursor for the next page
    lost: int = 0  # entries that could not be kept since the service has started


# ---- what nodes are asked ------------------------------------------------------------------------


class HoldingsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    projects: tuple[str, ...]
    kept: bool = False  # also what outlives sandboxes


class Holdings(msgspec.Struct, frozen=True):
    """Of each project that was asked for, all below it included: cap → what its sandboxes of this node have; and how
    many snapshots and volumes of it there are, where that was asked."""

    by_project: dict[str, dict[str, int]] = {}
    kept: dict[str, dict[str, int]] = {}


def amounts_of(spec: SandboxSpec) -> dict[str, int]:
    """What one sandbox counts for, by cap. Whole numbers: cores in thousandths, so that sums are exact."""
    amounts = {
        "sandboxes": 1,
        "cpu": max(1, round(spec.cpu * 1000)),
        "memory_bytes": spec.memory_bytes,
        "disk_bytes": spec.disk_bytes or 0,
    }
    return amounts | {f"{spec.substrate}.{name}": amount for name, amount in amounts.items()}


def check_principal_name(name: str) -> None:
    if not name or len(name) > 255 or not name.isprintable():
        raise InvalidArgumentError("principal must be 1 to 255 printable characters")


def check_ttl(ttl_s: float | None) -> None:
    if ttl_s is not None and not 0 < ttl_s <= limits.TOKEN_TTL_S_MAX:
        raise LimitError(f"ttl_s must be above 0 and at most {limits.TOKEN_TTL_S_MAX:g}")
