"""Who may call what. A caller who may not see a sandbox is told that there is none (ruling 2)."""

from __future__ import annotations

from typing import Final

from dsec.core.clock import Clock
from dsec.core.errors import AuthError, ForbiddenError
from dsec.wire.environments import BuildRequest, DebianSource, GitSource, RegistrySource, StoreSource, is_on_node
from dsec.wire.images import ExportRequest, RegistryTarget
from dsec.wire.node import Caller, Method, Right
from dsec.wire.node import project_seen as project_seen  # of the contract, and asked for here by those who check rights
from dsec.wire.node import reaches as reaches

_READ: Final = (
    Method.GET,
    Method.LIST,
    Method.METRICS,
    Method.JOB_COUNT,
    Method.USAGE,
    Method.EVENTS,
    Method.EXEC_GET,
    Method.EXEC_LIST,
    Method.EXEC_OUTPUT,
    Method.ENVIRONMENT_LIST,
    Method.ENVIRONMENT_GET,
    Method.ENVIRONMENT_STATS,
    Method.ENVIRONMENT_DIFF,
    Method.LAYER_LIST,
    Method.LAYER_GET,
    Method.LAYER_STATS,
    Method.VOLUME_LIST,
    Method.VOLUME_GET,
    Method.SNAPSHOT_LIST,
    Method.SNAPSHOT_GET,
    Method.CALL_TYPES,
    Method.CALL_POOLS,
    Method.MACHINE_LIST,
)
_ADMIN: Final = (
    Method.HOLDINGS,
    Method.GC,
    Method.VOLUME_CREATE,
    Method.VOLUME_REMOVE,
    Method.ENVIRONMENT_REMOVE,
    Method.ENVIRONMENT_BUILD,
    Method.ENVIRONMENT_COMPOSE,
    Method.ENVIRONMENT_UPDATE,
    Method.ENVIRONMENT_COLLAPSE,
    Method.LAYER_REMOVE,
    Method.ENVIRONMENT_PUSH,
    Method.ENVIRONMENT_EXPORT,
    Method.ENVIRONMENT_TRACE,
    Method.SNAPSHOT_PUBLISH,
    Method.MACHINE_BUILD,
    Method.MACHINE_IMPORT,
    Method.MACHINE_REMOVE,
    Method.MACHINE_PUSH,
    Method.MACHINE_PULL,
    Method.MACHINE_COMMIT,
    Method.MACHINE_COLLAPSE,
    Method.MACHINE_EXPORT,
    Method.MACHINE_TRACE,
    Method.DOCTOR,
)

REQUIRED: Final[dict[Method, Right | None]] = {
    **dict.fromkeys(Method, Right.USE),
    **dict.fromkeys(_READ, Right.READ),
    **dict.fromkeys(_ADMIN, Right.ADMIN),
    Method.HEALTH: None,
}


def check_rights(caller: Caller, method: Method, clock: Clock) -> None:
    """Raises AuthError when the caller's credentials are over, ForbiddenError when they do not suffice."""
    if caller.expires_at is not None and clock.wall_s() >= caller.expires_at:
        raise AuthError("the credentials have expired", hint="get a fresh token")
    need = REQUIRED[method]
    if need is not None and need not in caller.rights and Right.ADMIN not in caller.rights:
        raise ForbiddenError(f"{method} needs the right to {need}", hint="ask for a token with that right")


def check_source(request: BuildRequest, caller: Caller) -> None:
    """The node reads sources as root: only who is on the node may name its files. Raises ForbiddenError."""
    if caller.local or isinstance(request.source, (DebianSource, RegistrySource)):
        return
    if isinstance(request.source, GitSource) and request.source.url.startswith("https:"):
        return
    if isinstance(request.source, StoreSource):
        check_store_of(request.source.url, caller)
    else:
        raise ForbiddenError(
            "environments from files of the node can be built only over its own socket",
            hint="run `dsec env build` on the node, without DSEC_URL and DSEC_TOKEN",
        )


def check_machine_source(caller: Caller) -> None:
    """The node reads disks as root: only who is on the node may name its files. Raises ForbiddenError."""
    if not caller.local:
        raise ForbiddenError(
            "disks of machines are files of the node, and can be imported only over its own socket",
            hint="run `dsec vm import` on the node, without DSEC_URL and DSEC_TOKEN, or with --state",
        )


def check_machine_target(caller: Caller) -> None:
    """And writes them. Raises ForbiddenError."""
    if not caller.local:
        raise ForbiddenError(
            "disks of machines become files of the node, and that only over its own socket",
            hint="run it on the node, without DSEC_URL and DSEC_TOKEN",
        )


def check_target(request: ExportRequest, caller: Caller) -> None:
    """The node writes files as root, too. Raises ForbiddenError."""
    if not caller.local and not isinstance(request.target, RegistryTarget):
        raise ForbiddenError(
            "images are written to files of the node only over its own socket",
            hint="push to a registry, or run it on the node, without DSEC_URL and DSEC_TOKEN",
        )


def check_store_of(url: str, caller: Caller) -> None:
    """The node reads and writes stores as root, too. Raises ForbiddenError."""
    if not caller.local and is_on_node(url):
        raise ForbiddenError(
            "a store in a directory of the node can be named only over its own socket",
            hint="use a store on a web server or in a bucket, or run it on the node, without DSEC_URL and DSEC_TOKEN",
        )
