"""How registries are reached: redirects, accounts, tokens, in clear or not."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from dsec.core.errors import (
    DsecError,
    StorageError,
    UnavailableError,
)
from dsec.core.image_names import parse_image_name
from dsec.image.registry.accounts import Accounts
from dsec.image.registry.challenges import Challenge, fetch_token, parse_challenges
from dsec.image.registry.client import Registry, RegistrySettings
from dsec.image.registry.web import Patience, Web, check_redirect
from tests.registries import LARGE, LAYER, Client, Fault, Front

# ---- redirects -----------------------------------------------------------------------------------


def test_blobs_are_fetched_from_where_a_registry_sends_us_without_our_password(front: Front, tmp_path: Path) -> None:
    client = Client(front, tmp_path, login=True)
    front.put_image("team/tools", [LARGE])
    digest = next(path for path, (_, data) in front.content.items() if data == LARGE)
    front.users = {"tester": "not-a-secret"}
    with Front() as elsewhere:
        elsewhere.content["/signed"] = ("application/octet-stream", LARGE)
        target = f"http://{elsewhere.host}/signed?signature=private"
        front.faults = [Fault(digest, status=307, headers={"Location": target}, times=9)]

        client.pull()

        assert [path for _, path, _ in elsewhere.requests] == ["/signed?signature=private"]
        assert "Authorization" not in elsewhere.requests[0][2]
    assert any("Authorization" in headers for _, path, headers in front.requests if path == digest)


def test_signatures_of_places_are_in_no_message(front: Front, client: Client) -> None:
    front.put_image("team/tools", [LARGE])
    with Front() as elsewhere:
        target = f"http://{elsewhere.host}/signed?signature=private"
        front.faults = [Fault("/blobs/", status=307, headers={"Location": target}, times=9)]
        elsewhere.faults = [Fault("/signed", status=418, times=9)]

        with pytest.raises(StorageError, match="answers 418") as caught:
            client.pull()

    assert "private" not in str(caught.value)


def test_redirects_in_a_circle_end(front: Front, client: Client) -> None:
    front.faults = [Fault("/manifests/", status=302, headers={"Location": "/v2/team/tools/manifests/1"}, times=100)]

    with pytest.raises(StorageError, match="redirects more than"):
        client.pull()


@pytest.mark.parametrize(
    ("asked", "target"),
    [
        ("https://example.org/", "http://example.org/"),
        ("https://example.org/", "http://127.0.0.1/"),
        ("https://example.org/", "https://127.0.0.1:8080/"),
        ("https://example.org/", "https://localhost/"),
        ("http://example.org/", "http://169.254.169.254/latest/meta-data"),
        ("http://example.org/", "http://[::1]/"),
        ("http://example.org/", "http://0.0.0.0/"),
        ("https://example.org/", "file:///etc/passwd"),
        ("https://example.org/", "ftp://example.org/"),
        ("https://example.org/", "https://user:pass@example.org/"),
        ("https://example.org/", "https://example.org/\nX: y"),
        ("https://example.org/", "https:///x"),
    ],
)
def test_a_registry_cannot_send_us_to_where_only_we_can_go(asked: str, target: str) -> None:
    with pytest.raises(StorageError):
        check_redirect(asked, target)


def test_a_registry_may_send_us_to_itself_wherever_it_is() -> None:
    check_redirect("https://0.0.0.0/v2/", "https://0.0.0.0/v2/x")


# ---- accounts and tokens -------------------------------------------------------------------------


def test_a_token_is_fetched_with_our_account_and_used_for_all(front: Front, tmp_path: Path) -> None:
    client = Client(front, tmp_path, login=True)
    front.users = {"tester": "not-a-secret"}
    front.put_image("team/tools", [LAYER, LARGE])

    client.pull()

    tokens = [path for _, path, _ in front.requests if path.startswith("/token")]
    assert tokens == ["/token?service=tests&scope=repository%3Ateam%2Ftools%3Apull"]
    for _, path, headers in front.requests:
        assert headers.get("Authorization", "").startswith("Basic ") == path.startswith("/token")


def test_a_token_that_is_over_is_replaced(front: Front, tmp_path: Path) -> None:
    client = Client(front, tmp_path, login=True)
    front.users = {"tester": "not-a-secret"}
    front.token_life_s = 0
    front.put_image("team/tools", [LAYER])

    client.pull()
    front.token_life_s = None
    client.registry.manifest("1")
    front.revoke()

    client.registry.manifest("1")


def test_an_identity_token_is_exchanged(front: Front, tmp_path: Path) -> None:
    client = Client(front, tmp_path)
    (tmp_path / "docker").mkdir()
    auths = {front.host: {"auth": base64.b64encode(b"x:").decode(), "identitytoken": "refreshing"}}
    (tmp_path / "docker" / "config.json").write_text(json.dumps({"auths": auths}))
    front.users = {"<token>": "refreshing"}
    front.put_image("team/tools", [LAYER])

    client.pull()

    assert ("POST", "/token") in [(method, path) for method, path, _ in front.requests]


def test_without_an_account_it_is_said_how_to_get_one(front: Front, client: Client) -> None:
    front.users = {"tester": "not-a-secret"}
    front.put_image("team/tools", [])

    with pytest.raises(StorageError, match="docker login"):
        client.pull()


def test_a_wrong_password_is_not_told(front: Front, tmp_path: Path) -> None:
    client = Client(front, tmp_path, login=True)
    front.users = {"tester": "another"}

    with pytest.raises(StorageError, match="no token") as caught:
        client.pull()

    assert "not-a-secret" not in str(caught.value)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"{}",
        b"[]",
        b'{"token": ""}',
        b'{"token": "a\\nb"}',
        b'{"token": 5}',
        b'{"token": "\\u00e9"}',
        b"x" * 300_000,
    ],
)
def test_a_token_that_is_none_is_an_error(front: Front, tmp_path: Path, answer: bytes) -> None:
    client = Client(front, tmp_path, login=True)
    front.users = {"tester": "not-a-secret"}
    front.faults = [Fault("/token", status=200, body=answer, times=99)]

    with pytest.raises(DsecError):
        client.pull()


@pytest.mark.parametrize("realm", ["file:///etc/passwd", "ftp://example.org/", "", "//example.org", "http://user:x@h/"])
def test_tokens_are_not_fetched_from_anywhere(front: Front, tmp_path: Path, realm: str) -> None:
    client = Client(front, tmp_path, login=True)
    front.users = {"tester": "not-a-secret"}
    front.realm = realm or "-"

    with pytest.raises(StorageError):
        client.pull()


@pytest.mark.parametrize("realm", ["https://169.254.169.254/latest", "https://[fe80::1]/", "https://0.0.0.0:8080/x"])
def test_tokens_are_not_asked_of_services_of_this_machine(realm: str) -> None:
    web = Web()
    with pytest.raises(StorageError, match="of this machine"):
        fetch_token(web, Challenge("bearer", realm), [], None, registry="https://192.0.2.1/", patience=Patience())


def test_challenges_are_read_as_they_come() -> None:
    header = 'Bearer realm="https://auth.example.org/token",service="a \\"b\\"",scope="repository:x:pull,push"'

    assert parse_challenges([header]) == [
        Challenge("bearer", "https://auth.example.org/token", 'a "b"', "repository:x:pull,push")
    ]
    assert parse_challenges(["basic realm=x", 'BASIC realm="y"']) == [Challenge("basic", "x"), Challenge("basic", "y")]
    for nonsense in (
        "",
        "Negotiate",
        "Bearer",
        "=",
        '"',
        "Bearer realm=",
        "Bearer " + "x" * 10_000,
        "Digest a=b",
        "\xff",
    ):
        parse_challenges([nonsense])


# ---- insecure ------------------------------------------------------------------------------------


def test_only_loopback_and_what_is_configured_is_asked_in_clear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def refuse(host: str, port: int, *_: object, **__: object) -> None:
        asked.append(port)
        raise socket.gaierror("no such host")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    name = parse_image_name("registry.invalid/x")
    waited: list[float] = []
    secure = Registry(name, Accounts({"DOCKER_CONFIG": str(tmp_path)}), sleep=waited.append)

    with pytest.raises(UnavailableError):
        secure.manifest("1")
    assert set(asked) == {443}

    settings = RegistrySettings(insecure=("registry.invalid",))
    either = Registry(name, Accounts({"DOCKER_CONFIG": str(tmp_path)}), settings=settings, sleep=waited.append)
    with pytest.raises(UnavailableError):
        either.manifest("1")
    assert set(asked) == {443, 80}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Of 127.0.0.1, and its key; nobody trusts it."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    place = tmp_path_factory.mktemp("tls")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(place / "key"),
         "-out", str(place / "cert")],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    return place / "cert", place / "key"


def test_a_certificate_that_nobody_trusts_is_refused_at_once(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    with Front(tls=certificate) as front:
        client = Client(front, tmp_path, login=True)
        with pytest.raises(StorageError, match=r"certificate of 127\.0\.0\.1:.* is not trusted"):
            client.pull()

    assert client.waited == []
    assert [path for _, path, _ in front.requests] == []


def test_a_certificate_that_the_system_trusts_is_taken(
    certificate: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    with Front(tls=certificate) as front:
        front.put_image("team/tools", [LAYER])

        Client(front, tmp_path).pull()


def test_a_registry_that_is_named_as_insecure_may_have_any_certificate(
    certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    with Front(tls=certificate) as front:
        front.put_image("team/tools", [LAYER])

        Client(front, tmp_path, settings=RegistrySettings(insecure=(front.host,))).pull()
