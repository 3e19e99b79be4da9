"""Capabilities of commands and of the agent inside a sandbox (capabilities(7)), as bit masks."""

from __future__ import annotations

from typing import Final

_BITS: Final = {
    "chown": 0,
    "dac_override": 1,
    "fowner": 3,
    "fsetid": 4,
    "kill": 5,
    "setgid": 6,
    "setuid": 7,
    "setpcap": 8,
    "net_bind_service": 10,
    "sys_admin": 21,
    "setfcap": 31,
}


def mask(*names: str) -> int:
    return sum(1 << _BITS[name] for name in names)


# Docker's default set without net_raw (raw sockets), mknod (device nodes are useless on nodev mounts), audit_write,
# sys_chroot and setpcap: what package managers and test suites use, and nothing that reaches the kernel's own state.
EXEC: Final = mask(
    "chown", "dac_override", "fowner", "fsetid", "kill", "setgid", "setuid", "net_bind_service", "setfcap"
)

# The agent hands commands theirs, so it needs them all, and setpcap to cut the bounding set.
AGENT: Final = EXEC | mask("setpcap")

# Without no_new_privs a filter is loaded by right of sys_admin alone: the agent loads that of each command, which never
# has the right itself. What else the right would allow is refused to the agent by its own filter.
AGENT_WITH_PRIVILEGE_GAIN: Final = AGENT | mask("sys_admin")
