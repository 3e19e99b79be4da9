"""What environments are built from, as options say it. The node reads the paths, whose working directory is another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

if TYPE_CHECKING:
    from dsec.wire.environments import BuildSource, History, Ownership

_KINDS: Final = ("debian", "registry", "oci", "docker_archive", "dockerfile", "directory", "tar", "git", "store")
_BELONGS: Final = {  # an option, and what it goes with
    "packages": ("debian",),
    "suite": ("debian",),
    "reference": ("oci", "docker_archive"),
    "environment": ("store",),
    "place": ("git",),
    "history": ("git",),
    "file": ("dockerfile",),
    "target": ("dockerfile",),
    "arguments": ("dockerfile",),
    "layer": ("tar",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """As they were given; `source` says what is wrong with them."""

    owner: str
    debian: bool = False
    packages: Sequence[str] = ()
    suite: str | None = None
    registry: str | None = None
    oci: Path | None = None
    docker_archive: Path | None = None
    reference: str | None = None
    dockerfile: Path | None = None
    file: str | None = None
    target: str | None = None
    arguments: Sequence[str] = ()
    directory: Path | None = None
    tar: Path | None = None
    layer: bool = False
    git: str | None = None
    place: str | None = None  # of the work tree
    history: str | None = None
    store: str | None = None
    environment: str | None = None  # its name in the store

    def source(self, name: str) -> BuildSource:
        """For the environment `name`. Raises typer.BadParameter, InvalidArgumentError."""
        self._check()
        from dsec.sdk.environments import BASE_PACKAGES
        from dsec.wire import environments as wire

        owner = parse_owner(self.owner)
        if self.registry is not None:
            return wire.RegistrySource(self.registry, owner)
        if self.oci is not None:
            return wire.OciSource(_absolute(self.oci), self.reference, owner)
        if self.docker_archive is not None:
            return wire.DockerArchiveSource(_absolute(self.docker_archive), self.reference, owner)
        if self.dockerfile is not None:
            arguments = dict(_argument(text) for text in self.arguments)
            return wire.DockerfileSource(_absolute(self.dockerfile), self.file, self.target, arguments, owner)
        if self.directory is not None:
            return wire.DirectorySource(_absolute(self.directory), owner)
        if self.tar is not None:
            return wire.TarSource(_absolute(self.tar), owner, self.layer)
        if self.git is not None:
            url, at, commit = self.git.rpartition("@")
            if not at:
                raise typer.BadParameter("--git takes URL@COMMIT, with the whole name of a commit")
            return wire.GitSource(
                url=url,
                commit=commit,
                path=self.place or wire.GIT_PATH,
                history=parse_history(self.history),
                owner=owner,
            )
        if self.store is not None:
            return wire.StoreSource(url=self.store, environment=self.environment or name)
        return wire.DebianSource(packages=tuple(self.packages) or BASE_PACKAGES, suite=self.suite)

    def _check(self) -> None:
        given = [kind for kind in _KINDS if getattr(self, kind) not in (None, False)]
        if len(given) != 1:
            raise typer.BadParameter(f"give exactly one of {_listed(_KINDS)}")
        for option, kinds in _BELONGS.items():
            if getattr(self, option) and given[0] not in kinds:
                what = "packages" if option == "packages" else _option(option)
                raise typer.BadParameter(f"{what} goes with {_listed(kinds)}")


def parse_owner(text: str) -> Ownership:
    from dsec.core.errors import InvalidArgumentError
    from dsec.wire.environments import Ownership

    if text not in list(Ownership):
        raise InvalidArgumentError(f"there is no owner {text[:40]!r}", hint="keep, squash or root")
    return Ownership(text)


def parse_history(text: str | None) -> History:
    from dsec.core.errors import InvalidArgumentError
    from dsec.wire.environments import History

    if text is not None and text not in list(History):
        raise InvalidArgumentError(f"there is no history {text[:40]!r}", hint="ancestors, none or keep")
    return History(text or History.ANCESTORS)


def _argument(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise typer.BadParameter(f"--build-arg is NAME=VALUE, not {text[:80]!r}")
    return name, value


def _absolute(path: Path) -> str:
    return str(path.absolute())


def _listed(names: Sequence[str]) -> str:
    options = [_option(name) for name in names]
    return options[0] if len(options) == 1 else f"{', '.join(options[:-1])} and {options[-1]}"


def _option(name: str) -> str:
    special = {"arguments": "--build-arg", "place": "--at"}
    return special.get(name) or f"--{name.replace('_', '-')}"
