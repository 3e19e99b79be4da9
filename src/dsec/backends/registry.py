"""Which backends there are, and how each is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dsec.backends.base import Backend
from dsec.core.ids import NodeId
from dsec.core.spec import Substrate


@dataclass(frozen=True, slots=True)
class BackendSettings:
    """What every backend is given: where it may put things, and for which node."""

    node: NodeId
    run_dir: Path
    state_dir: Path
    container: dict[str, object] | None = None  # fields of ContainerConfig besides the directories
    microvm: dict[str, object] | None = None  # fields of MicrovmConfig besides the directories
    fullvm: dict[str, object] | None = None  # fields of FullvmConfig besides the directories


def _container(settings: BackendSettings) -> Backend:
    from dsec.backends.container.backend import ContainerBackend
    from dsec.backends.container.config import ContainerConfig

    extra = settings.container or {}
    config = ContainerConfig(run_dir=settings.run_dir, state_dir=settings.state_dir, **extra)  # type: ignore[arg-type]
    return ContainerBackend(config, node=settings.node)


def _microvm(settings: BackendSettings) -> Backend:
    from dsec.backends.microvm.backend import MicrovmBackend
    from dsec.backends.microvm.config import MicrovmConfig

    extra = settings.microvm or {}
    config = MicrovmConfig(run_dir=settings.run_dir, state_dir=settings.state_dir, **extra)  # type: ignore[arg-type]
    return MicrovmBackend(config, node=settings.node)


def _fullvm(settings: BackendSettings) -> Backend:
    from dsec.backends.fullvm.backend import FullvmBackend
    from dsec.backends.fullvm.config import FullvmConfig

    extra = settings.fullvm or {}
    config = FullvmConfig(run_dir=settings.run_dir, state_dir=settings.state_dir, **extra)  # type: ignore[arg-type]
    return FullvmBackend(config, node=settings.node)


def _fake(settings: BackendSettings) -> Backend:
    from dsec.backends.fake.backend import FakeBackend

    return FakeBackend()


# Imported when built: a node that offers containers only does not load the others.
_BUILDERS: dict[Substrate, Callable[[BackendSettings], Backend]] = {
    Substrate.CONTAINER: _container,
    Substrate.MICROVM: _microvm,
    Substrate.FULLVM: _fullvm,
    Substrate.FAKE: _fake,
}


def build_backends(settings: BackendSettings, offered: frozenset[Substrate]) -> dict[Substrate, Backend]:
    """The backends that this package has, of those that the node is told to offer."""
    return {substrate: build(settings) for substrate, build in _BUILDERS.items() if substrate in offered}
