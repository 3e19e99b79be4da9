"""Compose files become groups. What of a file cannot be had is an error that names service and key; only `x-…` is
passed over.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from dsec.core.errors import InvalidArgumentError
from dsec.core.ids import parse_name
from dsec.core.spec import Environment, NetworkMode, ReadyProbe, SandboxSpec, VolumeMount
from dsec.sdk.composefile import HINT, Scope, load, read_env_file, wrong
from dsec.sdk.composevalues import (
    ports_of,
    probe_of,
    size_of,
    volumes_of,
    words_of,
)
from dsec.wire.groups import GroupLink, GroupMember, GroupRequest, parse_member

_SERVICE: Final = frozenset(
    (
        "image",
        "command",
        "entrypoint",
        "environment",
        "env_file",
        "working_dir",
        "user",
        "depends_on",
        "ports",
        "expose",
        "volumes",
        "deploy",
        "mem_limit",
        "cpus",
        "pids_limit",
        "healthcheck",
        "labels",
        "profiles",
        "container_name",
        "restart",
        "platform",
        "x-dsec-egress",
        "x-dsec-links",
        "x-dsec-network",
    )
)
_HINTS: Final = {
    "build": "build the environment first (dsec env build NAME --dockerfile DIR), and name it as image",
    "networks": "all services of a group reach the ports of each other that are in ports or expose; leave it out",
    "network_mode": "there is loopback and the links of the group; more comes with x-dsec-network and x-dsec-egress",
    "links": "services reach each other by their names already; leave it out",
    "secrets": "give secrets to commands: sandbox.exec(…, secrets=…)",
    "configs": "upload the file when the group runs: sandbox.upload",
    "privileged": "leave it out; what needs a kernel of its own runs outside a group: dsec create --backend microvm",
    "extends": "write the service out, or use YAML anchors",
    "include": "write the services into one file",
}


@dataclass(frozen=True, slots=True)
class Composed:
    """`volumes`: of the project, to be made where they are not there. `images`: what the services start from."""

    name: str
    members: dict[str, GroupMember]
    links: tuple[GroupLink, ...]
    images: dict[str, str]  # as written → name of the environment
    volumes: tuple[str, ...]
    notes: tuple[str, ...]  # what is there in the file and means less here

    def without(self, volumes: frozenset[str]) -> Composed:
        """The same, with nothing mounted from these."""

        def spared(member: GroupMember) -> GroupMember:
            mounts = tuple(mount for mount in member.spec.volumes if mount.name not in volumes)
            return msgspec.structs.replace(member, spec=msgspec.structs.replace(member.spec, volumes=mounts))

        return replace(self, members={name: spared(member) for name, member in self.members.items()})

    def request(self, *, timeout_s: float) -> GroupRequest:
        """Raises InvalidArgumentError."""
        return GroupRequest(name=self.name, members=self.members, links=self.links, timeout_s=timeout_s)


def read_compose(
    path: Path, *, name: str | None = None, profiles: Sequence[str] = (), variables: Mapping[str, str] | None = None
) -> Composed:
    """Raises InvalidArgumentError, LimitError; UnsupportedError without PyYAML."""
    given = dict(os.environ if variables is None else variables)
    beside = path.parent / ".env"
    if beside.is_file():
        given = read_env_file(beside, Scope("the file .env")) | given
    file = load(path, given)
    _check_keys(file, frozenset(("name", "version", "services", "volumes")), Scope(path.name))
    group = parse_name(name or _text(file.get("name"), Scope("name")) or _of_directory(path), "group name")
    services = _mapping(file.get("services"), Scope("services"))
    chosen = {service: one for service, one in services.items() if _is_chosen(one, profiles, Scope(service))}
    if not chosen:
        raise InvalidArgumentError(f"{path.name} has no service to start", hint="is a profile missing?")
    kept = _volumes(file.get("volumes"), group)
    found = {service: _Service(service, one, path.parent, given, kept) for service, one in chosen.items()}
    members = {service: one.member(found) for service, one in found.items()}
    reach = {service: one.reaches(found) for service, one in found.items()}
    links = [
        GroupLink(name=service, port=port, by=_by(service, reach))
        for service, one in found.items()
        for port in one.ports
    ]
    used = {mount.name for one in members.values() for mount in one.spec.volumes}
    return Composed(
        name=group,
        members=members,
        links=tuple(links),
        images={one.image: one.environment for one in found.values()},
        volumes=tuple(sorted(volume for volume, external in kept.values() if volume in used and not external)),
        notes=tuple(note for one in found.values() for note in one.notes),
    )


def _by(service: str, reach: Mapping[str, frozenset[str] | None]) -> tuple[str, ...] | None:
    if all(allowed is None for allowed in reach.values()):
        return None
    return tuple(one for one, allowed in reach.items() if one != service and (allowed is None or service in allowed))


class _Service:
    """One service of the file, checked key by key."""

    def __init__(
        self, name: str, given: Any, directory: Path, variables: Mapping[str, str], volumes: Mapping[str, Any]
    ) -> None:
        self.name = parse_member(name)
        self.scope = Scope(f"service {name}")
        self.given = _mapping(given, self.scope)
        _check_keys(self.given, _SERVICE, self.scope)
        self._check_values()
        self.image = self._image()
        self.environment = environment_of(self.image)
        published, exposed = self.given.get("ports"), self.given.get("expose")
        self.ports, self.notes = ports_of(published, exposed, self.scope)
        self._directory = directory
        self._variables = variables
        self._volumes = volumes

    def member(self, all: Mapping[str, _Service]) -> GroupMember:
        given, scope = self.given, self.scope
        limits = self._limits()
        entrypoint, command = given.get("entrypoint"), given.get("command")
        try:
            spec = SandboxSpec(
                environment=Environment(self.environment),
                start=True,
                entrypoint=None if entrypoint is None else words_of(entrypoint, scope.at("entrypoint")),
                command=None if command is None else words_of(command, scope.at("command")),
                env=self._env(),
                user=_text(given.get("user"), scope.at("user")),
                workdir=_text(given.get("working_dir"), scope.at("working_dir")),
                name=_text(given.get("container_name"), scope.at("container_name")),
                labels=_pairs(given.get("labels"), scope.at("labels")),
                ready=self.probe,
                volumes=self._mounts(),
                network=self._network(),
                egress=self._egress(),
                **limits,
            )
        except InvalidArgumentError as error:
            error.hint = error.hint or HINT
            error.message = error.message if scope.what in error.message else f"{scope.what}: {error.message}"
            raise
        return GroupMember(spec=spec, after=self._after(all))

    def _image(self) -> str:
        given = self._need("image") if self.given.get("image") in (None, "") else self.given["image"]
        if not isinstance(given, str) or not environment_of(given) or len(given.split()) != 1:
            raise wrong(self.scope.at("image"), f"{str(given)[:60]!r} is no name of an image", "such as postgres:16")
        return given

    def _network(self) -> NetworkMode:
        given = self.given.get("x-dsec-network", NetworkMode.NONE)
        if given not in list(NetworkMode):
            raise wrong(self.scope.at("x-dsec-network"), f"there is no network {str(given)[:40]!r}", "none or proxied")
        return NetworkMode(given)

    def _egress(self) -> tuple[str, ...] | None:
        scope = self.scope.at("x-dsec-egress")
        given = self.given.get("x-dsec-egress")
        if given is None:
            return None
        rules = _list(given, scope)
        if not all(isinstance(rule, str) for rule in rules):
            raise wrong(scope, "every rule must be text", 'such as "packages.example" or "10.1.0.0/16:5432"')
        return tuple(rules)

    @property
    def probe(self) -> ReadyProbe | None:
        return probe_of(self.given.get("healthcheck"), self.scope.at("healthcheck"))

    def reaches(self, all: Mapping[str, _Service]) -> frozenset[str] | None:
        """None: all the others."""
        given = self.given.get("x-dsec-links")
        if given is None:
            return None
        names = _list(given, self.scope.at("x-dsec-links"))
        for name in names:
            if name not in all:
                raise wrong(self.scope.at("x-dsec-links"), f"there is no service {str(name)[:40]!r}")
        return frozenset(names)

    def _check_values(self) -> None:
        restart, platform = self.given.get("restart", "no"), self.given.get("platform", "linux/amd64")
        if restart not in ("no", False):
            raise wrong(self.scope.at("restart"), "nothing starts a program again that has ended", "leave it out")
        if platform not in ("linux/amd64", "linux/x86_64", "linux"):
            raise wrong(self.scope.at("platform"), f"sandboxes run on linux/amd64, not on {str(platform)[:40]!r}")

    def _need(self, key: str) -> Any:
        value = self.given.get(key)
        if not isinstance(value, str) or not value:
            raise wrong(self.scope, f"it has no {key}", _HINTS["build"])
        return value

    def _limits(self) -> dict[str, Any]:
        given, scope = self.given, self.scope
        found: dict[str, Any] = {}
        deploy = _mapping(given.get("deploy"), scope.at("deploy"))
        _check_keys(deploy, frozenset(("resources",)), scope.at("deploy"))
        resources = _mapping(deploy.get("resources"), scope.at("deploy.resources"))
        _check_keys(resources, frozenset(("limits",)), scope.at("deploy.resources"))
        limits = _mapping(resources.get("limits"), scope.at("deploy.resources.limits"))
        _check_keys(limits, frozenset(("cpus", "memory", "pids")), scope.at("deploy.resources.limits"))
        for field, key, inner, kind in (
            ("cpu", "cpus", "cpus", _number),
            ("memory_bytes", "mem_limit", "memory", size_of),
            ("pids_max", "pids_limit", "pids", _whole),
        ):
            values = {}
            if given.get(key) is not None:
                values[key] = kind(given[key], scope.at(key))
            if limits.get(inner) is not None:
                within = f"deploy.resources.limits.{inner}"
                values[within] = kind(limits[inner], scope.at(within))
            if len(set(values.values())) > 1:
                raise wrong(scope, f"{' and '.join(values)} say different things")
            found |= {field: value for value in values.values()}  # noqa: B035  there is one at most, or they are equal
        return found

    def _env(self) -> dict[str, str]:
        found: dict[str, str] = {}
        scope = self.scope.at("env_file")
        files = self.given.get("env_file")
        for one in [] if files is None else [files] if isinstance(files, (str, dict)) else _list(files, scope):
            entry = {"path": one} if isinstance(one, str) else _mapping(one, scope)
            _check_keys(entry, frozenset(("path", "required")), scope)
            path = (self._directory / str(entry.get("path", ""))).resolve()
            if not path.is_relative_to(self._directory.resolve()):
                raise wrong(scope, f"{str(entry.get('path'))[:60]!r} is not below the directory of the compose file")
            if path.exists() and not path.is_file():
                raise wrong(scope, f"{path.name[:60]!r} is no file")
            if path.is_file() or entry.get("required", True):
                found |= read_env_file(path, scope)
        scope = self.scope.at("environment")
        for key, value in _pairs(self.given.get("environment"), scope, bare=True).items():
            if value is not None:
                found[key] = value
            elif key in self._variables:  # one without a value is this process' own
                found[key] = self._variables[key]
        return found

    def _mounts(self) -> tuple[VolumeMount, ...]:
        return volumes_of(self.given.get("volumes"), self._volumes, self.scope.at("volumes"))

    def _after(self, all: Mapping[str, _Service]) -> tuple[str, ...]:
        scope = self.scope.at("depends_on")
        given = self.given.get("depends_on")
        entries = dict.fromkeys(given) if isinstance(given, list) else _mapping(given, scope)
        found = []
        for name, how in entries.items():
            rule = {"condition": "service_started"} if how is None else _mapping(how, scope.at(str(name)))
            _check_keys(rule, frozenset(("condition", "required")), scope.at(str(name)))
            if name not in all:
                if rule.get("required", True):
                    raise wrong(scope, f"there is no service {str(name)[:40]!r}", "or its profile is not asked for")
                continue
            condition = rule.get("condition", "service_started")
            if condition == "service_healthy" and all[name].probe is None:
                raise wrong(scope, f"{name} has no healthcheck by which it could be healthy")
            if condition not in ("service_started", "service_healthy"):
                raise wrong(
                    scope,
                    f"the condition {str(condition)[:40]!r} cannot be waited for",
                    "service_started or service_healthy",
                )
            found.append(str(name))
        return tuple(found)


def environment_of(image: str) -> str:
    """What the environment of an image is called: the name itself where it can be one, else made from the path."""
    if "@" in image:
        image, _, digest = image.partition("@")
        tag = digest.partition(":")[2][:12] or digest[:12]
    else:
        slash = image.rfind("/")
        colon = image.find(":", slash + 1)
        image, tag = (image[:colon], image[colon + 1 :]) if colon >= 0 else (image, "")
    name = "".join(char if char.isascii() and (char.isalnum() or char in "._-") else "-" for char in image).strip("._-")
    return f"{name}:{tag}" if tag else name


def _volumes(given: Any, group: str) -> dict[str, tuple[str, bool]]:
    """As services call them → name in dsec, and whether it is there already."""
    found: dict[str, tuple[str, bool]] = {}
    for name, one in _mapping(given, Scope("volumes")).items():
        scope = Scope(f"volume {name}")
        options = _mapping(one, scope)
        _check_keys(options, frozenset(("name", "external")), scope)
        external = options.get("external", False)
        if not isinstance(external, bool):
            raise wrong(scope.at("external"), "it is true or false")
        called = str(options.get("name") or (name if external else f"{group}-{name}"))
        found[name] = (parse_name(called, "volume name"), external)
    return found


def _is_chosen(given: Any, profiles: Sequence[str], scope: Scope) -> bool:
    own = _mapping(given, scope).get("profiles")
    return own is None or "*" in profiles or bool(set(_list(own, scope.at("profiles"))) & set(profiles))


def _check_keys(given: Mapping[str, Any], known: frozenset[str], scope: Scope) -> None:
    for key in given:
        # One of ours that is misspelt would take a restriction away without a word.
        if key not in known and (not str(key).startswith("x-") or str(key).startswith("x-dsec-")):
            hint = _HINTS.get(str(key), f"there are {', '.join(sorted(known))}")
            raise wrong(scope, f"{str(key)[:60]!r} is not supported", hint)


def _of_directory(path: Path) -> str:
    given = path.absolute().parent.name.lower()
    name = "".join(char if char.isascii() and (char.isalnum() or char in "_-") else "-" for char in given)
    return name[:40].strip("_-") or "group"


def _text(value: Any, scope: Scope) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise wrong(scope, f"{str(value)[:60]!r} is no text")
    return str(value)


def _mapping(value: Any, scope: Scope) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise wrong(scope, "it must be a mapping: NAME: …")
    return value


def _list(value: Any, scope: Scope) -> list[Any]:
    if not isinstance(value, list):
        raise wrong(scope, "it must be a list")
    return value


def _pairs(value: Any, scope: Scope, *, bare: bool = False) -> dict[str, Any]:
    """A mapping, or a list of KEY=VALUE; None for a key alone where that means something."""
    found: dict[str, Any] = {}
    if isinstance(value, list):
        for item in value:
            key, equals, text = str(item).partition("=")
            if not equals and not bare:
                raise wrong(scope, f"{key[:40]!r} has no value")
            found[key] = text if equals else None
        return found
    for key, item in _mapping(value, scope).items():
        if isinstance(item, (dict, list)):
            raise wrong(scope, f"the value of {key[:40]!r} must be text")
        found[key] = None if item is None and bare else ("" if item is None else _plain(item))
    return found


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _number(value: Any, scope: Scope) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise wrong(scope, f"{_shown(value)} is no number") from error


def _whole(value: Any, scope: Scope) -> int:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise wrong(scope, f"{_shown(value)} is no whole number") from error


def _shown(value: Any) -> str:
    return "such a large number" if isinstance(value, int) else repr(str(value)[:40])
