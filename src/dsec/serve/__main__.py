"""`python -m dsec.serve up|down`: what the CLI and the SDK's automatic start run."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from dsec.core.errors import DsecError, InvalidArgumentError, UnavailableError

_SETTINGS: Final = (
    "run_dir",
    "state_dir",
    "api.listen",
    "api.tls_certificate",
    "api.tls_key",
    "api.insecure",
    "node.substrates",
    "log.level",
)


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given)
    # Not imported above: in a service this is the pipe on which a failure of those imports is told, too.
    from dsec.serve.detach import ready_pipe

    pipe = ready_pipe(os.environ) if options.command == "up" else None  # type: ignore[arg-type]
    try:
        return _up(options, given, pipe) if options.command == "up" else _down(options)
    except DsecError as error:
        text = f"dsec: {error.message}\n" + (f"      {error.hint}\n" if error.hint else "")
        if pipe is not None:
            with suppress(OSError):
                os.write(pipe, text.encode("utf-8", "replace"))
        else:
            sys.stderr.write(text)
        return 2 if isinstance(error, InvalidArgumentError) else 1


def _up(options: argparse.Namespace, given: list[str], pipe: int | None) -> int:
    from dsec.serve.config import load_config
    from dsec.serve.detach import READY, start_detached
    from dsec.serve.up import run_up

    config = load_config(_flags(options), os.environ, file=options.config)
    if options.detach:
        pid = start_detached(config, [item for item in given[1:] if item != "--detach"])
        sys.stderr.write(f"dsec answers at {config.socket}, as process {pid}; its log is {config.log_file}\n")
        return 0

    def ready() -> None:
        if pipe is not None:
            os.chdir("/")  # a service must not keep a file system busy; names in its settings were relative to here
            os.write(pipe, READY)
            os.close(pipe)

    return run_up(config, ready=ready, to_file=pipe is not None)


def _down(options: argparse.Namespace) -> int:
    from dsec.serve.config import load_config
    from dsec.serve.down import stop_service
    from dsec.serve.lock import holder_of
    from dsec.serve.retire import destroy_all, retire_launcher

    config = load_config(_flags(options), os.environ, file=options.config)
    run_dir = Path(config.run_dir)
    if options.destroy and holder_of(run_dir) is None:
        raise UnavailableError("nothing runs that could destroy sandboxes", hint="start it first: dsec up --detach")
    if options.destroy:
        sys.stderr.write(f"dsec: {destroy_all(config.socket)} sandboxes destroyed\n")
    pid = stop_service(run_dir, timeout_s=options.timeout)
    sys.stderr.write(f"dsec: process {pid} has ended\n" if pid else f"dsec: nothing runs on {run_dir}\n")
    held = asyncio.run(retire_launcher(run_dir, force=options.launcher))
    if held:
        sys.stderr.write(f"dsec: {held} sandboxes run on; `dsec up` takes them over\n")
    return 0


def _flags(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name, None) for name in _SETTINGS}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dsec.serve", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="run node and API in one process", allow_abbrev=False)
    down = commands.add_parser("down", help="stop the service; sandboxes run on", allow_abbrev=False)
    for command in (up, down):
        command.add_argument("--config", type=Path, help="default: /etc/dsec/dsec.toml, where there is one")
        command.add_argument("--run-dir", dest="run_dir", metavar="DIR")
        command.add_argument("--state-dir", dest="state_dir", metavar="DIR")
    up.add_argument("--listen", dest="api.listen", metavar="HOST:PORT", help="also on TCP, with tokens")
    up.add_argument("--tls-certificate", dest="api.tls_certificate", metavar="FILE")
    up.add_argument("--tls-key", dest="api.tls_key", metavar="FILE")
    up.add_argument("--insecure", dest="api.insecure", action="store_true", default=None, help="TCP beyond loopback")
    up.add_argument("--substrate", dest="node.substrates", action="append", metavar="NAME", help="may be repeated")
    up.add_argument("--log-level", dest="log.level", metavar="LEVEL")
    up.add_argument("--detach", action="store_true", help="return when it answers, and leave it running")
    down.add_argument("--destroy", action="store_true", help="destroy all sandboxes first; otherwise they run on")
    down.add_argument("--launcher", action="store_true", help="end dsec-launch although sandboxes run on")
    down.add_argument("--timeout", type=float, default=30.0, metavar="SECONDS")
    return parser


if __name__ == "__main__":
    sys.exit(main())
