"""What an operator may set of calls: of all of them, and of the pools that they are to differ in."""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dsec.backends.fncall.tasks import TaskType
from dsec.core import limits
from dsec.core.cpus import parse_cpus
from dsec.core.errors import InvalidArgumentError

PLACE_MEMORY_BYTES: Final = 512 * limits.MIB
_CALLS_MAX: Final = 20_000  # a call has two users of the 40,000 of its place, when it has a checker
_DEVICES_MAX: Final = 64  # of one pool: more than a machine has
_MODULES_MAX: Final = 256
_DEVICE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*=[A-Za-z0-9][A-Za-z0-9._:-]*\Z")


class Qos(enum.StrEnum):
    NORMAL = "normal"
    BACKGROUND = "background"  # runs when nobody else wants the processor


class DeviceMode(enum.StrEnum):
    SHARED = "shared"  # every place has all of the pool's devices, as others may
    EXCLUSIVE = "exclusive"  # every place has one of them, and nobody else has it


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """Of the pools that `environment` and `type` fit; None fits all."""

    environment: str | None = None
    type: str | None = None
    places_min: int = 0  # kept ready, whether or not calls come
    places_max: int = limits.CALL_PLACES_MAX
    place_memory_bytes: int = PLACE_MEMORY_BYTES  # of one, files of calls included
    place_cpu: float = 1.0
    preload: tuple[str, ...] = ()  # modules that warm interpreters import before the first call
    age_s_max: float = 3_600.0  # then a place is replaced: whatever adds up in a container is gone
    calls_max: int = 10_000  # of one place; its users are not used twice, and it has 40,000
    qos: Qos = Qos.NORMAL
    cpus: str | None = None  # such as "0-3,8": on no other processors
    devices: tuple[str, ...] = ()  # names of CDI: vendor.com/class=name
    device_mode: DeviceMode = DeviceMode.SHARED

    def __post_init__(self) -> None:
        if not 0 <= self.places_min <= self.places_most <= self.places_max <= limits.CALL_PLACES_MAX:
            raise InvalidArgumentError(
                f"places_min and places_max of a pool must be between 0 and {limits.CALL_PLACES_MAX}, in this order"
            )
        if self.places_min and (self.environment is None or self.type is None):
            raise InvalidArgumentError("places_min wants both environment and type: a place is made for one of each")
        if not 1 <= self.calls_max <= _CALLS_MAX or self.age_s_max <= 0:
            raise InvalidArgumentError(f"calls_max must be between 1 and {_CALLS_MAX}, age_s_max above 0")
        check_place(memory_bytes=self.place_memory_bytes, cpu=self.place_cpu)
        check_preload(self.preload)
        for name in self.devices:
            check_device_name(name)
        if len(self.devices) > _DEVICES_MAX or len(set(self.devices)) < len(self.devices):
            raise InvalidArgumentError(f"a pool has at most {_DEVICES_MAX} devices, each of them once")
        if self.cpus is not None:
            parse_cpus(self.cpus)

    @property
    def places_most(self) -> int:
        """With devices of their own there are no more than those."""
        own = self.devices and self.device_mode is DeviceMode.EXCLUSIVE
        return min(self.places_max, len(self.devices)) if own else self.places_max

    def fits(self, environment: Collection[str], type: str) -> bool:
        return self.environment in (None, *environment) and self.type in (None, type)


@dataclass(frozen=True, slots=True)
class CallsConfig:
    places_max: int = 2 * (os.cpu_count() or 1)  # containers for calls, of all pools together; 0: no calls
    place_memory_bytes: int = PLACE_MEMORY_BYTES
    place_cpu: float = 1.0
    idle_s: float = 300.0  # then a place that nobody used goes
    preload: tuple[str, ...] = ()
    types: Mapping[str, TaskType] = field(default_factory=dict)  # beside those that are shipped
    pools: tuple[PoolConfig, ...] = ()  # the first that fits is taken
    cdi_dirs: tuple[Path, ...] = (Path("/etc/cdi"), Path("/var/run/cdi"))  # of descriptions of devices; later ones win

    def __post_init__(self) -> None:
        if not 0 <= self.places_max <= limits.CALL_PLACES_MAX:
            raise InvalidArgumentError(f"calls.places_max must be between 0 and {limits.CALL_PLACES_MAX}")
        if self.idle_s <= 0:
            raise InvalidArgumentError("calls.idle_s must be above 0")
        check_place(memory_bytes=self.place_memory_bytes, cpu=self.place_cpu)
        check_preload(self.preload)
        if sum(pool.places_min for pool in self.pools) > self.places_max:
            raise InvalidArgumentError("places_min of all pools together are more than calls.places_max")

    def pool(self, environment: Collection[str], type: str) -> PoolConfig:
        """What holds for a pool: the first that fits, or what is said for all."""
        for pool in self.pools:
            if pool.fits(environment, type):
                return pool
        return PoolConfig(place_memory_bytes=self.place_memory_bytes, place_cpu=self.place_cpu, preload=self.preload)


def check_device_name(name: str) -> None:
    """Raises InvalidArgumentError."""
    if _DEVICE.match(name) is None:
        raise InvalidArgumentError(
            f"{name[:100]!r} is no name of a device", hint="vendor.com/class=name, as CDI has it"
        )


def check_place(*, memory_bytes: int, cpu: float) -> None:
    """Raises InvalidArgumentError."""
    if memory_bytes < 2 * limits.CALL_MEMORY_BYTES_MIN:
        raise InvalidArgumentError("place_memory_bytes of calls is too small")
    if not limits.CPU_MIN <= cpu <= limits.CPU_MAX:
        raise InvalidArgumentError(f"place_cpu of calls must be between {limits.CPU_MIN} and {limits.CPU_MAX:g}")


def check_preload(modules: Collection[str]) -> None:
    """Raises InvalidArgumentError."""
    if len(modules) > _MODULES_MAX or not all(part.isidentifier() for module in modules for part in module.split(".")):
        raise InvalidArgumentError(f"preload of calls is up to {_MODULES_MAX} names of Python modules")
