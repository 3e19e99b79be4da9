"""What an operator may set of calls, and what of it holds for a pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dsec.backends.fncall.config import CallsConfig, DeviceMode, PoolConfig, Qos
from dsec.core.cpus import parse_cpus
from dsec.core.errors import DsecError, InvalidArgumentError
from dsec.serve.config import load_config
from dsec.wire.calls import CallRequest
from dsec.wire.codec import from_json

FILE = """
[calls]
places_max = 8
preload = ["json"]
place_memory_bytes = "64MiB"

[calls.pools.ml]
environment = "ml"
type = "python"
places_min = 1
places_max = 2
preload = ["numpy", "os.path"]
place_memory_bytes = "1GiB"
devices = ["vendor.com/gpu=0", "vendor.com/gpu=1"]
device_mode = "exclusive"

[calls.pools.judge]
type = "cpp"
qos = "background"
cpus = "0-1,3"
"""


def load(tmp_path: Path, text: str) -> CallsConfig:
    file = tmp_path / "dsec.toml"
    file.write_text(text)
    flags = {"run_dir": "/run/dsec-calls", "state_dir": "/var/lib/dsec-calls"}
    return load_config(flags, {}, file=file).calls.config()


def test_the_first_table_that_fits_holds_and_what_it_leaves_out_is_as_for_all(tmp_path: Path) -> None:
    config = load(tmp_path, FILE)

    ml, judge, other = config.pool(["ml"], "python"), config.pool(["base"], "cpp"), config.pool(["base"], "python")

    assert (ml.places_min, ml.places_max, ml.preload, ml.place_memory_bytes) == (1, 2, ("numpy", "os.path"), 1 << 30)
    assert (ml.device_mode, ml.places_most) == (DeviceMode.EXCLUSIVE, 2)
    assert (judge.qos, judge.cpus, judge.preload, judge.place_memory_bytes) == (
        Qos.BACKGROUND,
        "0-1,3",
        ("json",),
        64 << 20,
    )
    assert (other.qos, other.cpus, other.devices, other.place_memory_bytes) == (Qos.NORMAL, None, (), 64 << 20)


@pytest.mark.parametrize(
    "pool",
    [
        'cpus = ""',
        'cpus = "3-1"',
        'cpus = "all"',
        'cpus = "0-99999"',
        'qos = "best"',
        'devices = ["gpu0"]',
        'devices = ["a/b=c", "a/b=c"]',
        "places_min = 1",
        "places_max = 1000",
        "calls_max = 0",
        "calls_max = 1000000",
        "age_s_max = 0",
        "place_cpu = 0",
        'place_memory_bytes = "1MiB"',
        'preload = ["os; import x"]',
        'type = "cobol"',
        "unknown = 1",
        'environment = "a"\ntype = "sh"\nplaces_min = 2\nplaces_max = 1',
        'environment = "a"\ntype = "sh"\nplaces_min = 9\nplaces_max = 9',
        'environment = "a"\ntype = "sh"\nplaces_min = 2\ndevices = ["a/b=c"]\ndevice_mode = "exclusive"',
    ],
)
def test_what_cannot_be_is_refused_at_the_start(tmp_path: Path, pool: str) -> None:
    with pytest.raises(InvalidArgumentError):
        load(tmp_path, f"[calls]\nplaces_max = 8\n[calls.pools.x]\n{pool}\n")


def test_neither_a_pool_nor_a_call_has_a_network(tmp_path: Path) -> None:
    pool = '[calls.pools.x]\nenvironment = "a"\ntype = "sh"\nplaces_min = 1\n'
    load(tmp_path, pool)
    with pytest.raises(InvalidArgumentError, match="network"):
        load(tmp_path, f'{pool}network = "proxied"\n')
    call = b'{"type": "sh", "code": ""'
    from_json(call + b"}", CallRequest)
    with pytest.raises(InvalidArgumentError, match="network"):
        from_json(call + b', "network": "proxied"}', CallRequest)


def test_lists_of_processors_are_read_as_the_kernel_writes_them() -> None:
    assert parse_cpus("0-2,7, 9") == {0, 1, 2, 7, 9}
    for text in ("", ",", "a", "-1", "1-", "2-1", "8192"):
        with pytest.raises(DsecError):
            parse_cpus(text)


def test_more_places_are_not_kept_than_there_may_be() -> None:
    kept: dict[str, Any] = {"environment": "a", "places_min": 2}
    with pytest.raises(InvalidArgumentError):
        CallsConfig(places_max=3, pools=(PoolConfig(type="sh", **kept), PoolConfig(type="bash", **kept)))
