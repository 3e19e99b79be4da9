"""Dockerfiles: what a build of one is named by, and what is said when it cannot be built."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsec.core.errors import InvalidArgumentError
from dsec.image.sources import dockerfile
from dsec.node import fingerprint
from dsec.serve.config import RegistriesSettings
from dsec.wire.environments import DockerfileSource, Ownership


def test_the_key_names_all_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "context").mkdir()
    context = str(tmp_path / "context")
    (tmp_path / "context" / "Dockerfile").write_text("FROM scratch\n")
    (tmp_path / "other").write_text("FROM scratch\n")
    sources = [
        DockerfileSource(context),
        DockerfileSource(context, file="Dockerfile"),
        DockerfileSource(context, file=str(tmp_path / "other")),
        DockerfileSource(context, target="a"),
        DockerfileSource(context, arguments={"A": "1"}),
        DockerfileSource(context, arguments={"A": "2"}),
        DockerfileSource(context, arguments={"A": "1", "B": "2"}),
        DockerfileSource(context, owner=Ownership.ROOT),
    ]
    keys = [dockerfile.build_key(source) for source in sources]

    assert len(set(keys)) == len(keys)
    assert keys == [dockerfile.build_key(source) for source in sources]

    (tmp_path / "context" / "added").touch()
    (tmp_path / "other").write_text("FROM scratch AS a\n")
    assert not set(keys) & {dockerfile.build_key(source) for source in sources}


@pytest.mark.parametrize("path", ["missing", "file"])
def test_a_directory_that_is_none_is_named(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(InvalidArgumentError, match="cannot open the directory"):
        dockerfile.build_key(DockerfileSource(str(tmp_path / path)))


def test_doctor_says_whether_dockerfiles_can_be_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "buildah"
    program.write_text("#!/bin/sh\necho buildah version 1.2.3 '(image-spec 1.0)'\n")
    program.chmod(0o755)
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    found = []
    for path in (None, str(program), str(broken)):
        monkeypatch.setattr(fingerprint, "buildah_program", lambda path=path: path)
        found.append(fingerprint.dockerfiles())

    assert [finding.status for finding in found] == ["missing", "ok", "missing"]
    assert (found[0].hint, found[1].detail) == ("apt install buildah", "buildah 1.2.3")


def test_settings_of_registries_are_checked_where_they_are_read() -> None:
    settings = RegistriesSettings(insecure=("registry.lan:5000", "index.docker.io"), cache_bytes="1GiB").settings()

    assert (settings.insecure, settings.cache_bytes) == (("registry.lan:5000", "docker.io"), 1 << 30)
    for wrong in ({"insecure": ("http://registry.lan",)}, {"insecure": ("a/b",)}, {"cache_bytes": "much"}):
        with pytest.raises(InvalidArgumentError):
            RegistriesSettings(**wrong)  # type: ignore[arg-type]
