"""What is stored of images and environments, and how the parts of one become one. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from dsec.core import limits
from dsec.core.errors import InvalidArgumentError, LimitError
from dsec.core.spec import check_env, check_path
from dsec.wire import codec
from dsec.wire.environments import EnvironmentInfo, EnvironmentPart, Role


class ImageConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What an image says about running it."""

    env: dict[str, str] = {}
    user: str | None = None
    workdir: str | None = None
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()


def check_config(config: ImageConfig) -> None:
    """As a caller's would be: every sandbox made from the image starts with it. InvalidArgumentError, LimitError."""
    check_env(config.env)
    if config.workdir is not None:
        check_path(config.workdir, "the image's working directory")
    if len(config.user or "") > 255 or "\0" in (config.user or ""):
        raise InvalidArgumentError("the image's user must be at most 255 characters without NUL")
    words = [*config.entrypoint, *config.command]
    if sum(map(len, words)) > limits.ARGV_BYTES_MAX or any("\0" in word for word in words):
        raise LimitError(f"the image's command is over {limits.ARGV_BYTES_MAX} bytes, or holds NUL")


class EnvironmentRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Stored; readers ignore fields that they do not know."""

    version: int = 1
    build_key: str  # empty: composed, or made from a sandbox
    info: EnvironmentInfo
    depth: int = 0  # of composed environments inside each other; an image has 0


class BuildRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What one request led to. It is a hint: a layer may have been removed since."""

    version: int = 2
    layers: tuple[str, ...]  # digests, lowest first
    source: str
    config: ImageConfig = ImageConfig()


def config_of(info: EnvironmentInfo) -> ImageConfig:
    return ImageConfig(
        env=info.env, user=info.user, workdir=info.workdir, entrypoint=info.entrypoint, command=info.command
    )


def record_digest(layers: tuple[str, ...], config: ImageConfig) -> str:
    """Names exactly what a sandbox starts from: the same on every node, whoever built it and when."""
    content = (layers, sorted(config.env.items()), config.user, config.workdir, config.entrypoint, config.command)
    return hashlib.sha256(b"dsec-record-1\0" + codec.to_json(content)).hexdigest()


def merge_configs(configs: Iterable[ImageConfig]) -> ImageConfig:
    """Later parts win: variable by variable, and for the rest whichever says something last.

    A part that brings its own entrypoint takes no command from below: that would be arguments for another program.
    """
    merged = ImageConfig()
    for config in configs:
        merged = ImageConfig(
            env=merged.env | config.env,
            user=config.user if config.user is not None else merged.user,
            workdir=config.workdir if config.workdir is not None else merged.workdir,
            entrypoint=config.entrypoint or merged.entrypoint,
            command=config.command if config.entrypoint else config.command or merged.command,
        )
    return merged


def stack_layers(parts: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """The layers of all parts, lowest first, each once.

    The kernel refuses the same lower twice, and only its highest place shows.
    """
    digests = [digest for layers in parts for digest in layers]
    return tuple(reversed(dict.fromkeys(reversed(digests))))


@dataclass(frozen=True, slots=True)
class Part:
    """A part as it is now."""

    role: Role
    reference: str
    info: EnvironmentInfo

    def locked(self) -> EnvironmentPart:
        return EnvironmentPart(
            role=self.role, reference=self.reference, digest=self.info.digest, layers=self.info.layers
        )


def combine(name: str, parts: Sequence[Part], *, follow: bool, created_at: float) -> EnvironmentInfo:
    """The environment that these parts make, lowest first."""
    layers = stack_layers(part.info.layers for part in parts)
    config = merge_configs(config_of(part.info) for part in parts)
    sizes = {d: size for part in parts for d, size in zip(part.info.layers, part.info.layer_bytes, strict=False)}
    return EnvironmentInfo(
        name=name,
        digest=record_digest(layers, config),
        layers=layers,
        size_bytes=sum(sizes.get(digest, 0) for digest in layers),
        layer_bytes=tuple(sizes.get(digest, 0) for digest in layers),
        created_at=created_at,
        source=", ".join(f"{part.role} {part.reference}" for part in parts)[:500],
        kind=parts[-1].info.kind,
        env=config.env,
        user=config.user,
        workdir=config.workdir,
        entrypoint=config.entrypoint,
        command=config.command,
        parts=tuple(part.locked() for part in parts),
        follow=follow,
    )
