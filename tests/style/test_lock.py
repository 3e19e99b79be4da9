"""The locks hold what pyproject.toml asks for."""

from __future__ import annotations

import re
import tomllib

from tests.style.tree import ROOT


def test_the_locks_hold_every_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    run = project["dependencies"] + project["optional-dependencies"]["build"]
    dev = run + project["optional-dependencies"]["dev"]

    assert names(run) - locked("run.txt") == set(), "run `make lock`"
    assert names(dev) - locked("dev.txt") == set(), "run `make lock`"


def test_both_locks_agree_on_versions() -> None:
    run, dev = versions("run.txt"), versions("dev.txt")

    assert {name: version for name, version in run.items() if dev.get(name) != version} == {}


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^A-Za-z0-9._-]", requirement)[0].lower().replace("_", "-") for requirement in requirements}


def locked(name: str) -> set[str]:
    return set(versions(name))


def versions(name: str) -> dict[str, str]:
    text = (ROOT / "tools" / "lock" / name).read_text(encoding="utf-8")
    return {found[1]: found[2] for found in re.finditer(r"^([a-z0-9-]+)==([^\s;]+)", text, flags=re.M)}
