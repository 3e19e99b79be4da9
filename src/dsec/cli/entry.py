"""Where the `dsec` command begins: Ctrl-C while it is still loading is no traceback either."""

from __future__ import annotations


def main() -> None:
    try:
        from dsec.cli.main import main as run

        run()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
