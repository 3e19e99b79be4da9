"""The sandboxes of this node in memory: by id, by name within a project, in order of creation."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator

from dsec.core.errors import CapacityError, ConflictError
from dsec.core.spec import SandboxSpec
from dsec.node.holdings import ProjectHoldings
from dsec.node.supervisor import Supervisor
from dsec.wire.cursors import Place

BEGINNING = Place(0.0, "")


class Registry:
    def __init__(self) -> None:
        self._by_id: dict[str, Supervisor] = {}
        self._by_name: dict[tuple[str, str], str] = {}
        self._by_job: dict[tuple[str, str], set[str]] = {}
        self._order: list[Place] = []
        self.memory_promised_bytes = 0
        self.holdings = ProjectHoldings()

    def check_name(self, project: str, name: str | None) -> None:
        """Raises ConflictError when it is in use in that project."""
        holder = None if name is None else self._by_name.get((project, name))
        if holder is not None:
            raise ConflictError(
                f"the name {name!r} is in use",
                hint=f"choose another name, or end the sandbox that has it: `dsec rm {name}`",
                sandbox=holder,
            )

    def check_member(self, project: str, spec: SandboxSpec) -> None:
        """Raises ConflictError when another one of its job is called so already."""
        if spec.job is None or spec.member is None:
            return
        for sandbox in self.of_job(project, spec.job):
            if sandbox.row.spec.member == spec.member and sandbox.row.spec.job_id == spec.job_id:
                raise ConflictError(f"job {spec.job} has a {spec.member!r} already", sandbox=sandbox.id)

    def check_apart(self, project: str, spec: SandboxSpec) -> None:
        """Raises CapacityError when it is to be apart from one of its group that is here: another node may take it."""
        place = spec.place
        if place is None or place.group is None:
            return
        for sandbox in self._by_id.values():
            other = sandbox.row.spec.place
            if (
                other is not None
                and other.group == place.group
                and sandbox.row.project == project
                and (place.apart or other.apart)
            ):
                raise CapacityError(
                    f"one of the group {place.group!r} is on this node already, and they are to be apart",
                    hint="it takes another node, or a sandbox without apart",
                )

    def add(self, sandbox: Supervisor) -> None:
        """Raises ConflictError when its name is in use in its project."""
        self.check_name(sandbox.row.project, sandbox.row.spec.name)
        name = self._name(sandbox)
        if name is not None:
            self._by_name[name] = sandbox.id
        self._by_id[sandbox.id] = sandbox
        if sandbox.row.spec.job is not None:
            self._by_job.setdefault((sandbox.row.project, sandbox.row.spec.job), set()).add(sandbox.id)
        insort(self._order, _place(sandbox))
        self.memory_promised_bytes += sandbox.row.spec.memory_bytes
        self.holdings.add(sandbox.row.project, sandbox.row.spec)

    def remove(self, id: str) -> None:
        sandbox = self._by_id.pop(id, None)
        if sandbox is None:
            return
        name = self._name(sandbox)
        if name is not None and self._by_name.get(name) == sandbox.id:
            del self._by_name[name]
        if sandbox.row.spec.job is not None:
            job = (sandbox.row.project, sandbox.row.spec.job)
            self._by_job[job].discard(id)
            if not self._by_job[job]:
                del self._by_job[job]
        del self._order[bisect_right(self._order, _place(sandbox)) - 1]
        self.memory_promised_bytes -= sandbox.row.spec.memory_bytes
        self.holdings.remove(sandbox.row.project, sandbox.row.spec)

    def forget_name(self, id: str) -> None:
        """Others may have it from here on. The sandbox's row is the caller's to change."""
        sandbox = self._by_id[id]
        name = self._name(sandbox)
        if name is not None and self._by_name.get(name) == id:
            del self._by_name[name]

    def find(self, id: str) -> Supervisor | None:
        return self._by_id.get(id)

    def of_job(self, project: str, job: str) -> list[Supervisor]:
        return [self._by_id[id] for id in self._by_job.get((project, job), ())]

    def after(self, place: Place) -> Iterator[tuple[Place, Supervisor]]:
        """In order of creation, strictly after `place`. Ends early when the registry changes meanwhile; ask again."""
        for found in self._order[bisect_right(self._order, place) :]:
            sandbox = self._by_id.get(found.id)
            if sandbox is not None:
                yield found, sandbox

    def __iter__(self) -> Iterator[Supervisor]:
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)

    def _name(self, sandbox: Supervisor) -> tuple[str, str] | None:
        name = sandbox.row.spec.name
        return None if name is None else (sandbox.row.project, name)


def _place(sandbox: Supervisor) -> Place:
    return Place(sandbox.row.created_at, sandbox.id)
