"""What the tree must not hold: paths of the machine that it was written on, hosts of package registries, long files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.style.tree import ROOT, files_below, relative, tracked_files

LINES_MAX = 600
DERIVED = {ROOT / "src" / "dsec" / "sdk" / "sync.py"}  # by tools/derive_sync.py: nobody edits it

# Put together here, so that this file does not hold what it looks for.
_HOSTS = [
    ("pypi", "org"), ("pythonhosted", "org"), ("crates", "io"), ("npmjs", "org"), ("npmjs", "com"),
    ("repo1.maven", "org"), ("proxy.golang", "org"), ("deb.debian", "org"), ("archive.ubuntu", "com"),
    ("security.debian", "org"),
]  # fmt: skip
FORBIDDEN = re.compile(
    "|".join(
        [rf"\b{re.escape(f'{name}.{top}')}\b" for name, top in _HOSTS]
        + ["/work" + r"/(?:main|shared|\.)", "/root" + r"/\.", r"/home" + r"/[a-z]+/", r"/Users" + r"/"]
    )
)
# cargo writes the name of its registry into its lock by itself.
EXEMPT = {ROOT / "native" / "Cargo.lock"}


def test_no_file_names_this_machine_or_a_registry() -> None:
    wrong = [
        f"{relative(path)}:{number}: {line.strip()[:100]}"
        for path in tracked_files()
        if path not in EXEMPT
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if FORBIDDEN.search(line)
    ]

    assert wrong == []


@pytest.mark.parametrize("text", ["https://pypi" + ".org/simple", "cd /work" + "/main", "~ is /home" + "/someone/"])
def test_a_forbidden_name_is_noticed(text: str) -> None:
    assert FORBIDDEN.search(text)


def test_files_are_short_enough_to_have_one_subject() -> None:
    sources = [
        path
        for folder in ("src", "tests", "tools", "bench", "examples", "native")
        for suffix in (".py", ".rs")
        for path in files_below(folder, suffix)
    ]

    long = [
        f"{relative(path)}: {count}"
        for path in sources
        if path not in DERIVED and (count := lines_of(path)) > LINES_MAX
    ]

    assert long == []


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        relative(path)
        for path in files_below("src", ".py")
        if not path.read_text(encoding="utf-8").lstrip().startswith(('"""', "'''"))
    ]

    assert silent == []


def lines_of(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n")
