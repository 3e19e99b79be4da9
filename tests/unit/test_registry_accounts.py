"""Accounts at registries: docker's own file, and its helpers."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest

from dsec.core.errors import StorageError
from dsec.core.image_names import parse_image_name
from dsec.image.registry.accounts import Account, Accounts


def accounts(tmp_path: Path, content: Any, **environ: str) -> Accounts:
    (tmp_path / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return Accounts({"DOCKER_CONFIG": str(tmp_path), **environ})


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def helper(tmp_path: Path, name: str, script: str) -> str:
    """A directory for PATH with that helper in it."""
    directory = tmp_path / "bin"
    directory.mkdir(exist_ok=True)
    program = directory / f"docker-credential-{name}"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return f"{directory}:/usr/bin:/bin"


IMAGE = parse_image_name("example.org:5000/team/tools:1")


@pytest.mark.parametrize(
    "key",
    ["example.org:5000", "https://example.org:5000", "https://example.org:5000/v2/", "example.org:5000/team",
     "example.org:5000/team/tools"],
)  # fmt: skip
def test_an_account_is_found_however_its_registry_is_written(tmp_path: Path, key: str) -> None:
    found = accounts(tmp_path, {"auths": {key: {"auth": encoded("me:pass:word")}}}).find(IMAGE)

    assert found == Account("me", "pass:word")
    assert found is not None
    assert found.basic() == f"Basic {encoded('me:pass:word')}"


def test_the_most_particular_account_is_taken(tmp_path: Path) -> None:
    auths = {
        "example.org:5000": {"auth": encoded("all:x")},
        "example.org:5000/team": {"auth": encoded("team:x")},
        "example.org:5000/tea": {"auth": encoded("other:x")},
    }

    found = accounts(tmp_path, {"auths": auths}).find(IMAGE)

    assert found is not None
    assert found.user == "team"


def test_the_hub_is_found_under_the_name_that_docker_gives_it(tmp_path: Path) -> None:
    content = {"auths": {"https://index.docker.io/v1/": {"username": "me", "password": "x"}}}

    assert accounts(tmp_path, content).find(parse_image_name("debian")) == Account("me", "x")


@pytest.mark.parametrize(
    "content", [{}, {"auths": {}}, {"auths": {"other.org": {}}}, {"auths": {"example.org:5000": {}}}]
)
def test_no_account_is_no_error(tmp_path: Path, content: Any) -> None:
    assert accounts(tmp_path, content).find(IMAGE) is None


def test_no_file_is_no_error(tmp_path: Path) -> None:
    assert Accounts({"DOCKER_CONFIG": str(tmp_path / "nowhere")}).find(IMAGE) is None


def test_the_file_that_podman_uses_comes_first(tmp_path: Path) -> None:
    (tmp_path / "auth.json").write_text(json.dumps({"auths": {"example.org:5000": {"auth": encoded("pod:x")}}}))
    content = {"auths": {"example.org:5000": {"auth": encoded("doc:x")}}}

    found = accounts(tmp_path, content, REGISTRY_AUTH_FILE=str(tmp_path / "auth.json")).find(IMAGE)

    assert found is not None
    assert found.user == "pod"


def test_tokens_in_the_file_are_used(tmp_path: Path) -> None:
    auths = {"example.org:5000": {"auth": encoded("00000000:"), "identitytoken": "it"}}

    assert accounts(tmp_path, {"auths": auths}).find(IMAGE) == Account("00000000", "", identity_token="it")


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{", '{"auths": []}', '{"auths": {"example.org:5000": {"auth": "@@secret@@"}}}', "[" * 100_000,
     " " * 2_000_000],
)  # fmt: skip
def test_a_file_that_is_broken_is_said_without_what_is_in_it(tmp_path: Path, content: str) -> None:
    with pytest.raises(StorageError) as caught:
        accounts(tmp_path, content).find(IMAGE)

    assert "secret" not in str(caught.value)


def test_a_directory_or_a_pipe_is_no_file_of_accounts(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(StorageError, match="is not a file"):
            Accounts({"REGISTRY_AUTH_FILE": str(path)}).find(IMAGE)


def test_a_helper_is_asked_for_its_registry(tmp_path: Path) -> None:
    path = helper(tmp_path, "mine", 'read host; echo "{\\"Username\\": \\"$host\\", \\"Secret\\": \\"s\\"}"')

    found = accounts(tmp_path, {"credHelpers": {"example.org:5000": "mine"}}, PATH=path)

    assert found.find(IMAGE) == Account("example.org:5000", "s")
    assert found.find(parse_image_name("other.org/x")) is None


def test_a_store_is_asked_for_every_registry_and_may_hold_identity_tokens(tmp_path: Path) -> None:
    path = helper(tmp_path, "store", 'read host; echo "{\\"Username\\": \\"<token>\\", \\"Secret\\": \\"$host\\"}"')

    found = accounts(tmp_path, {"credsStore": "store"}, PATH=path)

    assert found.find(parse_image_name("debian")) == Account(identity_token="https://index.docker.io/v1/")


def test_a_store_without_the_account_leaves_it_to_the_file(tmp_path: Path) -> None:
    path = helper(tmp_path, "store", "echo credentials not found in native keychain; exit 1")
    auths = {"example.org:5000": {"auth": encoded("me:x")}}

    found = accounts(tmp_path, {"credsStore": "store", "auths": auths}, PATH=path).find(IMAGE)

    assert found == Account("me", "x")


@pytest.mark.parametrize(
    "script", ["echo secret-of-mine; exit 3", "echo secret-of-mine", "head -c 1000000 /dev/zero", "exec 0<&-; exit 4"]
)
def test_a_helper_that_fails_is_said_without_its_words(tmp_path: Path, script: str) -> None:
    found = accounts(tmp_path, {"credsStore": "bad"}, PATH=helper(tmp_path, "bad", script))

    with pytest.raises(StorageError, match="docker-credential-bad") as caught:
        found.find(IMAGE)

    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("name", ["missing", "../../bin/sh", "a b", ""])
def test_a_helper_that_is_not_there_is_named(tmp_path: Path, name: str) -> None:
    found = accounts(tmp_path, {"credHelpers": {"example.org:5000": name}}, PATH=str(tmp_path))

    if not name:
        assert found.find(IMAGE) is None
        return
    with pytest.raises(StorageError, match="not installed"):
        found.find(IMAGE)


def test_passwords_are_in_no_repr() -> None:
    text = repr(Account("me", "hidden", "hidden", "hidden"))

    assert "me" in text
    assert "hidden" not in text
