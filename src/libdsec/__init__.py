"""The published client names, on top of `dsec`.

client = DSecClient()
await client.open()
args = DSecContainerRunArgs(container_image="base", memory_limit_mb=4096, cpu_cores_limit=4)
sandbox = await client.run_container(args, timeout=120)
output, status = await sandbox.run_shell("echo hello")
await sandbox.stop()
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    from dsec.sdk.client import AsyncClient
    from dsec.sdk.results import ExecResult
    from dsec.sdk.sandbox import AsyncSandbox

__all__ = ["DSecClient", "DSecContainerRunArgs", "DSecSandbox", "ShellResult"]

_NO_EXIT_STATUS = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class DSecContainerRunArgs:
    """What a container is to be. `container_image` is the name of an environment."""

    container_image: str = "base"
    memory_limit_mb: int = 1_024
    cpu_cores_limit: float = 1.0
    disk_limit_mb: int | None = None
    pids_limit: int = 1_024
    ttl_running_stop: float | None = None  # seconds from now until it is destroyed
    ttl_idle_stop: float | None = None  # seconds without use
    network_rules: Mapping[str, bool] = field(default_factory=dict)  # what may be reached
    init_user: str | None = None
    workdir: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    name: str | None = None
    backend: str = "container"


class ShellResult(NamedTuple):
    """`output, status = …`. `status` is the exit code, 128 + n after signal n, -1 when nobody saw the end."""

    output: str  # stdout and stderr, as they came
    status: int


class DSecSandbox:
    """A running container. `sandbox` is the same thing with everything that `dsec` can do."""

    def __init__(self, sandbox: AsyncSandbox) -> None:
        self.sandbox = sandbox

    @property
    def id(self) -> str:
        return self.sandbox.id

    async def run_shell(
        self,
        cmd: str,
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> ShellResult:
        """Runs a command line. One that fails is a result; platform failures raise from `dsec.errors`."""
        result = await self.sandbox.exec(cmd, timeout_s=timeout, cwd=cwd, env=env, user=user, stderr="merge")
        return ShellResult(result.stdout, _status(result))

    async def stop(self) -> None:
        """Ends and removes it. Doing it twice is fine."""
        await self.sandbox.destroy()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()


class DSecClient:
    """Without `url` it is DSEC_URL, or the service of this machine, which is started when it does not run."""

    def __init__(self, url: str | None = None, token: str | None = None) -> None:
        self._url, self._token = url, token
        self._client: AsyncClient | None = None

    async def open(self) -> None:
        """Connects. Raises UnavailableError or HostError when there is no service."""
        from dsec.sdk.client import AsyncClient

        client = AsyncClient(self._url, self._token)
        await client.health()
        self._client = client

    async def run_container(self, args: DSecContainerRunArgs, timeout: float = 60.0) -> DSecSandbox:
        """A new sandbox, running and reachable within `timeout` seconds; or an error, and nothing of it is left."""
        _check_network(args.network_rules)
        if self._client is None:
            await self.open()
        assert self._client is not None
        sandbox = await self._client.create(
            args.container_image,
            backend=args.backend,
            memory=args.memory_limit_mb << 20,
            cpu=args.cpu_cores_limit,
            disk=None if args.disk_limit_mb is None else args.disk_limit_mb << 20,
            pids=args.pids_limit,
            ttl_running_s=args.ttl_running_stop,
            ttl_idle_s=args.ttl_idle_stop,
            user=args.init_user,
            workdir=args.workdir,
            env=args.env,
            labels=args.labels,
            name=args.name,
            timeout_s=timeout,
        )
        return DSecSandbox(sandbox)

    async def close(self) -> None:
        """Closes the connections. Sandboxes are not touched."""
        if self._client is not None:
            await self._client.close()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


def _check_network(rules: Mapping[str, bool]) -> None:
    """A rule that allows something is refused, and never ignored: it is a word, and no host."""
    from dsec.core.errors import UnsupportedError

    allowed = sorted(name for name, allow in rules.items() if allow)
    if allowed:
        raise UnsupportedError(
            f"network_rules allow {', '.join(allowed)}, and which hosts that are is not known here",
            hint="set every rule to False; dsec's own create(network='proxied', egress=[…]) takes hosts",
        )


def _status(result: ExecResult) -> int:
    if result.status == "exited" and result.exit_code is not None:
        return result.exit_code
    if result.status == "signaled" and result.signal is not None:
        return 128 + result.signal
    return _NO_EXIT_STATUS
