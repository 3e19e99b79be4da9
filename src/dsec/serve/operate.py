"""`dsec cluster …`: makes the keys of a cluster, issues identities, and tells nodes what is wanted of them."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import secrets
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from nats.aio.msg import Msg

from dsec.cluster.engine.buckets import EngineRegistry
from dsec.cluster.engine.connection import Engine, EngineSettings
from dsec.cluster.engine.layout import Layout
from dsec.cluster.members.nodes import SUSPECT_S
from dsec.cluster.members.rulings import want
from dsec.cluster.registry import Bucket, Entry
from dsec.core.errors import ConflictError, InvalidArgumentError, Outcome, ProtocolError, UnavailableError
from dsec.core.ids import NodeId, parse_node_id
from dsec.serve.authority import AuthorityDirectory
from dsec.serve.config import load_config
from dsec.serve.identity import Identity
from dsec.wire.cluster import Card, Heartbeat, Member, Ruling, Wanted, ruling_key
from dsec.wire.codec import unpack

_WANTED: Final = {
    "serve": Wanted.SERVE,
    "cordon": Wanted.CORDON,
    "drain": Wanted.DRAIN,
    "retire": Wanted.RETIRE,
    "remove": Wanted.RETIRE,
}
_ISSUED: Final = ("node", "api", "nats")


def run_operation(options: argparse.Namespace, flags: Mapping[str, Any]) -> int:
    operation, names = options.operation, options.names
    if operation == "init":
        return _init(options, _one(names, "DIR"))
    if operation == "issue":
        return _issue(options, names)
    if operation in ("nodes", *_WANTED):
        # On TLS that was begun later asyncio warns of each end of a connection, on stderr.
        logging.getLogger("asyncio").setLevel(logging.ERROR)
        return asyncio.run(_ask(options, flags))
    raise InvalidArgumentError(
        f"there is no `dsec cluster {operation}`", hint=f"init, issue, nodes, {', '.join(_WANTED)}"
    )


def _init(options: argparse.Namespace, directory: str) -> int:
    AuthorityDirectory.create(Path(directory), options.unit)
    _tell(options, {"authority": directory, "unit": options.unit}, f"the keys of {options.unit} are in {directory}")
    return 0


def _issue(options: argparse.Namespace, names: list[str]) -> int:
    usage = "dsec cluster issue node|api|nats DIR [NAME…] --authority DIR"
    if names and names[0] not in _ISSUED:
        raise InvalidArgumentError(f"there is no identity of {names[0][:80]!r}", hint=usage)
    if len(names) < 2:
        raise InvalidArgumentError("issue what, and into which directory?", hint=usage)
    what, into, more = names[0], Path(names[1]), names[2:]
    if options.authority is None:
        raise InvalidArgumentError("--authority names the directory that `dsec cluster init` has made")
    authority = AuthorityDirectory.load(options.authority)
    told: dict[str, Any] = {"identity": str(into), "of": what}
    if what == "node":
        told["node"] = authority.issue_node(into, parse_node_id(more[0]) if more else None, days=options.days)
    elif what == "api":
        authority.issue_api(into, more[0] if more else f"api-{secrets.token_hex(3)}", days=options.days)
    else:
        if not more:
            raise InvalidArgumentError(
                "name the hosts of the NATS server", hint="dsec cluster issue nats DIR nats-1 10.0.0.2"
            )
        authority.issue_nats(into, more, days=options.days)
    who = f"node {told['node']}" if what == "node" else what
    _tell(options, told, f"the identity of {who} is in {into}")
    return 0


async def _ask(options: argparse.Namespace, flags: Mapping[str, Any]) -> int:
    config = load_config(flags, os.environ, file=options.config)
    config.cluster.check_servers()
    identity = Identity.load(Path(config.cluster.identity))
    identity.check_role(node=False)
    who = f"operator-{secrets.token_hex(4)}"
    settings = EngineSettings(
        config.cluster.servers, Layout(identity.unit), who, identity.credentials, identity.to_engine()
    )
    engine = await Engine.connect(settings)
    try:
        registry = EngineRegistry(engine)
        if options.operation == "nodes":
            members, cards = await registry.entries(Bucket.MEMBERS), await registry.entries(Bucket.NODES)
            _list(options, members, cards, await _heard(engine, {entry.key for entry in cards}))
            return 0
        node = parse_node_id(_one(options.names, "NODE"))
        authority = None if options.authority is None else AuthorityDirectory.load(options.authority)
        if authority is not None:
            authority.issued_to(node)  # raises before anything is done
        if options.operation == "remove":
            await check_empty(engine, registry, node)
        ruling = await want(registry, node, _WANTED[options.operation], note=options.note)
        if options.operation == "remove":
            await registry.delete(Bucket.NODES, node)
        told: dict[str, Any] = {"node": node, "wanted": str(ruling.wanted)}
        text = f"node {node}: {ruling.wanted}"
        if authority is not None:
            told |= {"revoked": authority.revoke(node), "trust": str(authority.trust)}
            text += f"; copy {authority.trust} to each NATS server, and reload it (nats-server --signal reload=PID)"
        _tell(options, told, text)
        return 0
    finally:
        await engine.close()


async def check_empty(engine: Engine, registry: EngineRegistry, node: NodeId) -> None:
    """Raises ConflictError for a node that takes new sandboxes or has some, UnavailableError for one that is silent."""
    entry = await registry.get(Bucket.MEMBERS, ruling_key(node))
    wanted = Wanted.SERVE if entry is None else unpack(entry.value, Ruling).wanted
    if wanted is Wanted.SERVE:
        raise ConflictError(f"node {node} takes new sandboxes", hint=f"first: dsec cluster drain {node}")
    beat = await _next_beat(engine, node)
    if beat.admits:
        raise UnavailableError(f"node {node} does not know yet that it is drained", retry_after_s=SUSPECT_S)
    if beat.load.sandboxes:
        raise ConflictError(
            f"node {node} has {beat.load.sandboxes} sandboxes",
            hint=f"they end by their callers, or by their times to live; `dsec cluster retire {node}` gives them up",
        )


async def _next_beat(engine: Engine, node: NodeId) -> Heartbeat:
    beats: asyncio.Queue[Heartbeat] = asyncio.Queue(1)

    async def hear(message: Msg) -> None:
        with contextlib.suppress(ProtocolError, asyncio.QueueFull):
            beats.put_nowait(unpack(message.data, Heartbeat))

    subscription = await engine.listen(engine.layout.heartbeat(node), hear)
    try:
        async with asyncio.timeout(SUSPECT_S):
            return await beats.get()
    except TimeoutError:
        raise UnavailableError(
            f"node {node} gives no sign of life, and may have sandboxes",
            outcome=Outcome.UNCHANGED,
            hint=f"`dsec cluster retire {node}` says that it never comes back",
        ) from None
    finally:
        await subscription.unsubscribe()


async def _heard(engine: Engine, nodes: set[str]) -> set[str]:
    """Those of them that give a sign of life before they would be suspect. It takes a second where all do."""
    heard: set[str] = set()
    everybody = asyncio.Event()

    async def hear(message: Msg) -> None:
        heard.add(message.subject.rpartition(".")[2])
        if heard >= nodes:
            everybody.set()

    await engine.listen(engine.layout.heartbeat("*"), hear)
    if nodes:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SUSPECT_S):
                await everybody.wait()
    return heard


def _list(options: argparse.Namespace, members: list[Entry], cards: list[Entry], heard: set[str]) -> None:
    found = {entry.key: entry for entry in members}
    shown = {entry.key: unpack(entry.value, Card) for entry in cards}
    rows = []
    for key, entry in found.items():
        if "." in key:
            continue
        member = unpack(entry.value, Member)
        ruled = found.get(ruling_key(key))
        ruling = unpack(ruled.value, Ruling) if ruled else Ruling()
        rows.append(_row(member, ruling, shown.get(key), late=key not in heard))
    if options.json:
        sys.stdout.write(json.dumps(rows) + "\n")
        return
    for row in rows:
        words = (row["node"], f"{row['state']:8}", f"{row['wanted']:7}", f"{row['address'] or '-':24}")
        sys.stdout.write("  ".join((*words, ",".join(row["substrates"]), row["note"])).rstrip() + "\n")


def _row(member: Member, ruling: Ruling, card: Card | None, *, late: bool) -> dict[str, Any]:
    if ruling.wanted == Wanted.RETIRE:
        state = "retired"
    elif card is not None:
        state = "stopped" if card.stopped and late else "late" if late else "here"
    else:
        state = "lost" if ruling.lost_term >= member.term else "away"
    return {
        "node": member.node,
        "state": state,
        "wanted": str(ruling.wanted),
        "note": ruling.note,
        "term": member.term,
        "joined_s_ago": round(max(time.time() - member.joined_at, 0.0)),
        "address": f"{card.host}:{card.port}" if card else None,
        "substrates": list(card.substrates) if card else [],
        "labels": card.labels if card else {},
        "version": card.version if card else None,
    }


def _one(names: list[str], what: str) -> str:
    if len(names) != 1:
        raise InvalidArgumentError(f"give one {what}")
    return names[0]


def _tell(options: argparse.Namespace, answer: dict[str, Any], text: str) -> None:
    if options.json:
        sys.stdout.write(json.dumps(answer) + "\n")
    elif not options.quiet:
        sys.stderr.write(f"dsec: {text}\n")
