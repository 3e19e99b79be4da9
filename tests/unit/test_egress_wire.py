"""Records between a node and dsec-egress: what one sends, the other reads."""

from __future__ import annotations

from pathlib import Path

import msgspec

from dsec.testing.egress import egress_of
from dsec.wire.codec import pack, unpack
from dsec.wire.egress import (
    MESSAGE_BYTES_MAX,
    PORT_RANGES_MAX,
    RULES_MAX,
    AttachArgs,
    EgressCounts,
    EgressDenied,
    EgressOp,
    EgressReply,
    EgressRequest,
    EgressRule,
    RulesArgs,
)


def test_a_request_keeps_everything_and_as_many_rules_as_there_may_be_fit() -> None:
    name = ".".join(["n" * 60] * 4)
    rules = tuple(EgressRule(name, ((443, 443),)) for _ in range(RULES_MAX))
    args = AttachArgs(sandbox="sb-" + "x" * 40, pid=4_000_000, start=2**63, rules=rules)

    message = pack(EgressRequest(7, EgressOp.ATTACH.value, args))

    assert len(message) < MESSAGE_BYTES_MAX
    read = unpack(message, EgressRequest)
    assert (read.id, read.op, msgspec.convert(read.args, AttachArgs)) == (7, "attach", args)


def test_rules_tell_nothing_from_everything() -> None:
    everything, nothing = (RulesArgs(sandbox="s", rules=rules) for rules in (None, ()))

    assert unpack(pack(everything), RulesArgs).rules is None
    assert unpack(pack(nothing), RulesArgs).rules == ()
    assert PORT_RANGES_MAX < 100


def test_a_refusal_is_told_without_a_request() -> None:
    denied = EgressDenied(sandbox="s", target="evil.example", port=443, protocol="tcp", reason="rules", count=3)

    read = unpack(pack(EgressReply(0, denied=denied)), EgressReply)

    assert (read.id, read.denied, read.ok, read.error) == (0, denied, None, None)


async def test_nothing_is_started_to_hear_that_nothing_is_attached(tmp_path: Path) -> None:
    async with egress_of(tmp_path) as egress:
        assert await egress.counts() == {}
        assert await egress.detach("s") == EgressCounts(sandbox="s")
        await egress.shutdown()

    assert list(tmp_path.iterdir()) == []
