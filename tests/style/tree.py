"""The files of this checkout, as the style tests see them."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SRC = ROOT / "src"


@cache
def tracked_files() -> tuple[Path, ...]:
    """What git knows, and what it does not ignore: a new file is checked before it is added."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=60)
    paths = [ROOT / name for name in done.stdout.decode().split("\0") if name]
    return tuple(sorted(path for path in paths if path.is_file() and not path.is_symlink()))


def files_below(folder: str, suffix: str) -> list[Path]:
    return [path for path in tracked_files() if path.suffix == suffix and path.is_relative_to(ROOT / folder)]


def module_name(path: Path) -> str:
    """`src/dsec/core/ids.py` is dsec.core.ids, `src/dsec/core/__init__.py` is dsec.core."""
    parts = list(path.relative_to(SRC).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))
