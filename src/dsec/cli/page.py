"""What a page of the manual is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True, slots=True)
class Page:
    text: str = ""  # paragraphs, after the command's first sentence
    examples: tuple[tuple[str, str], ...] = ()  # what is typed, what it does
    json: str = ""  # what --json answers
    exits: Mapping[int, str] = field(default_factory=dict)  # beside those of every command


OF_SERVICE: Final = {1: "it cannot be done on this machine now; the error says why"}
