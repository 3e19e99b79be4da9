"""How shared state lies in the engine: names of buckets, streams and subjects, and who may touch which."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import Any, Final

from dsec.cluster.log import LogStream
from dsec.cluster.registry import TOGETHER, Bucket
from dsec.core.errors import InvalidArgumentError
from dsec.core.ids import NodeId
from dsec.core.limits import (
    AUDIT_KEEP_S,
    EVENTS_KEPT_S,
    LOG_RECORD_BYTES_MAX,
    MIB,
    NODE_MESSAGE_BYTES_MAX,
    NODE_SUBSCRIPTIONS_MAX,
    REGISTRY_VALUE_BYTES_MAX,
)

_UNIT: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?\Z")
_NS: Final = 1_000_000_000
_MARKER_S: Final = 60  # a deletion is told of for so long; watchers that are away for longer begin anew anyway
_AUDIT_PART: Final = 8  # of what a stream of events may have
_AUDIT_BYTES_MIN: Final = 16 * MIB
_DUPLICATES_S: Final = 60  # above the time for which a write is tried again
_PREFIXES: Final = {LogStream.EVENTS: "ev", LogStream.AUDIT: "audit", LogStream.TRAJECTORIES: "t"}


@dataclass(frozen=True, slots=True)
class Layout:
    """Of one deployment, the `unit`: several may share the engine and know nothing of each other."""

    unit: str

    def __post_init__(self) -> None:
        if not _UNIT.match(self.unit):
            raise InvalidArgumentError(
                f"{self.unit[:40]!r} is not a unit", hint="1 to 32 of a-z, 0-9 and '-', as in 'main' or 'train-2'"
            )

    # -- names -------------------------------------------------------------------------------------

    @property
    def prefix(self) -> str:
        return f"dsec.{self.unit}"

    def bucket_stream(self, bucket: Bucket) -> str:
        return f"KV_{self.bucket(bucket)}"

    def bucket(self, bucket: Bucket) -> str:
        return f"dsec-{self.unit}-{bucket}"

    def log_stream(self, stream: LogStream) -> str:
        return f"dsec-{self.unit}-{stream}"

    def log_subject(self, stream: LogStream, subject: str) -> str:
        return f"{self.prefix}.{_PREFIXES[stream]}.{subject}" if subject else f"{self.prefix}.{_PREFIXES[stream]}.>"

    def heartbeat(self, node: NodeId | str) -> str:
        """`*` for those of all nodes."""
        return f"{self.prefix}.hb.{node}"

    def desk(self, node: NodeId | str) -> str:
        """Where a node asks replicas and watchers, any one of them. `*` for what all nodes ask."""
        return f"{self.prefix}.desk.{node}"

    def desks(self, node: NodeId | str) -> str:
        """The same, all of them: one may have gone without the engine's knowing."""
        return f"{self.prefix}.desks.{node}"

    def inbox(self, who: str) -> str:
        """Of one client: what is answered to one is read by no other."""
        return f"_INBOX_{self.unit}_{who}"

    # -- streams -----------------------------------------------------------------------------------

    def streams(self, *, replicas: int, log_bytes_max: int) -> list[dict[str, Any]]:
        """Their configurations, as the engine's API takes them."""
        return [
            *(self._bucket_config(bucket, replicas) for bucket in Bucket),
            *(self._log_config(stream, replicas, log_bytes_max) for stream in LogStream),
        ]

    def _bucket_config(self, bucket: Bucket, replicas: int) -> dict[str, Any]:
        return {
            "name": self.bucket_stream(bucket),
            # The engine sends acknowledgements to whatever subject an asker names: this one is told only to who may ask
            # for streams. Nodes ask the engine for nothing; here is one more thing that they lack.
            "subjects": [f"$KV.{self.bucket(bucket)}.{secrets.token_hex(8)}.>"],
            "storage": "file",
            "num_replicas": replicas,
            "retention": "limits",
            "discard": "new",
            "max_msgs_per_subject": 1,
            "max_msg_size": REGISTRY_VALUE_BYTES_MAX + 4_096,  # headers count
            "deny_delete": True,
            "allow_direct": True,
            "allow_atomic": bucket in TOGETHER,
            "allow_msg_ttl": True,
            "duplicate_window": _DUPLICATES_S * _NS,
            "allow_rollup_hdrs": True,  # markers need it
            "subject_delete_marker_ttl": _MARKER_S * _NS,
        }

    def _log_config(self, stream: LogStream, replicas: int, bytes_max: int) -> dict[str, Any]:
        config: dict[str, Any] = {
            "name": self.log_stream(stream),
            "subjects": [self.log_subject(stream, "")],
            "storage": "file",
            "num_replicas": replicas,
            "retention": "limits",
            "max_bytes": bytes_max,
            "max_msg_size": LOG_RECORD_BYTES_MAX + 4_096,
            "allow_direct": True,
            "allow_rollup_hdrs": False,
            "duplicate_window": _DUPLICATES_S * _NS,
        }
        if stream == LogStream.EVENTS:  # the oldest go
            return {**config, "discard": "old", "max_age": int(EVENTS_KEPT_S * _NS)}
        if stream == LogStream.AUDIT:
            bytes_max = max(bytes_max // _AUDIT_PART, _AUDIT_BYTES_MIN)
            return {**config, "discard": "old", "max_age": int(AUDIT_KEEP_S * _NS), "max_bytes": bytes_max}
        return {**config, "discard": "new", "allow_atomic": True}

    # -- rights (ruling 5) -------------------------------------------------------------------------

    def node_rights(self, node: NodeId) -> Rights:
        """A node tells its load, and asks who has rights of its own to write for it (`engine.desk`). It has none with
        the engine: whoever may ask that chooses where the answer goes, and so writes to any subject that keeps it."""
        return Rights(
            publish=(self.heartbeat(node), self.desk(node), self.desks(node)),
            subscribe=(f"{self.inbox(node)}.>",),
            message_bytes_max=NODE_MESSAGE_BYTES_MAX,
            subscriptions_max=NODE_SUBSCRIPTIONS_MAX,
            plain=True,
        )

    def control_rights(self) -> Rights:
        """API replicas and watchers: all of the account, which is the deployment's own."""
        return Rights(publish=(">",), subscribe=(">",))


@dataclass(frozen=True, slots=True)
class Rights:
    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    message_bytes_max: int = -1  # the server's own bound
    subscriptions_max: int = -1
    plain: bool = False  # by connections of clients alone: none of other servers, of browsers or of MQTT
