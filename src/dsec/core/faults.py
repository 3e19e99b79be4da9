"""Places where a test may make things fail. In production a point is one global read."""

from __future__ import annotations

from collections.abc import Callable

Hook = Callable[[str], None]

_hook: Hook | None = None


def fault_point(name: str) -> None:
    """Called just before a step that can fail on a real host. Raises what a test has asked for, else does nothing."""
    if _hook is not None:
        _hook(name)


def install_hook(hook: Hook | None) -> Hook | None:
    """For `dsec.testing.faults` only. Returns the hook of before."""
    global _hook
    old, _hook = _hook, hook
    return old
