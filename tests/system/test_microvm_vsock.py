"""The agent at a vsock, as Firecracker's guests have it, on a kernel of Debian: tried by another agent in a guest of
QEMU, to which that guest is its own host."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dsec.agent.client import AgentClient
from dsec.backends.vm.kernel import PACKAGE, fetch_kernel
from dsec.binaries import find_binary
from dsec.core.errors import HostError
from dsec.core.ids import new_exec_id
from dsec.wire import agent
from dsec.wire.codec import pack
from dsec.wire.frames import PREAMBLE_BYTES, PREAMBLE_MAGIC
from tests.contract.backends_under_test import BACKENDS, layer_of
from tests.system.container_images import make_root

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(600)]

CONFIG = pack(
    {
        "sandbox": "x",
        "env": {},
        "user": None,
        "workdir": None,
        "caps_exec": 2**64 - 1,
        "filter_exec": b"",
        "no_new_privs": False,
        "nofile": None,
        "spare": False,
    }
)
PREAMBLE = PREAMBLE_MAGIC + bytes(range(PREAMBLE_BYTES - len(PREAMBLE_MAGIC)))
SCRIPT = f"""
import ctypes, os, socket, subprocess, time
libc = ctypes.CDLL(None, use_errno=True)
assert libc.syscall(313, os.open("/vsock_loopback.ko", os.O_RDONLY), b"", 0) == 0, ctypes.get_errno()
config = os.memfd_create("config")
os.write(config, {CONFIG!r})
os.dup2(config, 5)
agent = subprocess.Popen(["/dsec-agent", "--vsock", "5000"], pass_fds=(5,))
for _ in range(1000):
    link = socket.socket(socket.AF_VSOCK)
    try:
        link.connect((1, 5000))
        break
    except OSError:
        link.close()
        time.sleep(0.05)
link.settimeout(60)
link.sendall({PREAMBLE!r})
heard = b""
while len(heard) < {PREAMBLE_BYTES}:
    heard += link.recv(64)
print(heard == {PREAMBLE!r})
agent.kill()
"""


async def test_an_agent_at_a_vsock_answers_its_host(short_tmp: Path) -> None:
    try:
        module = fetch_kernel(short_tmp / "kernels", PACKAGE, ("vsock_loopback",)).modules[-1]
    except HostError as error:
        pytest.skip(error.message)
    root = make_root(short_tmp / "root")
    shutil.copy(module, root / "vsock_loopback.ko")
    shutil.copy(find_binary("dsec-agent"), root / "dsec-agent")
    (root / "try.py").write_text(SCRIPT)
    backend = BACKENDS["microvm"](short_tmp)
    try:
        probe = await backend.backend.probe()
        if not probe.usable:
            pytest.skip(f"microvm: {probe.reason}")
        backend.layers = (layer_of(root),)
        instance = await backend.create(deadline_s=240)
        client = await AgentClient.connect(instance.connect, sandbox=instance.id)
        stream = await client.exec(agent.Exec(id=new_exec_id(), argv=[b"python3", b"/try.py"]))
        said = b"".join([bytes(data.payload) async for data in stream])
        client.close()
    finally:
        await backend.close()

    assert said == b"True\n"
