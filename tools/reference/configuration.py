"""docs/reference/configuration.md"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from dsec.backends.container.config import ContainerConfig
from dsec.node.config import CollectConfig, NodeConfig, WarmConfig
from dsec.serve.config import VARIABLES, CollectSettings, ContainerSettings, NodeSettings, ServeConfig, WarmSettings
from tools.reference.text import NOTE, comments_of, join, kind_of, table

# Where a setting is explained when it is not in the service's own record: in that of its part.
_EXPLAINED = {
    NodeSettings: NodeConfig,
    WarmSettings: WarmConfig,
    CollectSettings: CollectConfig,
    ContainerSettings: ContainerConfig,
}
_DIRECTORIES = {"run_dir": "/run/dsec as root", "state_dir": "/var/lib/dsec as root"}


@dataclass(frozen=True, slots=True)
class Setting:
    table: str
    name: str
    kind: str
    default: str
    meaning: str

    @property
    def dotted(self) -> str:
        return f"{self.table}.{self.name}" if self.table else self.name


def page() -> str:
    variables = {name: variable for variable, name in VARIABLES.items()}
    lines = ["# Configuration", "", NOTE, ""]
    lines += [
        "`/etc/dsec/dsec.toml`, or the file that `--config` or `DSEC_CONFIG` names. Variables win over the file, and"
    ]
    lines += [
        "flags of `dsec up` over both. A setting that does not exist is an error. Sizes are bytes or text such as"
    ]
    lines += ['`"4GiB"`, durations seconds.', ""]
    found = list(settings())
    for section in dict.fromkeys(setting.table for setting in found):
        lines += ["", f"## [{section}]" if section else "## At the top", ""]
        lines += table(
            ("setting", "type", "default", "variable", "meaning"),
            (
                (
                    f"`{s.name}`",
                    s.kind,
                    s.default,
                    f"`{variables[s.dotted]}`" if s.dotted in variables else "",
                    s.meaning,
                )
                for s in found
                if s.table == section
            ),
        )
    return join(lines)


def settings() -> list[Setting]:
    return sorted(_walk(ServeConfig, ""), key=lambda setting: setting.table)


def _walk(record: type[msgspec.Struct], table: str) -> Iterator[Setting]:
    meanings = {**comments_of(_EXPLAINED.get(record, record)), **comments_of(record)}
    for field in msgspec.structs.fields(record):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from _walk(field.type, f"{table}.{field.name}" if table else field.name)
        else:
            kind = "text, …" if "tuple" in str(field.type) else kind_of(field.type).replace("str", "text")
            kind = "table of texts" if field.default_factory is dict else kind
            yield Setting(table, field.name, kind, _default(field), meanings.get(field.name, ""))


def _default(field: Any) -> str:
    if field.default_factory is dict:
        return "none"
        return "empty"
    if field.default is msgspec.NODEFAULT:
        return _DIRECTORIES[field.name]
    if field.default is None:
        return "none"
    if isinstance(field.default, tuple):
        return ", ".join(f"`{item}`" for item in field.default)
    if "bytes" in field.name and isinstance(field.default, int):
        return next(
            f"{field.default // size} {unit}"
            for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1))
            if field.default % size == 0
        )
    return f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"
