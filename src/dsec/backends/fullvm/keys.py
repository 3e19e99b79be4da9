"""Which keys of a US keyboard give a text or a combination. Pure. Keys are called as QEMU calls them (QKeyCode)."""

from __future__ import annotations

from typing import Final

from dsec.core.errors import InvalidArgumentError

_PLAIN: Final = {
    " ": "spc", "\n": "ret", "\r": "ret", "\t": "tab", "-": "minus", "=": "equal", "[": "bracket_left",
    "]": "bracket_right", ";": "semicolon", "'": "apostrophe", "`": "grave_accent", "\\": "backslash", ",": "comma",
    ".": "dot", "/": "slash",
    **{letter: letter for letter in "abcdefghijklmnopqrstuvwxyz0123456789"},
}  # fmt: skip
_SHIFTED: Final = {
    **dict(zip('!@#$%^&*()_+{}|:"~<>?', "1234567890-=[]\\;'`,./", strict=True)),
    **{letter.upper(): letter for letter in "abcdefghijklmnopqrstuvwxyz"},
}
_NAMED: Final = {
    "enter": "ret", "return": "ret", "tab": "tab", "space": "spc", "backspace": "backspace", "escape": "esc",
    "esc": "esc", "delete": "delete", "insert": "insert", "home": "home", "end": "end", "pageup": "pgup",
    "pagedown": "pgdn", "up": "up", "down": "down", "left": "left", "right": "right", "capslock": "caps_lock",
    "printscreen": "print", "menu": "menu", "plus": "shift+equal",
    **{f"f{number}": f"f{number}" for number in range(1, 13)},
}  # fmt: skip
_MODIFIERS: Final = {
    "ctrl": "ctrl", "control": "ctrl", "alt": "alt", "altgr": "alt_r", "shift": "shift", "super": "meta_l",
    "meta": "meta_l", "win": "meta_l", "cmd": "meta_l",
}  # fmt: skip


def keys_of_text(text: str) -> list[tuple[str, ...]]:
    """For each character the keys that are held together, in this order. Raises InvalidArgumentError for a character
    that a US keyboard has not."""
    return [_keys_of(character) for character in text]


def keys_of(combination: str) -> tuple[str, ...]:
    """Of one such as "enter" or "ctrl+shift+t". Raises InvalidArgumentError."""
    *held, last = combination.split("+") if combination != "+" else ["plus"]
    keys: list[str] = []
    for name in held:
        modifier = _MODIFIERS.get(name.strip().lower())
        if modifier is None:
            raise InvalidArgumentError(f"{name[:40]!r} cannot be held", hint=", ".join(sorted(_MODIFIERS)))
        keys.append(modifier)
    return tuple(dict.fromkeys([*keys, *_last(last.strip())]))


def _last(name: str) -> tuple[str, ...]:
    if len(name) == 1:
        return _keys_of(name)
    named = _NAMED.get(name.lower()) or _MODIFIERS.get(name.lower())
    if named is None:
        raise InvalidArgumentError(f"there is no key {name[:40]!r}", hint=", ".join(sorted(_NAMED)))
    return tuple(named.split("+"))


def _keys_of(character: str) -> tuple[str, ...]:
    if character in _PLAIN:
        return (_PLAIN[character],)
    if character in _SHIFTED:
        return ("shift", _PLAIN[_SHIFTED[character]])
    raise InvalidArgumentError(f"a US keyboard has no key for {character!r}", hint="write it to a file, and open that")
