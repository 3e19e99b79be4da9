"""What a machine's screen shows, of QEMU: memory of its own, which is no part of the state of devices."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any, Final

from dsec.backends.vm.guestmemory import read_from, written_to
from dsec.backends.vm.qmp import Monitor, MonitorError
from dsec.core.limits import MIB

SCREEN: Final = "screen.raw"
VIDEO: Final = "video"  # the device
_BYTES_MAX: Final = 64 * MIB
_FOUND: Final = re.compile(r"Host virtual address for 0x[0-9a-f]+ \(([^)]{1,100})\) is 0x([0-9a-f]{1,16})")


async def take_screen(monitor: Monitor, pid: int) -> bytes | None:
    """None: it has none, or shows nothing yet. Raises MonitorError, HostError."""
    found = await _find(monitor)
    if found is None:
        return None
    address, size = found
    return await asyncio.to_thread(read_from, pid, address, size)


async def put_screen(monitor: Monitor, pid: int, directory: Path) -> None:
    """As it was saved in `directory`, if it was, before the machine goes on. Raises MonitorError, HostError."""
    try:
        content = await asyncio.to_thread((directory / SCREEN).read_bytes)
    except FileNotFoundError:
        return
    found = await _find(monitor)
    if found is None or found[1] != len(content):
        raise MonitorError("the machine has another screen than it had")
    await asyncio.to_thread(written_to, pid, found[0], content)


async def _find(monitor: Monitor) -> tuple[int, int] | None:
    """Where the monitor has it, and its size. Addresses are the monitor's own: nothing but its own memory is there."""
    buses: Any = await monitor.execute("query-pci")
    devices = [device for bus in buses if isinstance(bus, dict) for device in bus.get("devices", [])]
    video = next((device for device in devices if device.get("qdev_id") == VIDEO), None)
    if video is None:
        return None
    region = next((region for region in video.get("regions", []) if region.get("bar") == 0), None)
    if region is None or not 0 < region["size"] <= _BYTES_MAX or region["address"] < 0:
        return None
    command = {"command-line": f"gpa2hva {int(region['address']):#x}"}
    found = _FOUND.search(str(await monitor.execute("human-monitor-command", command)))
    return (int(found[2], 16), int(region["size"])) if found is not None else None
