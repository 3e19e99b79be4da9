"""All routes, by area."""

from __future__ import annotations

from dsec.api.routes import (
    archives,
    batch,
    calls,
    environments,
    events,
    execs,
    files,
    grants,
    host,
    jobs,
    layers,
    machines,
    output,
    projects,
    run_code,
    sandboxes,
    sessions,
    snapshots,
    sockets,
    tokens,
    usage,
    volumes,
)
from dsec.api.routing import Route

ROUTES: tuple[Route, ...] = (
    *host.ROUTES,
    *sandboxes.ROUTES,
    *batch.ROUTES,
    *jobs.ROUTES,
    *execs.ROUTES,
    *output.ROUTES,
    *sessions.ROUTES,
    *files.ROUTES,
    *archives.ROUTES,
    *sockets.ROUTES,
    *snapshots.ROUTES,
    *calls.ROUTES,
    *run_code.ROUTES,
    *environments.ROUTES,
    *layers.ROUTES,
    *machines.ROUTES,
    *volumes.ROUTES,
    *tokens.ROUTES,
    *projects.ROUTES,
    *usage.ROUTES,
    *events.ROUTES,
    *grants.ROUTES,
)
