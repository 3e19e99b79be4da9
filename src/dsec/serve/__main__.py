"""`python -m dsec.serve COMMAND`: what the CLI and the SDK's automatic start run."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from dsec.core.errors import DsecError, InvalidArgumentError, UnavailableError
from dsec.serve.told import in_words, to_line
from dsec.wire.api import DEFAULT_SOCKET_NAME

_FAILED: Final = 125  # as the commands of the CLI that ask a service
_SETTINGS: Final = (
    "run_dir",
    "state_dir",
    "api.listen",
    "api.tls_certificate",
    "api.tls_key",
    "api.insecure",
    "node.substrates",
    "cluster.servers",
    "cluster.identity",
    "cluster.listen",
    "cluster.advertise",
    "cluster.metrics",
    "log.level",
)


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given)
    # Not imported above: in a service this is the pipe on which a failure of those imports is told, too.
    from dsec.serve.detach import ready_pipe

    pipe = ready_pipe(os.environ) if options.command == "up" else None  # type: ignore[arg-type]
    try:
        return _RUN[options.command](options) if options.command != "up" else _up(options, given, pipe)
    except DsecError as error:
        if pipe is not None:
            with suppress(OSError):
                os.write(pipe, to_line(error))
        elif options.json:
            sys.stdout.write(to_line(error).decode())
        else:
            sys.stderr.write(in_words(error))
        return 2 if isinstance(error, InvalidArgumentError) else _FAILED


def _up(options: argparse.Namespace, given: list[str], pipe: int | None) -> int:
    from dsec.serve.config import load_config
    from dsec.serve.detach import READY, start_detached
    from dsec.serve.up import run_up

    config = load_config(_flags(options), os.environ, file=options.config)
    if options.detach:
        pid = start_detached(config, [item for item in given[1:] if item not in ("--detach", "--json")])
        if options.json:
            _put({"pid": pid, "socket": str(config.socket), "log": str(config.log_file)})
        else:
            _say(options, f"dsec answers at {config.socket}, as process {pid}; its log is {config.log_file}")
        return 0
    if options.json:
        raise InvalidArgumentError("--json goes with --detach", hint="in the foreground the log is the output")

    def ready() -> None:
        if pipe is not None:
            os.chdir("/")  # a service must not keep a file system busy; names in its settings were relative to here
            os.write(pipe, READY)
            os.close(pipe)

    return run_up(config, ready=ready, to_file=pipe is not None)


def _sandboxes(count: int) -> str:
    return f"{count} sandbox{'' if count == 1 else 'es'}"


def _down(options: argparse.Namespace) -> int:
    from dsec.serve.config import find_run_dir
    from dsec.serve.down import stop_service
    from dsec.serve.lock import holder_of
    from dsec.serve.retire import count_all, destroy_all, retire_launcher, tidy

    run_dir, wrong = find_run_dir(_flags(options), os.environ, file=options.config)
    if wrong is not None:
        _say(options, f"the configuration is wrong, and only {run_dir} taken from it or its place: {wrong.message}")
    socket = run_dir / DEFAULT_SOCKET_NAME
    if options.destroy and holder_of(run_dir) is None:
        raise UnavailableError("nothing runs that could destroy sandboxes", hint="start it first: dsec up --detach")
    destroyed = destroy_all(socket) if options.destroy else 0
    if options.destroy:
        _say(options, f"{_sandboxes(destroyed)} destroyed")
    left = None if holder_of(run_dir) is None else count_all(socket)
    pid = stop_service(run_dir, timeout_s=options.timeout)
    _say(options, f"process {pid} has ended" if pid else f"nothing runs on {run_dir}")
    held = asyncio.run(retire_launcher(run_dir, force=options.launcher))
    left = held if left is None else left  # the launcher has none of the machines
    if options.destroy and not left and not held:
        tidy(run_dir)
    if left:
        _say(options, f"left as before: {_sandboxes(left)}; `dsec up` takes over")
    if options.json:
        _put({"pid": pid, "destroyed": destroyed, "sandboxes": left})
    return 0


def _doctor(options: argparse.Namespace) -> int:
    """The report on stdout, as JSON: `dsec doctor` asks for it when no service answers."""
    from dsec.serve.config import load_config
    from dsec.serve.examine import examine_host
    from dsec.wire.codec import to_json

    config = load_config(_flags(options), os.environ, file=options.config)
    sys.stdout.write(to_json(asyncio.run(examine_host(config))).decode() + "\n")
    return 0


def _clustered(options: argparse.Namespace) -> int:
    """`api`, `node`, `watcher`: in the foreground, each of its own process."""
    if options.command == "node" and (options.leave or options.destroy):
        return _leave(options)
    from dsec.serve.clustered import ApiProcess, NodeProcess, WatcherProcess  # loads NATS' client
    from dsec.serve.config import load_config
    from dsec.serve.lock import FILE_NAME
    from dsec.serve.up import run_service

    config = load_config(_flags(options), os.environ, file=options.config)
    makes = {"api": ApiProcess, "node": NodeProcess, "watcher": WatcherProcess}
    # Nodes and `dsec up` keep each other out; a replica may run beside either.
    lock = FILE_NAME if options.command == "node" else f"{options.command}.pid"
    return run_service(config, makes[options.command](config), lock_name=lock)


def _leave(options: argparse.Namespace) -> int:
    from dsec.serve.config import load_config
    from dsec.serve.leave import leave

    if not options.leave:
        raise InvalidArgumentError("--destroy goes with --leave")
    config = load_config(_flags(options), os.environ, file=options.config)
    destroyed = leave(config, destroy=options.destroy)
    if options.json:
        _put({"destroyed": destroyed, "state_dir": config.state_dir})
    ended = f", {_sandboxes(destroyed)} destroyed" if destroyed else ""
    _say(options, f"this machine has left its cluster{ended}; environments, volumes and snapshots: {config.state_dir}")
    return 0


def _cluster(options: argparse.Namespace) -> int:
    from dsec.serve.operate import run_operation

    return run_operation(options, _flags(options))


def _import(options: argparse.Namespace) -> int:
    from dsec.serve.importing import run_import

    return run_import(options, _flags(options))


def _say(options: argparse.Namespace, text: str) -> None:
    if not options.json and not options.quiet:
        sys.stderr.write(f"dsec: {text}\n")


def _put(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")


def _flags(options: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(options, name, None) for name in _SETTINGS}
    for name in ("run_dir", "state_dir"):
        if path := given[name]:
            given[name] = str(Path(path).absolute())  # from here, as everywhere; in a file it is written whole
    return given


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dsec.serve", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="run node and API in one process", allow_abbrev=False)
    down = commands.add_parser("down", help="stop the service; sandboxes run on", allow_abbrev=False)
    doctor = commands.add_parser("doctor", help="report on this machine without a service, in JSON", allow_abbrev=False)
    for command in (up, down, doctor):
        _common(command)
    up.add_argument("--listen", dest="api.listen", metavar="HOST:PORT", help="also on TCP, with tokens")
    up.add_argument("--tls-certificate", dest="api.tls_certificate", metavar="FILE")
    up.add_argument("--tls-key", dest="api.tls_key", metavar="FILE")
    up.add_argument("--insecure", dest="api.insecure", action="store_true", default=None, help="TCP beyond loopback")
    up.add_argument("--substrate", dest="node.substrates", action="append", metavar="NAME", help="may be repeated")
    up.add_argument("--log-level", dest="log.level", metavar="LEVEL")
    up.add_argument("--detach", action="store_true", help="return when it answers, and leave it running")
    _cluster_parsers(commands)
    _import_parser(commands)
    down.add_argument("--destroy", action="store_true", help="destroy all sandboxes first; otherwise they run on")
    down.add_argument("--launcher", action="store_true", help="end dsec-launch although sandboxes run on")
    down.add_argument("--timeout", type=float, default=30.0, metavar="SECONDS")
    return parser


def _cluster_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    for name, what in (
        ("api", "run an API replica of a cluster"),
        ("node", "run the node of this machine in a cluster"),
        ("watcher", "run a watcher of a cluster"),
    ):
        parser = commands.add_parser(name, help=what, allow_abbrev=False)
        _common(parser)
        _joining(parser)
        parser.add_argument("--log-level", dest="log.level", metavar="LEVEL")
        if name == "api":
            parser.add_argument("--listen", dest="api.listen", metavar="HOST:PORT", help="on TCP, with tokens")
            parser.add_argument("--tls-certificate", dest="api.tls_certificate", metavar="FILE")
            parser.add_argument("--tls-key", dest="api.tls_key", metavar="FILE")
            parser.add_argument("--insecure", dest="api.insecure", action="store_true", default=None)
        if name != "api":
            parser.add_argument("--metrics", dest="cluster.metrics", metavar="HOST:PORT")
        if name == "node":
            parser.add_argument("--listen", dest="cluster.listen", metavar="HOST:PORT", help="for API replicas")
            parser.add_argument("--advertise", dest="cluster.advertise", metavar="HOST:PORT")
            parser.add_argument("--substrate", dest="node.substrates", action="append", metavar="NAME")
            parser.add_argument("--leave", action="store_true", help="clean this machine: it is no node any more")
            parser.add_argument("--destroy", action="store_true", help="with --leave: sandboxes that live, too")
    cluster = commands.add_parser("cluster", help="make a cluster, and look after its nodes", allow_abbrev=False)
    _common(cluster)
    _joining(cluster)
    cluster.add_argument("operation")
    cluster.add_argument("names", nargs="*")
    cluster.add_argument("--authority", type=Path, metavar="DIR")
    cluster.add_argument("--unit", default="main")
    cluster.add_argument("--days", type=int, default=365)
    cluster.add_argument("--note", default="")


def _import_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("import", help="copy a disk as an image of a node", allow_abbrev=False)
    _common(parser)
    parser.add_argument("name")
    parser.add_argument("path")
    parser.add_argument("--format", choices=("raw", "qcow2"), required=True)
    parser.add_argument("--firmware", choices=("bios", "uefi"), default="bios")
    parser.add_argument("--agent", choices=("dsec", "qga", "none"), default="none")
    parser.add_argument("--bus", choices=("virtio", "sata"), default="virtio")
    parser.add_argument("--boot-wait", type=float, default=0.0, metavar="SECONDS")


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="answers, and errors, in JSON")
    parser.add_argument("--quiet", action="store_true", help="errors only")
    parser.add_argument("--config", type=Path, help="default: /etc/dsec/dsec.toml, where there is one")
    parser.add_argument("--run-dir", dest="run_dir", metavar="DIR")
    parser.add_argument("--state-dir", dest="state_dir", metavar="DIR")


def _joining(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--join", dest="cluster.servers", action="append", metavar="URL", help="a NATS server")
    parser.add_argument("--identity", dest="cluster.identity", metavar="DIR")


_RUN: Final[dict[str, Callable[[argparse.Namespace], int]]] = {
    "down": _down,
    "doctor": _doctor,
    "api": _clustered,
    "node": _clustered,
    "watcher": _clustered,
    "cluster": _cluster,
    "import": _import,
}


if __name__ == "__main__":
    sys.exit(main())
