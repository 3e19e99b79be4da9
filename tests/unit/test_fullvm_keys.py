"""Text and combinations as keys of a US keyboard."""

from __future__ import annotations

import string

import pytest

from dsec.backends.fullvm.keys import keys_of, keys_of_text
from dsec.core.errors import InvalidArgumentError


def test_every_printable_character_has_keys_of_its_own() -> None:
    text = string.ascii_letters + string.digits + string.punctuation + " \t\n"

    keys = keys_of_text(text)

    assert len(keys) == len(text)
    assert len(set(keys)) == len(text)


def test_capitals_and_signs_are_shifted() -> None:
    assert keys_of_text("aA1!?") == [("a",), ("shift", "a"), ("1",), ("shift", "1"), ("shift", "slash")]


@pytest.mark.parametrize("text", ["é", "a\x00", "€", "\x1b", "\ud800"])
def test_what_the_keyboard_lacks_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError):
        keys_of_text(text)


@pytest.mark.parametrize(
    ("combination", "keys"),
    [
        ("enter", ("ret",)),
        ("F5", ("f5",)),
        ("ctrl+l", ("ctrl", "l")),
        ("Ctrl+Alt+Delete", ("ctrl", "alt", "delete")),
        ("ctrl+A", ("ctrl", "shift", "a")),
        ("shift+A", ("shift", "a")),
        ("super", ("meta_l",)),
        ("+", ("shift", "equal")),
        ("ctrl+plus", ("ctrl", "shift", "equal")),
    ],
)
def test_combinations_are_held_in_their_order(combination: str, keys: tuple[str, ...]) -> None:
    assert keys_of(combination) == keys


@pytest.mark.parametrize("combination", ["", "hyper+a", "a+b", "ctrl+", "f13", "ctrl++", "nosuchkey", "é"])
def test_what_is_no_combination_is_refused(combination: str) -> None:
    with pytest.raises(InvalidArgumentError):
        keys_of(combination)
