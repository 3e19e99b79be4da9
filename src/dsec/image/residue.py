"""What work leaves behind in a sandbox and nobody wants in a workspace or toolkit: rules as data, and their report.

A pattern is a path from the top: `*` stands for anything within a name, `**` for anything at all. What matches goes,
with all below it. Marks that hide something of the layers below stay.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from dsec.core.errors import InvalidArgumentError
from dsec.image.scan import Entry, is_whiteout, walk
from dsec.storage.syscalls import RESOLVE_BENEATH, RESOLVE_NO_SYMLINKS, openat2
from dsec.storage.trees import remove_entry
from dsec.wire.snapshots import Removed

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_SHOWN_MAX: Final = 20  # paths of one rule in a report
_HOMES: Final = ("/root", "/home/*")


def _at_home(*names: str) -> tuple[str, ...]:
    return tuple(f"{home}/{name}" for home in _HOMES for name in names)


RULES: Final[dict[str, tuple[str, ...]]] = {
    "temporary": ("/tmp/*", "/var/tmp/*", "/run/*"),
    "caches": (
        *_at_home(".cache", ".npm/_cacache", ".cargo/registry/cache", ".gradle/caches", ".m2/repository/.cache"),
        "/var/cache/apt/archives/*.deb",
        "/var/cache/apt/archives/partial/*",
        "/var/cache/apt/*.bin",
        "/var/cache/debconf/*-old",
        "/var/cache/apk/*",
        "/var/cache/dnf/*",
        "/var/cache/yum/*",
    ),
    "package-lists": ("/var/lib/apt/lists/*", "/var/lib/dnf/repos/*"),
    "bytecode": ("**/__pycache__",),
    "logs": ("/var/log/*",),
    "histories": _at_home(
        ".*_history",
        ".lesshst",
        ".viminfo",
        ".wget-hsts",
        ".local/share/fish/fish_history",
        ".sudo_as_admin_successful",
    ),
    "ssh": (*_at_home(".ssh"), "/etc/ssh/ssh_host_*"),
    "credentials": _at_home(
        ".git-credentials",
        ".config/git/credentials",
        ".netrc",
        ".npmrc",
        ".pypirc",
        ".docker/config.json",
        ".aws",
        ".azure",
        ".config/gcloud",
        ".config/gh",
        ".kube/config",
        ".gnupg",
    ),
}


def rules_for(configured: Mapping[str, Collection[str]], keep: Collection[str]) -> dict[str, tuple[str, ...]]:
    """The rules to apply: an operator's beside and instead of ours, without those to keep. InvalidArgumentError."""
    rules = {**RULES, **{name: tuple(patterns) for name, patterns in configured.items()}}
    if unknown := sorted(set(keep) - set(rules)):
        raise InvalidArgumentError(
            f"there is no rule {unknown[0][:80]!r}", hint=f"rules are {', '.join(sorted(rules))}"
        )
    return {name: patterns for name, patterns in rules.items() if name not in keep and patterns}


@dataclass(slots=True)
class _Found:
    rule: str
    path: bytes
    entries: int = 1
    size_bytes: int = 0


@dataclass(slots=True)
class Residue:
    """What of a tree the rules are about."""

    found: list[_Found] = field(default_factory=list)

    def report(self) -> list[Removed]:
        """By rule, in order; a bounded number of paths each."""
        rules = dict.fromkeys(item.rule for item in self.found)
        return [
            Removed(
                rule=rule,
                entries=sum(item.entries for item in self.found if item.rule == rule),
                size_bytes=sum(item.size_bytes for item in self.found if item.rule == rule),
                paths=[
                    "/" + item.path.decode("utf-8", "backslashreplace")
                    for item in [item for item in self.found if item.rule == rule][:_SHOWN_MAX]
                ],
            )
            for rule in rules
        ]


def find_residue(root: int, rules: Mapping[str, Collection[str]]) -> Residue:
    """Looks through the tree below the descriptor `root`; nothing is changed."""
    patterns = [(name, re.compile(b"|".join(map(_expression, chosen)))) for name, chosen in rules.items() if chosen]
    residue = Residue()
    inside: _Found | None = None
    for entry in walk(root):
        if inside is not None and entry.path.startswith(inside.path + b"/"):
            inside.entries += 1
            inside.size_bytes += _size(entry)
            continue
        inside = None
        if not entry.path or is_whiteout(entry.info):
            continue
        rule = next((name for name, pattern in patterns if pattern.fullmatch(b"/" + entry.path)), None)
        if rule is not None:
            inside = _Found(rule, entry.path, size_bytes=_size(entry))
            residue.found.append(inside)
    return residue


def remove_residue(root: int, residue: Residue) -> None:
    """Removes what was found; the directories that it was in keep their times."""
    for item in residue.found:
        above, _, name = item.path.rpartition(b"/")
        parent = openat2(root, above or b".", _DIRECTORY, resolve=RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS)
        try:
            info = os.fstat(parent)
            remove_entry(parent, name)
            os.utime(parent, ns=(info.st_mtime_ns, info.st_mtime_ns))
        finally:
            os.close(parent)


def check_pattern(pattern: str) -> None:
    """Raises InvalidArgumentError for what is no pattern of a rule."""
    if not pattern.startswith(("/", "**/")) or "\0" in pattern or pattern in ("/", "/*", "/**", "**/", "**/*"):
        raise InvalidArgumentError(
            f"{pattern[:80]!r} is no pattern of residue", hint='such as "/var/cache/x/*" or "**/node_modules"'
        )


def _expression(pattern: str) -> bytes:
    parts = re.split(r"(\*\*/|\*\*|\*)", pattern)
    wild = {"**/": "/(?:.*/)?", "**": ".*", "*": "[^/]*"}
    return "".join(wild.get(part, re.escape(part)) for part in parts).encode()


def _size(entry: Entry) -> int:
    return entry.info.st_size if stat.S_ISREG(entry.info.st_mode) else 0
