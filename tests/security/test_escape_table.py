"""The documentation says which attempts were shown to succeed, and where."""

from __future__ import annotations

from tests.conftest import ROOT
from tests.security.weakenings import table


def test_the_table_of_attempts_is_that_of_the_tests() -> None:
    written = (ROOT / "docs/internals/escapes.md").read_text()

    assert written == table(), "run python3 -m tests.security.weakenings > docs/internals/escapes.md"
