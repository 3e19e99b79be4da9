"""A lasting shell in a sandbox: directory and variables persist from one command to the next."""

from __future__ import annotations

from typing import Self

import msgspec

from dsec.core import limits
from dsec.core.errors import SessionNotFoundError
from dsec.sdk.leaving import body_first
from dsec.sdk.requests import Command, make_exec
from dsec.sdk.results import ExecResult
from dsec.sdk.running import OutputCallback, failure_of, run_command
from dsec.sdk.transport import Transport
from dsec.wire.records import SessionInfo, SessionRequest


class _Nothing(msgspec.Struct):
    pass


class AsyncSession:
    """One named shell. It is opened by the first command (or `open`), and found again by its name.

    One command at a time: a second one meanwhile raises ConflictError. Its status is as trustworthy as the shell,
    which belongs to the sandbox: for grading use `Sandbox.exec`.
    """

    def __init__(self, transport: Transport, sandbox: str, request: SessionRequest) -> None:
        self._transport = transport
        self._sandbox = sandbox
        self._request = request
        self._opened = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} of {self._sandbox}>"

    @property
    def name(self) -> str:
        """The session's name: any client finds it by that."""
        return self._request.name

    async def open(self) -> SessionInfo:
        """Starts the shell unless it is there; says which."""
        info = await self._transport.call(
            "POST", f"/sandboxes/{self._sandbox}/sessions", SessionInfo, body=self._request, repeatable=True
        )
        self._opened = True
        return info

    async def exec(
        self,
        command: Command,
        *,
        timeout_s: float | None = None,
        grace_s: float = limits.EXEC_GRACE_S_DEFAULT,
        on_stdout: OutputCallback | None = None,
        on_stderr: OutputCallback | None = None,
        check: bool = False,
        output_bytes_max: int | None = None,
        record_bytes_max: int = limits.EXEC_OUTPUT_BYTES_DEFAULT,
    ) -> ExecResult:
        """Runs a command in the shell; `cd`, variables and functions stay for the next one.

        Arguments as those of `Sandbox.exec`; directory, environment and user are the shell's. When the command ends the
        shell itself (`exit`), `session_ended` is true in the result, and the next exec begins a new one.
        """
        request = make_exec(
            command,
            timeout_s=timeout_s,
            grace_s=grace_s,
            output_bytes_max=output_bytes_max,
            record_bytes_max=record_bytes_max,
            session=self.name,
        )
        if not self._opened:
            await self.open()
        try:
            result = await run_command(
                self._transport, self._sandbox, request, on_stdout=on_stdout, on_stderr=on_stderr, check=False
            )
        except SessionNotFoundError:
            self._opened = False  # what it held is gone, which the caller is told; the next command begins anew
            raise
        self._opened = not result.session_ended
        if check and not result.ok:
            raise failure_of(result, self._sandbox)
        return result

    async def close(self) -> None:
        """Ends the shell and what runs in it. One that has ended already is fine."""
        self._opened = False
        try:
            await self._transport.call(
                "DELETE", f"/sandboxes/{self._sandbox}/sessions/{self.name}", _Nothing, repeatable=True
            )
        except SessionNotFoundError:
            return

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *error: object) -> None:
        with body_first(error):
            await self.close()
