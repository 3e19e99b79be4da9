"""The network card of a machine that has any, and what is behind it. Pure.

Under QEMU that is a small net of the monitor's own (`-netdev user`): what a guest sends ends there, and what is TCP or
UDP of it becomes an ordinary connection of the monitor, in the network namespace of its jail. Under Firecracker it is a
device in that namespace. Either leads nowhere, or where the node's rules of egress let it (docs/internals/vm.md).
Addresses are of a net for benchmarks (RFC 2544), which is nobody's, and the same in all machines: each is alone.
"""

from __future__ import annotations

from typing import Final

from dsec.core.machines import ADDRESS, GATEWAY, PREFIX
from dsec.wire.egress import NAMESERVER
from dsec.wire.jail import JailFile, JailTap

NET: Final = "198.18.0.0/24"
CARD: Final = "52:54:00:64:73:63"  # of templates; clones have their own (native/agent/src/machine.rs)

# In the jail.
RESOLVERS: Final = "/etc/resolv.conf"
TAP: Final = "tap0"


def plan_line() -> str:
    """As native/guest/src/plan.rs reads it."""
    return f"network {ADDRESS} {PREFIX} {GATEWAY} {NAMESERVER}"


def card_arguments(device: str) -> list[str]:
    """One card, and the net behind it: IPv4 with DHCP. Nothing is forwarded to it from outside; files by TFTP or SMB
    need a directory, which there is none of."""
    net = f"user,id=net0,ipv4=on,ipv6=off,restrict=off,net={NET},host={GATEWAY},dns={NAMESERVER},dhcpstart={ADDRESS}"
    # Without a ROM of its own no firmware starts anything from there.
    rom = ",romfile=" if device.endswith("-pci") or device.startswith("e1000") else ""
    return ["-netdev", net, "-device", f"{device},netdev=net0,mac={CARD}{rom}"]


def resolver_file() -> JailFile:
    """Whom the monitor asks for names on behalf of its guest: an address that is steered as all others are."""
    return JailFile(RESOLVERS, f"nameserver {NAMESERVER}\n".encode())


def tap() -> JailTap:
    """Of Firecracker, which has no net of its own. Only the machine's address is behind it: all others stay in the
    namespace."""
    return JailTap(TAP, GATEWAY, 32, ADDRESS)
