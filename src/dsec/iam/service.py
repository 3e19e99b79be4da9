"""All of it, as the front door uses it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dsec.core.clock import Clock
from dsec.iam.audit import Audit, AuditLog
from dsec.iam.delegation import Delegation
from dsec.iam.directory import Directory
from dsec.iam.hierarchy import Hierarchy
from dsec.iam.store import IamStore, SqliteIamStore
from dsec.iam.tokens import Tokens


@dataclass(frozen=True, slots=True)
class Iam:
    directory: Directory
    projects: Hierarchy
    delegation: Delegation
    tokens: Tokens
    audit: AuditLog

    @classmethod
    async def on(cls, store: IamStore, audit: AuditLog, *, clock: Clock | None = None) -> Iam:
        directory = await Directory.open(store, clock=clock)
        delegation = Delegation(directory)
        return cls(directory, Hierarchy(directory), delegation, Tokens(directory, delegation), audit)

    @classmethod
    async def open(cls, state_dir: Path, *, clock: Clock | None = None) -> Iam:
        """Of this machine, in files of `state_dir`. Raises StorageError."""
        store = SqliteIamStore.open(state_dir / "iam.db")
        try:
            audit = Audit.open(state_dir / "audit.db", clock=clock)
            return await cls.on(store, audit, clock=clock)
        except BaseException:
            store.close()
            raise

    @classmethod
    async def shared(
        cls,
        store: IamStore,
        state_dir: Path,
        *,
        share: Callable[[Audit], AuditLog] = lambda own: own,
        clock: Clock | None = None,
    ) -> Iam:
        """Of a cluster; what was done through this replica is kept in a file of `state_dir`, and told to the others as
        `share` has it. Raises StorageError."""
        return await cls.on(store, share(Audit.open(state_dir / "audit.db", clock=clock)), clock=clock)

    async def close(self) -> None:
        await self.audit.close()
        self.directory.close()
