"""Layers of a node, and environments that are put together from others: shared by node, API, SDK and CLI."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from dsec.core.errors import InvalidArgumentError
from dsec.core.references import parse_reference, parse_tagged
from dsec.core.spec import Environment, check_workspace
from dsec.wire.environments import Role

_LAYER: Final = re.compile(r"[0-9a-f]{12,64}\Z")


class Composition(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an environment is put together from, each by reference: NAME, NAME:TAG or NAME@DIGEST.

    Later parts hide what earlier ones have in the same place. Locked, it stays what it is now until it is updated;
    with `follow` its parts are looked up again at each create. A name that is composed the same way already is
    success; with other content it is an error unless `replace`.
    """

    base: str
    workspace: str | None = None
    toolkits: tuple[str, ...] = ()
    follow: bool = False
    replace: bool = False

    def __post_init__(self) -> None:
        self.environment()

    def environment(self) -> Environment:
        return Environment(self.base, self.workspace, self.toolkits)


class ComposeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str  # NAME, or NAME:TAG
    of: Composition

    def __post_init__(self) -> None:
        parse_tagged(self.name)
        check_workspace(self.of.workspace)


class CollapseRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Make one layer of runs of an environment's lower layers, to be mounted instead of them."""

    name: str

    def __post_init__(self) -> None:
        parse_reference(self.name)


class DiffRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    one: str
    other: str

    def __post_init__(self) -> None:
        parse_reference(self.one)
        parse_reference(self.other)


class LayerChange(msgspec.Struct, frozen=True, kw_only=True):
    digest: str
    size_bytes: int


class PartChange(msgspec.Struct, frozen=True, kw_only=True):
    """A part that only one has, or that both have and is not the same."""

    role: Role
    one: str | None = None  # reference, and the digest of its record: NAME@DIGEST
    other: str | None = None


class ConfigChange(msgspec.Struct, frozen=True, kw_only=True):
    what: str  # user, workdir, entrypoint, command, or env.NAME
    one: str | None = None
    other: str | None = None


class EnvironmentDiff(msgspec.Struct, frozen=True, kw_only=True):
    """What is in `other` and not in `one`, and the other way round."""

    one: str  # NAME@DIGEST
    other: str
    added: tuple[LayerChange, ...] = ()
    removed: tuple[LayerChange, ...] = ()
    same: int = 0  # layers that both have
    moved: bool = False  # they lie in another order
    parts: tuple[PartChange, ...] = ()
    config: tuple[ConfigChange, ...] = ()


class LayerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A layer of this node."""

    digest: str
    kind: str  # erofs | directory
    size_bytes: int  # on this node's disk
    entries: int
    created_at: float
    store: str | None = None  # its content is loaded from there
    environments: tuple[str, ...] = ()  # that have it: NAME, NAME:TAG, or NAME@DIGEST for what a name was before
    collapsed: tuple[str, ...] = ()  # digests of the layers that it stands for, lowest first


class LayerPage(msgspec.Struct, frozen=True):
    layers: list[LayerInfo] = []


class LayerRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    digest: str  # or the beginning of one

    def __post_init__(self) -> None:
        if not _LAYER.match(self.digest):
            raise InvalidArgumentError(f"{self.digest[:80]!r} is not the digest of a layer", hint="12 digits or more")
