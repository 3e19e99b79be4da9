"""A change that is being decided: what it would write, and on what it rests."""

from __future__ import annotations

from dataclasses import dataclass, field

from dsec.iam.principals import Held
from dsec.iam.rows import Row, encoded, key_of, principal_key, project_key
from dsec.iam.view import View


@dataclass(slots=True)
class Change:
    """`expect`: key → revision that it must still be at when this is written."""

    view: View
    puts: dict[str, bytes | None] = field(default_factory=dict)
    expect: dict[str, int] = field(default_factory=dict)

    def rely(self, key: str) -> None:
        self.expect[key] = self.view.revisions.get(key, 0)

    def rely_on(self, held: Held) -> None:
        """A right by a grant: neither it nor any that it came by may have gone meanwhile, nor their holders."""
        grant = None if held.grant is None else self.view.grant(held.grant)
        while grant is not None:
            self.rely(key_of(grant))
            self.rely(principal_key(grant.principal))
            grant = None if grant.parent is None else self.view.grant(grant.parent)

    def put(self, *rows: Row) -> None:
        for key, value in encoded(list(rows)).items():
            self.rely(key)
            self.puts[key] = value

    def delete(self, key: str) -> None:
        self.rely(key)
        self.puts[key] = None

    def touch(self, path: str) -> None:
        """Something comes into this project: whoever removes it meanwhile, as empty, is overtaken."""
        if project_key(path) not in self.puts and (row := self.view.project(path)) is not None:
            self.put(row)
