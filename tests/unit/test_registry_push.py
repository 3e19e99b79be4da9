"""Pushing to registries that make no sense."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsec.core.errors import (
    StorageError,
    UnavailableError,
)
from dsec.image.registry.push import is_there, upload
from tests.registries import Client, Fault, Front


def test_an_upload_to_a_server_that_makes_no_sense_ends(front: Front, tmp_path: Path) -> None:
    client = Client(front, tmp_path, push=True)
    for location in ("", "ftp://example.org/", "http://user:x@h/"):
        headers = {"Location": location} if location else {}
        front.faults = [Fault("/uploads/", status=202, headers=headers, method="POST", times=99)]

        with pytest.raises(StorageError):
            upload(client.registry, "sha256:" + "0" * 64, b"x")


def test_a_place_for_uploads_is_not_told_who_we_are(front: Front, tmp_path: Path) -> None:
    client = Client(front, tmp_path, login=True, push=True)
    front.users = {"tester": "not-a-secret"}
    with Front() as thief, Front() as elsewhere:
        elsewhere.faults = [
            Fault("/up", status=401, headers={"WWW-Authenticate": f'Bearer realm="http://{thief.host}/token"'},
                  method="PUT", times=99),
        ]  # fmt: skip
        location = {"Location": f"http://{elsewhere.host}/up"}
        front.faults = [
            Fault("/uploads/", status=401, headers={"WWW-Authenticate": f'Bearer realm="http://{front.host}/token"'},
                  method="POST"),
            Fault("/uploads/", status=202, headers=location, method="POST", times=99),
        ]  # fmt: skip

        with pytest.raises(StorageError, match="refuses"):
            upload(client.registry, "sha256:" + "0" * 64, b"x")

        assert thief.requests == []
        assert all("Authorization" not in headers for _, _, headers in elsewhere.requests)
        assert any(headers.get("Authorization", "").startswith("Bearer") for _, _, headers in front.requests)


@pytest.mark.parametrize("location", ["https://169.254.169.254/x", "http://127.0.0.1:1/x", "http://0.0.0.0/x"])
def test_uploads_do_not_go_to_services_of_this_machine(
    front: Front, tmp_path: Path, location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(front, tmp_path, push=True)
    front.faults = [Fault("/uploads/", status=202, headers={"Location": location}, method="POST", times=99)]
    monkeypatch.setattr("dsec.image.registry.web.is_loopback", lambda url: "127.0.0.1:1" in url)

    with pytest.raises(StorageError, match="of this machine"):
        upload(client.registry, "sha256:" + "0" * 64, b"x")


def test_an_upload_that_is_forgotten_again_and_again_is_given_up(front: Front, tmp_path: Path) -> None:
    client = Client(front, tmp_path, push=True)
    front.faults = [Fault("/uploads/", status=202, headers={"Location": "/v2/team/tools/up"}, method="POST", times=99)]

    with pytest.raises(UnavailableError):
        upload(client.registry, "sha256:" + "0" * 64, b"x")


def test_a_mount_that_the_registry_does_not_know_is_an_upload_that_is_cancelled(front: Front, tmp_path: Path) -> None:
    client = Client(front, tmp_path, push=True)
    front.faults = [Fault("/uploads/", status=202, headers={"Location": "/v2/team/tools/up"}, method="POST")]

    assert not is_there(client.registry, "sha256:" + "0" * 64, (f"{front.host}/other", "elsewhere/x"))

    assert [(method, path) for method, path, _ in front.requests if method in ("POST", "DELETE")] == [
        ("POST", f"/v2/team/tools/blobs/uploads/?mount=sha256%3A{'0' * 64}&from=other"),
        ("DELETE", "/v2/team/tools/up"),
    ]
