"""What `dsec doctor` says of a machine on which no service answers. Nothing is started, and nothing is left."""

from __future__ import annotations

import datetime
import os
import tempfile
from pathlib import Path

from dsec import __version__
from dsec.backends.base import Backend
from dsec.backends.registry import BackendSettings, build_backends
from dsec.core.errors import DsecError
from dsec.core.ids import NodeId, new_node_id
from dsec.core.spec import Substrate
from dsec.image.environments import EnvironmentStore
from dsec.node.doctor import no_environments, of_backend, of_environments
from dsec.node.fingerprint import DEGRADED, OK, fingerprint
from dsec.serve.config import ServeConfig
from dsec.serve.lock import holder_of
from dsec.serve.retire import retire_launcher
from dsec.wire.records import DoctorReport, Finding


async def examine_host(config: ServeConfig) -> DoctorReport:
    """Container substrates are tried for real, in a directory of their own."""
    state_dir, run_dir = Path(config.state_dir), Path(config.run_dir)
    findings = [_service(run_dir), *fingerprint(config.node.config(state_dir=state_dir, run_dir=run_dir))]
    findings.append(await _environments(state_dir))
    if config.cluster.servers:
        from dsec.serve.identity import examine_identity  # loads what only clusters need

        findings += examine_identity(Path(config.cluster.identity), now=datetime.datetime.now(datetime.UTC))
    substrates: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="dsec-doctor-", ignore_cleanup_errors=True) as directory:
        place = Path(directory)
        backends = _backends(config, new_node_id(), place)
        try:
            for substrate, backend in backends.items():
                verdict, more = await of_backend(str(substrate), backend)
                substrates[str(substrate)] = verdict
                findings += more
        finally:
            for backend in backends.values():
                await backend.close()
            await _end_launcher(place)
    return DoctorReport(node="", version=__version__, findings=findings, substrates=substrates)


def _service(run_dir: Path) -> Finding:
    try:
        pid = holder_of(run_dir)
    except DsecError as error:
        return Finding(what="service", status=DEGRADED, detail=error.message, hint="run doctor as the service's user")
    if pid is None:
        return Finding(what="service", status=OK, detail=f"none runs on {run_dir}; commands that need one start it")
    return Finding(
        what="service",
        status=DEGRADED,
        detail=f"process {pid} holds {run_dir} and does not answer",
        hint=f"look at its log; `dsec down` ends it, kill -KILL {pid} too: sandboxes run on",
        need="needed",
        cost="commands wait in vain",
    )


def _backends(config: ServeConfig, node: NodeId, place: Path) -> dict[Substrate, Backend]:
    (place / "run").mkdir()
    (place / "state").mkdir()
    settings = BackendSettings(
        node=node,
        run_dir=place / "run",
        state_dir=place / "state",
        container=config.containers(),
        microvm=config.machines(),
        fullvm=config.full_machines(),
    )
    return build_backends(settings, frozenset(config.node.substrates))


async def _environments(state_dir: Path) -> Finding:
    if not (state_dir / "environments").is_dir() or not os.access(state_dir, os.R_OK | os.W_OK | os.X_OK):
        return no_environments()
    return of_environments(EnvironmentStore(state_dir).describe())


async def _end_launcher(place: Path) -> None:
    await retire_launcher(place / "run", force=True)
