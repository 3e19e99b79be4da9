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
DOWNLOAD_WINDOW_BYTES: Final = 512 * KIB  # of one file on its way out: two frames, so that neither side waits
STREAMS_MAX: Final = 4096  # open streams on one agent channel
PREAMBLE_SCAN_BYTES_MAX: Final = 2 * MIB  # discarded before the echoed marker; more than a lost channel has in flight
PREAMBLE_TIMEOUT_S: Final = 5.0  # an agent that is up echoes at once; a paused or dead one must not hold the caller

# Execs
ARGV_ITEMS_MAX: Final = 65_536  # bounds what a request makes the agent allocate, beside the bound in bytes
ARGV_BYTES_MAX: Final = 512 * KIB  # argv and env together; fits a frame, and the kernel's own bound is 2 MiB
ARG_BYTES_MAX: Final = 128 * KIB - 1  # one argument, or NAME=value: the kernel takes 128 KiB with the final NUL
ENV_ITEMS_MAX: Final = 8_192  # bounds what a request makes the agent allocate, beside the bound in bytes
EXEC_UNACKED_BYTES_MAX: Final = 1 * MIB  # kept by the agent until acknowledged, then the pipe blocks
EXECS_LIVE_MAX: Final = 512  # running at once in one sandbox
EXECS_KEPT_MAX: Final = 1_024  # ended execs whose record the agent and the node keep
EXEC_OUTPUT_BYTES_DEFAULT: Final = 16 * MIB  # node's record of one exec: head and tail kept, middle dropped
EXEC_OUTPUT_BYTES_MAX: Final = 1 * GIB  # what a caller may ask to have recorded; the disk of the node is shared
EXEC_GRACE_S_DEFAULT: Final = 2.0  # between TERM and KILL
EXEC_GRACE_S_MAX: Final = 300.0  # a tree that is to be killed must not live on for long
EXEC_TIMEOUT_S_MAX: Final = 30 * 86_400.0  # thirty days; longer is a service, and needs no timeout
DRAIN_AFTER_EXIT_S: Final = 0.25  # how long output of grandchildren is still read after the leader's exit
SESSIONS_MAX: Final = 64  # shells of one sandbox; each is a process and a pipe in the agent
EXEC_INLINE_OUTPUT_BYTES_MAX: Final = 8 * MIB  # returned inside one exec answer; longer output is fetched by offset

# Files
PATH_BYTES_MAX: Final = 4_095  # the kernel's PATH_MAX without the final NUL
NAME_BYTES_MAX: Final = 255  # the kernel's NAME_MAX
LIST_ENTRIES_MAX: Final = 1_000  # a page of a directory; fits a frame even with the longest names
READ_BYTES_MAX: Final = 1 << 50  # one read; keeps offset + length far from overflow
WATCHES_MAX: Final = 16  # of one sandbox; all share the agent's one inotify instance
WATCH_DIRECTORIES_MAX: Final = 65_536  # kernel watches of one recursive watch; each costs about 1 KiB of kernel memory
WATCH_EVENTS_QUEUED_MAX: Final = 16_384  # the kernel's own default; beyond it one overflow event is told

# Sandboxes
CPU_MIN: Final = 0.01  # cores; a smaller quota is below the kernel's 1 ms in its usual 100 ms period
CPU_MAX: Final = 1_024.0  # cores; no machine has more today
MEMORY_BYTES_MIN: Final = 8 * MIB  # below this the agent and a shell do not fit
MEMORY_BYTES_MAX: Final = 16 * 1024 * GIB  # 16 TiB; no machine has more today
DISK_BYTES_MIN: Final = 1 * MIB  # below this an overlay's own directories do not fit
DISK_BYTES_MAX: Final = 64 * 1024 * GIB  # 64 TiB; the largest disk that one sandbox may claim
PIDS_MIN: Final = 4  # the agent, a shell and two commands
PIDS_MAX: Final = 1 << 22  # the kernel's PID_MAX_LIMIT
TTL_S_MAX: Final = 366 * 86_400.0  # a year; what lives longer needs no time to live
LABELS_MAX: Final = 64  # labels are reported with every listing
LABEL_KEY_BYTES_MAX: Final = 63  # as in other systems that callers keep labels in
LABEL_VALUE_BYTES_MAX: Final = 255  # labels are reported with every listing
IDEMPOTENCY_KEY_BYTES_MAX: Final = 255  # kept for a day for each create
CREATE_TIMEOUT_S_DEFAULT: Final = 60.0  # allows for a cold environment; a warm create takes milliseconds
CREATE_TIMEOUT_S_MAX: Final = 3_600.0  # an hour; a first pull of a large environment
READY_INTERVAL_S_MIN: Final = 0.01  # between two tries of a probe; each may be a process in the sandbox
READY_INTERVAL_S_MAX: Final = 60.0  # a create that waits longer between two tries wastes its caller's time
READY_TIMEOUT_S_MAX: Final = CREATE_TIMEOUT_S_MAX  # the create that waits for it has no more either
BATCH_ITEMS_MAX: Final = 10_000  # one batch of creates; its results are streamed, its specs are held at once
SECRETS_MAX: Final = 128  # of one exec; held in the node's memory only
SECRET_BYTES_MAX: Final = 64 * KIB  # fits keys and certificates, and the exec's request frame
VOLUMES_PER_SANDBOX_MAX: Final = 16  # each is a mount of its namespace, copied with it at its creation
LOWERS_MAX: Final = 64  # layers below one overlay; each is a descriptor in the launcher and a look-up in the kernel

# Node
SANDBOXES_PER_NODE_MAX: Final = 4_000  # id ranges of one host: 4,095 slots, a margin kept
WARM_SPARES_MAX: Final = 96  # the margin of id ranges beside the sandboxes
PREPARED_MAX: Final = 16  # containers made ahead: each is two processes that wait, and an id range
CGROUPS_KEPT_MAX: Final = 64  # of ended sandboxes, for as many that begin soon: more than are ended at once
WARM_SHAPES_MAX: Final = 64  # that the node keeps count of; the one that was asked for longest ago goes first
TOMBSTONE_TTL_S: Final = 86_400.0  # a day; how long the end of a sandbox can be asked for
TOMBSTONES_MAX: Final = 100_000  # rows in the journal of a node; the oldest go first
MEMORY_AVAILABLE_BYTES_MIN: Final = 512 * MIB  # below it the node refuses creates: what runs may still grow
DISK_FREE_BYTES_MIN: Final = 1 * GIB  # below it the node refuses creates (ruling 17)
USAGE_RECORDS_KEEP_S: Final = 35 * 86_400.0  # five weeks: a month can be looked at when it is over
USAGE_RECORDS_MAX: Final = 500_000  # sandboxes in the journal of a node, some 300 bytes each; the oldest go first
USAGE_DAYS_KEEP_S: Final = 400 * 86_400.0  # a year and a month: sums can be compared with those of a year ago
USAGE_DAYS_MAX: Final = 500_000  # sums of one project and one day; the oldest go first
USAGE_JOBS_MAX: Final = 200_000  # sums of one job, some 150 bytes each; the oldest go first
IDEMPOTENCY_TTL_S: Final = 86_400.0  # a day; how long a create may be asked for again under its key
IDEMPOTENCY_KEYS_MAX: Final = 200_000  # rows in the journal of a node; the oldest go first
RECORDS_BYTES_MAX: Final = 1 * GIB  # output kept of one sandbox over all its execs; the oldest ended go first
ENDED_RECORDS_BYTES_MAX: Final = 2 * GIB  # of output kept of all ended sandboxes; the oldest ends go first
ENDED_RECORDS_MAX: Final = 10_000  # ended sandboxes whose output is kept; a directory with some files each
RECORD_INLINE_BYTES_MAX: Final = 64 * KIB  # an exec's output up to this needs no file of its own
RECORD_RUNS_MAX: Final = 1_024  # changes between the two output channels of which the order is kept
RECORD_HOLES_MAX: Final = 64  # stretches of output lost on the way to the record that are told apart
READ_CHUNK_BYTES: Final = 128 * KIB  # one piece of recorded output on its way to a reader
CLOCK_LATE_S_MAX: Final = 0.25  # of an answer about the time: later, it is told again; clones promise half a second
CLOCK_TRIES_MAX: Final = 4  # on a machine without time for its guest, that is late by what the last answer took
RECONNECTS_MAX: Final = 5  # tries to get a sandbox's channel back before it has failed
CHANNEL_LOSSES_MAX: Final = 10  # in a row, each soon after hello: beyond, an agent makes its node connect for ever
CHANNEL_CALM_S: Final = 10.0  # a channel that lasted as long was a good one
DESTROY_RETRY_S_MAX: Final = 60.0  # between tries to remove what could not be removed

# Volumes
VOLUMES_MAX: Final = 10_000  # of one node; each is a directory that a listing reads
VOLUME_BYTES_MIN: Final = 16 * MIB  # below this an ext4 with a journal has no room for anything else
DATASETS_MAX: Final = 1_000  # in the configuration of one node; all are told in one answer
QUOTA_BYTES_PER_INODE: Final = 8 * KIB  # a limit in bytes is one of files, too: each takes more than its content
QUOTA_INODES_MIN: Final = 1_024  # so that a small limit still holds a small checkout

# Environments
# Snapshots
SNAPSHOTS_MAX: Final = 10_000  # of one node; each is a record in memory, and a layer at least
SNAPSHOTS_PER_PROJECT_MAX: Final = 2_000  # of one below the root, with all below it: it does not take all of them
SNAPSHOT_LOOKS_MAX: Final = 4  # passes over what a sandbox has written before it is stopped for the last one
SNAPSHOT_CHAIN_MAX: Final = 16  # layers of snapshots on top of each other; with the next they become one
SNAPSHOT_MAKE_S_MAX: Final = 1_800.0  # for copying and keeping what a sandbox has written; others wait for their turn
SNAPSHOT_FREEZE_S_MAX: Final = 600.0  # a command inside that is stopped for longer takes it for a crash
SNAPSHOTS_AT_ONCE_MAX: Final = 4  # on one node: each reads and writes all that a sandbox has written, twice
SNAPSHOTS_WAITING_MAX: Final = 256  # for their turn; each is a request that is held
SNAPSHOTS_AT_ONCE_PER_PROJECT_MAX: Final = 3  # a large disk takes minutes: one turn is left for others
SNAPSHOTS_WAITING_PER_PROJECT_MAX: Final = 192  # those being made included; of one below the root, as above
FORKS_MAX: Final = 1_000  # of one request; all of them are made, or none

IMAGE_ENTRIES_MAX: Final = 2_000_000  # files and directories of one layer: an archive of empty files is a bomb too
IMAGE_BYTES_MAX: Final = 256 * GIB  # of file content of one layer, holes included
STORE_OBJECT_BYTES_MAX: Final = 512 * MIB  # metadata of a layer from a store, checked in memory: a million files
STORE_RECORD_BYTES_MAX: Final = 1 * MIB  # a manifest or a trace of a store: each is parsed whole, here
CACHE_BYTES_MIN: Final = 64 * MIB  # of chunks from stores: below it a running program throws out what it needs next
IMAGE_DEPTH_MAX: Final = 256  # directories inside each other: bounds descriptors here and recursion in mkfs.erofs
IMAGE_PATH_BYTES_MAX: Final = 3_840  # below PATH_BYTES_MAX by what the path of the store adds
IMAGE_ID_MAX: Final = 65_534  # 65,535 is the agent's (ruling 9): a set-user-id file of it would become the agent
IMAGE_XATTRS_BYTES_MAX: Final = 64 * KIB  # of one file; the kernel's own bound for one attribute
IMAGE_LAYERS_MAX: Final = 128  # of one OCI image
ENVIRONMENT_DEPTH_MAX: Final = 4  # environments made of environments; deeper ones nobody can follow
COLLAPSE_ABOVE: Final = 16  # layers of an environment; those of more are collapsed (ruling 27)
COLLAPSE_KEPT: Final = 8  # of its highest layers are left alone then: they change most often
COLLAPSE_BYTES_MAX: Final = 3 * GIB  # of one collapsed layer; it is copied once for each run of layers
GIT_DEPTH_MAX: Final = 1_000_000  # commits of a shallow history; no repository is deeper and still shallow
GIT_TIMEOUT_S: Final = 1_800.0  # of one build: a large repository over a slow line
IMAGE_MANIFEST_BYTES_MAX: Final = 4 * MIB  # index, manifest or config of an OCI image
IMAGE_CACHE_BYTES_DEFAULT: Final = 16 * GIB  # blobs of images from registries, kept for the next pull or push
IMAGE_PACKAGES_MAX: Final = 1_000  # of one build: bounds its command line and its request
TAR_HEADER_BYTES_MAX: Final = 4 * MIB  # all headers of one member: long names, pax records, sparse maps
BUILD_LOG_LINE_BYTES_MAX: Final = 2_000  # what a package says while it is set up is cut at this
PULLS_MAX: Final = 4  # environments taken from stores at once, because creates ask for them: each a few requests
PULLS_FAILED_KEPT: Final = 1_000  # names that no store had a moment ago; the oldest is looked for again
BUILDS_MAX: Final = 4  # at once in one process: each may take a core and gigabytes of disk
BUILD_TIMEOUT_S_DEFAULT: Final = 3_600.0  # a large set of packages over a slow line

# Full machines
MACHINE_IMAGES_MAX: Final = 1_000  # of one node; each is gigabytes of disk
MACHINE_LAYERS_MAX: Final = 16  # files that a read of a machine's disk goes through at worst; more are made one
MACHINE_SYSTEM_BYTES_MIN: Final = 4 * GIB  # a desktop takes a good 1 GiB, and its own packages go beside it
MACHINE_DISK_BYTES_MIN: Final = 512  # a boot sector is a disk
MACHINE_COMMAND_LINE_BYTES_MAX: Final = 2_048  # what the kernel of a machine reads of it on every processor
MACHINE_OVERLAYS_MAX: Final = 32  # of snapshots below one disk: each read looks through them, and each is an open file
MACHINE_OVERLAYS_KEPT: Final = 16  # the highest of more than that; those below become one, in every 16th snapshot
MACHINE_BOOT_WAIT_S_MAX: Final = 1_800.0  # a system that installs itself first; longer than that it is not awaited
SCREEN_BYTES_MAX: Final = 64 * MIB  # of one picture: 2560x1600 in four bytes, and room
SCREEN_ACTIONS_MAX: Final = 1_000  # of one request; each takes some milliseconds
SCREEN_TEXT_BYTES_MAX: Final = 4_000  # typed by one request: at 30 ms for each press and release that is minutes
SCREEN_STEPS_MAX: Final = 20_000  # presses and moves of one request, at 30 ms each ten minutes

# Calls
CALL_WALL_S_DEFAULT: Final = 10.0  # one run: what reward functions and judge cases stay below
CALL_WALL_S_MAX: Final = 3_600.0  # an hour; what runs longer wants a sandbox of its own
CALL_COMPILE_S_DEFAULT: Final = 30.0  # a few files of C++ with heavy headers
CALL_QUEUE_S_DEFAULT: Final = 60.0  # a burst of thousands drains meanwhile, and a caller learns in time if it does not
CALL_QUEUE_S_MAX: Final = 3_600.0  # what waits longer is not waiting for a call
CALL_OUTPUT_BYTES_DEFAULT: Final = 1 * MIB  # each of stdout and stderr, held in memory until the answer is sent
CALL_OUTPUT_BYTES_MAX: Final = 16 * MIB  # the answer is one body, in memory on every way station
CALL_CODE_BYTES_MAX: Final = 1 * MIB  # source text; larger data comes as files
CALL_FILES_MAX: Final = 256  # files of one call, each way
CALL_FILES_BYTES_MAX: Final = 16 * MIB  # content that a call gives back, all files together; the answer is one body
CALL_ANSWER_BYTES_MAX: Final = 32 * MIB  # output of all cases of a call together; the answer is one body
CALL_PATH_BYTES_MAX: Final = 1_024  # below PATH_BYTES_MAX by far more than the call's own directory adds
CALL_PATH_PARTS_MAX: Final = 32  # directories that are made for one file
CALL_CASES_MAX: Final = 1_000  # runs of one call; its place is taken for as long
CALL_MEMORY_BYTES_MIN: Final = 8 * MIB  # below it an interpreter that is forked has no room to begin
CALL_PIDS_DEFAULT: Final = 64  # a JVM and its threads
CALL_PIDS_MAX: Final = 4_096  # of one call; the place's own bound is above
CALL_FILE_BYTES_DEFAULT: Final = 64 * MIB  # one file; all are in memory and count against its limit
CALLS_QUEUED_MAX: Final = 10_000  # waiting on one node, each with its body in memory; beyond it 429
CALLS_QUEUED_PER_PROJECT_MAX: Final = 5_000  # half of the node's: of a project below the root, with all below it
CALL_PLACES_MAX: Final = 64  # containers for calls of one node: each takes an id range that a sandbox could have
CALL_POOLS_MAX: Final = 64  # of one node; the one without calls for the longest time makes room

# API
BODY_BYTES_MAX: Final = 4 * MIB  # JSON bodies; file bodies are streamed and have no bound but the disk
BODIES_BYTES_MAX: Final = 256 * MIB  # JSON bodies of all requests under way; beyond it 429
HEADERS_BYTES_MAX: Final = 32 * KIB  # a token, an idempotency key and what proxies add
LIST_PAGE_DEFAULT: Final = 100  # items; a page is one answer of some 50 KiB
LIST_PAGE_MAX: Final = 1_000  # items; bounds the memory of one answer
WAIT_S_MAX: Final = 60.0  # one long poll
URL_BYTES_MAX: Final = 32 * KIB  # two paths of 4,095 bytes, every byte percent-encoded, and the rest of a query
QUERY_ITEMS_MAX: Final = 128  # parameters of one query: every label and a state each
HEAD_TIMEOUT_S: Final = 15.0  # from a request's first byte (or the connection) to the end of its headers
BODY_IDLE_S: Final = 60.0  # without a byte of a request's body that is not complete
INBOX_BYTES_HIGH: Final = 64 * KIB  # of a request's body that nobody has taken; then the connection is not read
WRITE_STALL_S: Final = 600.0  # a client that takes nothing of its answer for so long is cut off
KEEP_ALIVE_S: Final = 75.0  # an idle connection; above what clients' pools assume
CONNECTIONS_MAX: Final = 8_192  # of one API process, each a descriptor and some 40 KiB; beyond it 503
BATCH_CONCURRENCY: Final = 64  # creates of one batch under way at once, where each is placed alone
BATCH_GROUP: Final = 128  # creates of a batch that are placed and written down together; two such are under way at once
CREATES_TOGETHER_MAX: Final = 8  # of those, at one node: more at once would make it the slowest, and the fullest
CREATE_QUEUE_S_MAX: Final = 3_600.0  # an hour; what waits longer is a job
CREATES_QUEUED_MAX: Final = 4_096  # waiting for room at one replica, each a request that is held; beyond it 429
CREATES_QUEUED_PER_PROJECT_MAX: Final = 2_048  # half of them: of a project below the root, with all below it
RESUMES_WAITING_MAX: Final = 4_096  # for memory at one node, each a request that is held; beyond it 429
RESUMES_WAITING_PER_PROJECT_MAX: Final = 2_048  # half of them: of a project below the root, with all below it
KEPT_CREATES_MAX: Final = 16_384  # creates with a key that are under way, whoever still waits for them
WEBSOCKET_MESSAGE_BYTES_MAX: Final = 1 * MIB + 4  # one frame with its length
TOKENS_MAX: Final = 100_000  # kept in memory, some 500 bytes each
TOKEN_TTL_S_MAX: Final = 10 * 366 * 86_400.0  # ten years; what lives longer has no expiry
TOKEN_OVERLAP_S_DEFAULT: Final = 3_600.0  # an hour; for how long the token before stays good when one is rotated
PROJECTS_MAX: Final = 100_000  # kept in memory, some 500 bytes each
PRINCIPALS_MAX: Final = 100_000  # kept in memory, some 300 bytes each
GRANTS_MAX: Final = 200_000  # kept in memory, some 400 bytes each
DELEGATIONS_MAX: Final = 16  # grants in a row, each given by the holder of the one before: walked at each first use
IAM_BATCH_MAX: Final = 64  # keys that one change writes together; in a cluster they are one value of the registry
IAM_CHANGES_KEPT: Final = 10_000  # deletions that are remembered for replicas; one that is further behind reads all
IAM_BATCHES_MAX: Final = 2_000  # changes that replicas write one after the other before they are summed up
IAM_BATCHES_KEPT: Final = 200  # of those that are summed up: for replicas that are a little behind
IAM_STALE_S: Final = 1.0  # between two looks at what other replicas have changed: a revocation counts within 2 s
IAM_RETRIES_MAX: Final = 16  # of a change that another replica has overtaken; each saw that one succeed
PROJECT_PATH_BYTES_MAX: Final = 512  # it is a key of its own, and goes with every call to a node
AUDIT_ROWS_MAX: Final = 200_000  # the oldest go first
AUDIT_KEEP_S: Final = 90 * 86_400.0  # ninety days; what must be kept for longer is exported
AUDIT_QUEUED_MAX: Final = 20_000  # not yet written; above it the oldest are lost, and that is counted

# Quotas
SLICE_TTL_S: Final = 10.0  # what a replica has leased of a cap and not used within it is void
SLICE_GRACE_S: Final = 120.0  # more: after that long without a sign of its replica, a slice is taken back
RATE_WINDOW_S: Final = 1.0  # creations a second are counted in any window as long as this
ADMISSIONS_WAITING_MAX: Final = 4_096  # creates that wait for a slice of one cap; beyond it they are refused at once

# Streams between API and node
STREAM_QUEUE_FRAMES_MAX: Final = 256  # one direction of one stream; small frames cost more than their bytes
STREAM_QUEUE_BYTES_MAX: Final = 128 * KIB  # one direction of one stream: what a reader that stands still costs
STREAM_LINGER_S: Final = 1.0  # after the caller has closed: for what it had sent, then the work is cancelled
PROJECT_STREAMS_MAX: Final = 1_024  # of one API, with all below it; each may hold 0.5 MiB for a reader that waits
NODE_STREAMS_MAX: Final = 16_384  # open between one API and one node

# Shared state of a cluster
REGISTRY_KEY_BYTES_MAX: Final = 1_024  # twice an idempotency key of 255 bytes, each escaped; an engine's line has 4 KiB
REGISTRY_VALUE_BYTES_MAX: Final = 64 * KIB  # state is small: what is larger belongs into a store of blobs
REGISTRY_TOGETHER_MAX: Final = 1_000  # keys that one write makes: the engine takes no more together
REGISTRY_TTL_S_MAX: Final = 366 * 86_400.0  # a year; what lives longer has no time to live
REGISTRY_WATCH_CHANGES_MAX: Final = 16_384  # that a slow watcher has not taken; beyond it it gets everything again
CARD_IMAGES_BYTES_MAX: Final = 32 * KIB  # names of environments in a node's card, the youngest: half of a value
DEVICE_KINDS_MAX: Final = 64  # in a card; a machine has a few
LOG_RECORD_BYTES_MAX: Final = 512 * KIB  # an engine's message has 1 MiB; larger results go to a store, the log points
LOG_ID_BYTES_MAX: Final = 255  # remembered for each record while it may be sent again
LOG_READ_MAX: Final = 1_024  # records of one read: bounds the memory of its answer
LOG_READ_BYTES_MAX: Final = 8 * MIB  # of one read of an engine: sixteen of the largest records, many of others
LOG_BYTES_DEFAULT: Final = 8 * GIB  # of one stream of the engine; beyond it appends fail, and nothing old is lost
EVENTS_KEPT_S: Final = 3 * 86_400.0  # three days: who reads events comes back over a weekend
ENGINE_WAIT_S: Final = 15.0  # for an answer of the engine: without a leader it is silent for up to 10 s
DESK_ASKED_MAX: Final = 16  # under way for one node at one replica: it asks for its card and its events, one by one
DESK_WAITING_MAX: Final = 4_096  # asked by all nodes and not looked at yet; of 160 nodes that is 25 each
DESK_MESSAGES_S: Final = 100.0  # of one node, at one replica: it asks for its card 0.2 times and its events 20 times
DESK_MESSAGES_BURST: Final = 400  # more, once: what has waited while a replica was busy
HEARTBEATS_S: Final = 20.0  # of one node, that are looked at: it sends one a second
HEARTBEATS_BURST: Final = 100  # more, once: a minute and a half that a replica has stood still
HEARTBEAT_BYTES_MAX: Final = 16 * KIB  # it has some 150
HEARTBEATS_WAITING_MAX: Final = 16_384  # of all nodes, not looked at yet; of 5,000 nodes that is 3 each
NODE_FLOOD_MESSAGES: Final = 1_000  # beyond these measures, of one node: then it is not listened to for a minute
NODE_MESSAGE_BYTES_MAX: Final = LOG_RECORD_BYTES_MAX + 16 * KIB  # that a node sends: a record of events, and its frame
NODE_SUBSCRIPTIONS_MAX: Final = 8  # of a node with the engine: it has one, for answers
DESK_EVENTS_BYTES_S: Final = 1 * MIB  # of one node, at one replica: some 3,000 events, far above what it makes for long
ENGINE_PENDING_BYTES_MAX: Final = 2 * MIB  # written while the engine is away; beyond it writers are told at once

TOMBSTONES_OF_NODE_MAX: Final = 10_000  # of a node that is lost, for a day; each is a key of the registry

# Events
EVENTS_NODE_BYTES_MAX: Final = 64 * MIB  # kept by a node, some 200,000: a day of a busy one; the oldest go first
EVENTS_READ_MAX: Final = 256  # looked at for one piece of an answer: bounds its memory, and others' wait meanwhile
EVENTS_RECORD_MAX: Final = 128  # told to the log as one record, in one round trip; with labels at most 128 KiB
EVENTS_RECORD_BYTES_MAX: Final = 128 * KIB  # of such a record: below LOG_RECORD_BYTES_MAX by more than one event
EVENTS_TAIL_MAX: Final = 16_384  # kept in memory by a replica, some 500 bytes each; who is further behind reads the log
EVENTS_TAIL_BYTES_MAX: Final = 64 * MIB  # of those records, whatever a node has put into them
EVENTS_QUIET_S: Final = 15.0  # without an event a reader is told how far it is, and proxies that it lives
EVENT_NUMBER_MAX: Final = (1 << 63) - 1  # what a journal and a log count to

# Jobs
JOBS_MAX: Final = 20_000  # of a deployment; every replica keeps them in memory, some 500 bytes each
JOBS_PER_PROJECT_MAX: Final = 1_000  # so that one project does not take all of them
JOB_LEASE_S_MIN: Final = 2.0  # below it a pause of a client's garbage collector is a missed lease
JOB_LEASE_S_MAX: Final = 366 * 86_400.0  # a year; what is to live longer has no lease
JOB_LEASE_S_DEFAULT: Final = 60.0  # of `client.job(…)`, which renews it four times as often
JOB_GRACE_S_DEFAULT: Final = 300.0  # for a client that is started again before what cannot be paused is stopped
JOB_GRACE_S_MAX: Final = 30 * 86_400.0  # thirty days; a longer grace is no lease
JOB_KEPT_S: Final = 86_400.0  # a day; how long a job that was stopped can be asked for, as tombstones
JOB_SLICE_ITEMS_MAX: Final = 256  # sandboxes that a node acts on for one call; then it is called again
JOB_PARTS_MAX: Final = 1_000  # answers of one node to one order: far above what it can have, in slices that end early
JOB_SLICE_S: Final = 20.0  # after so long a node begins with no further one for the same call
JOB_ITEM_S: Final = 60.0  # for one sandbox; one that takes longer is told as such, and looked at again
JOB_ITEMS_AT_ONCE_MAX: Final = 16  # of one order on one node; pausing and removing take its processors and its disk
JOB_NODES_AT_ONCE_MAX: Final = 64  # that one order is under way at
GROUP_MEMBERS_MAX: Final = 64  # in one request
GROUP_LINKS_ACROSS_MAX: Final = 512  # from node to node: with 64 members, a row of the longest names has 60 KiB
GROUPS_AT_ONCE_MAX: Final = 8  # members of one group that are being created; further ones wait
SANDBOX_LINKS_MAX: Final = 64  # each is a listening socket of the node
HOSTS_BYTES_MAX: Final = 64 * KIB  # of /etc/hosts in a machine, to which names of links are added; read whole
LINK_CONNECTIONS_MAX: Final = 256  # of one sandbox, over all its links: two sockets' buffers and a stream each
LINK_BACKLOG: Final = 128  # connections that wait for their turn, in the kernel; further ones are not answered
EGRESS_RULES_MAX: Final = 128  # of one sandbox: each new connection and name is compared with all of them
EGRESS_RULE_BYTES_MAX: Final = 512  # a name of 253, and room for ports
EGRESS_PORT_RANGES_MAX: Final = 16  # of one rule
EGRESS_DENIALS_TOLD_MAX: Final = 8  # different ones in one event: a sandbox chooses what it asks for
LINK_CHUNK_BYTES: Final = 64 * KIB  # one piece on its way; what a peer that reads nothing costs
JOB_ORDERS_KEPT: Final = 10_000  # jobs of which a node remembers the last order, so that a late one changes nothing

METRICS_CONNECTIONS_MAX: Final = 16  # to the port for metrics: Prometheus has one or two
METRICS_REQUEST_BYTES_MAX: Final = 16 * KIB  # of one request there, which is some headers
METRICS_REQUEST_S: Final = 10.0  # for one request there, as long as Prometheus waits

# Compose files
COMPOSE_BYTES_MAX: Final = 1 * MIB  # of the file, and of each file of variables; read whole
COMPOSE_TEXT_MAX: Final = 4 * MIB  # characters of all texts, each counted for every alias, with their variables
YAML_ITEMS_MAX: Final = 50_000  # values, each counted for every alias of it: a small file can stand for a huge one
YAML_ALIASES_MAX: Final = 1_000  # each is one more time for what it stands for
YAML_DEPTH_MAX: Final = 32  # values in values; a deployment has eight

# Connections between API and node
LINK_FRAME_BYTES_MAX: Final = 1 * MIB + 64  # one frame of a stream, with what carries it
LINK_PART_BYTES: Final = 128 * KIB  # a larger body goes in parts, so that streams beside it go on
LINK_BODY_BYTES_MAX: Final = 48 * MIB  # of one call or answer: above what calls may give back in one body
LINK_BODIES_BYTES_MAX: Final = 256 * MIB  # of calls that are not complete yet, of one node
LINK_CALLS_MAX: Final = 16_384  # under way on one connection; beyond it 429
LINK_FRAME_COST_BYTES: Final = 512  # what a frame counts beside its bytes: small ones cost more than they hold
LINK_PING_S: Final = 5.0  # between two signs of life
LINK_SILENCE_S: Final = 15.0  # without one: the connection is dead, whatever TCP says
LINK_CONNECT_S: Final = 5.0  # for a connection and its first exchange; a node on the same network answers in one
LINK_WRITE_BYTES_HIGH: Final = 1 * MIB  # not sent yet on one connection; then writers wait
LINKS_MAX: Final = 256  # connections to one node: every API replica has one

# Links between sandboxes of two nodes
PEERS_MAX: Final = 512  # connections of other nodes to one: each has one, and three times as many nodes as are planned
PEER_CONNECTIONS_MAX: Final = 2  # of one other node: its last one may hang yet when it comes again
PEER_STREAMS_MAX: Final = 512  # between two nodes, one way: two sandboxes with all their connections; some 0.2 MiB each
PEERS_STREAMS_MAX: Final = 2_048  # into one node, of all others: 0.4 GiB when nobody inside reads
PEER_DIAL_BYTES_MAX: Final = 4 * KIB  # of one ask: three names, a project and a port
PEER_FRAME_BYTES_MAX: Final = LINK_CHUNK_BYTES + 64  # one piece with its head: two other nodes hold no more for us
PEER_IDLE_S: Final = 60.0  # a connection to another node without a stream; the next one costs a handshake
GROUPS_KNOWN_MAX: Final = 1_024  # of which a node remembers where their members are; a few KiB each
GROUP_FRESH_S: Final = 10.0  # so long what was told of a group is good: a node that is lost is refused then
GROUP_STALE_S: Final = 600.0  # so long while no replica answers: the engine may be away for minutes

# Client
DOWNLOAD_BYTES_DEFAULT: Final = 64 * GIB  # of one download, holes included: the sandbox decides how big its files are
DOWNLOAD_ENTRIES_DEFAULT: Final = 1_000_000  # of one directory
