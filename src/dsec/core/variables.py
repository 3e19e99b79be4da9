"""The environment variables that dsec reads, each with what it is for."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

# For people; `dsec help`, the manual page and the reference list them in this order.
VARIABLES: Final = {
    "DSEC_URL": "the service that commands and the SDK speak to: http://host:port, https://… or unix:///path",
    "DSEC_TOKEN": "the token to show to that service",
    "DSEC_PROJECT": "path of the project to act in, instead of the token's own",
    "DSEC_NODE": "id of the node of a cluster that is meant, for what is of one node",
    "DSEC_RUN_DIR": "run directory of the local service, where its socket is",
    "DSEC_STATE_DIR": "state directory of the local service",
    "DSEC_CONFIG": "configuration file of the service, instead of /etc/dsec/dsec.toml",
    "DSEC_LISTEN": "HOST:PORT on which the service listens on TCP, beside its socket",
    "DSEC_SUBSTRATES": "substrates that the service offers, separated by commas",
    "DSEC_JOIN": "NATS servers of the cluster, separated by commas, for its processes and `dsec cluster`",
    "DSEC_IDENTITY": "directory with this machine's identity in its cluster, instead of /etc/dsec/identity",
    "DSEC_LOG_LEVEL": "debug, info, warning or error",
}
# Names of files and directories among them: from where one stands, as everywhere.
_PATHS: Final = ("DSEC_RUN_DIR", "DSEC_STATE_DIR", "DSEC_CONFIG", "DSEC_IDENTITY")
# Between processes of ours, and for our tests.
_INTERNAL: Final = ("DSEC_READY_FD", "DSEC_TEST_", "DSEC_LAUNCH_FAIL_STEP")


def wherever(environ: Mapping[str, str]) -> dict[str, str]:
    """The same for a process that stands elsewhere: names of files and directories are whole."""
    return {name: str(Path(value).absolute()) if value and name in _PATHS else value for name, value in environ.items()}


def unknown_variables(names: Iterable[str]) -> dict[str, str | None]:
    """Of `names`, those that look as if they were for us and are not → the one that was probably meant."""
    strange = [
        name for name in names if name.startswith("DSEC_") and name not in VARIABLES and not name.startswith(_INTERNAL)
    ]
    return {name: next(iter(difflib.get_close_matches(name, VARIABLES, n=1)), None) for name in sorted(strange)}
