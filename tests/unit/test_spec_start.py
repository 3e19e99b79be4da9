"""What may be asked of a sandbox that starts its environment's program."""

from __future__ import annotations

from typing import Any

import pytest

from dsec.core import limits
from dsec.core.errors import InvalidArgumentError, LimitError
from dsec.core.ids import main_exec_id, new_node_id, new_sandbox_id, parse_exec_id
from dsec.core.spec import Environment, ReadyProbe, SandboxSpec
from dsec.sdk.requests import make_spec
from dsec.wire.codec import pack, unpack


@pytest.mark.parametrize("fields", [{"argv": ("true",)}, {"shell": "true"}, {"port": 1}, {"port": 65_535}])
def test_a_probe_asks_for_one_thing(fields: dict[str, Any]) -> None:
    probe = ReadyProbe(**fields)

    assert (probe.interval_s, probe.timeout_s) == (0.25, 30.0)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"shell": "true", "port": 80},
        {"argv": ("true",), "shell": "true"},
        {"argv": ()},
        {"argv": ("", "x")},
        {"argv": ("a", "b\0")},
        {"shell": ""},
        {"shell": "a\0"},
        {"port": True},
    ],
)
def test_a_probe_that_says_nothing_or_too_much_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError):
        ReadyProbe(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"port": 0},
        {"port": 65_536},
        {"port": 1, "interval_s": limits.READY_INTERVAL_S_MIN / 2},
        {"port": 1, "interval_s": limits.READY_INTERVAL_S_MAX * 2},
        {"port": 1, "timeout_s": 0.0},
        {"port": 1, "timeout_s": limits.READY_TIMEOUT_S_MAX + 1},
        {"shell": "x" * (limits.ARGV_BYTES_MAX + 1)},
        {"argv": ("x",) * (limits.ARGV_ITEMS_MAX + 1)},
    ],
)
def test_a_probe_has_bounds(fields: dict[str, Any]) -> None:
    with pytest.raises(LimitError):
        ReadyProbe(**fields)


def test_ready_needs_start() -> None:
    with pytest.raises(InvalidArgumentError, match="start=True"):
        SandboxSpec(environment=Environment("base"), ready=ReadyProbe(port=1))


def test_a_spec_with_a_probe_survives_the_wire() -> None:
    spec = make_spec("base", start=True, ready={"argv": ["test", "-e", "/x"], "timeout_s": 2})

    assert unpack(pack(spec), SandboxSpec) == spec
    assert spec.ready == ReadyProbe(argv=("test", "-e", "/x"), timeout_s=2)
    assert make_spec("base", start=True, ready=ReadyProbe(port=1)).ready == ReadyProbe(port=1)


@pytest.mark.parametrize("ready", [{"port": "80"}, {"prot": 80}, {"port": 80, "shell": "true"}, 80, ["true"]])
def test_what_is_no_probe_is_refused_before_it_is_sent(ready: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        make_spec("base", start=True, ready=ready)


def test_the_id_of_main_follows_from_the_sandbox_s() -> None:
    one, other = (new_sandbox_id(new_node_id()) for _ in range(2))

    assert parse_exec_id(main_exec_id(one)) == main_exec_id(one)
    assert main_exec_id(one) != main_exec_id(other)
