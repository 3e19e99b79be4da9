"""Small things that tests of backends need."""

from __future__ import annotations

from dsec.backends.base import InstanceSpec, Layer
from dsec.core.ids import NodeId, new_node_id, new_sandbox_id
from dsec.core.spec import Environment, SandboxSpec, Substrate


def instance_spec(
    substrate: Substrate = Substrate.FAKE,
    *,
    node: NodeId | None = None,
    layers: tuple[Layer, ...] = (),
    env: dict[str, str] | None = None,
    user: str | None = None,
    workdir: str | None = None,
) -> InstanceSpec:
    """A small instance with a new id."""
    node = node or new_node_id()
    spec = SandboxSpec(environment=Environment("test"), substrate=substrate, memory_bytes=256 << 20, pids_max=128)
    return InstanceSpec(new_sandbox_id(node), node, spec, layers, env or {}, user, workdir)


class Intents:
    """Keeps what a backend journals before it acts."""

    def __init__(self) -> None:
        self.records: list[bytes] = []

    async def __call__(self, record: bytes) -> None:
        self.records.append(record)

    def last(self) -> bytes:
        return self.records[-1]
