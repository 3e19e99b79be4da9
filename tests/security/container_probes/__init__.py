"""Attempts to get out of a container, or at what is not its own, made from inside as root with a full Python.

Runs in the sandbox (`python3 -m container_probes [name ...] < facts.json`) and prints one JSON object: name → verdict,
detail. Every probe is a function in a child of its own, harmless when it succeeds. It returns what it has reached (then
the verdict is "allowed"), or raises: an OSError of the errors that it declares is "blocked", anything else "broken":
a probe that fails for another reason than the expected one proves nothing.
"""

from __future__ import annotations

from . import agent, host, kernel, network, privileges, resources, shared
from .kit import PROBES

__all__ = ["PROBES", "agent", "host", "kernel", "network", "privileges", "resources", "shared"]
