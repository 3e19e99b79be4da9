"""Commands and settings that documents, hints and messages name are there, with the options that they name."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
import typer
import typer.main

from dsec.cli import manual
from dsec.cli.main import app
from dsec.serve.config import load_config
from tests.style.tree import ROOT, relative, tracked_files

_PAGES = [path for path in tracked_files() if path.suffix == ".md" and path.name != "CHANGELOG.md"]
_SOURCES = [path for path in tracked_files() if path.suffix == ".py" and path.is_relative_to(ROOT / "src")]
_FENCE = re.compile(r"^```(.*)$")
_COMMAND = re.compile(r"(?:\w+=\S+ )*(dsec(?: .*)?)")
_SHELLS = ("", "sh", "sh registry", "sh-session")
# A setting and its whole file.
_TOML = re.compile(r"^```toml\n(.*?)^```", re.MULTILINE | re.DOTALL)
_QUOTED = re.compile(r"`dsec (?!is )([a-z][^`\n]*)`")  # "dsec is running …" is what it says itself


def shell_lines(page: Path) -> Iterator[str]:
    """Of blocks that are for a shell; those of others are left out."""
    fence: str | None = None
    for line in page.read_text(encoding="utf-8").splitlines():
        if found := _FENCE.match(line):
            fence = None if fence is not None else found[1].strip()
        elif fence == "sh-session":
            yield line.removeprefix("$ ") if line.startswith("$ ") else ""
        elif fence in _SHELLS or (fence is None and line.startswith("    ")):
            yield line.strip()


def typed(page: Path) -> Iterator[list[str]]:
    for line in shell_lines(page):
        for piece in re.split(r"\s(?:\||&&)\s|;\s", line):
            found = _COMMAND.fullmatch(piece.strip())
            try:
                words = shlex.split(found[1], comments=True)[1:] if found else []
            except ValueError:  # goes on in the next line
                continue
            ends = [words.index(word) for word in (">", "<", ">>", "2>", "&") if word in words]
            words = words[: min(ends, default=None)]
            if words and not words[0].startswith("-"):  # those of all commands come before
                yield words


@cache
def commands() -> Any:
    return typer.main.get_command(app)


def refusal(words: list[str]) -> str | None:
    """What the command line says of its own; nothing is run."""
    command = commands()
    context = click.Context(command, info_name="dsec")
    try:
        while hasattr(command, "get_command"):
            found = command.get_command(context, words[0]) if words else None
            if found is None:
                return f"no command {' '.join(words[:1])}"
            context = click.Context(found, parent=context, info_name=words[0])
            command, words = found, words[1:]
        command.make_context(context.info_name, list(words), parent=context.parent)
    except (SystemExit, typer.Exit):  # --help, --version
        return None
    except Exception as error:  # typer brings a click of its own, whose errors are no public ones
        return str(error) or type(error).__name__
    return None


def test_commands_of_documents_are_taken() -> None:
    pages = [page for page in _PAGES if not page.is_relative_to(ROOT / "docs/reference")]  # says what forms they have
    found = {(page, tuple(words)) for page in pages for words in typed(page)}
    refused = [(relative(page), " ".join(words), why) for page, words in sorted(found) if (why := refusal(list(words)))]

    assert refused == []
    assert len(found) > 100


@pytest.mark.parametrize("words", [["craete", "base"], ["create", "base", "--cpus"], ["env", "collapse", "x"]])
def test_a_command_that_there_is_not_is_noticed(words: list[str]) -> None:
    assert refusal(words)


def test_commands_that_are_named_in_texts_and_messages_are_there() -> None:
    options = {
        entry.name: {word for label, _ in entry.options for word in label.replace(",", "").split() if word[0] == "-"}
        for entry in manual.entries(app)
    }
    groups = {name.split()[0] for name in options if " " in name}
    wrong, seen = [], 0
    for path in (*_PAGES, *_SOURCES):
        for text in _QUOTED.findall(path.read_text(encoding="utf-8")):
            # What follows is a command of the sandbox, or any of several.
            words = re.split(r" -- | SANDBOX ", text)[0].split()
            name = next((" ".join(words[:n]) for n in (3, 2, 1) if " ".join(words[:n]) in options), None)
            if name is None and words[0] in groups and not (len(words) > 1 and words[1].isalpha()):
                continue  # all commands of a group
            used = {found[0] for word in words if (found := re.match(r"--[a-z-]+", word))}
            seen += 1
            if name is None or not used <= options[name] | {"--help"}:
                wrong.append((relative(path), text))

    assert wrong == []
    assert seen > 300


def test_settings_of_documents_are_taken(tmp_path: Path) -> None:
    blocks = [(page, block) for page in _PAGES for block in _TOML.findall(page.read_text(encoding="utf-8"))]
    for page, block in blocks:
        file = tmp_path / "dsec.toml"
        file.write_text(block, encoding="utf-8")

        config = load_config({}, {"HOME": "/root"}, file=file)  # a setting that there is not is an error

        assert config.run_dir, relative(page)
    assert len(blocks) >= 8
