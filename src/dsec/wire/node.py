"""The contract between API and node: methods, their records, and who calls.

Embedded (`dsec up`) and over the wire it is the same: bodies are msgpack bytes, streams carry frames.
"""

from __future__ import annotations

import enum
from typing import Protocol

import msgspec

from dsec.wire import agent
from dsec.wire.frames import Frame
from dsec.wire.records import EgressRequest, ExecRequest, NodeLoad, SessionRequest, SignalRequest, TtlRequest, TtySize


class Right(enum.StrEnum):
    READ = "read"  # get, list, metrics, logs
    USE = "use"  # create, exec, files, destroy
    MANAGE = "manage"  # sub-projects, tokens, grants and quotas below the own project
    ADMIN = "admin"  # environments, doctor details, shutdown, other projects


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks, as the API established it (ruling 2). The node answers other projects "not found"."""

    principal: str
    project: str  # path such as "/team/run-7"; a caller also reaches sub-projects of its own
    rights: frozenset[str] = frozenset()
    expires_at: float | None = None
    local: bool = False  # came by the node's own socket, so it may name files of the node


class Method(enum.StrEnum):
    # unary: request record → answer record
    CREATE = "create"  # CreateRequest → Sandbox; `key` = idempotency key
    CREATE_MANY = "create_many"  # many.CreateMany → many.CreatedMany
    CREATE_PLAN = "create_plan"  # plans.PlanRequest → plans.CreatePlan; `key` as of create
    USAGE = "usage"  # usage.UsageQuery → usage.UsagePage
    HOLDINGS = "holdings"  # iam.HoldingsQuery → iam.Holdings; of all projects, so for the API itself
    GET = "get"  # SandboxRef → Sandbox (tombstones too)
    LIST = "list"  # ListQuery → SandboxPage
    DESTROY = "destroy"  # SandboxRef → Sandbox; ended already is not an error
    SET_TTL = "set_ttl"  # OnSandbox[TtlRequest] → Sandbox
    SET_EGRESS = "set_egress"  # SetEgress → Sandbox
    PAUSE = "pause"  # PauseRequest → Sandbox
    RESUME = "resume"  # SandboxRef → Sandbox
    JOB_COUNT = "job_count"  # jobs.JobQuery → jobs.JobCounts
    JOB_ACT = "job_act"  # jobs.JobOrder → jobs.JobPart
    METRICS = "metrics"  # SandboxRef → Metrics
    EXEC_START = "exec_start"  # ExecStart → ExecAnswer
    EXEC_GET = "exec_get"  # ExecQuery → ExecInfo
    EXEC_LIST = "exec_list"  # SandboxRef → ExecPage
    EXEC_STDIN = "exec_stdin"  # StdinWrite → StdinAnswer
    EXEC_SIGNAL = "exec_signal"  # ExecSignal → ExecInfo
    EXEC_KILL = "exec_kill"  # ExecQuery → ExecInfo
    EXEC_RESIZE = "exec_resize"  # ExecResize → ExecInfo
    SESSION_OPEN = "session_open"  # SessionStart → SessionInfo
    SESSION_LIST = "session_list"  # SandboxRef → SessionPage
    SESSION_CLOSE = "session_close"  # SessionStop → Done
    FILE_STAT = "file_stat"  # FileCall(args: agent.PathArgs) → FileInfo
    FILE_LIST = "file_list"  # FileCall(args: agent.ListArgs) → FilePage
    FILE_MKDIR = "file_mkdir"  # FileCall(args: agent.MkdirArgs) → Done
    FILE_MOVE = "file_move"  # FileCall(args: agent.MoveArgs) → Done
    FILE_REMOVE = "file_remove"  # FileCall(args: agent.RemoveArgs) → Done
    FILE_CHMOD = "file_chmod"  # FileCall(args: agent.ChmodArgs) → Done
    FILE_CHOWN = "file_chown"  # FileCall(args: agent.ChownArgs) → Done
    FILE_SYMLINK = "file_symlink"  # FileCall(args: agent.SymlinkArgs) → Done
    ENVIRONMENT_LIST = "environment_list"  # Nothing → environments.EnvironmentPage
    ENVIRONMENT_GET = "environment_get"  # environments.EnvironmentRef → environments.EnvironmentInfo
    ENVIRONMENT_REMOVE = "environment_remove"  # environments.EnvironmentRef → Done
    ENVIRONMENT_STATS = "environment_stats"  # environments.EnvironmentRef → environments.EnvironmentStats
    ENVIRONMENT_TRACE = "environment_trace"  # environments.EnvironmentRef → environments.EnvironmentTrace
    SNAPSHOT_TAKE = "snapshot_take"  # snapshots.SnapshotTake → snapshots.SnapshotInfo
    SNAPSHOT_LIST = "snapshot_list"  # snapshots.SnapshotQuery → snapshots.SnapshotPage
    SNAPSHOT_GET = "snapshot_get"  # snapshots.SnapshotRef → snapshots.SnapshotInfo
    SNAPSHOT_REMOVE = "snapshot_remove"  # snapshots.SnapshotRef → Done
    VOLUME_CREATE = "volume_create"  # volumes.VolumeRequest → volumes.VolumeInfo
    VOLUME_LIST = "volume_list"  # Nothing → volumes.VolumePage
    VOLUME_GET = "volume_get"  # volumes.VolumeRef → volumes.VolumeInfo
    VOLUME_REMOVE = "volume_remove"  # volumes.VolumeRef → Done
    ENVIRONMENT_COMPOSE = "environment_compose"  # layers.ComposeRequest → environments.EnvironmentInfo
    ENVIRONMENT_UPDATE = "environment_update"  # environments.EnvironmentRef → environments.EnvironmentInfo
    ENVIRONMENT_DIFF = "environment_diff"  # layers.DiffRequest → layers.EnvironmentDiff
    LAYER_LIST = "layer_list"  # Nothing → layers.LayerPage
    LAYER_GET = "layer_get"  # layers.LayerRef → layers.LayerInfo
    LAYER_STATS = "layer_stats"  # layers.LayerRef → environments.LayerUse
    LAYER_REMOVE = "layer_remove"  # layers.LayerRef → Done
    SNAPSHOT_PUBLISH = "snapshot_publish"  # snapshots.Publish → snapshots.Published
    FORK = "fork"  # snapshots.Fork → snapshots.Forked; `key` as of create
    ROLLBACK = "rollback"  # snapshots.Rollback → Sandbox
    GC = "gc"  # collect.GcRequest → collect.GcReport
    SCREEN_PICTURE = "screen_picture"  # SandboxRef → screens.Picture
    SCREEN_ACT = "screen_act"  # screens.ScreenInput → screens.ScreenSize
    MACHINE_LIST = "machine_list"  # Nothing → machines.MachinePage
    MACHINE_IMPORT = "machine_import"  # machines.MachineImport → machines.MachineInfo
    MACHINE_PUSH = "machine_push"  # disks.MachinePush → machines.MachineInfo
    MACHINE_PULL = "machine_pull"  # disks.MachinePull → machines.MachineInfo
    MACHINE_COMMIT = "machine_commit"  # disks.SandboxCommit → machines.MachineInfo
    MACHINE_EXPORT = "machine_export"  # machines.DiskExport → machines.DiskFile
    MACHINE_COLLAPSE = "machine_collapse"  # machines.MachineRef → machines.MachineInfo
    MACHINE_TRACE = "machine_trace"  # machines.MachineRef → environments.EnvironmentTrace
    MACHINE_REMOVE = "machine_remove"  # machines.MachineRef → Done
    CALL = "call"  # calls.CallRequest → calls.CallAnswer
    CALL_TYPES = "call_types"  # Nothing → calls.TaskTypePage
    CALL_POOLS = "call_pools"  # Nothing → calls.CallPoolPage
    DOCTOR = "doctor"  # Nothing → DoctorReport
    HEALTH = "health"  # Nothing → Health

    # streams
    EVENTS = "events"  # events.EventQuery; out: EVENT events.EventLine …, END Done when not following; in: END = stop
    EXEC_OUTPUT = (
        "exec_output"  # OutputQuery; out: DATA(1|2), EVENT {gap: Gap}, END ExecInfo (or END when not following)
    )
    EXEC_ATTACH = "exec_attach"  # OutputQuery; both: as exec_output, and in: DATA(0), END = end of stdin
    FILE_READ = "file_read"  # FileCall(args: agent.ReadArgs); out: RES FileInfo, DATA(1), END Done
    FILE_WRITE = "file_write"  # FileCall(args: agent.WriteArgs); in: DATA(0), END; out: END WriteAnswer
    FILE_ARCHIVE = "file_archive"  # FileCall(args: agent.PathArgs); out: RES FileInfo, DATA(1) tar, END Done
    FILE_EXTRACT = "file_extract"  # FileCall(args: agent.ExtractArgs); in: DATA(0) tar, END; out: END WriteAnswer
    FILE_WATCH = "file_watch"  # FileCall(args: agent.WatchArgs); out: RES Done, EVENT WatchNotice …; in: END = stop
    CONNECT = "connect"  # FileCall(args: agent.ConnectArgs); out: RES Done; both: DATA(0 in, 1 out), END each way
    SCREEN_VIEW = "screen_view"  # SandboxRef; out: RES Done; both: DATA(0 in, 1 out) of RFB, END each way
    MACHINE_BUILD = "machine_build"  # machines.MachineBuild; out: EVENT BuildEvent …, END machines.MachineInfo
    ENVIRONMENT_BUILD = (
        "environment_build"  # environments.BuildRequest; out: EVENT environments.BuildEvent …, END EnvironmentInfo
    )
    ENVIRONMENT_PUSH = "environment_push"  # environments.PushRequest; out: as environment_build
    ENVIRONMENT_COLLAPSE = "environment_collapse"  # layers.CollapseRequest; out: as environment_build
    ENVIRONMENT_EXPORT = "environment_export"  # images.ExportRequest; out: EVENT BuildEvent …, END images.ExportedImage


class Nothing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Done(msgspec.Struct, frozen=True):
    pass


class SetTtl(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sandbox: str
    ttl: TtlRequest


class SetEgress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sandbox: str
    request: EgressRequest


class ExecStart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sandbox: str
    exec: ExecRequest


class StdinWrite(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Bytes below what was accepted already are skipped, so that a retry does no harm."""

    sandbox: str
    exec: str
    data: bytes = b""
    offset: int | None = None  # of data's first byte; None: append
    eof: bool = False


class ExecSignal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sandbox: str
    exec: str
    signal: SignalRequest


class ExecResize(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sandbox: str
    exec: str
    size: TtySize


class SessionStart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sandbox: str
    session: SessionRequest


class SessionStop(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sandbox: str
    name: str


class FileCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`args` is the msgpack of the agent record that the method names; the node decodes it as that."""

    sandbox: str
    args: msgspec.Raw


class OutputQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    sandbox: str
    exec: str
    out: int = 0  # offsets to begin at
    err: int = 0
    follow: bool = True  # until the exec's end; False: what is recorded now


AGENT_ARGS: dict[Method, type[msgspec.Struct]] = {
    Method.FILE_STAT: agent.PathArgs,
    Method.FILE_LIST: agent.ListArgs,
    Method.FILE_MKDIR: agent.MkdirArgs,
    Method.FILE_MOVE: agent.MoveArgs,
    Method.FILE_REMOVE: agent.RemoveArgs,
    Method.FILE_CHMOD: agent.ChmodArgs,
    Method.FILE_CHOWN: agent.ChownArgs,
    Method.FILE_SYMLINK: agent.SymlinkArgs,
    Method.FILE_READ: agent.ReadArgs,
    Method.FILE_WRITE: agent.WriteArgs,
    Method.FILE_ARCHIVE: agent.PathArgs,
    Method.FILE_EXTRACT: agent.ExtractArgs,
    Method.FILE_WATCH: agent.WatchArgs,
    Method.CONNECT: agent.ConnectArgs,
}


class Stream(Protocol):
    """A bidirectional sequence of frames (stream number 0). Sending waits while the other side is behind."""

    async def send(self, frame: Frame) -> None:
        """Raises UnavailableError once the other side has closed."""
        ...

    async def recv(self) -> Frame | None:
        """The next frame, None after the other side's close. Raises the DsecError with which it closed."""
        ...

    async def close(self, error: BaseException | None = None) -> None:
        """Idempotent. The other side sees the end, or the error, after what was sent before."""
        ...


class NodeService(Protocol):
    """What a node offers; a transport (embedded or TCP) carries it, and `load` with each reply."""

    def load(self) -> NodeLoad:
        """Cheap: it is asked for with every reply."""
        ...

    async def call(
        self, method: Method, body: bytes, *, caller: Caller, key: str | None, timeout_s: float
    ) -> bytes: ...

    async def serve_stream(self, method: Method, body: bytes, stream: Stream, *, caller: Caller) -> None:
        """Runs one stream to its end; returns or raises, and the transport closes the stream accordingly."""
        ...


def project_seen(caller: Caller) -> str | None:
    """Below which path a caller sees sandboxes; None: all of them."""
    return None if Right.ADMIN in caller.rights else caller.project


def team_of(project: str) -> str:
    """The project below the root that this one is, or lies in: what is shared out between projects is between these,
    since whoever manages one makes as many below it as they like."""
    return "/".join(project.split("/", 2)[:2])


def reaches(project: str | None, owner: str) -> bool:
    """Whether a caller of `project` reaches what belongs to `owner`: its own, and those of its sub-projects."""
    return project is None or owner == project or owner.startswith(project.rstrip("/") + "/")
