"""Environments that are put together from others: made, brought up to date, compared. Blocking."""

from __future__ import annotations

import hashlib
import time
from itertools import zip_longest
from typing import Final

from dsec.core import limits
from dsec.core.errors import ConflictError, EnvironmentNotFoundError, InvalidArgumentError, LimitError
from dsec.core.references import Reference, parse_reference, parse_tagged
from dsec.core.spec import Environment
from dsec.image.environments import EnvironmentStore
from dsec.image.records import EnvironmentRecord, Part, combine
from dsec.wire.environments import EnvironmentInfo, EnvironmentPart, Role
from dsec.wire.layers import ComposeRequest, ConfigChange, EnvironmentDiff, LayerChange, PartChange

_PLAIN: Final = ("user", "workdir", "entrypoint", "command")


def compose(store: EnvironmentStore, request: ComposeRequest) -> EnvironmentInfo:
    """Name what these parts make now.

    Raises EnvironmentNotFoundError for a part, InvalidArgumentError for one that contains what is being made,
    LimitError for too many layers or too deep in each other, ConflictError when the name has other content.
    """
    name = str(parse_tagged(request.name))
    wanted = roles_of(request.of.environment())
    with store.layers.single_flight(_flight(name)), store.layers.publishing():
        try:
            present = store.record(name)
        except EnvironmentNotFoundError:
            present = None
        record = _made(store, name, wanted, follow=request.of.follow)
        if present is not None:
            if _same(present.info, record.info):
                return store.get(name)
            if not request.of.replace:
                raise ConflictError(
                    f"environment {name!r} exists, made from {present.info.source}",
                    hint="update it with `dsec env update`, choose another name, or use --replace",
                )
        store.put(record)
        return record.info


def update(store: EnvironmentStore, name: str) -> EnvironmentInfo:
    """Lock a composed environment to what its parts are now. What it was stays as NAME@DIGEST, until it is collected.

    Raises InvalidArgumentError for one that is not composed, and what `compose` raises.
    """
    name = str(parse_tagged(name))
    with store.layers.single_flight(_flight(name)), store.layers.publishing():
        info = store.record(name).info
        if not info.parts:
            raise InvalidArgumentError(
                f"environment {name!r} is not made of others", hint="build it again, with --replace"
            )
        record = _made(store, name, [(part.role, part.reference) for part in info.parts], follow=info.follow)
        if not _same(info, record.info):
            store.put(record)
            return record.info
        return store.get(name)


def roles_of(environment: Environment) -> list[tuple[Role, str]]:
    """The parts of an environment, lowest first, by canonical reference."""
    workspace = [(Role.WORKSPACE, environment.workspace)] if environment.workspace else []
    found = [(Role.BASE, environment.base), *workspace, *((Role.TOOLKIT, kit) for kit in environment.toolkits)]
    return [(role, str(parse_reference(text))) for role, text in found]


def _made(store: EnvironmentStore, name: str, wanted: list[tuple[Role, str]], *, follow: bool) -> EnvironmentRecord:
    _refuse_cycles(store, parse_tagged(name), [reference for _, reference in wanted])
    depth = 1 + max(store.record(reference).depth for _, reference in wanted)
    if depth > limits.ENVIRONMENT_DEPTH_MAX:
        raise LimitError(f"environments lie at most {limits.ENVIRONMENT_DEPTH_MAX} deep in each other, not {depth}")
    parts = [Part(role, reference, store.get(reference)) for role, reference in wanted]
    info = combine(name, parts, follow=follow, created_at=time.time())
    if len(info.layers) > limits.IMAGE_LAYERS_MAX:
        raise LimitError(f"an environment has at most {limits.IMAGE_LAYERS_MAX} layers, not {len(info.layers)}")
    return EnvironmentRecord(build_key="", info=info, depth=depth)


def _refuse_cycles(store: EnvironmentStore, target: Reference, references: list[str]) -> None:
    seen: set[str] = set()
    left = list(references)
    while left:
        reference = left.pop()
        if reference in seen:
            continue
        seen.add(reference)
        if parse_reference(reference) == target:
            raise InvalidArgumentError(f"environment {str(target)!r} would be made of itself")
        try:
            left += [part.reference for part in store.record(reference).info.parts]
        except EnvironmentNotFoundError:
            if reference in references:
                raise
            # A part of a part that is locked: what it was is known.


def _same(one: EnvironmentInfo, other: EnvironmentInfo) -> bool:
    return (one.parts, one.follow, one.digest) == (other.parts, other.follow, other.digest)


def _flight(name: str) -> str:
    return hashlib.sha256(f"name {name}".encode()).hexdigest()


# ---- comparing -------------------------------------------------------------------------------------


def diff(one: EnvironmentInfo, other: EnvironmentInfo) -> EnvironmentDiff:
    sizes = dict(zip((*one.layers, *other.layers), (*one.layer_bytes, *other.layer_bytes), strict=False))
    both = [digest for digest in one.layers if digest in set(other.layers)]

    def changes(layers: tuple[str, ...]) -> tuple[LayerChange, ...]:
        return tuple(LayerChange(digest=d, size_bytes=sizes.get(d, 0)) for d in layers if d not in set(both))

    return EnvironmentDiff(
        one=_exact(one.name, one.digest),
        other=_exact(other.name, other.digest),
        added=changes(other.layers),
        removed=changes(one.layers),
        same=len(both),
        moved=both != [digest for digest in other.layers if digest in set(both)],
        parts=_part_changes(one.parts, other.parts),
        config=_config_changes(one, other),
    )


def _exact(name: str, digest: str) -> str:
    return str(Reference(parse_reference(name).name, digest=digest[:12]))


def _part_changes(one: tuple[EnvironmentPart, ...], other: tuple[EnvironmentPart, ...]) -> tuple[PartChange, ...]:
    found = []
    for role in Role:
        mine, theirs = ([part for part in parts if part.role is role] for parts in (one, other))
        for before, after in zip_longest(mine, theirs):
            if before is None or after is None or before.digest != after.digest:
                found.append(PartChange(role=role, one=_shown(before), other=_shown(after)))
    return tuple(found)


def _shown(part: EnvironmentPart | None) -> str | None:
    return None if part is None else _exact(part.reference, part.digest)


def _config_changes(one: EnvironmentInfo, other: EnvironmentInfo) -> tuple[ConfigChange, ...]:
    pairs = [(name, _text(getattr(one, name)), _text(getattr(other, name))) for name in _PLAIN]
    names = sorted(one.env.keys() | other.env.keys())
    pairs += [(f"env.{name}", one.env.get(name), other.env.get(name)) for name in names]
    return tuple(ConfigChange(what=what, one=before, other=after) for what, before, after in pairs if before != after)


def _text(value: str | tuple[str, ...] | None) -> str | None:
    return " ".join(value) if isinstance(value, tuple) and value else value or None  # type: ignore[return-value]
