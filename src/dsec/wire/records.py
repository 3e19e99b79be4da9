"""Records that callers see: the bodies of the API, and what a node answers.

Requests refuse unknown fields; what comes back ignores them. Times are seconds since the epoch, durations seconds,
sizes bytes. `bytes` fields are base64 in JSON.
"""

from __future__ import annotations

from typing import Any

import msgspec

from dsec.core import limits
from dsec.core.egress import plain_egress
from dsec.core.errors import InvalidArgumentError, LimitError
from dsec.core.ids import parse_exec_id, parse_name
from dsec.core.spec import SandboxSpec, check_env, check_path, check_workspace

_NUMBER_MAX = (1 << 64) - 1  # of msgpack, and of the kernel's limits, to which it means "none"


class Sandbox(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox as its owner sees it. Ended ones stay readable for a day (tombstone, ruling 24)."""

    id: str
    state: str  # core.states.SandboxState
    node: str
    substrate: str
    environment: str  # names, lowest first, joined by "+"
    project: str
    created_at: float
    cpu: float
    memory_bytes: int
    pids_max: int
    network: str
    egress: list[str] | None = None  # with network "proxied": what it reaches; None: all that is public
    disk_bytes: int | None = None  # None: no limit of its own
    name: str | None = None
    job: str | None = None
    member: str | None = None  # what the others of its group call it
    labels: dict[str, str] = {}
    user: str | None = None
    workdir: str | None = None
    ttl_running_s: float | None = None
    ttl_idle_s: float | None = None
    idle_since: float | None = None  # None: busy now
    asleep: bool = False  # paused, and on the disk alone
    incarnation: int = 1
    execs_live: int = 0
    ended_at: float | None = None
    cause: str | None = None  # core.states.EndCause, once ended
    cause_detail: str | None = None
    create_ms: float | None = None  # from admission to the agent's hello; with `start`, until it was ready
    usage: Usage | None = None
    metrics: Metrics | None = None  # in a list that was asked for them, of those that have not ended


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Use since creation, for the owner's account (ruling 34)."""

    cpu_s: float = 0.0
    memory_gib_s: float = 0.0
    frozen_s: float = 0.0
    lived_s: float = 0.0
    output_bytes: int = 0  # of its commands: recorded, and dropped above the budget
    sent_bytes: int = 0  # through the proxy, with network "proxied"
    received_bytes: int = 0


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox now. None: this host cannot tell."""

    at: float
    cpu_s: float | None = None
    memory_bytes: int | None = None
    memory_peak_bytes: int | None = None
    memory_limit_bytes: int | None = None
    oom_kills: int | None = None
    pids: int | None = None
    pids_limit: int | None = None
    disk_used_bytes: int | None = None
    disk_limit_bytes: int | None = None
    cpu_pressure_s: float | None = None  # PSI "some" total
    memory_pressure_s: float | None = None
    execs_live: int = 0
    output_recorded_bytes: int = 0
    output_dropped_bytes: int = 0


class CreateRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """With a snapshot, what `spec` leaves at its default is the snapshotted sandbox's, and so is the environment.

    `given`: fields of `spec` that count as said, also where they are at their default; of a body in JSON without it,
    those that are there.
    """

    spec: SandboxSpec
    timeout_s: float = limits.CREATE_TIMEOUT_S_DEFAULT
    snapshot: str | None = None  # name or id
    queue_s: float = 0.0  # to wait for room, when there is none, before `timeout_s` begins
    given: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s <= limits.CREATE_TIMEOUT_S_MAX:
            raise LimitError(f"timeout_s must be above 0 and at most {limits.CREATE_TIMEOUT_S_MAX:g}")
        _check_queue_s(self.queue_s)
        if self.snapshot is not None:
            parse_name(self.snapshot, "snapshot name")
        check_workspace(self.spec.environment.workspace)
        if self.given is not msgspec.UNSET:
            for name in self.given:
                if name not in SandboxSpec.__struct_fields__:
                    raise InvalidArgumentError(f"{name[:40]!r} in `given` is no field of a spec")

    def said(self) -> frozenset[str]:
        return frozenset() if self.given is msgspec.UNSET else frozenset(self.given)


def _check_queue_s(queue_s: float) -> None:
    if not 0 <= queue_s <= limits.CREATE_QUEUE_S_MAX:
        raise LimitError(f"queue_s must be between 0 and {limits.CREATE_QUEUE_S_MAX:g}")


class BatchRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Create `count` sandboxes alike. Item i has the idempotency key `<key>/<i>`."""

    spec: SandboxSpec
    count: int
    timeout_s: float = limits.CREATE_TIMEOUT_S_DEFAULT
    queue_s: float = 0.0  # of each, as in a create

    def __post_init__(self) -> None:
        _check_queue_s(self.queue_s)
        if not 1 <= self.count <= limits.BATCH_ITEMS_MAX:
            raise LimitError(f"count must be between 1 and {limits.BATCH_ITEMS_MAX}, and is {self.count}")
        if self.spec.name is not None and self.count > 1:
            raise InvalidArgumentError("a batch cannot give one name to several sandboxes", hint="use labels")


class BatchItem(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the answer: exactly one of `sandbox` and `error` (an ErrorBody)."""

    index: int
    sandbox: Sandbox | None = None
    error: dict[str, Any] | None = None


class SandboxPage(msgspec.Struct, frozen=True):
    sandboxes: list[Sandbox] = []
    next: str | None = None  # cursor for the next page
    missing: list[str] = []  # nodes that did not answer: their sandboxes are not here


class ListQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    labels: dict[str, str] = {}
    name: str | None = None
    job: str | None = None
    states: list[str] = []  # empty: all that have not ended
    limit: int = limits.LIST_PAGE_DEFAULT
    cursor: str | None = None
    metrics: bool = False  # as they are now, with each


class TtlRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Replaces both times to live; None = none. `ttl_running_s` counts from now."""

    ttl_running_s: float | None = None
    ttl_idle_s: float | None = None

    def __post_init__(self) -> None:
        for ttl in (self.ttl_running_s, self.ttl_idle_s):
            if ttl is not None and not 0.001 <= ttl <= limits.TTL_S_MAX:
                raise LimitError(f"a time to live must be between 0.001 and {limits.TTL_S_MAX:g} seconds")


class EgressRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Replaces what a sandbox with network "proxied" reaches; None: all that is public, []: nothing."""

    egress: list[str] | None

    def __post_init__(self) -> None:
        plain = plain_egress(self.egress)
        msgspec.structs.force_setattr(self, "egress", None if plain is None else list(plain))


class SandboxRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str


class PauseRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    id: str
    deep: bool = False  # its memory goes to the disk, and nothing of it is left to run


# ---- execs ---------------------------------------------------------------------------------------


class TtySize(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Size of a terminal, in characters."""

    cols: int = 80
    rows: int = 24

    def __post_init__(self) -> None:
        if not (1 <= self.cols <= 65_535 and 1 <= self.rows <= 65_535):
            raise InvalidArgumentError(f"a terminal of {self.cols} by {self.rows}")


class ExecRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Exactly one of argv, argv_bytes and shell. The caller chooses the id: the same id never runs twice."""

    id: str
    argv: list[str] | None = None
    argv_bytes: list[bytes] | None = None  # for arguments that are not UTF-8
    shell: str | None = None
    cwd: str | None = None
    env: dict[str, str] = {}
    user: str | None = None
    stdin: bool = False  # True: stays open until the caller closes it
    stdin_data: bytes | None = None  # given whole, then end-of-file; not together with stdin
    tty: TtySize | None = None
    timeout_s: float | None = None
    grace_s: float = limits.EXEC_GRACE_S_DEFAULT
    output_bytes_max: int | None = None  # the exec is killed above it, cause output_budget
    record_bytes_max: int = limits.EXEC_OUTPUT_BYTES_DEFAULT  # kept by the node: head and tail, the middle dropped
    merge_stderr: bool = False
    rlimits: dict[str, int] = {}
    session: str | None = None
    secrets: dict[str, str] = {}  # environment that is written nowhere: no journal, log, event or record
    wait_s: float | None = None  # answer when it has ended, or after this long, with the output so far

    def __post_init__(self) -> None:
        parse_exec_id(self.id)
        given = [x for x in (self.argv, self.argv_bytes, self.shell) if x is not None]
        if len(given) != 1:
            raise InvalidArgumentError("exactly one of argv, argv_bytes and shell must be given")
        if self.shell is None:
            self._check_argv(self.argv if self.argv is not None else self.argv_bytes or [])
        elif "\0" in self.shell:
            raise InvalidArgumentError("the command holds NUL")
        check_env(self.env)
        check_env(self.secrets)
        if len(self.secrets) > limits.SECRETS_MAX:
            raise LimitError(f"at most {limits.SECRETS_MAX} secrets")
        for name, secret in self.secrets.items():
            if len(secret.encode("utf-8", "surrogatepass")) > limits.SECRET_BYTES_MAX:
                raise LimitError(f"the secret {name[:40]!r} has more than {limits.SECRET_BYTES_MAX} bytes")
        self._check_sizes()
        self._check_numbers()
        if self.cwd is not None:
            check_path(self.cwd, "cwd")
        if self.session is not None:
            parse_name(self.session, "session name")
            self._check_in_session()
        if self.stdin and self.stdin_data is not None:
            raise InvalidArgumentError("stdin and stdin_data exclude each other")

    def _check_in_session(self) -> None:
        """The shell of a session has a directory, an environment and a user already; an exec in it is text alone."""
        stdin = self.stdin or self.stdin_data is not None or self.tty is not None
        if self.shell is None or stdin or self.cwd or self.env or self.secrets or self.user or self.rlimits:
            raise InvalidArgumentError(
                "in a session an exec is shell text alone: no directory, environment, secrets, user, limits, stdin or "
                "terminal of its own",
                hint="say it in the text (`cd`, `export`), or use an exec without session",
            )

    def _check_argv(self, argv: list[str] | list[bytes]) -> None:
        if not argv or not argv[0]:
            raise InvalidArgumentError("argv must not be empty, nor its first item")
        if len(argv) > limits.ARGV_ITEMS_MAX:
            raise LimitError(f"argv has {len(argv)} items; the most is {limits.ARGV_ITEMS_MAX}")
        for item in argv:
            if ("\0" in item) if isinstance(item, str) else (b"\0" in item):
                raise InvalidArgumentError("argv holds NUL")

    def _check_sizes(self) -> None:
        arguments = [len(x.encode()) for x in self.argv or ()] + [len(x) for x in self.argv_bytes or ()]
        variables = [len(k.encode()) + len(v.encode()) + 1 for d in (self.env, self.secrets) for k, v in d.items()]
        text = len((self.shell or "").encode())
        size = text + sum(arguments) + len(arguments) + sum(variables) + len(variables)
        hint = "write it to a file in the sandbox and pass the path, or use stdin"
        if size > limits.ARGV_BYTES_MAX:
            raise LimitError(
                f"command and environment have {size} bytes; the most is {limits.ARGV_BYTES_MAX}", hint=hint
            )
        # The shell of a session reads its text; for any other it is an argument.
        longest = max([*arguments, *variables, 0 if self.session else text], default=0)
        if longest > limits.ARG_BYTES_MAX:
            raise LimitError(
                f"one argument or variable has {longest} bytes; the most is {limits.ARG_BYTES_MAX}", hint=hint
            )

    def _check_numbers(self) -> None:
        for what, value in (("timeout_s", self.timeout_s), ("grace_s", self.grace_s), ("wait_s", self.wait_s)):
            _check_kind(what, value, int | float, "a number of seconds")
        _check_kind("record_bytes_max", self.record_bytes_max, int, "a number of bytes")
        _check_kind("output_bytes_max", self.output_bytes_max, int, "a number of bytes")
        for name, value in self.rlimits.items():
            _check_kind(f"the limit {name!r}"[:60], value, int, "a whole number")
        if self.timeout_s is not None and not 0 < self.timeout_s <= limits.EXEC_TIMEOUT_S_MAX:
            raise LimitError(f"timeout_s must be above 0 and at most {int(limits.EXEC_TIMEOUT_S_MAX)}")
        if not 0 <= self.grace_s <= limits.EXEC_GRACE_S_MAX:
            raise LimitError(f"grace_s must be between 0 and {limits.EXEC_GRACE_S_MAX:g}")
        if not 0 <= self.record_bytes_max <= limits.EXEC_OUTPUT_BYTES_MAX:
            raise LimitError(f"record_bytes_max must be between 0 and {limits.EXEC_OUTPUT_BYTES_MAX}")
        for what, number in (("output_bytes_max", self.output_bytes_max or 0), *self.rlimits.items()):
            if not 0 <= number <= _NUMBER_MAX:
                raise LimitError(f"{what[:40]!r} must be between 0 and 2^64-1")
        if self.wait_s is not None and not 0 <= self.wait_s <= limits.WAIT_S_MAX:
            raise LimitError(f"wait_s must be between 0 and {limits.WAIT_S_MAX:g}")


def _check_kind(what: str, value: object, kind: Any, words: str) -> None:
    """Callers build these records by hand, and Python does not look at types."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, kind)):
        raise InvalidArgumentError(f"{what} must be {words}, not {value!r}"[:200])


class Gap(msgspec.Struct, frozen=True):
    """Output that was produced and is no longer to be had: bytes start … end-1 of a channel."""

    channel: int
    start: int
    end: int


class GapNotice(msgspec.Struct, frozen=True):
    """Body of EVENT on a stream of output."""

    gap: Gap


class ExecInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A command as it is known now. `status` and what follows it are there once it has ended.

    `cause` says what ended or spoiled it, if anything did: timed_out, oom, output_budget, disk_full, layer_unavailable,
    layer_corrupt, agent_lost, node_lost, killed, rolled_back.
    """

    id: str
    sandbox: str
    state: str  # "running" | "ended"
    name: str | None = None  # "main": the environment's own program, started with the sandbox
    command: str = ""  # shortened, for people
    started_at: float = 0.0
    ended_at: float | None = None
    session: str | None = None
    tty: bool = False
    status: str | None = None  # exited | signaled | unknown, once ended
    exit_code: int | None = None
    signal: int | None = None
    cause: str | None = None  # timed_out | oom | disk_full | …, as above
    session_ended: bool = False
    out_bytes: int = 0  # produced
    err_bytes: int = 0
    gaps: list[Gap] = []
    wall_s: float | None = None
    user_s: float | None = None
    system_s: float | None = None
    max_rss_bytes: int | None = None


class ExecAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a start. With `wait_s`, and once ended, it carries the output if that fits inline."""

    exec: ExecInfo
    out: bytes | None = None
    err: bytes | None = None
    existing: bool = False


class ExecQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    sandbox: str
    exec: str
    wait_s: float | None = None  # answer at its end, or after this long


class ExecPage(msgspec.Struct, frozen=True):
    execs: list[ExecInfo] = []


class SignalRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    signal: int = 15
    tree: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.signal <= 64:
            raise InvalidArgumentError(f"there is no signal {self.signal}")


class StdinAnswer(msgspec.Struct, frozen=True):
    offset: int  # bytes of stdin accepted in all: where the next piece begins


# ---- sessions ------------------------------------------------------------------------------------


class SessionRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str
    shell: str | None = None
    cwd: str | None = None
    env: dict[str, str] = {}
    user: str | None = None

    def __post_init__(self) -> None:
        parse_name(self.name, "session name")
        check_env(self.env)
        for what, path in (("cwd", self.cwd), ("shell", self.shell)):
            if path is not None:
                check_path(path, what)


class SessionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A lasting shell."""

    name: str
    pid: int = 0  # of the shell, in its sandbox
    busy: str | None = None  # the exec that runs in it
    existing: bool = False  # it was there before this request


class SessionPage(msgspec.Struct, frozen=True):
    sessions: list[SessionInfo] = []


# ---- files ---------------------------------------------------------------------------------------


class FileInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of a sandbox's file system, as the sandbox says it."""

    name: str  # bytes that are not UTF-8 are shown as U+FFFD, and `name_bytes` holds the truth
    kind: str  # file | directory | symlink | …
    name_bytes: bytes | None = None
    size: int = 0
    mode: int = 0
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    target: str | None = None
    target_bytes: bytes | None = None
    nlink: int = 1


class FilePage(msgspec.Struct, frozen=True):
    entries: list[FileInfo] = []
    after: bytes | None = None  # cursor for the next page


class WriteAnswer(msgspec.Struct, frozen=True):
    bytes: int = 0
    entries: int = 0


class WatchNotice(msgspec.Struct, frozen=True, kw_only=True):
    """One change below a watched directory; `overflow` says that some were lost."""

    kind: str  # created | modified | deleted | moved | attributes | overflow
    path: str = ""
    path_bytes: bytes | None = None
    source: str | None = None
    source_bytes: bytes | None = None
    directory: bool = False


# ---- the host ------------------------------------------------------------------------------------


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `dsec doctor`."""

    what: str
    status: str  # ok | degraded | missing
    detail: str = ""
    hint: str | None = None  # how to get it
    need: str = "advised"  # needed: no sandbox without it | advised | optional
    cost: str | None = None  # what its lack costs the user


class DoctorReport(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    version: str
    findings: list[Finding] = []
    substrates: dict[str, str] = {}  # substrate → "ok" or the reason why not


class NodeLoad(msgspec.Struct, frozen=True, kw_only=True):
    """How full a node is, as it says itself with every reply, refusals included (ruling 32)."""

    sandboxes: int = 0  # those that are being created too
    sandboxes_max: int = 0
    memory_promised_bytes: int = 0
    memory_promised_bytes_max: int = 0


class Health(msgspec.Struct, frozen=True, kw_only=True):
    version: str
    node: str
    started_at: float
    sandboxes: int = 0
    pid: int = 0
    load: NodeLoad | None = None  # as the API knows it from the node's last reply
