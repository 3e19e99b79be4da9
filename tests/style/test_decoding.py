"""Bytes become records in wire/codec.py only: one place for strictness, bounds and typed errors."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.style.tree import ROOT, files_below, relative

CODEC = ROOT / "src/dsec/wire/codec.py"
# A program of its own for the interpreters of environments, which have no package of ours.
ZYGOTE = ROOT / "src/dsec/backends/fncall/zygote.py"
_DECODERS = {
    *(f"msgspec.{form}.{name}" for form in ("json", "msgpack") for name in ("decode", "Decoder")),
    *("json.load", "json.loads", "pickle", "marshal", "yaml"),
}


def test_only_the_codec_decodes() -> None:
    wrong = [
        f"{relative(path)}:{line}: {name}"
        for path in files_below("src", ".py")
        if path not in (CODEC, ZYGOTE)
        for line, name in decoders_in(path)
    ]

    assert wrong == []


@pytest.mark.parametrize(
    "source",
    [
        "import msgspec\nmsgspec.json.decode(b'')",
        "import json\njson.loads('')",
        "import pickle",
        "from json import loads",
    ],
)
def test_a_decoder_elsewhere_is_noticed(tmp_path: Path, source: str) -> None:
    path = tmp_path / "probe.py"
    path.write_text(source, encoding="utf-8")

    assert list(decoders_in(path))


def decoders_in(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Attribute():
                names = [ast.unparse(node)]
            case ast.Import():
                names = [alias.name for alias in node.names]
            case ast.ImportFrom():
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            case _:
                continue
        yield from ((node.lineno, name) for name in names if name in _DECODERS)
