"""What there is to say of the parts of a cluster."""

from __future__ import annotations

from typing import Final

from dsec.cli.page import OF_SERVICE, Page

CLUSTER: Final[dict[str, Page]] = {
    "api": Page(
        "It finds the nodes through NATS, and any other replica can answer in its place. It listens at a socket in its "
        "run directory and, with --listen, on TCP. [cluster] in the configuration holds what flags leave out.",
        (("dsec api --join tls://nats-1:4222 --listen 0.0.0.0:8080 …", "a replica, with a certificate for callers"),),
        "its errors",
        OF_SERVICE,
    ),
    "node": Page(
        "It joins under the id in its identity, and serves API replicas alone. Without NATS its sandboxes run on and "
        "are served; it takes nothing new. When another process joins under its id, it ends. With --leave it ends "
        "the launcher and its mounts and removes the machine's identity instead, and refuses while sandboxes live.",
        (
            ("dsec node --join tls://nats-1:4222 --advertise 10.0.0.5:7373", "join, and say where replicas reach it"),
            ("dsec node --leave", "after `dsec cluster remove`, when it has ended"),
        ),
        "its errors",
        OF_SERVICE,
    ),
    "watcher": Page(
        "A node that has not been heard of for 30 seconds, and 10 more, is declared lost. While NATS is away, or many "
        "nodes go at once, none is.",
        (("dsec watcher --join tls://nats-1:4222", "one of any number"),),
        "its errors",
        OF_SERVICE,
    ),
    "cluster init": Page(
        "Who has this directory can make nodes and replicas: it belongs on an operator's machine, and into a backup.",
        (("dsec cluster init ~/dsec-keys", "once for each cluster"),),
        "authority, unit",
        OF_SERVICE,
    ),
    "cluster issue": Page(
        "The directory is copied to the machine as /etc/dsec/identity. A node gets a new id, unless one is named: then "
        "it gets a certificate and credentials that are good for longer.",
        (
            ("dsec cluster issue nats nats-1 nats-1 10.0.0.2 --authority ~/dsec-keys", "for a NATS server"),
            ("dsec cluster issue api api-1 --authority ~/dsec-keys", "for a replica, or a watcher"),
            ("dsec cluster issue node worker-7 --authority ~/dsec-keys", "for a new node"),
        ),
        "identity, of, and of a node its id",
        OF_SERVICE,
    ),
    "cluster nodes": Page(
        "A node is `late` when it gives no sign of life for five seconds: nothing new goes there. One whose process "
        "was stopped is `stopped`, and half a minute later `away`.",
        (("dsec cluster nodes", "who is here, stopped, late, away, lost or retired, and what is wanted of each"),),
        "a list of node, state, wanted, note, term, joined_s_ago, address, substrates, labels, version",
        OF_SERVICE,
    ),
    "cluster cordon": Page(
        "", (("dsec cluster cordon k7m2p4qz --note 'disk swap'", "until `serve`"),), "node, wanted", OF_SERVICE
    ),
    "cluster drain": Page(
        "Its sandboxes end as their callers end them, or by their times to live.",
        (("dsec cluster drain k7m2p4qz", "before it goes away"),),
        "node, wanted",
        OF_SERVICE,
    ),
    "cluster serve": Page("", (("dsec cluster serve k7m2p4qz", "after cordon or drain"),), "node, wanted", OF_SERVICE),
    "cluster remove": Page(
        "Only a node that was drained and says that it has no sandboxes. Its process ends, its id is never good again, "
        "and nothing is written for its credentials any more. With --authority NATS refuses them, too, once its "
        "servers have the trust file that is named. Its machine is cleaned there: `dsec node --leave`.",
        (("dsec cluster remove k7m2p4qz --authority ~/dsec-keys", "some time after `dsec cluster drain k7m2p4qz`"),),
        "node, wanted; with --authority: revoked, trust",
        OF_SERVICE,
    ),
    "cluster retire": Page(
        "Who asks for one of its sandboxes is told that it is gone. Its machine can join again under a new identity.",
        (
            ("dsec cluster retire k7m2p4qz", "a machine that does not come back"),
            ("dsec cluster retire k7m2p4qz --authority ~/dsec-keys", "one that others may have: its keys are void"),
        ),
        "node, wanted; with --authority: revoked, trust",
        OF_SERVICE,
    ),
}
