"""Certificates that are replaced while a process runs; and the port for metrics."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dsec.cluster.certificates import client_context, node_name
from dsec.core.errors import HostError
from dsec.serve.authority import AuthorityDirectory
from dsec.serve.cluster_settings import METRICS_DEFAULT
from dsec.serve.metricsport import MetricsPort
from dsec.serve.renewal import LiveIdentity


async def served_serial(port: int, identity: Path, name: str) -> str:
    context = client_context(identity / "ca.pem", identity / "cert.pem", identity / "cert.key")
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name)
    found = writer.get_extra_info("peercert")["serialNumber"]
    writer.close()
    return str(found)


async def test_new_connections_use_what_is_on_the_disk_now(tmp_path: Path) -> None:
    authority = AuthorityDirectory.create(tmp_path / "keys", "main")
    node = authority.issue_node(tmp_path / "node")
    authority.issue_api(tmp_path / "api", "api-1")
    live = LiveIdentity(tmp_path / "node")
    renewal = live.renewal()

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=live.of_node())
    port = server.sockets[0].getsockname()[1]

    async def serial() -> str:
        return await served_serial(port, tmp_path / "api", node_name(node))

    try:
        first, token = await serial(), live.token()
        assert not renewal.look()
        AuthorityDirectory.load(tmp_path / "keys").issue_node(tmp_path / "node", node)
        assert await serial() == first
        assert renewal.look()
        second = await serial()
        assert second != first
        assert live.token() != token

        good = (tmp_path / "node" / "cert.pem").read_bytes()
        (tmp_path / "node" / "cert.pem").write_bytes(good[:200])
        assert not renewal.look()
        assert await serial() == second
        (tmp_path / "node" / "cert.pem").write_bytes((tmp_path / "api" / "cert.pem").read_bytes())
        assert not renewal.look()  # of somebody else, and without its key
        assert await serial() == second
        (tmp_path / "node" / "cert.pem").write_bytes(good)
        assert renewal.look()
    finally:
        server.close()
        await server.wait_closed()


async def test_an_identity_that_is_another_one_is_not_taken(tmp_path: Path) -> None:
    authority = AuthorityDirectory.create(tmp_path / "keys", "main")
    authority.issue_node(tmp_path / "node")
    live = LiveIdentity(tmp_path / "node")
    renewal, before = live.renewal(), live.now
    authority.issue_node(tmp_path / "node", None)

    assert not renewal.look()
    assert live.now is before
    (tmp_path / "node" / "cert.key").unlink()
    assert not renewal.look()


async def _ask(port: int, head: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head)
    answer = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    return answer


async def test_the_port_gives_metrics_and_nothing_else() -> None:
    port = MetricsPort()
    place = await port.listen("127.0.0.1:0")
    assert place is not None
    try:
        whole = await _ask(place[1], b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert whole.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"\ndsec_nodes_lost_total " in whole
        head, _, body = (await _ask(place[1], b"HEAD /metrics HTTP/1.1\r\n\r\n")).partition(b"\r\n\r\n")
        assert b"Content-Length: " in head
        assert body == b""
        assert b" 404 " in await _ask(place[1], b"GET /v1/sandboxes HTTP/1.1\r\n\r\n")
        assert b" 405 " in await _ask(place[1], b"POST /metrics HTTP/1.1\r\n\r\n")
        assert await _ask(place[1], b"x" * 20_000) == b""
    finally:
        await port.close()


async def test_a_port_that_another_process_has_is_an_error_only_where_it_was_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, other = MetricsPort(), MetricsPort()
    place = await one.listen("127.0.0.1:0")
    assert place is not None
    taken = f"127.0.0.1:{place[1]}"
    with pytest.raises(HostError, match="cannot give metrics"):
        await other.listen(taken)
    monkeypatch.setattr("dsec.serve.metricsport.METRICS_DEFAULT", taken)
    assert await other.listen(taken) is None
    assert await other.listen(None) is None
    assert METRICS_DEFAULT.startswith("127.0.0.1:")
    await one.close()
