"""`dsec up --detach`: starts the service as a process of its own, and returns when it answers."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Final

from dsec.core.errors import HostError
from dsec.serve.config import ServeConfig
from dsec.serve.lock import already_running, holder_of
from dsec.serve.probe import answers_health
from dsec.serve.told import from_line

START_TIMEOUT_S: Final = 60.0
READY: Final = b"ready\n"
MESSAGE_BYTES_MAX: Final = 16_384

_PIPE_VARIABLE: Final = "DSEC_READY_FD"


def start_detached(config: ServeConfig, arguments: Sequence[str], *, timeout_s: float = START_TIMEOUT_S) -> int:
    """The pid of a service that answers. `arguments` are those of `up`, without --detach.

    Raises ConflictError when one runs there already, and the service's own error when it ends before.
    One that does not answer in time is stopped.
    """
    if (holder := holder_of(config.socket.parent)) is not None:
        raise already_running(config.socket.parent, holder)
    reader, writer = os.pipe2(os.O_CLOEXEC)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "dsec.serve", "up", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, _PIPE_VARIABLE: str(writer)},
            pass_fds=(writer,),
            start_new_session=True,  # the terminal's signals are not for it
        )
    except OSError as error:
        os.close(reader)
        raise HostError(f"the service cannot be started: {error}") from error
    finally:
        os.close(writer)
    deadline = time.monotonic() + timeout_s
    try:
        _wait_ready(process, reader, deadline, config)
    except BaseException:
        process.terminate()
        raise
    finally:
        os.close(reader)
    # It outlives us: nobody is to warn that nobody waits for it.
    process.returncode = 0
    return process.pid


def ready_pipe(environ: dict[str, str]) -> int | None:
    """In the service: the pipe to its starter, None when it runs in the foreground. Not inherited by its children."""
    text = environ.pop(_PIPE_VARIABLE, None)
    if text is None or not text.isdigit():
        return None
    os.set_inheritable(int(text), False)
    return int(text)


def _wait_ready(process: subprocess.Popen[bytes], reader: int, deadline: float, config: ServeConfig) -> None:
    said = b""
    while not said.endswith(READY):
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([reader], [], [], left)[0]:
            raise HostError(f"the service is not ready in time; its log is {config.log_file}")
        piece = os.read(reader, MESSAGE_BYTES_MAX - len(said) or 1)
        if not piece:
            if (error := from_line(said)) is not None:
                raise error
            text = said.decode("utf-8", "replace").strip()
            raise HostError(f"the service did not start: {text or f'its log is {config.log_file}'}")
        said += piece
    if holder_of(config.socket.parent) != process.pid or not answers_health(config.socket, deadline):
        raise HostError(f"the service does not answer at {config.socket}; its log is {config.log_file}")
