"""Compose files: what becomes of each key, and that nothing of them is passed over."""

from __future__ import annotations

import builtins
import os
from pathlib import Path
from typing import Any

import pytest

from dsec.core.errors import InvalidArgumentError, LimitError, UnsupportedError
from dsec.core.spec import Link, ReadyProbe, SandboxSpec, VolumeMount
from dsec.sdk.compose import Composed, environment_of, read_compose
from dsec.wire.groups import create_request, levels


def read(directory: Path, text: str, **more: Any) -> Composed:
    file = directory / "compose.yaml"
    file.write_text(text)
    return read_compose(file, **{"variables": {}, "name": "shop", **more})


def spec_of(directory: Path, lines: str, **more: Any) -> SandboxSpec:
    """Of a service with these keys beside its image."""
    text = "services:\n  web:\n    image: base\n" + "".join(f"    {line}\n" for line in lines.strip().splitlines())
    return read(directory, text, **more).members["web"].spec


def test_a_service_becomes_a_sandbox(tmp_path: Path) -> None:
    lines = ("# of the service", "export A=from file", "B='quoted # not a comment'", "", "C=c # comment")
    (tmp_path / "web.env").write_text("\n".join(lines))
    spec = spec_of(
        tmp_path,
        """
command: serve --port 80 'two words'
entrypoint: ["/bin/tool"]
environment: [A=from list, OWN, UNSET, EMPTY=]
env_file: [web.env, {path: missing.env, required: false}]
working_dir: /srv
user: "1000:1000"
container_name: front
cpus: 0.5
mem_limit: 512m
pids_limit: 64
labels: {tier: front, n: 3, fast: true}
restart: "no"
platform: linux/amd64
healthcheck: {test: [CMD-SHELL, "test -e /up"], interval: 2s, timeout: 3s, retries: 4, start_period: 1m30s}
""",
        variables={"OWN": "mine"},
    )

    assert spec.start
    assert spec.entrypoint == ("/bin/tool",)
    assert spec.command == ("serve", "--port", "80", "two words")
    assert spec.env == {"A": "from list", "B": "quoted # not a comment", "C": "c", "OWN": "mine", "EMPTY": ""}
    assert (spec.workdir, spec.user, spec.name) == ("/srv", "1000:1000", "front")
    assert (spec.cpu, spec.memory_bytes, spec.pids_max) == (0.5, 512 << 20, 64)
    assert spec.labels == {"tier": "front", "n": "3", "fast": "true"}
    assert spec.ready == ReadyProbe(shell="test -e /up", interval_s=2.0, timeout_s=110.0)


def test_services_are_linked_ordered_and_chosen(tmp_path: Path) -> None:
    composed = read(
        tmp_path,
        """
services:
  web: {image: base, depends_on: {db: {condition: service_healthy}, cache: {required: false}}, ports: ["8080:80"]}
  db: {image: "postgres:16", expose: [5432, "6000-6001/tcp"], healthcheck: {test: pg_isready}}
  cache: {image: redis, profiles: [fast], ports: [{target: 6379, published: "6379"}]}
""",
    )
    request = composed.request(timeout_s=60)

    assert levels(request) == [["db"], ["web"]]
    spec = create_request(request, "web").spec
    assert spec.links == (Link("db", 5432), Link("db", 6000), Link("db", 6001))
    assert (spec.job, spec.member, spec.name) == ("shop", "web", "shop-web")
    assert create_request(request, "db").spec.links == (Link("web", 80),)
    assert composed.images == {"base": "base", "postgres:16": "postgres:16"}
    assert composed.notes == ("service web: port 80 is not published here; sandbox.connect_port reaches it",)
    with_cache = read(tmp_path, (tmp_path / "compose.yaml").read_text(), profiles=["fast"])
    assert set(with_cache.members) == {"web", "db", "cache"}


def test_two_of_one_port_are_told_apart_by_who_reaches_them(tmp_path: Path) -> None:
    text = """
services:
  a: {image: base, expose: [80], x-dsec-links: []}
  b: {image: base, expose: [80], x-dsec-links: []}
  front: {image: base}
"""
    request = read(tmp_path, text).request(timeout_s=60)

    assert create_request(request, "front").spec.links == (Link("a", 80), Link("b", 80))
    with pytest.raises(InvalidArgumentError, match="listens on port 80 itself"):
        read(tmp_path, text.replace(", x-dsec-links: []", "")).request(timeout_s=60)


def test_named_volumes_are_of_the_group_unless_they_are_external(tmp_path: Path) -> None:
    composed = read(
        tmp_path,
        """
services:
  db: {image: base, volumes: ["data:/data", {type: volume, source: old, target: /old, read_only: true}, "x:/x:ro"]}
volumes: {data: , old: {external: true}, x: {name: called}, unused: }
""",
    )

    assert composed.members["db"].spec.volumes == (
        VolumeMount("shop-data", "/data"),
        VolumeMount("old", "/old", readonly=True),
        VolumeMount("called", "/x", readonly=True),
    )
    assert composed.volumes == ("called", "shop-data")


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ("$NAME", "v"),
        ("${NAME}", "v"),
        ("${NONE:-d}", "d"),
        ("${EMPTY:-d}", "d"),
        ("${EMPTY-d}", ""),
        ("${NONE-}", ""),
        ("${NAME:+is set}", "is set"),
        ("${NONE+is set}", ""),
        ("$$NAME costs 5$$", "$NAME costs 5$"),
        ("a${NAME}b${NAME}", "avbv"),
    ],
)
def test_variables_are_filled_in(tmp_path: Path, given: str, value: str) -> None:
    spec = spec_of(tmp_path, f"environment: {{X: '{given}'}}", variables={"NAME": "v", "EMPTY": ""})

    assert spec.env == {"X": value}


def test_a_service_has_a_network_when_that_is_asked_for(tmp_path: Path) -> None:
    spec = spec_of(
        tmp_path, "x-dsec-network: proxied\nx-dsec-egress: [Packages.example, $HOST]", variables={"HOST": "a.example"}
    )

    assert (spec.network, spec.egress) == ("proxied", ("packages.example", "a.example"))
    assert spec_of(tmp_path, "x-dsec-network: proxied").egress is None
    assert spec_of(tmp_path, "x-other: {a: 1}").network == "none"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("x-dsec-egress: [packages.example]", "network proxied"),
        ("x-dsec-network: host", "there is no network 'host'"),
        ("x-dsec-network: proxied\nx-dsec-egress: packages.example", "it must be a list"),
        ("x-dsec-network: proxied\nx-dsec-egress: [80]", "every rule must be text"),
        ("x-dsec-network: proxied\nx-dsec-egres: [packages.example]", "'x-dsec-egres' is not supported"),
    ],
)
def test_what_is_not_said_rightly_of_a_network_is_refused(tmp_path: Path, lines: str, said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=said):
        spec_of(tmp_path, lines)


def test_variables_come_from_a_file_beside_it_too(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("TAG=12\nOTHER=file\n")

    spec = spec_of(tmp_path, "environment: {TAG: $TAG, OTHER: $OTHER}", variables={"OTHER": "given"})

    assert spec.env == {"TAG": "12", "OTHER": "given"}


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("networks: [a]", "service web: 'networks' is not supported"),
        ("privileged: true", "service web: 'privileged' is not supported"),
        ("bulid: .", "service web: 'bulid' is not supported"),
        ("restart: always", "service web, restart"),
        ("platform: linux/arm64", "service web, platform"),
        ("volumes: ['./src:/src']", "service web, volumes: './src' is a directory of this machine"),
        ("volumes: ['/etc:/etc:ro']", "directory of this machine"),
        ("volumes: [{type: bind, source: ., target: /x}]", "mounts of type 'bind'"),
        ("volumes: [data:/data]", "there is no volume 'data'"),
        ("volumes: [/data]", "has no name"),
        ("ports: ['53:53/udp']", "only TCP"),
        ("ports: [99999]", "service web, ports: '99999' is no port"),
        ("ports: [90-80]", "'90-80' is no range of ports"),
        ("ports: [1000-2000]", "has more than 64 ports"),
        ("ports: [{target: x}]", "'x' is no port"),
        ("expose: [a]", "is no port"),
        ("x-dsec-network: foo", "service web, x-dsec-network: there is no network 'foo'"),
        ("environment: {A: $NONE}", "the variable NONE is not set"),
        ("environment: {A: '${NONE:?say which}'}", "say which"),
        ("environment: {A: 5$}", "names no variable"),
        ("environment: {A: [1]}", "must be text"),
        ("env_file: none.env", "none.env cannot be read"),
        ("depends_on: [db]", "there is no service 'db'"),
        ("depends_on: {web: {condition: service_healthy}}", "no healthcheck"),
        ("depends_on: {web: {condition: service_completed_successfully}}", "cannot be waited for"),
        ("deploy: {replicas: 3}", "service web, deploy: 'replicas' is not supported"),
        ("deploy: {resources: {reservations: {cpus: '1'}}}", "service web, deploy.resources: 'reservations'"),
        ("deploy: {resources: {limits: {cpus: '1'}}}\ncpus: 2", "say different things"),
        ("mem_limit: much", "is no size"),
        ("cpus: many", "is no number"),
        ("cpus: 0", "service web: cpu must be between"),
        ("healthcheck: {test: [RUN, x]}", "test must be text"),
        ("healthcheck: {test: x, interval: soon}", "is no duration"),
        ("healthcheck: {test: x, every: 1s}", "and nothing else"),
        ("command: {a: b}", "service web, command: it must be text or a list of texts"),
        ("labels: {a: [", "is no YAML"),
        ("command: 'unended \"'", "cannot be split"),
        ("image: base\nimage: other", "is there twice"),
        ("user: [a]", "service web, user: \"['a']\" is no text"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, lines: str, said: str) -> None:
    with pytest.raises(InvalidArgumentError) as found:
        spec_of(tmp_path, lines)

    assert said in found.value.message

    assert found.value.hint


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("services: {}", "no service to start"),
        ("[]", "must be a mapping"),
        ("services: {a: {image: base}}\nnetworks: {}", "'networks' is not supported"),
        ("services: {a: {image: base}}\nvolumes: {v: {driver: nfs}}", "volume v: 'driver' is not supported"),
        ("services: {a: }", "has no image"),
        ("services: {a: {build: .}}", "'build' is not supported"),
        ("services: {A_: {image: base}}", "no name of a member"),
        ("services: {a: {image: base, profiles: [x]}}", "no service to start"),
        ("services: [a]", "must be a mapping"),
        ("a: !!python/object/apply:os.system [id]", "is no YAML"),
        ("a: {b", "is no YAML"),
        ("services: {a: {image: base}}\nservices: {}", "is there twice"),
    ],
)
def test_files_that_make_no_sense_are_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InvalidArgumentError) as found:
        read(tmp_path, text)

    assert said in found.value.message


def test_a_small_file_does_not_become_a_huge_one(tmp_path: Path) -> None:
    laughs = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9)
    )
    merges = "m0: &m0 {k: v}\n" + "".join(f"m{n}: &m{n} {{<<: [*m{n - 1}, *m{n - 1}]}}\n" for n in range(1, 60))
    deep = "a: " + "[" * 60 + "]" * 60
    itself = "services: &s {a: *s}"

    for text in (laughs, merges, deep, itself, "x: " + "y" * (2 << 20)):
        with pytest.raises(InvalidArgumentError):
            read(tmp_path, text)
    with pytest.raises(LimitError):
        read(tmp_path, laughs)


def test_anchors_and_merges_are_fine(tmp_path: Path) -> None:
    composed = read(
        tmp_path,
        """
x-common: &common {image: base, mem_limit: 64m}
services:
  a: *common
  b: {<<: *common, mem_limit: 128m}
""",
    )

    assert {name: one.spec.memory_bytes for name, one in composed.members.items()} == {"a": 64 << 20, "b": 128 << 20}


@pytest.mark.parametrize(
    ("image", "name"),
    [
        ("base", "base"),
        ("postgres:16", "postgres:16"),
        ("registry.example:5000/team/app:v1.2", "registry.example-5000-team-app:v1.2"),
        ("registry.example/app@sha256:0123456789abcdef0123", "registry.example-app:0123456789ab"),
    ],
)
def test_images_have_environments_called_after_them(image: str, name: str) -> None:
    assert environment_of(image) == name


def test_without_the_reader_of_yaml_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *more: Any) -> Any:
        if name == "yaml":
            raise ImportError(name)
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", without)

    with pytest.raises(UnsupportedError, match="PyYAML"):
        read(tmp_path, "services: {a: {image: base}}")


def test_texts_and_variables_of_a_small_file_do_not_become_huge_ones(tmp_path: Path) -> None:
    many = {"A": "x" * 1_000_000}
    aliases = "name: &a ['" + "$$" * 400_000 + "']\nservices: {web: {labels: [" + "*a," * 900 + "]}}"
    for text in ("services: {web: {image: b, command: '" + "$A" * 100_000 + "'}}", aliases):
        with pytest.raises(LimitError):
            read(tmp_path, text, variables=many)


@pytest.mark.parametrize(
    "line",
    [
        "pids_limit: .inf",
        f"cpus: {'9' * 400}",
        f"mem_limit: {'9' * 5_000}g",
        f"healthcheck: {{test: a, retries: {'9' * 400}}}",
        "env_file: ../secret.env",
        "env_file: link.env",
        "env_file: pipe",
    ],
)
def test_what_no_service_can_have_is_told_as_such(tmp_path: Path, line: str) -> None:
    (tmp_path / "secret.env").write_text("KEY=secret")
    directory = tmp_path / "of"
    directory.mkdir()
    (directory / "link.env").symlink_to(tmp_path / "secret.env")
    os.mkfifo(directory / "pipe")

    with pytest.raises(InvalidArgumentError):
        spec_of(directory, line)


@pytest.mark.parametrize("image", ["5", "'B C'", "[a]", "'@'"])
def test_what_is_no_name_of_an_image_is_told_as_that(tmp_path: Path, image: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"service web, image: .* is no name of an image"):
        read(tmp_path, f"services: {{web: {{image: {image}}}}}")
