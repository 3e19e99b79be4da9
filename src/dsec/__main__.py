"""`python -m dsec` is the `dsec` command, also where the environment's programs are not on PATH."""

from __future__ import annotations

from dsec.cli.entry import main

if __name__ == "__main__":
    main()
