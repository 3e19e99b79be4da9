"""The accounts of a fake sandbox."""

from __future__ import annotations

from typing import Final, NamedTuple

from dsec.backends.fake.failures import AgentFailure
from dsec.backends.fake.files import User


class Account(NamedTuple):
    name: str
    uid: int
    gid: int
    home: bytes

    @property
    def user(self) -> User:
        return User(self.uid, self.gid)


_ACCOUNTS: Final = (
    Account("root", 0, 0, b"/root"),
    Account("user", 1000, 1000, b"/home/user"),
    Account("nobody", 65_534, 65_534, b"/nonexistent"),
)
_GROUPS: Final = {"root": 0, "user": 1000, "nogroup": 65_534}
_ID_MAX: Final = 65_535


def find_account(text: str | None) -> Account:
    """`name`, `uid`, `name:group` or `uid:gid`. Raises AgentFailure `user_not_found`."""
    name, _, group = (text or "root").partition(":")
    account = _by_name(name)
    return account._replace(gid=find_group(group)) if group else account


def find_group(text: str) -> int:
    if text in _GROUPS:
        return _GROUPS[text]
    return _number(text)


def user_of(text: str | None) -> User:
    return find_account(text).user


def _by_name(name: str) -> Account:
    for account in _ACCOUNTS:
        if name in (account.name, str(account.uid)):
            return account
    number = _number(name)
    return Account(str(number), number, number, b"/")


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > _ID_MAX:
        raise AgentFailure("user_not_found", f"there is no user or group {text[:80]!r}")
    return int(text)
