"""The documentation says which attempts were shown to succeed, and where."""

from __future__ import annotations

import re

import pytest

from tests.conftest import ROOT
from tests.security.container_probes import PROBES
from tests.security.weakenings import table


def test_the_table_of_attempts_is_that_of_the_tests() -> None:
    written = (ROOT / "docs/internals/escapes.md").read_text()

    assert written == table(), "run python3 -m tests.security.weakenings > docs/internals/escapes.md"


@pytest.mark.parametrize("page", ["SECURITY.md", "SPECIFICATION.md"])
def test_as_many_attempts_are_told_of_as_are_made(page: str) -> None:
    told = re.findall(r"(?:of )?(\d+)(?: attempts of root|; nearly half)", (ROOT / page).read_text())

    assert told == [str(len(PROBES))]
