"""What monitors and guests are told of a network card: where none is asked for, nothing at all."""

from __future__ import annotations

import ipaddress
from dataclasses import replace
from pathlib import Path

import pytest

from dsec.backends.base import Layer
from dsec.backends.fullvm import machine as full
from dsec.backends.vm import machine, network
from dsec.backends.vm.clones import check_network, check_same
from dsec.backends.vm.disks import LAYERS_MAX, check_layers
from dsec.backends.vm.firecracker_driver import DRIVES_MAX, drives_of
from dsec.backends.vm.initramfs import plan_text
from dsec.backends.vm.machine import Drive, Persistent, Shape
from dsec.backends.vm.monitor import Confines, jail_plan
from dsec.backends.vm.running import confined
from dsec.core.errors import InvalidArgumentError, UnsupportedError
from dsec.core.limits import GIB, MIB
from dsec.core.machines import ADDRESS, GATEWAY, PREFIX, Agent, Bus, Firmware
from dsec.core.spec import Environment, NetworkMode, SandboxSpec, Substrate
from dsec.wire.codec import pack, unpack
from dsec.wire.egress import NAMESERVER, OWN_ADDRESS
from dsec.wire.jail import JailBind, JailPlan

SHAPE = Shape(processors=1, memory_bytes=256 * MIB, disk_bytes=GIB, pids=100, layers=())
FULL = full.Shape(
    image="0" * 64, format="raw", firmware=Firmware.BIOS, agent=Agent.NONE, bus=Bus.VIRTIO, boot_wait_s=0.0,
    command_line="", processors=1, memory_bytes=256 * MIB, disk_bytes=GIB,
)  # fmt: skip
CONFINES = Confines(uid=70_000, cgroups=(), root=Path("/r"), sockets=Path("/s"))


def small(shape: Shape, *persistent: Persistent) -> list[str]:
    return machine.machine_arguments(
        shape,
        accelerator="tcg",
        drives=[Drive("disk", "/disk", writable=True)],
        memory="memory-backend-ram,id=ram0,size=256M",
        firmware="/firmware",
        persistent=persistent,
    )


def large(shape: full.Shape) -> list[str]:
    return full.machine_arguments(
        shape, accelerator="tcg", disk=full.clone_disk(shape), memory="m", data=[], variables=None
    )  # fmt: skip


def words_of_network(given: list[str]) -> list[str]:
    return [word for word in given if "net" in word or "e1000" in word]


def test_a_machine_without_a_network_has_no_card_and_no_words_about_one() -> None:
    assert words_of_network(small(SHAPE)) == []
    assert words_of_network(large(FULL)) == []
    plan = jail_plan(confined(CONFINES, [JailBind("/a", "/b")], network=False), ["/bin/true"])
    assert (plan.files, plan.tap) == ([], None)
    assert not {"files", "tap"} & unpack(pack(plan), dict).keys()
    assert "network" not in plan_text(layers=[], disk="disk", pids=9)


@pytest.mark.parametrize(
    ("given", "device"),
    [
        (small(replace(SHAPE, network=True)), "virtio-net-device"),
        (small(replace(SHAPE, network=True), Persistent("/layers/0.meta", 2 * MIB)), "virtio-net-pci"),
        (large(replace(FULL, network=True)), "virtio-net-pci"),
        (large(replace(FULL, network=True, bus=Bus.SATA)), "e1000e"),
    ],
)
def test_a_card_has_a_net_of_the_monitor_s_own_that_nothing_leads_into(given: list[str], device: str) -> None:
    (net,) = [given[at + 1] for at, word in enumerate(given) if word == "-netdev"]
    kind, *options = net.split(",")
    named = dict(option.split("=", 1) for option in options)

    assert kind == "user"
    assert named["ipv6"] == "off"
    assert not named.keys() & {"hostfwd", "guestfwd", "tftp", "smb", "bootfile"}
    (card,) = [word for word in given if word.startswith(f"{device},")]
    assert f"netdev={named['id']}" in card
    assert card.endswith(",romfile=") == (device != "virtio-net-device")


def test_all_addresses_are_of_one_net_and_none_of_them_is_the_sandbox_s_own() -> None:
    net = ipaddress.ip_network(network.NET)
    addresses = [ADDRESS, GATEWAY, NAMESERVER]

    assert net.prefixlen == PREFIX
    assert net.subnet_of(ipaddress.ip_network("198.18.0.0/15"))  # type: ignore[arg-type]
    assert all(ipaddress.ip_address(address) in net for address in addresses)
    assert len({*addresses, OWN_ADDRESS}) == 4


def test_a_monitor_with_a_net_of_its_own_asks_whom_its_guest_would_ask() -> None:
    plan = jail_plan(confined(CONFINES, [], network=True), ["/bin/true"])

    assert [(file.path, file.content) for file in plan.files] == [
        ("/etc/resolv.conf", f"nameserver {NAMESERVER}\n".encode())
    ]
    assert plan.tap is None
    assert unpack(pack(plan), JailPlan) == plan


def test_a_guest_is_told_all_of_its_network_in_one_line() -> None:
    text = plan_text(layers=[], disk="disk", pids=9, network=True)

    line = text.splitlines()[-1].split()
    assert line == ["network", ADDRESS, str(PREFIX), GATEWAY, NAMESERVER]


def test_a_card_takes_the_place_of_a_layer() -> None:
    layers = tuple(Layer(f"{number:064x}", "erofs", "/l") for number in range(LAYERS_MAX))

    check_layers(layers)
    check_layers(layers[1:], network=True)
    with pytest.raises(UnsupportedError, match=f"at most {LAYERS_MAX - 1} layers"):
        check_layers(layers, network=True)


def test_a_card_takes_an_interrupt_of_firecracker_s() -> None:
    shape = replace(SHAPE, layers=tuple((f"{number}", False) for number in range(DRIVES_MAX)))

    assert len(drives_of(shape)) == DRIVES_MAX + 1
    with pytest.raises(UnsupportedError, match=f"at most {DRIVES_MAX - 1} devices"):
        drives_of(replace(shape, network=True))


def spec(network: NetworkMode) -> SandboxSpec:
    return SandboxSpec(
        environment=Environment("base"), substrate=Substrate.MICROVM, memory_bytes=256 * MIB, network=network
    )


def test_what_goes_on_from_a_machine_without_a_card_is_given_none() -> None:
    with pytest.raises(InvalidArgumentError, match="without a network card"):
        check_same(SHAPE, spec(NetworkMode.PROXIED))
    check_same(SHAPE, spec(NetworkMode.NONE))
    for mode in (NetworkMode.NONE, NetworkMode.PROXIED):  # a card that nothing is behind, or something
        check_same(replace(SHAPE, network=True), spec(mode))


def test_a_network_that_machines_do_not_have_is_refused_by_name() -> None:
    for mode in (NetworkMode.PROXIED, NetworkMode.ROUTED):
        with pytest.raises(UnsupportedError, match=str(mode)):
            check_network(spec(mode), {NetworkMode.NONE})
    check_network(spec(NetworkMode.PROXIED), {NetworkMode.NONE, NetworkMode.PROXIED})
