"""A private place for a node with real containers: directories, id ranges, cgroups, launcher; and its end."""

from __future__ import annotations

import asyncio
import dataclasses
import glob
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from dsec.image.build import build
from dsec.image.environments import EnvironmentStore
from dsec.sdk.client import AsyncClient
from dsec.serve.config import ServeConfig
from dsec.serve.service import LocalService
from dsec.testing.launchers import end_launcher, remove_cgroups
from dsec.testing.leaks import Watched, no_leaks_async
from dsec.testing.processes import all_processes, command_line
from dsec.testing.waiting import eventually
from dsec.wire.codec import from_toml
from dsec.wire.environments import BuildRequest, DirectorySource
from tests.system.container_images import make_root

ENVIRONMENT: Final = "small"
_CGROUPS: Final = Path("/sys/fs/cgroup")
_START_S: Final = 60.0


def container_store(directory: Path) -> Path:
    """A state directory with the environment "small", made at the first call. Places copy what is in it."""
    state = directory / "container-store"
    if not state.exists():
        draft = directory / f"container-store-{secrets.token_hex(4)}"
        root = make_root(draft / "root")
        request = BuildRequest(name=ENVIRONMENT, source=DirectorySource(path=str(root)))
        # In a thread: the caller may have an event loop of its own.
        with ThreadPoolExecutor(1) as pool:
            pool.submit(asyncio.run, build(EnvironmentStore(draft / "state"), request)).result()
        shutil.rmtree(root)
        (draft / "state").rename(state)
    return state


@dataclass
class Place:
    """Everything of one node, or of two that follow each other. `close` ends what still runs and removes it."""

    directory: Path
    name: str = field(  # of its cgroups; below others' where a guest says so
        default_factory=lambda: f"{os.environ.get('DSEC_TEST_CGROUPS', '')}dsec-test-{secrets.token_hex(4)}"
    )
    id_dir: Path | None = None  # None: its own
    settings: dict[str, Any] = field(default_factory=dict)  # of ServeConfig: {"node": {...}}
    more: str = ""  # of the configuration, for nodes in processes of their own
    wrap: tuple[str, ...] = ()  # before the command of its node: into a network, say
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def run(self) -> Path:
        return self.directory / "r"

    @property
    def state(self) -> Path:
        return self.directory / "s"

    @property
    def ids(self) -> Path:
        return self.id_dir or self.directory / "i"

    @property
    def url(self) -> str:
        return f"unix://{self.run / 'api.sock'}"

    @property
    def log(self) -> Path:
        return self.directory / "log"

    def fill(self, store: Path) -> None:
        """Takes over environments by hard links; the store itself is only read."""
        for name in ("layers", "environments", "builds"):
            shutil.copytree(store / name, self.state / name, copy_function=os.link)

    def config(self) -> ServeConfig:
        settings: dict[str, Any] = {
            "run_dir": str(self.run),
            "state_dir": str(self.state),
            **self.settings,
        }
        settings["container"] = self._container()
        settings["node"] = {"disk_free_bytes_min": 0, **settings.get("node", {})}
        return from_toml(settings, ServeConfig)

    def _container(self) -> dict[str, Any]:
        """What is made ahead looks like what a sandbox has left: there is none where a test does not ask for it."""
        own = {"id_dir": str(self.ids), "cgroup_parent": self.name, "prepared": 0}
        return {**own, **self.settings.get("container", {})}

    def watched(self) -> Watched:
        """What a sandbox of this place could leave. The launcher and what it keeps for all of them is there before."""
        pid = self.launcher_pid()
        return Watched(
            roots=frozenset({os.getpid()} | ({pid} if pid else set())),
            markers=(f"{self.directory}/".encode(),),
            cgroups=(self.name,),
            directories=(self.run, self.state / "sandboxes"),
            lock_directories=(self.ids,),
            mounts_of=(pid,) if pid else (),
        )

    @asynccontextmanager
    async def no_leaks(self, *, descriptors: bool = False) -> AsyncIterator[None]:
        """Raises AssertionError when the block has left something of this place.

        `descriptors`: of this process too; not for clients, which keep connections.
        """
        async with no_leaks_async(dataclasses.replace(self.watched(), descriptors=descriptors)):
            yield

    def cgroup_files(self, name: str) -> list[Path]:
        """Of this place in every hierarchy; `name` below its node's directory, with wildcards.

        Unlike Path.glob this bears cgroups that come and go meanwhile.
        """
        patterns = (f"{top}/{self.name}/*/{name}" for top in (_CGROUPS, *_CGROUPS.iterdir()))
        return [Path(path) for pattern in patterns for path in glob.glob(pattern, recursive=True)]  # noqa: PTH207

    # ---- launcher and processes ----

    def pids(self, groups: str = "**") -> list[int]:
        """Processes in these cgroups below its node's, the lowest pid first. A cgroup may go while it is looked at."""
        found: set[int] = set()
        for file in self.cgroup_files(f"{groups}/cgroup.procs"):
            with suppress(OSError):
                found.update(map(int, file.read_text().split()))
        return sorted(found)

    def launcher_pid(self) -> int | None:
        """The launcher that serves this place, if one runs."""
        mark = b"\0--run\0" + str(self.run).encode() + b"\0"
        found = [pid for pid in all_processes() if mark in command_line(pid)]
        served = self.run / "launch.pid"
        if served.exists() and (pid := int(served.read_text())) in found:
            return pid
        return None

    def start_launcher(self, *arguments: str) -> None:
        """One of our own, before the node starts its: with test hooks, say."""
        from dsec.binaries import find_binary

        self.run.mkdir(parents=True, exist_ok=True, mode=0o700)
        command = [find_binary("dsec-launch"), "--run", self.run, "--agent", find_binary("dsec-agent"), *arguments]
        subprocess.run(command, check=True, timeout=60, stdin=subprocess.DEVNULL, start_new_session=True)

    def start_process(self, *verb: str, before: str = "") -> subprocess.Popen[bytes]:
        """`dsec up` of this place in a process of its own, or another `verb` and its options. It may not be ready yet:
        see `ready`. `before`: a program that runs in the process first."""
        config = self.directory / "dsec.toml"
        node = {"disk_free_bytes_min": 0, **self.settings.get("node", {})}
        lines = ["[container]", *(f"{key} = {json.dumps(value)}" for key, value in self._container().items()), "[node]"]
        lines += [f"{name} = {value!r}" for name, value in node.items() if not isinstance(value, dict)]
        for name, table in node.items():
            if isinstance(table, dict):
                lines += [f"[node.{name}]", *(f"{key} = {value!r}" for key, value in table.items())]
        config.write_text("\n".join((*lines, self.more)))
        started = f"{before}\nimport runpy; runpy.run_module('dsec.serve', run_name='__main__', alter_sys=True)"
        program = ["-c", started] if before else ["-m", "dsec.serve"]
        command = [*self.wrap, sys.executable, *program, *(verb or ("up",)), "--config", str(config)]
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [*command, "--run-dir", str(self.run), "--state-dir", str(self.state)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.processes.append(process)
        return process

    async def ready(self, client: AsyncClient) -> None:
        """Waits until the newest process answers."""
        process = self.processes[-1]

        async def answers() -> bool:
            assert process.poll() is None, f"the node has ended: {self.log.read_text()[-2_000:]}"
            with suppress(Exception):
                return (await client.health()).pid == process.pid
            return False

        await eventually(answers, deadline_s=_START_S)

    def kill_node(self) -> None:
        process = self.processes[-1]
        process.kill()
        process.wait(60)

    def kill_launcher(self) -> None:
        """kill -9 of the launcher alone; what it has started runs on."""
        pid = self.launcher_pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait(60)
        for kill in {*_CGROUPS.glob(f"{self.name}/cgroup.kill"), *_CGROUPS.glob(f"*/{self.name}/cgroup.kill")}:
            kill.write_text("1")
        end_launcher(self.run)
        remove_cgroups(self.name)
        shutil.rmtree(self.directory)


@contextmanager
def private_place(store: Path | None, **fields: Any) -> Iterator[Place]:
    place = Place(Path(tempfile.mkdtemp(prefix="dsec-", dir="/tmp")), **fields)
    try:
        place.state.mkdir()
        if store is not None:
            place.fill(store)
        yield place
    finally:
        place.close()


@asynccontextmanager
async def served(place: Place) -> AsyncIterator[tuple[LocalService, AsyncClient]]:
    """The whole service in this process, and a client of it over its socket."""
    service = LocalService(place.config())
    await service.start()
    hurry = asyncio.Event()
    hurry.set()
    try:
        async with AsyncClient(place.url) as client:
            yield service, client
    finally:
        await service.close(hurry=hurry)
