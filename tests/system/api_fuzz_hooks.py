"""What schemathesis lacks: tar streams, whole, hostile, cut off, or none at all; and how to read lines of JSON."""

from __future__ import annotations

import io
import json
import tarfile
from typing import Any

import schemathesis
from hypothesis import strategies as st

from dsec.wire.api import TYPE_NDJSON, TYPE_TAR

_NAMES = st.one_of(
    st.sampled_from(["a", "d/e", "../up", "/absolute", "a/../../b", ".", "x" * 255, "y/" * 80 + "z", "new\nline"]),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=40),
)
_TYPES = st.sampled_from(
    [tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, b"?"]
)


@st.composite
def _archives(draw: st.DrawFn) -> bytes:
    file = io.BytesIO()
    kind = draw(st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]))
    with tarfile.open(fileobj=file, mode="w", format=kind) as tar:
        for name in draw(st.lists(_NAMES, max_size=4)):
            entry = tarfile.TarInfo(name)
            entry.type = draw(_TYPES)
            entry.linkname = draw(_NAMES) if entry.type in (tarfile.SYMTYPE, tarfile.LNKTYPE) else ""
            entry.mode = draw(st.integers(0, 0o7777))
            content = draw(st.binary(max_size=600)) if entry.type == tarfile.REGTYPE else b""
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return file.getvalue()


def _cut(archive: bytes, at: int) -> bytes:
    return archive[: at % (len(archive) + 1)]


schemathesis.openapi.media_type(
    TYPE_TAR,
    st.one_of(_archives(), st.builds(_cut, _archives(), st.integers(0, 20_000)), st.binary(max_size=2_000)),
)


@schemathesis.deserializer(TYPE_NDJSON)
def _lines(context: Any, response: Any) -> Any:
    return [json.loads(line) for line in response.content.splitlines()]
