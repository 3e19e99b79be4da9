"""The locks hold what pyproject.toml asks for, and that is used."""

from __future__ import annotations

import re
import tomllib

from tests.style.tree import ROOT, files_below


def test_the_locks_hold_every_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    run = project["dependencies"] + project["optional-dependencies"]["build"]
    dev = run + project["optional-dependencies"]["dev"]

    assert names(run) - locked("run.txt") == set(), "run `make lock`"
    assert names(dev) - locked("dev.txt") == set(), "run `make lock`"


def test_both_locks_agree_on_versions() -> None:
    run, dev = versions("run.txt"), versions("dev.txt")

    assert {name: version for name, version in run.items() if dev.get(name) != version} == {}


def test_every_dependency_is_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    code = "\n".join(path.read_text(encoding="utf-8") for path in files_below("src", ".py"))
    # As module, or as the name in one of uvicorn's modules that need it (`httptools_impl`).
    imported = set(re.findall(r"^\s*(?:from|import) (\w+)", code, flags=re.M))
    imported |= {
        word for path in re.findall(r"^\s*from uvicorn\.([\w.]+)", code, flags=re.M) for word in path.split(".")
    }
    imported |= {word.removesuffix("_impl") for word in imported}

    assert {name for name in names(project["dependencies"]) if name.replace("-", "_") not in imported} == set()


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^A-Za-z0-9._-]", requirement)[0].lower().replace("_", "-") for requirement in requirements}


def locked(name: str) -> set[str]:
    return set(versions(name))


def versions(name: str) -> dict[str, str]:
    text = (ROOT / "tools" / "lock" / name).read_text(encoding="utf-8")
    return {found[1]: found[2] for found in re.finditer(r"^([a-z0-9-]+)==([^\s;]+)", text, flags=re.M)}
