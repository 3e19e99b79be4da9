"""Writes docs/reference from what the code declares.

    .venv/bin/python tools/gen_docs.py

A test compares the pages with what this would write, so they cannot fall behind.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run as a program, its own directory is what Python looks in

from tools.reference import api, cli, configuration, errors, limits, metrics, sdk  # noqa: E402
from tools.reference.limits import read_limits as read_limits  # noqa: E402


def main() -> None:
    for name, text in pages().items():
        path = ROOT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(name, file=sys.stderr)


def pages() -> dict[str, str]:
    """Path in the checkout → content."""
    return {
        "docs/reference/api.md": api.page(),
        "docs/reference/cli.md": cli.page(),
        "docs/reference/configuration.md": configuration.page(),
        "docs/reference/errors.md": errors.page(),
        "docs/reference/limits.md": limits.page(),
        "docs/reference/metrics.md": metrics.page(),
        "docs/reference/sdk.md": sdk.page(),
        "docs/reference/dsec.1": cli.man_page(),
    }


if __name__ == "__main__":
    main()
