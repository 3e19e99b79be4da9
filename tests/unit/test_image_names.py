"""Names of images, as docker and podman write them."""

from __future__ import annotations

import pytest

from dsec.core.errors import InvalidArgumentError
from dsec.core.image_names import parse_image_name, parse_registry

DIGEST = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("text", "full", "reference"),
    [
        ("debian", "docker.io/library/debian", "latest"),
        ("debian:12", "docker.io/library/debian:12", "12"),
        ("team/tools", "docker.io/team/tools", "latest"),
        ("index.docker.io/debian", "docker.io/library/debian", "latest"),
        ("localhost/x", "localhost/x", "latest"),
        ("localhost:5000/a/b__c/d-e.f:V1", "localhost:5000/a/b__c/d-e.f:V1", "V1"),
        ("registry.example.org/a", "registry.example.org/a", "latest"),
        ("[::1]:5000/a", "[::1]:5000/a", "latest"),
        (f"127.0.0.1:1/x@{DIGEST}", f"127.0.0.1:1/x@{DIGEST}", DIGEST),
        (f"a/b:t@{DIGEST}", f"docker.io/a/b:t@{DIGEST}", DIGEST),
    ],
)
def test_a_name_says_where_an_image_is(text: str, full: str, reference: str) -> None:
    name = parse_image_name(text)

    assert (str(name), name.reference) == (full, reference)
    assert parse_image_name(str(name)) == name


@pytest.mark.parametrize(
    "text",
    [
        "", ":", "/", "a:", "a:b:c", "a//b", "A", "a/B", "example.org/", "https://example.org/a", "a@sha256:1", "-a",
        "a@", "a b", "a\n", "a:t\n", "../a", "example.org/../a", "user@example.org/a", "example.org:port/a",
        "x" * 2_000,
        f"a@{DIGEST}0", "a:" + "t" * 129, "example.org/" + "p" * 250,
    ],
)  # fmt: skip
def test_what_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="not the name of an image"):
        parse_image_name(text)


def test_registries_are_hosts() -> None:
    assert parse_registry("example.org:5000") == "example.org:5000"
    assert parse_registry("registry-1.docker.io") == "docker.io"
    for text in ("example.org/a", "https://example.org", "", "a b"):
        with pytest.raises(InvalidArgumentError):
            parse_registry(text)
