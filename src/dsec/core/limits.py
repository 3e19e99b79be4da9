"""Every bound, with its unit and its reason."""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

# Frames between node and agent
FRAME_BYTES_MAX: Final = 1 * MIB  # one frame, header after the length included: bounds a reader's buffer
DATA_BYTES_MAX: Final = 256 * KIB  # payload of one DATA frame: keeps streams interleaved
CREDIT_INITIAL_BYTES: Final = 256 * KIB  # what a sender may send on a new stream before it is granted more
STREAMS_MAX: Final = 4096  # open streams on one agent channel
PREAMBLE_SCAN_BYTES_MAX: Final = 2 * MIB  # discarded while looking for the echoed marker
PREAMBLE_TIMEOUT_S: Final = 5.0

# Execs
ARGV_ITEMS_MAX: Final = 65_536
ARGV_BYTES_MAX: Final = 512 * KIB  # argv and env together; fits a frame, and the kernel's own bound is 2 MiB
ENV_ITEMS_MAX: Final = 8_192
EXEC_UNACKED_BYTES_MAX: Final = 1 * MIB  # kept by the agent until acknowledged, then the pipe blocks
EXECS_LIVE_MAX: Final = 512  # running at once in one sandbox
EXECS_KEPT_MAX: Final = 1_024  # ended execs whose record the agent and the node keep
EXEC_OUTPUT_BYTES_DEFAULT: Final = 16 * MIB  # node's record of one exec: head and tail kept, middle dropped
EXEC_OUTPUT_BYTES_MAX: Final = 1 * GIB
EXEC_GRACE_S_DEFAULT: Final = 2.0  # between TERM and KILL
EXEC_GRACE_S_MAX: Final = 300.0
EXEC_TIMEOUT_S_MAX: Final = 30 * 86_400.0
DRAIN_AFTER_EXIT_S: Final = 0.25  # how long output of grandchildren is still read after the leader's exit
SESSIONS_MAX: Final = 64
EXEC_INLINE_OUTPUT_BYTES_MAX: Final = 8 * MIB  # returned inside one exec answer; longer output is fetched by offset

# Files
PATH_BYTES_MAX: Final = 4_095
NAME_BYTES_MAX: Final = 255
LIST_ENTRIES_MAX: Final = 1_000  # a page
READ_BYTES_MAX: Final = 1 << 50
WATCHES_MAX: Final = 16
WATCH_DIRECTORIES_MAX: Final = 65_536
WATCH_EVENTS_QUEUED_MAX: Final = 16_384

# Sandboxes
CPU_MIN: Final = 0.01
CPU_MAX: Final = 1_024.0
MEMORY_BYTES_MIN: Final = 8 * MIB  # below this the agent and a shell do not fit
MEMORY_BYTES_MAX: Final = 16 * 1024 * GIB
DISK_BYTES_MIN: Final = 1 * MIB
DISK_BYTES_MAX: Final = 64 * 1024 * GIB
PIDS_MIN: Final = 4
PIDS_MAX: Final = 1 << 22
TTL_S_MAX: Final = 366 * 86_400.0
LABELS_MAX: Final = 64
LABEL_KEY_BYTES_MAX: Final = 63
LABEL_VALUE_BYTES_MAX: Final = 255
IDEMPOTENCY_KEY_BYTES_MAX: Final = 255
CREATE_TIMEOUT_S_DEFAULT: Final = 60.0
CREATE_TIMEOUT_S_MAX: Final = 3_600.0
BATCH_ITEMS_MAX: Final = 10_000
SECRETS_MAX: Final = 128
SECRET_BYTES_MAX: Final = 64 * KIB
LOWERS_MAX: Final = 64

# Node
SANDBOXES_PER_NODE_MAX: Final = 4_000  # id ranges of one host: 4,096 slots, a margin kept
TOMBSTONE_TTL_S: Final = 86_400.0
TOMBSTONES_MAX: Final = 100_000
DISK_FREE_BYTES_MIN: Final = 1 * GIB  # below it the node refuses creates (ruling 17)

# API
BODY_BYTES_MAX: Final = 4 * MIB  # JSON bodies; file bodies are streamed and have no bound but the disk
HEADERS_BYTES_MAX: Final = 32 * KIB
LIST_PAGE_DEFAULT: Final = 100
LIST_PAGE_MAX: Final = 1_000
WAIT_S_MAX: Final = 60.0  # one long poll
