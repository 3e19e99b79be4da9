"""Documents that can be checked are: links, the error tree, reasons of limits."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from dsec.core import errors
from tests.style.tree import ROOT, relative, tracked_files

_LINK = re.compile(r"(?<!!)\[[^\]\n]+\]\(([^)\s]+)\)|!\[[^\]\n]*\]\(([^)\s]+)\)")


def test_links_between_documents_resolve() -> None:
    broken = [
        f"{relative(page)}: {target}"
        for page in tracked_files()
        if page.suffix == ".md"
        for target in links_of(page)
        if not resolves(page, target)
    ]

    assert broken == []


def test_the_tests_that_documents_name_exist() -> None:
    pages = [ROOT / name for name in ("ARCHITECTURE.md", "SPECIFICATION.md", "SECURITY.md", "CONTRIBUTING.md")]
    named = {(page, path) for page in pages for path in re.findall(r"`((?:tests|bench)/[\w./]*)`", page.read_text())}

    missing = [f"{relative(page)}: {path}" for page, path in sorted(named) if not (ROOT / path).exists()]
    files = {page.name for page in tracked_files()}
    bare = {name for page in pages for name in re.findall(r"`(test_\w+\.py)`", page.read_text())}

    assert missing == []
    assert len(bare) > 10
    assert bare <= files


@pytest.mark.parametrize("target", ["no-such-page.md", "README.md#no-such-heading"])
def test_a_broken_link_is_noticed(target: str) -> None:
    assert not resolves(ROOT / "README.md", target)


def test_the_error_tree_is_drawn_as_it_is() -> None:
    drawn = [(depth_of(line), name) for line in (errors.__doc__ or "").splitlines() if (name := class_in(line))]

    assert drawn == list(class_tree(errors.DsecError, 0))


def test_error_codes_are_stated_and_differ() -> None:
    classes = [getattr(errors, name) for _, name in class_tree(errors.DsecError, 0)]
    # DsecError and PlatformError are what anything unforeseen becomes.
    codes = [cls.__dict__.get("code") for cls in classes if cls is not errors.DsecError]

    assert None not in codes
    assert len(codes) == len(set(codes))


def test_every_limit_has_a_reason() -> None:
    limits = generator().read_limits()

    assert len(limits) > 20
    assert [limit.name for limit in limits if len(limit.reason) < 10] == []


def test_generated_pages_are_up_to_date() -> None:
    pages = generator().pages()

    stale = [name for name, text in pages.items() if not (ROOT / name).exists() or (ROOT / name).read_text() != text]

    assert stale == [], "run `make docs`"


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gen_docs", ROOT / "tools" / "gen_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their own module up
    spec.loader.exec_module(module)
    return module


def links_of(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    text = re.sub(r"`[^`\n]*`", "", text)
    return [first or second for first, second in _LINK.findall(text)]


def resolves(page: Path, target: str) -> bool:
    if re.match(r"[a-z]+:", target):
        return True  # the web is not ours to test
    name, _, anchor = target.partition("#")
    path = (page.parent / name).resolve() if name else page
    if not path.exists():
        return False
    return not anchor or anchor in anchors_of(path)


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ +(.+?) *$", page.read_text(encoding="utf-8"), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def depth_of(line: str) -> int:
    return len(re.match(r"[│├└─ ]*", line)[0]) // 4  # type: ignore[index]


def class_in(line: str) -> str | None:
    found = re.match(r"[│├└─ ]*(\w+Error)\b", line)
    return found[1] if found else None


def class_tree(cls: type[errors.DsecError], depth: int) -> list[tuple[int, str]]:
    found = [(depth, cls.__name__)]
    for child in cls.__subclasses__():
        if child.__module__ == errors.__name__:
            found += class_tree(child, depth + 1)
    return found
