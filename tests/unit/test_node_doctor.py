"""What doctor says of a substrate: whether it is needed, and what of it is weaker than it could be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dsec.backends.base import Probe, Weakness
from dsec.backends.fake.backend import FakeBackend
from dsec.backends.steering import why_not_steered
from dsec.backends.vm.qemu import weaknesses
from dsec.core.spec import NetworkMode
from dsec.node.doctor import of_backend


class Probed(FakeBackend):
    def __init__(self, probe: Probe) -> None:
        super().__init__()
        self._told = probe

    async def probe(self) -> Probe:
        return self._told


@pytest.mark.parametrize(
    ("substrate", "need"), [("container", "needed"), ("microvm", "advised"), ("fullvm", "advised")]
)
async def test_only_containers_are_needed_on_every_machine(substrate: str, need: str) -> None:
    verdict, findings = await of_backend(substrate, Probed(Probe(False, "there is no QEMU", "install it")))

    head = findings[0]
    assert verdict == "there is no QEMU"
    assert (head.status, head.need, head.hint) == ("missing", need, "install it")
    assert head.cost == f"no {substrate} sandbox can be made"


async def test_what_is_weaker_is_told_with_its_cost_and_what_is_not_is_fine() -> None:
    probe = Probe(True, facts={"processor": "emulated", "kernel": "6.12"}, weak={"processor": Weakness("slow", "KVM")})

    _, findings = await of_backend("microvm", Probed(probe))

    told = {finding.what: finding for finding in findings}
    weak, fine = told["microvm: processor"], told["microvm: kernel"]
    assert (weak.status, weak.need, weak.cost, weak.hint) == ("degraded", "advised", "slow", "KVM")
    assert (fine.status, fine.need, fine.cost) == ("ok", "optional", None)


async def test_a_network_that_cannot_be_had_is_told_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Probed(Probe(True))
    _, findings = await of_backend("fake", backend)
    assert next(found for found in findings if found.what == "fake: network").status == "ok"

    able = replace(backend.capabilities, networks=frozenset({NetworkMode.NONE}), network_reason="no BPF here")
    monkeypatch.setattr(backend, "_capabilities", able)
    _, findings = await of_backend("fake", backend)
    told = next(found for found in findings if found.what == "fake: network")
    assert (told.status, told.need, told.detail) == ("degraded", "optional", "none only: no BPF here")


def _held() -> tuple[int, Path]:
    return len(list(Path("/proc/self/fd").iterdir())), Path("/proc/self/ns/net").readlink()


@pytest.mark.root
def test_this_host_is_tried_and_nothing_of_that_is_left() -> None:
    before = _held()

    assert why_not_steered.__wrapped__() == why_not_steered()
    assert _held() == before


def test_machines_are_weak_by_emulation_and_by_old_monitors_and_by_nothing_else() -> None:
    assert weaknesses(emulated=False, keeps_templates=True) == {}
    assert set(weaknesses(emulated=True, keeps_templates=True)) == {"processor"}
    assert set(weaknesses(emulated=False, keeps_templates=False)) == {"templates"}
