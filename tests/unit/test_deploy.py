"""The files in deploy/ are valid as far as that can be seen here, and start what there is."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
import typer
import yaml

from dsec.cli.main import app

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
KINDS = {"DaemonSet": "apps/v1", "Deployment": "apps/v1", "Service": "v1"}


def documents() -> list[dict[str, Any]]:
    return [document for path in MANIFESTS for document in yaml.safe_load_all(path.read_text()) if document]


def check_command(words: list[str]) -> None:
    """That dsec takes this command line. Nothing is run."""
    assert words[0] == "/opt/dsec/.venv/bin/dsec"
    group = typer.main.get_command(app)
    command = group.get_command(click.Context(group), words[1])  # type: ignore[attr-defined]
    assert command is not None, words[1]
    command.make_context(words[1], list(words[2:]), resilient_parsing=False)


def test_there_is_one_of_each() -> None:
    assert [path.stem for path in UNITS] == ["dsec-api", "dsec-node", "dsec-watcher"]
    assert sorted(document["metadata"]["name"] for document in documents()) == [
        "dsec-api", "dsec-api", "dsec-node", "dsec-watcher",
    ]  # fmt: skip


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_units_start_what_there_is(path: Path) -> None:
    (line,) = re.findall(r"^ExecStart=(.*)$", path.read_text(), re.M)

    check_command(shlex.split(line))


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_systemd_takes_the_units(path: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze")
    # Of a machine that has dsec where the unit expects it.
    text = re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", path.read_text(), flags=re.M)
    copy = tmp_path / path.name
    copy.write_text(text)
    done = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True, timeout=60)
    complaints = [line for line in done.stderr.splitlines() if path.name in line]

    assert (complaints, done.returncode if complaints else 0) == ([], 0)


def test_a_nodes_unit_leaves_its_sandboxes_running() -> None:
    text = (DEPLOY / "systemd" / "dsec-node.service").read_text()

    assert "KillMode=process" in text
    assert "RuntimeDirectoryPreserve=yes" in text


def test_manifests_have_the_shape_of_their_kinds() -> None:
    for document in documents():
        assert KINDS[document["kind"]] == document["apiVersion"]
        assert document["metadata"]["namespace"] == "dsec"
        if document["kind"] == "Service":
            continue
        spec = document["spec"]
        pod = spec["template"]["spec"]
        assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in [*pod["containers"], *pod.get("initContainers", ())]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            assert container["image"]


def test_manifests_start_what_there_is() -> None:
    commands = [
        container["command"]
        for document in documents()
        if document["kind"] != "Service"
        for container in document["spec"]["template"]["spec"]["containers"]
    ]

    assert len(commands) == 3
    for command in commands:
        check_command(command)


def test_the_service_finds_the_replicas() -> None:
    found = {(document["kind"], document["metadata"]["name"]): document for document in documents()}
    service, api = found["Service", "dsec-api"], found["Deployment", "dsec-api"]
    ports = {port["name"] for port in api["spec"]["template"]["spec"]["containers"][0]["ports"]}

    assert service["spec"]["selector"] == api["spec"]["template"]["metadata"]["labels"]
    assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
