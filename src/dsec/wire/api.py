"""The HTTP contract between callers and the API: paths, headers, media types. docs/internals/api.md is its text.

Bodies are the records of `wire.records` and `wire.environments` as JSON; errors are `wire.errors.ErrorBody`.
"""

from __future__ import annotations

from typing import Final

PREFIX: Final = "/v1"

HEADER_IDEMPOTENCY: Final = "Idempotency-Key"
HEADER_REQUEST_ID: Final = "X-Request-Id"
HEADER_PROJECT: Final = "Dsec-Project"  # path of the project to act in, instead of the token's own
HEADER_NODE: Final = "Dsec-Node"  # id of the node that is meant, where there are several
HEADER_FILE_INFO: Final = "X-Dsec-File"  # FileInfo as JSON, on GET of a file or archive

TYPE_JSON: Final = "application/json"
TYPE_NDJSON: Final = "application/x-ndjson"
TYPE_FRAMES: Final = "application/vnd.dsec.frames"  # wire.frames, stream number 0
TYPE_BYTES: Final = "application/octet-stream"
TYPE_TAR: Final = "application/x-tar"

DEFAULT_SOCKET_NAME: Final = "api.sock"  # below the run directory
RUN_DIR_ROOT: Final = "/run/dsec"
STATE_DIR_ROOT: Final = "/var/lib/dsec"
ENV_URL: Final = "DSEC_URL"  # http://host:port, or unix:///path/to/socket
ENV_TOKEN: Final = "DSEC_TOKEN"
ENV_NODE: Final = "DSEC_NODE"
ENV_PROJECT: Final = "DSEC_PROJECT"  # path of the project to act in
