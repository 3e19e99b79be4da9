"""The apt sources that this machine uses, for one suite."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from dsec.core.errors import HostError

_POCKETS: Final = ("", "-updates", "-security", "-backports", "/updates")
_CREDENTIALS: Final = re.compile(r"(?<=://)[^/@\s]*@")


@dataclass(frozen=True, slots=True)
class AptSource:
    """One repository, as far as building an environment needs it."""

    uris: tuple[str, ...]
    suites: tuple[str, ...]
    components: tuple[str, ...]
    signed_by: str = ""  # a path, or a key block with its line breaks

    def text(self) -> str:
        """As a deb822 paragraph."""
        lines = [
            "Types: deb",
            f"URIs: {' '.join(self.uris)}",
            f"Suites: {' '.join(self.suites)}",
            f"Components: {' '.join(self.components)}",
        ]
        if self.signed_by:
            lines.append(f"Signed-By: {self.signed_by}")
        return "\n".join(lines) + "\n"

    def without_credentials(self) -> AptSource:
        """Fit to lie in an environment: user names and passwords of the machine's mirrors stay out of it."""
        return replace(self, uris=tuple(_CREDENTIALS.sub("", uri) for uri in self.uris))


def host_suite(os_release: Path = Path("/etc/os-release")) -> str:
    """The suite that this machine runs. Raises HostError where there is none."""
    try:
        lines = shlex.split(os_release.read_text(), comments=True)
    except (OSError, ValueError) as error:
        raise HostError(
            f"cannot tell the Debian suite of this machine: {error}", hint="name one with --suite"
        ) from error
    for line in lines:
        key, _, value = line.partition("=")
        if key == "VERSION_CODENAME" and value:
            return value
    raise HostError("this machine does not say which Debian suite it runs", hint="name one with --suite")


def host_sources(suite: str, *, host: str, etc: Path = Path("/etc/apt")) -> tuple[AptSource, ...]:
    """This machine's sources, those of `suite` only; for another suite than its own, the same mirrors.

    Raises HostError when nothing is configured for either.
    """
    found = tuple(_all_sources(etc))
    for base in dict.fromkeys((suite, host)):
        fitting = tuple(_for_suite(found, base, suite))
        if fitting:
            return fitting
    raise HostError(
        f"apt on this machine has no source for {suite} or {host}", hint="add one in /etc/apt/sources.list.d"
    )


def proxy_settings() -> list[str]:
    """The proxies of this machine's apt, as lines of apt's configuration."""
    done = subprocess.run(["apt-config", "dump", "Acquire"], capture_output=True, text=True, check=False)
    return [line for line in done.stdout.splitlines() if re.match(r'Acquire::https?::Proxy(::\S+)? "[^"]+";', line)]


def _for_suite(sources: tuple[AptSource, ...], base: str, suite: str) -> Iterator[AptSource]:
    wanted = {base + pocket: suite + pocket for pocket in _POCKETS}
    for source in sources:
        suites = tuple(wanted[name] for name in source.suites if name in wanted)
        if suites:
            yield replace(source, suites=suites)


def _all_sources(etc: Path) -> Iterator[AptSource]:
    parts = etc / "sources.list.d"
    for path in [etc / "sources.list", *sorted(parts.glob("*.list")), *sorted(parts.glob("*.sources"))]:
        try:
            text = path.read_text()
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise HostError(f"cannot read {path}: {error}") from error
        yield from _paragraphs(text) if path.suffix == ".sources" else _lines(text)


def _paragraphs(text: str) -> Iterator[AptSource]:
    for paragraph in re.split(r"\n[ \t]*\n", text):
        fields: dict[str, str] = {}
        key = ""
        for line in paragraph.splitlines():
            if line.startswith("#"):
                continue
            if line[:1] in (" ", "\t"):
                if key:
                    fields[key] += "\n" + line
                continue
            key, _, value = line.partition(":")
            key = key.strip().lower()
            fields[key] = value.strip()
        if "deb" in fields.get("types", "").split() and fields.get("enabled", "yes").lower() not in (
            "no",
            "false",
            "0",
        ):
            yield AptSource(
                tuple(fields.get("uris", "").split()),
                tuple(fields.get("suites", "").split()),
                tuple(fields.get("components", "").split()),
                fields.get("signed-by", ""),
            )


def _lines(text: str) -> Iterator[AptSource]:
    for line in text.splitlines():
        match = re.match(r"\s*deb\s+(?:\[([^]]*)\]\s+)?(\S+)\s+(\S+)\s+([^#]*[^#\s])", line)
        if match:
            options = dict(item.split("=", 1) for item in (match[1] or "").split() if "=" in item)
            yield AptSource((match[2],), (match[3],), tuple(match[4].split()), options.get("signed-by", ""))
