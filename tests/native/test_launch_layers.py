"""Trees of many layers, put together in both ways: by descriptor, and by name as kernels before 6.15 need it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec.wire.launch import LayerMount
from tests.native import launch_wire as wire
from tests.native.launch_wire import Host, ask, destroy_args, wait_for

pytestmark = [pytest.mark.root]

LAYERS = 64


@pytest.fixture(params=[[], ["--layers-by-name"]], ids=["as the kernel likes it", "by name"])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Host]:
    with wire.running_host(tmp_path / "host") as host:
        host.start(*request.param)
        yield host


def test_the_highest_of_as_many_layers_as_there_may_be_wins(host: Host, tmp_path: Path) -> None:
    client, names = host.clients[0], [f"layer{number}" for number in range(LAYERS)]
    image = wire.make_image(tmp_path / "layer0")
    for number, name in enumerate(names):
        directory = image if number == 0 else tmp_path / name
        directory.mkdir(exist_ok=True)
        (directory / "highest").write_text(f"{number}\n")
        (directory / f"from{number}").touch()
        client.call("layer_mount", LayerMount(digest=name, kind="directory", meta=str(directory)))
    plan = host.plan(lowers=names)

    launched = client.launch(plan)
    seen = ask(
        plan, "cat /highest; id -u; echo own > /own; cat /own; ls -d /from* | wc -l; readlink /proc/1/cwd; ls /dev"
    )

    assert seen.split()[:4] == [str(LAYERS - 1), "0", "own", str(LAYERS)]
    mounts = ask(plan, "cat /proc/self/mountinfo")
    assert next(line.split()[4] for line in mounts.splitlines() if " - overlay " in line) == "/"
    assert str(tmp_path) not in mounts
    client.destroy(destroy_args(plan, launched))
    wait_for(lambda: not wire.leftovers(host))
