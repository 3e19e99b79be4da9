"""Words that options take, and what is said of wrong ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from dsec.cli import completion, hints, main
from dsec.core.errors import DsecError, InvalidArgumentError, NotFoundError
from dsec.core.ids import parse_exec_id, parse_name
from dsec.core.spec import NetworkMode, ReadyProbe, Substrate, parse_volume
from dsec.serve.config import find_run_dir, load_config
from dsec.wire.events import EventKind
from dsec.wire.node import Right

# Metavars of options that take words from a list, here or where the command runs.
LISTS = {"SUBSTRATE", "MODE", "RIGHT", "LEVEL", "KIND", "HOW"}


def commands(command: Any, name: str = "dsec") -> Iterator[tuple[str, Any]]:
    if hasattr(command, "commands"):
        for word, inner in command.commands.items():
            yield from commands(inner, f"{name} {word}")
    else:
        yield name, command


def test_what_is_offered_nowhere_is_taken_and_told_to_nobody() -> None:
    assert completion.one_of(*completion.SUBSTRATES)("f") == ["fullvm", "fncall"]
    assert completion.one_of(*completion.NETWORKS)("") == ["none", "proxied"]
    completion.check_words(["fake"], completion.SUBSTRATES, "--substrate")
    with pytest.raises(typer.BadParameter, match=r"is none of none, proxied$"):
        completion.check_words(["x"], completion.NETWORKS, "--network")


def test_the_words_are_those_of_the_contracts() -> None:
    assert set(completion.SUBSTRATES) == set(Substrate)
    assert set(completion.NETWORKS) == set(NetworkMode)
    assert set(completion.EVENTS) == set(EventKind)
    assert set(completion.RIGHTS) == set(Right) | {"manage"}


def test_every_option_that_takes_a_word_of_a_list_is_completed() -> None:
    found: dict[str, list[str]] = {}
    for name, command in commands(typer.main.get_command(main.app)):
        for param in command.params:
            if param.metavar in LISTS:
                context = command.make_context(name, [], resilient_parsing=True)
                found[f"{name} {param.name}"] = [item.value for item in param.shell_complete(context, "")]

    assert len(found) > 15
    assert [where for where, words in found.items() if len(words) < 2] == []
    assert "microvm" in found["dsec create backend"]
    assert found["dsec token create right"] == ["read", "use", "manage", "admin"]


@pytest.mark.parametrize(
    "words",
    [
        ("project", "policy", "/", "--network", "foo"),
        ("project", "policy", "/", "--substrate", "foo"),
        ("quota", "set", "/", "--backend", "foo"),
        ("token", "create", "t", "--right", "foo"),
        ("grant", "add", "a@/b", "/b", "--right", "foo"),
        ("top", "--sort", "foo"),
        ("vm", "import", "x", "y", "--format", "foo"),
    ],
    ids=" ".join,
)
def test_a_word_that_is_none_of_the_list_is_told_with_the_list(words: tuple[str, ...]) -> None:
    with pytest.raises(typer.BadParameter, match="'foo' is none of "):
        main.app(list(words), standalone_mode=False)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: parse_exec_id("x"), "'x' is not an exec id"),
        (lambda: parse_name("a b", "environment name"), "'a b' is not an environment name"),
        (lambda: parse_name("a b", "job name"), "'a b' is not a job name"),
        (lambda: parse_volume("foo", dataset=True), "'foo' does not name a dataset"),
        (lambda: ReadyProbe(port=99_999), "port must be between 1 and 65535, and is 99999"),
        (lambda: ReadyProbe(port=None, argv=("a",), interval_s=1e9), "seconds, and is 1000000000"),
    ],
)
def test_what_is_wrong_is_said_as_people_say_it(wrong: Any, said: str) -> None:
    with pytest.raises(DsecError) as told:
        wrong()
    assert said in told.value.message


def test_what_is_not_found_is_looked_for_with_ls() -> None:
    assert "ls" in hints.next_step(NotFoundError("no such thing"))


# ---- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[node.idle]\npause_s = -1", "node.idle.pause_s (from {file}): pause_s must not be negative, and is -1"),
        ("[node.collect]\nblob_keep_s = -2", "blob_keep_s must not be negative, and is -2"),
        ('[node.idle]\npause_s = "x"', "it must be a number, and is text"),
        ('[storage]\npull = "foo"', "it must be a list, and is text"),
    ],
)
def test_a_wrong_setting_is_named_and_what_it_must_be(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "dsec.toml"
    file.write_text(text)
    with pytest.raises(InvalidArgumentError) as told:
        load_config({"state_dir": "/s"}, {"HOME": "/root"}, file=file)
    assert said.format(file=file) in told.value.message


@pytest.mark.parametrize(
    ("text", "flags", "environ", "run_dir"),
    [
        ('run_dir = "/run/x"\nnonsense =', {}, {}, "/run/x"),
        ('run_dir = "/run/x"\n[nod]\nx = 1', {}, {}, "/run/x"),
        ("nonsense =", {"run_dir": "/run/y"}, {"DSEC_RUN_DIR": "/run/z"}, "/run/y"),
        ("nonsense =", {}, {"DSEC_RUN_DIR": "/run/z"}, "/run/z"),
        ("nonsense =\n[a]\nrun_dir = '/run/inner'", {}, {"XDG_RUNTIME_DIR": "/run/u"}, None),
    ],
)
def test_a_service_is_found_to_be_stopped_whatever_is_wrong_with_its_settings(
    tmp_path: Path, text: str, flags: dict[str, str], environ: dict[str, str], run_dir: str | None
) -> None:
    file = tmp_path / "dsec.toml"
    file.write_text(text)

    found, wrong = find_run_dir(flags, {"HOME": "/root", **environ}, file=file)

    assert str(found) == (run_dir or load_config({}, {"HOME": "/root", **environ}).run_dir)
    assert wrong is not None
    missing, wrong = find_run_dir({"run_dir": "/run/q"}, {}, file=tmp_path / "nothing")
    assert (str(missing), wrong is not None) == ("/run/q", True)
