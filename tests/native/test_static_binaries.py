"""The programs run where there is nothing else: no loader, no library."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

PT_DYNAMIC, PT_INTERP = 2, 3
DT_NULL, DT_NEEDED = 0, 1


@pytest.mark.parametrize("name", ["dsec-agent", "dsec-launch"])
def test_a_program_names_no_loader_and_no_library(native_binaries: dict[str, Path], name: str) -> None:
    image = native_binaries[name].read_bytes()

    segments = segments_of(image)

    assert PT_INTERP not in {kind for kind, _, _ in segments}
    assert [tag for tag in dynamic_tags(image, segments) if tag == DT_NEEDED] == []


def segments_of(image: bytes) -> list[tuple[int, int, int]]:
    """(type, offset, size in the file) of each program header of a 64-bit ELF file."""
    assert image[:5] == b"\x7fELF\x02"
    (table,) = struct.unpack_from("<Q", image, 32)
    size, count = struct.unpack_from("<HH", image, 54)
    found = []
    for number in range(count):
        kind, _, offset, _, _, length = struct.unpack_from("<IIQQQQ", image, table + number * size)
        found.append((kind, offset, length))
    return found


def dynamic_tags(image: bytes, segments: list[tuple[int, int, int]]) -> list[int]:
    tags = []
    for kind, offset, length in segments:
        if kind == PT_DYNAMIC:
            for place in range(offset, offset + length, 16):
                (tag,) = struct.unpack_from("<q", image, place)
                if tag == DT_NULL:
                    break
                tags.append(tag)
    return tags
