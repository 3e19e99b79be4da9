"""Values of compose files: durations, sizes, ports, health checks, volumes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any, Final

from dsec.core import limits
from dsec.core.spec import ReadyProbe, VolumeMount
from dsec.sdk.composefile import Scope, wrong

_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s|m|h)")
_UNITS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3_600.0}
_SIZE: Final = re.compile(r"(\d{1,18})\s*([bkmg]?)b?\Z", re.IGNORECASE)
_PORTS_MAX: Final = 64  # of one range
_TRIES_MAX: Final = 1_000_000
_NOT_BOUND: Final = "upload what is in it (sandbox.upload), or use a named volume (dsec volume create)"


def words_of(value: Any, scope: Scope) -> tuple[str, ...]:
    if isinstance(value, str):
        try:
            return tuple(shlex.split(value))
        except ValueError as error:
            raise wrong(scope, f"{value[:60]!r} cannot be split into words: {error}") from error
    if not isinstance(value, list) or any(isinstance(item, (dict, list)) or item is None for item in value):
        raise wrong(scope, "it must be text or a list of texts", 'such as python3 app.py, or ["python3", "app.py"]')
    return tuple(str(item) for item in value)


def size_of(value: Any, scope: Scope) -> int:
    match = _SIZE.match(str(value).strip())
    if match is None or isinstance(value, bool):
        raise wrong(scope, f"{str(value)[:40]!r} is no size", "such as 512m or 2g")
    return int(match[1]) << (10 * " kmg".index(match[2].lower().replace("b", "") or " "))


def seconds_of(value: Any, scope: Scope) -> float:
    text = str(value).strip()
    found = _DURATION.findall(text)
    if not found or "".join(number + unit for number, unit in found) != text:
        raise wrong(scope, f"{text[:40]!r} is no duration", "such as 10s or 1m30s")
    return sum(float(number) * _UNITS[unit] for number, unit in found)


def ports_of(published: Any, exposed: Any, scope: Scope) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The ports that others of the group reach, and what is to be said of those that would be on the host."""
    found: dict[int, None] = {}
    notes = []
    for item in _items(exposed, scope.at("expose")):
        found |= dict.fromkeys(_range(str(item), scope.at("expose")))
    for item in _items(published, scope.at("ports")):
        inside, outside = _published(item, scope.at("ports"))
        found |= dict.fromkeys(_range(inside, scope.at("ports")))
        if outside:
            notes.append(f"{scope.what}: port {inside} is not published here; sandbox.connect_port reaches it")
    return tuple(found), tuple(notes)


def _published(item: Any, scope: Scope) -> tuple[str, str]:
    """Port inside, and on the host."""
    if isinstance(item, dict):
        unknown = set(item) - {"target", "published", "protocol", "mode", "name", "app_protocol", "host_ip"}
        if unknown or "target" not in item:
            raise wrong(scope, f"{', '.join(sorted(map(str, unknown))) or 'without target'} is not supported")
        return f"{item['target']}/{item.get('protocol', 'tcp')}", str(item.get("published", ""))
    text, slash, protocol = str(item).partition("/")
    outside, _, inside = text.rpartition(":")
    return f"{inside}{slash}{protocol}", outside


_PORT: Final = "a port is 1 to 65535, a range such as 8000-8010"


def _range(text: str, scope: Scope) -> range:
    ports, _, protocol = text.partition("/")
    if protocol not in ("", "tcp"):
        raise wrong(scope, f"{text[:40]!r}: only TCP is relayed between sandboxes")
    first, dash, last = ports.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()) or len(ports) > 11:
        raise wrong(scope, f"{ports[:40]!r} is no port", _PORT)
    found = range(int(first), int(last or first) + 1)
    if not found or found[0] < 1 or found[-1] > 65_535:
        raise wrong(scope, f"{ports[:40]!r} is no {'range of ports' if dash else 'port'}", _PORT)
    if len(found) > _PORTS_MAX:
        raise wrong(scope, f"{ports[:40]!r} has more than {_PORTS_MAX} ports")
    return found


def probe_of(value: Any, scope: Scope) -> ReadyProbe | None:
    """A health check is tried until it succeeds the first time, and not afterwards."""
    if value is None:
        return None
    known = {"test", "interval", "timeout", "retries", "start_period", "start_interval", "disable"}
    if not isinstance(value, dict) or not set(value) <= known:
        raise wrong(scope, f"it has {', '.join(sorted(known))}, and nothing else")
    if value.get("disable") or value.get("test") == ["NONE"]:
        return None
    interval = seconds_of(value.get("start_interval", value.get("interval", "1s")), scope)
    tries, once = value.get("retries", 3), seconds_of(value.get("timeout", "30s"), scope)
    if isinstance(tries, bool) or not isinstance(tries, int) or not 1 <= tries <= _TRIES_MAX:
        raise wrong(scope, f"retries must be a whole number of 1 to {_TRIES_MAX}")
    within = seconds_of(value.get("start_period", "0s"), scope) + tries * (interval + once)
    shell, argv = _test_of(value.get("test"), scope)
    return ReadyProbe(
        shell=shell,
        argv=argv,
        interval_s=min(max(interval, limits.READY_INTERVAL_S_MIN), limits.READY_INTERVAL_S_MAX),
        timeout_s=min(within, limits.READY_TIMEOUT_S_MAX),
    )


def _test_of(test: Any, scope: Scope) -> tuple[str | None, tuple[str, ...] | None]:
    """For a shell, or as a program and its arguments."""
    if isinstance(test, str):
        return test, None
    if isinstance(test, list) and len(test) == 2 and test[0] == "CMD-SHELL":
        return str(test[1]), None
    if isinstance(test, list) and len(test) > 1 and test[0] == "CMD":
        return None, tuple(str(word) for word in test[1:])
    raise wrong(scope, "test must be text, or a list that begins with CMD, CMD-SHELL or NONE")


def volumes_of(value: Any, known: Mapping[str, tuple[str, bool]], scope: Scope) -> tuple[VolumeMount, ...]:
    return tuple(_mount(item, known, scope) for item in _items(value, scope))


def _mount(item: Any, known: Mapping[str, tuple[str, bool]], scope: Scope) -> VolumeMount:
    if isinstance(item, dict):
        kind = item.get("type")
        unknown = set(item) - {"type", "source", "target", "read_only"}
        if kind != "volume":
            hint = _NOT_BOUND if kind == "bind" else "of named volumes only"
            raise wrong(scope, f"mounts of type {str(kind)[:20]!r} are not possible", hint)
        if unknown:
            raise wrong(scope, f"{', '.join(sorted(map(str, unknown)))[:60]} is not supported")
        source, path, readonly = str(item.get("source", "")), str(item.get("target", "")), bool(item.get("read_only"))
    else:
        source, colon, rest = str(item).partition(":")
        path, _, how = rest.partition(":")
        if not colon:
            raise wrong(
                scope,
                f"{source[:60]!r} has no name",
                "what is written there goes with the sandbox: leave it out",
            )
        if how not in ("", "ro", "rw"):
            raise wrong(scope, f"{str(item)[:60]!r}: a volume is ro or rw, not {how[:20]!r}")
        readonly = how == "ro"
    if source.startswith((".", "/", "~")):
        raise wrong(scope, f"{source[:60]!r} is a directory of this machine, and cannot be mounted", _NOT_BOUND)
    if source not in known:
        raise wrong(scope, f"there is no volume {source[:40]!r}", "name it in the volumes of the file")
    return VolumeMount(known[source][0], path, readonly=readonly)


def _items(value: Any, scope: Scope) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise wrong(scope, "it must be a list")
    return value
