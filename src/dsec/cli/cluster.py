"""`dsec api`, `dsec node`, `dsec watcher`: the processes of a cluster; `dsec cluster`: making and operating one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from dsec.cli.completion import SUBSTRATES, one_of
from dsec.cli.console import Json
from dsec.cli.pages import command
from dsec.cli.service import Config, LogLevel, RunDir, StateDir, become

app = typer.Typer(help="A cluster: its keys, its machines' identities, its nodes.", no_args_is_help=True)

Join = Annotated[
    list[str] | None, typer.Option(metavar="URL", help="A NATS server, tls://HOST:PORT (default: DSEC_JOIN). Repeated.")
]
Identity = Annotated[
    str | None, typer.Option(metavar="DIR", help="Who this machine is (default: DSEC_IDENTITY, or /etc/dsec/identity).")
]
Metrics = Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Where /metrics is (default: 127.0.0.1:7374).")]
Authority = Annotated[str, typer.Option(metavar="DIR", help="What `dsec cluster init` has made.", show_default=False)]
Days = Annotated[int, typer.Option(metavar="DAYS", help="How long it is good.", min=1)]
Node = Annotated[str, typer.Argument(help="Its id.", show_default=False)]
Note = Annotated[str, typer.Option(metavar="TEXT", help="Why; `dsec cluster nodes` shows it.")]


def register(root: typer.Typer) -> None:
    command(root, api)
    command(root, node)
    command(root, watcher)


def api(
    join: Join = None,
    identity: Identity = None,
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="On TCP, where every request needs a token.")
    ] = None,
    tls_certificate: Annotated[str | None, typer.Option(metavar="FILE", help="With --listen: PEM.")] = None,
    tls_key: Annotated[str | None, typer.Option(metavar="FILE", help="With --tls-certificate: PEM.")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Let --listen go beyond loopback without TLS, on a network of yours.")
    ] = False,
    log_level: LogLevel = None,
    config: Config = None,
    run_dir: RunDir = None,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Run a replica of a cluster's API. It keeps nothing of a sandbox."""
    given = {
        "--identity": identity,
        "--listen": listen,
        "--tls-certificate": tls_certificate,
        "--tls-key": tls_key,
        "--log-level": log_level,
        "--config": config,
        "--run-dir": run_dir,
        "--state-dir": state_dir,
    }
    become("api", [*_joins(join), *(["--insecure"] if insecure else [])], given)


def node(
    join: Join = None,
    identity: Identity = None,
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="For API replicas (default: 0.0.0.0:7373).")
    ] = None,
    advertise: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where they reach it, if that is another place.")
    ] = None,
    substrate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="What it offers (default: container). May be repeated.",
            autocompletion=one_of(*SUBSTRATES),
        ),
    ] = None,
    leave: Annotated[
        bool, typer.Option("--leave", help="Do not run it: clean this machine, which is no node any more.")
    ] = False,
    destroy: Annotated[bool, typer.Option("--destroy", help="With --leave: destroy sandboxes that live.")] = False,
    metrics: Metrics = None,
    log_level: LogLevel = None,
    config: Config = None,
    run_dir: RunDir = None,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Run the node of this machine in a cluster. Its sandboxes outlive it."""
    substrates = [part for name in substrate or () for part in ("--substrate", name)]
    substrates += [*(["--leave"] if leave else []), *(["--destroy"] if destroy else [])]
    given = {
        "--identity": identity,
        "--listen": listen,
        "--advertise": advertise,
        "--metrics": metrics,
        "--log-level": log_level,
        "--config": config,
        "--run-dir": run_dir,
        "--state-dir": state_dir,
    }
    become("node", [*_joins(join), *substrates], given)


def watcher(
    join: Join = None,
    identity: Identity = None,
    metrics: Metrics = None,
    log_level: LogLevel = None,
    config: Config = None,
    run_dir: RunDir = None,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Run a watcher of a cluster: it says which nodes are lost. Of several, one acts."""
    given = {
        "--identity": identity,
        "--metrics": metrics,
        "--log-level": log_level,
        "--config": config,
        "--run-dir": run_dir,
        "--state-dir": state_dir,
    }
    become("watcher", _joins(join), given)


def init(
    directory: Annotated[str, typer.Argument(help="Where the keys go: a new directory.", show_default=False)],
    unit: Annotated[str, typer.Option(metavar="NAME", help="Of the cluster, where several share a NATS.")] = "main",
    json: Json = False,
) -> None:
    """Make the keys of a new cluster."""
    become("cluster", ["init", directory], {"--unit": unit})


def issue(
    what: Annotated[
        str,
        typer.Argument(
            help="node, api (also for watchers) or nats.",
            show_default=False,
            autocompletion=one_of("node", "api", "nats"),
        ),
    ],
    directory: Annotated[str, typer.Argument(help="Where the identity goes.", show_default=False)],
    authority: Authority,
    name: Annotated[
        list[str] | None, typer.Argument(help="nats: its hosts; node: the id of one that there is; api: its name.")
    ] = None,
    days: Days = 365,
    json: Json = False,
) -> None:
    """Make the identity of a node, an API replica or a NATS server."""
    become("cluster", ["issue", what, directory, *(name or ())], {"--authority": authority, "--days": str(days)})


def nodes(join: Join = None, identity: Identity = None, config: Config = None, json: Json = False) -> None:
    """List the nodes of the cluster."""
    _operate("nodes", [], join, identity, config)


def _ruled(operation: str, help: str) -> Callable[..., None]:
    """The command of an operation on one node that takes a note."""

    def rule(
        node: Node,
        note: Note = "",
        join: Join = None,
        identity: Identity = None,
        config: Config = None,
        json: Json = False,
    ) -> None:
        _operate(operation, [node, "--note", note], join, identity, config)

    rule.__name__, rule.__doc__ = operation, help
    return rule


def _last(operation: str, help: str) -> Callable[..., None]:
    """The same of one that ends a node."""

    def rule(
        node: Node,
        note: Note = "",
        authority: Annotated[
            str | None, typer.Option(metavar="DIR", help="Take its credentials for NATS back, by `dsec cluster init`.")
        ] = None,
        join: Join = None,
        identity: Identity = None,
        config: Config = None,
        json: Json = False,
    ) -> None:
        words = [node, "--note", note, *(["--authority", authority] if authority is not None else [])]
        _operate(operation, words, join, identity, config)

    rule.__name__, rule.__doc__ = operation, help
    return rule


cordon = _ruled("cordon", "Give a node nothing new. What is there stays.")
drain = _ruled("drain", "Give a node nothing new, as it is to become empty.")
retire = _last("retire", "Say that a node has left for good. Its id is never good again.")
remove = _last("remove", "Retire a node that is drained and empty.")


def serve(node: Node, join: Join = None, identity: Identity = None, config: Config = None, json: Json = False) -> None:
    """Let a node take new sandboxes again."""
    _operate("serve", [node], join, identity, config)


def _operate(
    operation: str, words: list[str], join: list[str] | None, identity: str | None, config: str | None
) -> None:
    become("cluster", [operation, *words, *_joins(join)], {"--identity": identity, "--config": config})


def _joins(join: list[str] | None) -> list[str]:
    return [part for url in join or () for part in ("--join", url)]


for _function in (init, issue, nodes, cordon, drain, serve, retire, remove):
    command(app, _function, of="cluster")
