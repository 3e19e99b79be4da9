"""Which monitor the microvms of this node run under: Firecracker where it is and guests run on the processor itself,
else QEMU."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from dsec.backends.base import Weakness
from dsec.backends.microvm.config import MicrovmConfig
from dsec.backends.vm import machine
from dsec.backends.vm.accelerator import choose_accelerator, why_no_firecracker
from dsec.backends.vm.driver import Driver
from dsec.backends.vm.drivers import Machine, VmDriver
from dsec.backends.vm.firecracker import find_firecracker
from dsec.backends.vm.firecracker_driver import FirecrackerDriver
from dsec.backends.vm.firecracker_machine import FirecrackerMachine
from dsec.backends.vm.initramfs import build_initramfs
from dsec.backends.vm.kernel import (
    MODULES,
    NETWORK,
    PERSISTENT,
    GuestKernel,
    content_digest,
    fetch_kernel,
    find_kernel,
)
from dsec.backends.vm.qemu import check_own_net, find_qemu, weaknesses
from dsec.backends.vm.qemu_machine import QemuMachine
from dsec.binaries import find_binary
from dsec.core.errors import HostError, UnsupportedError

_NETWORK: Final = "network"


@dataclass(frozen=True, slots=True)
class Chosen:
    driver: VmDriver[Any]
    identity: dict[str, str]  # of all templates
    shown: dict[str, str]  # for people
    weak: dict[str, Weakness]


async def choose_monitor(config: MicrovmConfig) -> Chosen:
    """Raises HostError or UnsupportedError: what is missing, or does not work."""
    guest, agent = find_binary("dsec-guest"), find_binary("dsec-agent")
    find_binary("dsec-jail")
    if config.monitor == "qemu":
        find_qemu(config.qemu)  # before a kernel is fetched
    kernel = await asyncio.to_thread(_kernel, config)
    initramfs = await asyncio.to_thread(
        lambda: build_initramfs(kernel, guest=guest, agent=agent, cache=config.cache_dir)
    )
    driver: VmDriver[Any]
    weak: dict[str, Weakness]
    if await _why_not_firecracker(config, kernel) is None:
        firecracker = find_firecracker(config.firecracker)
        driver = FirecrackerDriver(
            firecracker,
            kernel.vmlinux,
            initramfs,
            served=config.memory == "served",
            persistent=config.layer_device == "pmem",
            differences=config.diff_snapshots,
        )
        processor, weak = "kvm", {}
    else:
        qemu = find_qemu(config.qemu)
        accelerator = await choose_accelerator(config.accelerator, qemu, kernel, cache=config.cache_dir)
        driver = Driver(qemu, accelerator.name, kernel.vmlinux, initramfs, config.layer_device == "pmem")
        emulated = accelerator.name == "tcg"
        processor = f"emulated: {accelerator.reason}" if emulated else "kvm"
        weak = weaknesses(emulated=emulated, keeps_templates=qemu.keeps_templates)
    identity = await _identity(driver, kernel, initramfs)
    return Chosen(driver, identity, {**driver.shown, "processor": processor, "kernel": kernel.name}, weak)


async def with_card(config: MicrovmConfig, driver: VmDriver[Any]) -> tuple[VmDriver[Any], dict[str, str]]:
    """The same monitor for machines that boot with a network card, and the identity of their templates: a kernel with
    what drives one, which others do without. Raises HostError, UnsupportedError."""
    if isinstance(driver, Driver):
        await asyncio.to_thread(check_own_net, driver.qemu)
    guest, agent = find_binary("dsec-guest"), find_binary("dsec-agent")
    kernel = await asyncio.to_thread(_kernel, config, network=True)
    initramfs = await asyncio.to_thread(
        lambda: build_initramfs(kernel, guest=guest, agent=agent, cache=config.cache_dir / _NETWORK)
    )
    assert isinstance(driver, (Driver, FirecrackerDriver))
    able = replace(driver, vmlinux=kernel.vmlinux, initramfs=initramfs)
    return able, await _identity(able, kernel, initramfs)


async def _identity(driver: VmDriver[Any], kernel: GuestKernel, initramfs: Path) -> dict[str, str]:
    return {
        "generation": str(machine.GENERATION),
        "initramfs": initramfs.name,
        "kernel_name": kernel.name,
        "kernel": await asyncio.to_thread(content_digest, kernel),
        **driver.identity,
    }


def control_of(monitor: str, sockets: Path, *, owner: int) -> Machine:
    """A machine that runs, under the monitor of its record."""
    kind = FirecrackerMachine if monitor == FirecrackerDriver.name else QemuMachine
    return kind(sockets, owner=owner)


async def _why_not_firecracker(config: MicrovmConfig, kernel: GuestKernel) -> str | None:
    """Raises UnsupportedError or HostError when it is asked for by name."""
    if config.monitor == "qemu" or (config.monitor == "auto" and config.accelerator == "tcg"):
        return "as configured"
    try:
        firecracker = find_firecracker(config.firecracker)
    except HostError as error:
        if config.monitor == "firecracker":
            raise
        return error.message
    if config.layer_device == "pmem" and not firecracker.has_pmem:
        reason: str | None = f"{firecracker.text} has no pmem, which 1.14 has"
    else:
        reason = await why_no_firecracker(firecracker, kernel, cache=config.cache_dir)
    if reason is not None and config.monitor == "firecracker":
        raise UnsupportedError(f"Firecracker does not work here: {reason}", hint='set monitor = "qemu" to emulate')
    return reason


def _kernel(config: MicrovmConfig, *, network: bool = False) -> GuestKernel:
    """Machines with other modules have a kernel of their own in the cache."""
    modules: tuple[str, ...] = MODULES
    cache = config.cache_dir
    if network:
        modules, cache = (*modules, *NETWORK), cache / _NETWORK
    if config.layer_device == "pmem":
        modules, cache = (*modules, *PERSISTENT), cache / "pmem"
    return find_kernel(cache, config.kernel, modules) or fetch_kernel(cache, config.kernel, modules)
