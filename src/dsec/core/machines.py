"""What a full machine can be: words that images, API and backend share."""

from __future__ import annotations

import enum
from typing import Final

# Of a machine's network card: the same for all, as each is alone in its net (198.18.0.0/15 is nobody's, RFC 2544).
ADDRESS: Final = "198.18.0.15"
PREFIX: Final = 24
GATEWAY: Final = "198.18.0.14"


class Firmware(enum.StrEnum):
    BIOS = "bios"
    UEFI = "uefi"
    KERNEL = "kernel"  # no boot loader on the disk: kernel and initial files are beside it


class Agent(enum.StrEnum):
    DSEC = "dsec"  # ours: commands, sessions and files, as everywhere
    QGA = "qga"  # qemu-guest-agent: says when the system is up, and is told the time
    NONE = "none"  # a screen, a keyboard and a mouse only


class Bus(enum.StrEnum):
    """How the disk is connected."""

    VIRTIO = "virtio"
    SATA = "sata"  # for systems without drivers for virtual machines
