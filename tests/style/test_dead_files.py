"""Nothing lies about that nothing uses."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterable
from pathlib import Path

from tests.style.tree import ROOT, files_below, module_name, relative, tracked_files


def test_every_module_is_imported_or_an_entry_point() -> None:
    modules = {module_name(path): path for path in files_below("src", ".py") if path.name != "__init__.py"}
    users = [path for folder in ("src", "bench", "examples", "tools") for path in files_below(folder, ".py")]
    used = names_imported_by(users) | entry_points()
    # What is published for tests is used by tests, and may be used by other projects'.
    used |= {name for name in names_imported_by(files_below("tests", ".py")) if name.startswith("dsec.testing")}

    dead = [relative(path) for name, path in modules.items() if name not in used and path.name != "__main__.py"]

    assert dead == []


def test_every_tool_is_named_somewhere() -> None:
    tools = [path for path in tracked_files() if path.parent == ROOT / "tools"]
    texts = {path: text_of(path) for path in tracked_files() if path.suffix in {"", ".md", ".py", ".toml", ".rs"}}

    unnamed = [
        relative(tool)
        for tool in tools
        if not any(relative(tool) in text for path, text in texts.items() if path != tool)
    ]

    assert unnamed == []


def test_the_root_folder_holds_no_work_notes() -> None:
    expected = {
        ".gitignore", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md",
        "SECURITY.md", "SPECIFICATION.md", "hatch_build.py", "pyproject.toml",
    }  # fmt: skip

    found = {path.name for path in tracked_files() if path.parent == ROOT}

    assert found - expected == set()


def names_imported_by(paths: Iterable[Path]) -> set[str]:
    names: set[str] = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("dsec."):
                # Loaded by name: `python -m`, or importlib in a lazy __getattr__.
                names.add(node.value.split(":")[0])
    return names


def entry_points() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {target.split(":")[0] for target in project["scripts"].values()}


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")
