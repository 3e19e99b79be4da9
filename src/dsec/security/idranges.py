"""Ranges of 65,536 host ids, one per sandbox, leased host-wide (ruling 14).

Two node daemons on one host share the directory, so they never share a range. A slot is a lock on one byte of one file
(`fcntl(F_OFD_SETLK)`: a descriptor for all slots), which the kernel drops with the process. Sandboxes outlive their
node, so the file names the holder's cgroup as well, at a place of its own for each slot: while that directory exists,
nobody but the node that adopts the sandbox takes the slot again.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
from pathlib import Path

from dsec.core.errors import CapacityError, HostError
from dsec.core.faults import fault_point

IDS_PER_RANGE = 65_536
FIRST_ID = 0x7000_0000
# One id between two ranges stays unused: the kernel finds the record of a user by the low bits of (id + id / 128), and
# multiples of 65,536 have the same, so that each setuid(2) would go through the users of all sandboxes.
STRIDE = IDS_PER_RANGE + 1
SLOTS = 4_095

# What names a holder: a path and zeros. Written to a file that is open: making one takes longer than all else here.
_RECORD_BYTES = 1_024
# struct flock of fcntl(2) on x86-64: type, whence, start, length, pid
_FLOCK = struct.Struct("hhqqi4x")
_F_OFD_SETLK = 37


class IdRanges:
    """Leases slots. One instance per node process; safe to use from several threads."""

    def __init__(self, directory: Path, *, subid_files: tuple[Path, ...] = (Path("/etc/subuid"), Path("/etc/subgid"))):
        self._directory = directory
        self._subid_files = subid_files
        self._lock = threading.Lock()
        self._held: set[int] = set()
        self._next = 0
        self._fd: int | None = None
        self._reserved: frozenset[int] = frozenset()

    def open(self) -> None:
        """Raises HostError when the lock file cannot be used."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(self._directory / "slots", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise HostError(f"cannot open the id range locks in {self._directory}: {error}") from error
        self._reserved = frozenset(_reserved_slots(self._subid_files))

    def close(self) -> None:
        """Gives up every lease of this process."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        self._held.clear()

    def take(self, holder: str) -> int:
        """The first host id of a free range. Raises CapacityError when all are held, HostError when it cannot be noted.

        `holder` is the sandbox's cgroup directory: the range counts as held for as long as that exists.
        """
        with self._lock:
            for step in range(SLOTS):
                slot = (self._next + step) % SLOTS
                if slot not in self._held and slot not in self._reserved and self._try_take(slot):
                    self._mark(slot, holder)
                    self._held.add(slot)
                    # Onwards rather than back to the lowest: a range that was just given up rests longest.
                    self._next = (slot + 1) % SLOTS
                    return FIRST_ID + slot * STRIDE
        raise CapacityError(f"all {SLOTS} id ranges of this host are held", retry_after_s=5.0)

    def retake(self, base: int) -> None:
        """Lease the range of an adopted sandbox. Raises HostError when another process holds it."""
        with self._lock:
            for slot in _slots_of(base):
                if slot in self._held:
                    continue
                if not self._try_lock(slot):
                    raise HostError(f"the id range at {base:#x} is held by another node daemon on this host")
                self._held.add(slot)

    def give_back(self, base: int) -> None:
        """Idempotent. Only once nothing on the host runs or mounts with these ids."""
        slot, *more = _slots_of(base)
        if more:
            return  # its neighbours of before may lie in them too: free again with this process
        with self._lock:
            if slot in self._held:
                self._held.discard(slot)
                # The record stays: it names a cgroup that is gone, and keeps nobody from the slot.
                self._set_lock(slot, fcntl.F_UNLCK)

    @property
    def held(self) -> int:
        return len(self._held)

    def _mark(self, slot: int, holder: str) -> None:
        try:
            fault_point("idranges.mark")
            record = os.fsencode(holder)
            if len(record) > _RECORD_BYTES:
                raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), holder)
            os.pwrite(self._file(), record.ljust(_RECORD_BYTES, b"\0"), slot * _RECORD_BYTES)
        except OSError as error:
            self._set_lock(slot, fcntl.F_UNLCK)
            raise HostError(
                f"an id range cannot be noted in {self._directory}: {error}", hint="is its file system full?"
            ) from error

    def _try_take(self, slot: int) -> bool:
        if not self._try_lock(slot):
            return False
        if self._orphaned(slot):
            self._set_lock(slot, fcntl.F_UNLCK)
            return False
        return True

    def _orphaned(self, slot: int) -> bool:
        """Its node is gone, and its sandbox is not."""
        try:
            holder = os.pread(self._file(), _RECORD_BYTES, slot * _RECORD_BYTES).rstrip(b"\0")
        except OSError as error:
            raise HostError(f"the id ranges in {self._directory} cannot be read: {error}") from error
        return bool(holder) and os.path.lexists(holder)

    def _try_lock(self, slot: int) -> bool:
        try:
            self._set_lock(slot, fcntl.F_WRLCK)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise HostError(f"the id ranges in {self._directory} cannot be locked: {error}") from error
        return True

    def _set_lock(self, slot: int, kind: int) -> None:
        fcntl.fcntl(self._file(), _F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, slot, 1, 0))

    def _file(self) -> int:
        if self._fd is None:
            raise HostError("the id ranges are not open")
        return self._fd


def _slots_of(base: int) -> range:
    """One. A sandbox of a version whose ranges began at multiples of 65,536 lies in two."""
    low, high = ((id - FIRST_ID) // STRIDE for id in (base, base + IDS_PER_RANGE - 1))
    if not 0 <= low <= high < SLOTS:
        raise HostError(f"no id range begins at {base:#x}")
    return range(low, high + 1)


def _reserved_slots(files: tuple[Path, ...]) -> set[int]:
    """Slots that overlap a range which /etc/subuid or /etc/subgid gives to somebody, the id after each included."""
    reserved: set[int] = set()
    for path in files:
        try:
            lines = path.read_text(errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            fields = line.split(":")
            if len(fields) == 3 and fields[1].isdigit() and fields[2].isdigit():
                first, count = int(fields[1]), int(fields[2])
                low = max(0, (first - FIRST_ID) // STRIDE)
                high = min(SLOTS - 1, (first + count - 1 - FIRST_ID) // STRIDE)
                if count > 0:
                    reserved.update(range(low, high + 1))
    return reserved
