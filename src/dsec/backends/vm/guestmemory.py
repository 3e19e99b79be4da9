"""The memory of a machine that stands still, as its monitor has it mapped: a private view of a file.

What the machine has not written since it was begun is in that file, which never changes, and is copied while it runs.
The rest are pages of the monitor's own, and are few: the machine stands still for those alone. The kernel tells which
(pagemap in proc(5)). Nothing of what is read here is believed to be anything but bytes.
"""

from __future__ import annotations

import array
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec.backends.vm.copying import PIECE_BYTES, Deadline, copy_into, write_sparse
from dsec.core.errors import HostError, SandboxFaultError
from dsec.core.faults import fault_point

_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_THERE: Final = 1 << 63 | 1 << 62  # in memory, or in swap
_OF_FILE: Final = 1 << 61
_MAPPINGS_MAX: Final = 4096  # of one file


@dataclass(frozen=True, slots=True)
class _Part:
    start: int
    end: int
    offset: int  # in the file


class GuestMemory:
    def __init__(self, pid: int, parts: list[_Part]) -> None:
        self._pid = pid
        self._parts = parts

    @classmethod
    def of(cls, pid: int, path: str, size: int) -> GuestMemory:
        """`path`: of the file, as the monitor sees it. Raises SandboxFaultError."""
        try:
            lines = Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape").splitlines()
        except OSError as error:
            raise SandboxFaultError(f"the machine has ended: {error.strerror}") from error
        parts = sorted(
            (part for line in lines if (part := _part_of(line, path)) is not None), key=lambda part: part.offset
        )
        at = 0
        for part in parts:
            if part.offset != at:
                break
            at += part.end - part.start
        if at != size or len(parts) > _MAPPINGS_MAX:
            raise SandboxFaultError("the monitor has the machine's memory elsewhere than it should")
        return cls(pid, parts)

    def copy_file(self, target: int) -> None:
        """What is in the file: at any time. Raises HostError, OSError."""
        first = self._parts[0]
        try:
            source = os.open(f"/proc/{self._pid}/map_files/{first.start:x}-{first.end:x}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise HostError(f"the memory that the machine was begun with cannot be read: {error}") from error
        try:
            if os.fstat(source).st_size != self._parts[-1].offset + self._parts[-1].end - self._parts[-1].start:
                raise HostError("the memory that the machine was begun with is of another size")
            copy_into(source, target, Deadline(float("inf")))
        finally:
            os.close(source)

    def copy_own(self, target: int, deadline: Deadline) -> int:
        """What the machine has written, over what `copy_file` has copied. How many bytes. Raises DeadlineError,
        SandboxFaultError, OSError."""
        fault_point("vm.memory")
        copied = 0
        try:
            memory = os.open(f"/proc/{self._pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SandboxFaultError(f"the machine has ended: {error.strerror}") from error
        try:
            for part in self._parts:
                for start, end in self._own(part):
                    for at in range(start, end, PIECE_BYTES):
                        deadline.check()
                        piece = os.pread(memory, min(PIECE_BYTES, end - at), at)
                        if not piece:
                            raise SandboxFaultError("the machine has ended")
                        copied += write_sparse(target, piece, part.offset + at - part.start, over=True)
        finally:
            os.close(memory)
        return copied

    def _own(self, part: _Part) -> Iterator[tuple[int, int]]:
        """Addresses, as runs of pages that are next to each other."""
        count = (part.end - part.start) // _PAGE
        try:
            with Path(f"/proc/{self._pid}/pagemap").open("rb") as file:
                file.seek(part.start // _PAGE * 8)
                raw = file.read(count * 8)
        except OSError as error:
            raise SandboxFaultError(f"the machine has ended: {error.strerror}") from error
        entries = array.array("Q", raw)
        if len(entries) != count:
            raise SandboxFaultError("the machine has ended")
        run: int | None = None
        for number, entry in enumerate(entries):
            own = entry & _THERE and not entry & _OF_FILE
            if own and run is None:
                run = number
            elif not own and run is not None:
                yield part.start + run * _PAGE, part.start + number * _PAGE
                run = None
        if run is not None:
            yield part.start + run * _PAGE, part.end


def _part_of(line: str, path: str) -> _Part | None:
    fields = line.split(maxsplit=5)
    if len(fields) < 6 or fields[5] not in (path, f"{path} (deleted)") or fields[1] != "rw-p":
        return None
    start, _, end = fields[0].partition("-")
    return _Part(int(start, 16), int(end, 16), int(fields[2], 16))


def written_to(pid: int, address: int, content: bytes) -> None:
    """Into a monitor's own memory. Raises HostError."""
    try:
        memory = os.open(f"/proc/{pid}/mem", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.pwrite(memory, content, address) != len(content):
                raise HostError("the memory of a monitor is not where it should be")
        finally:
            os.close(memory)
    except OSError as error:
        raise HostError(f"the memory of a monitor cannot be written: {error}") from error


def read_from(pid: int, address: int, size: int) -> bytes:
    """Of a monitor's own memory. Raises HostError."""
    try:
        memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        try:
            content = os.pread(memory, size, address)
        finally:
            os.close(memory)
    except OSError as error:
        raise HostError(f"the memory of a monitor cannot be read: {error}") from error
    if len(content) != size:
        raise HostError("the memory of a monitor is not where it should be")
    return content
