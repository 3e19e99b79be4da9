"""Who may import whom. The same table, for people, is in ARCHITECTURE.md."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.style.tree import ROOT, files_below, module_name, relative

_HOST = {"core", "observe", "wire", "storage", "security", "density", "agent", "trajectory", "image", "backends"}

# Each package of dsec, and the others that it may import. `binaries` and the package's own root are for everyone.
MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "binaries": {"core"},
    "observe": {"core"},
    "wire": {"core"},
    "storage": {"core", "observe", "wire"},
    # A seccomp filter is written as the launcher's record of one.
    "security": {"core", "observe", "wire"},
    # Whoever asks becomes the Caller record that goes to the node.
    "iam": {"core", "observe", "wire"},
    "density": {"core", "observe"},
    "agent": {"core", "wire", "observe"},
    "trajectory": {"core", "observe", "storage"},
    # Builds are asked for in wire.environments' records.
    "image": {"core", "observe", "storage", "wire"},
    "backends": {"core", "observe", "wire", "storage", "security", "density", "agent", "image"},
    "node": _HOST,
    "cluster": {"core", "wire", "observe"},
    "api": {"core", "wire", "observe", "iam", "cluster", "trajectory", "storage"},
    "sdk": {"core", "wire"},
    "rollout": {"core", "wire", "sdk"},
    "integrations": {"core", "wire", "sdk", "rollout"},
    "dashboard": {"core", "wire", "sdk", "rollout"},
    "cli": {"core", "wire", "sdk", "rollout"},
    # `python -m dsec` is the command.
    "__main__": {"cli"},
}
# Composition root and published test tools.
ANYTHING = {"serve", "testing"}
# For everyone: where our programs are.
FOR_ALL = {"binaries"}
SHARED = "vm"  # no backend, but what those of virtual machines are made of; it imports none
# The only decoder, also of what a package has stored itself.
CODEC = "dsec.wire.codec"
# `dsec/__init__.py` and `dsec/errors.py` are the SDK's public face.
FACE = {"core", "wire", "sdk"}


@dataclass(frozen=True, slots=True)
class Import:
    path: Path
    line: int
    module: str

    def __str__(self) -> str:
        return f"{relative(self.path)}:{self.line} imports {self.module}"


def test_packages_import_only_what_the_table_allows() -> None:
    wrong = [str(found) for path in files_below("src/dsec", ".py") for found in imports_of(path) if not allowed(found)]

    assert wrong == []


def test_sibling_backends_import_nothing_of_each_other() -> None:
    wrong = []
    for path in files_below("src/dsec/backends", ".py"):
        own = module_name(path).split(".")[2:3]
        for found in imports_of(path):
            parts = found.module.split(".")
            sibling = (ROOT / "src/dsec/backends" / parts[2]).is_dir() if len(parts) > 2 else False
            # registry.py, beside the folders, is where they are listed.
            in_folder = own and (ROOT / "src/dsec/backends" / own[0]).is_dir()
            if parts[:2] == ["dsec", "backends"] and sibling and in_folder and parts[2] not in (own[0], SHARED):
                wrong.append(str(found))

    assert wrong == []


def test_libdsec_uses_the_sdk_only() -> None:
    allowed_modules = {"dsec", "dsec.errors", "dsec.sdk", "dsec.core", "dsec.wire"}

    wrong = [
        str(found)
        for path in files_below("src/libdsec", ".py")
        for found in imports_of(path)
        if found.module.split(".")[0] == "dsec" and ".".join(found.module.split(".")[:2]) not in allowed_modules
    ]

    assert wrong == []


def test_every_package_is_in_the_table() -> None:
    packages = {path.relative_to(ROOT / "src/dsec").parts[0] for path in files_below("src/dsec", ".py")}

    known = set(MAY_IMPORT) | ANYTHING | {"__init__.py", "__main__.py", "errors.py", "binaries.py"}

    assert packages - known == set()


def test_the_architecture_page_lists_every_package() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    packages = {path.parent.name for path in files_below("src/dsec", ".py") if path.parent.parent.name == "dsec"}

    missing = [name for name in sorted(packages) if f"`{name}`" not in page]

    assert missing == []


def test_importing_dsec_loads_nothing_heavy() -> None:
    code = "import dsec, libdsec, sys, json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60, cwd=ROOT)
    loaded = {name.split(".")[0] for name in json.loads(done.stdout)}

    # The client waits for the first call; the rest belongs to other processes.
    heavy = {"aiohttp", "structlog", "prometheus_client", "uvicorn", "starlette", "uvloop", "typer", "rich", "sqlite3"}

    assert loaded & heavy == set()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import dsec.node.journal", ["dsec.node.journal"]),
        ("from dsec.core import limits", ["dsec.core.limits"]),
        ("from dsec import node", ["dsec.node"]),
        ("def f():\n    from dsec.api import app", ["dsec.api.app"]),
    ],
)
def test_imports_are_found_wherever_they_stand(tmp_path: Path, source: str, expected: list[str]) -> None:
    path = tmp_path / "probe.py"
    path.write_text(source, encoding="utf-8")

    assert [found.module for found in imports_of(path)] == expected


def test_a_forbidden_import_is_noticed() -> None:
    path = ROOT / "src/dsec/sdk/probe.py"

    assert not allowed(Import(path, 1, "dsec.node.supervisor"))
    assert not allowed(Import(ROOT / "src/dsec/api/probe.py", 1, "dsec.sdk"))
    assert allowed(Import(path, 1, "dsec.wire.api"))


def imports_of(path: Path) -> Iterator[Import]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(path, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno}: imports are absolute"
            if node.module == "dsec":
                for alias in node.names:
                    yield Import(path, node.lineno, f"dsec.{alias.name}")
            else:
                for alias in node.names:
                    yield Import(path, node.lineno, f"{node.module}.{alias.name}")


def allowed(found: Import) -> bool:
    parts = found.module.split(".")
    if parts[0] != "dsec" or len(parts) == 1 or ".".join(parts[:3]) == CODEC:
        return True
    target = parts[1]
    importer = module_name(found.path).split(".")[1:2]
    if not importer or importer[0] == "errors":
        return target in FACE or target.startswith("__")
    own = importer[0]
    may = MAY_IMPORT.get(own, set())
    return own in ANYTHING or target in {own, "__version__"} | FOR_ALL | may
