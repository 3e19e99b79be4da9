"""Makes the attempts that are named, or all."""

from __future__ import annotations

import json
import os
import sys

from . import PROBES
from .kit import FACTS, run


def main() -> None:
    FACTS.update(json.load(sys.stdin))
    os.close(0)
    os.open("/dev/null", os.O_RDONLY)
    print(json.dumps({name: run(name) for name in sys.argv[1:] or PROBES}))


main()
