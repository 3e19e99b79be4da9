"""What the command line says of itself is whole, and agrees with what it does."""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from dsec.cli import completion, console, logs, manual
from dsec.cli.entry import main as enter
from dsec.cli.main import app
from dsec.cli.pages import EXITS, PAGES
from dsec.cli.top import Row, _cells, ordered
from dsec.core.variables import VARIABLES, unknown_variables
from dsec.sdk.results import Chunk
from dsec.serve.__main__ import _parser
from dsec.serve.config import VARIABLES as SERVICE_VARIABLES

ENTRIES = {entry.name: entry for entry in manual.entries(app)}


def test_every_command_has_a_page_and_every_page_a_command() -> None:
    assert set(ENTRIES) == set(PAGES)


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_everything_about_a_command_is_said(name: str) -> None:
    entry = ENTRIES[name]

    assert entry.summary
    assert entry.examples
    assert [label for label, meaning in (*entry.arguments, *entry.options) if not meaning] == []
    assert [label for label, _ in entry.options if label.endswith(" VALUE")] == []


@pytest.mark.parametrize("name", sorted(set(ENTRIES) - {"shell", "completion", "help"}))
def test_every_command_that_answers_something_does_so_in_json(name: str) -> None:
    assert any(label == "--json" for label, _ in ENTRIES[name].options)
    assert ENTRIES[name].json


def test_examples_are_commands_with_options_that_there_are() -> None:
    for name, entry in ENTRIES.items():
        known = {word for label, _ in entry.options for word in label.replace(",", "").split() if word[0] == "-"}
        for typed, _ in entry.examples:
            assert f"dsec {name}" in typed
            own = typed.partition(f"dsec {name}")[2].partition(" -- ")[0].split("'")[0]
            used = {word for word in own.split() if word.startswith("-") and word != "--"}
            assert used <= known, typed


def test_up_and_down_take_what_the_service_takes() -> None:
    commands = next(a for a in _parser()._actions if isinstance(a, argparse._SubParsersAction)).choices
    for name in ("up", "down"):
        ours = {
            word for label, _ in ENTRIES[name].options for word in label.replace(",", "").split() if word[:2] == "--"
        }
        theirs = {
            option for action in commands[name]._actions for option in action.option_strings if option[:2] == "--"
        }

        assert ours | {"--help", "--quiet"} == theirs


def test_the_manual_page_is_one_that_man_can_read() -> None:
    page = manual.man_page(app, "1.2.3")

    assert page.startswith(".TH DSEC 1")
    assert all(f"dsec {name}" in page.replace("\\", "") for name in ENTRIES)
    assert all(name in page.replace("\\&", "") for name in VARIABLES)
    # A line that begins with a dot is an order to the formatter.
    orders = {line.split()[0] for line in page.splitlines() if line.startswith(".")}
    assert orders <= {".TH", ".SH", ".SS", ".TP", ".PP", ".B", ".br"}


def test_help_of_a_command_says_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    app(["help", "exec"], standalone_mode=False)
    shown = capsys.readouterr().out

    assert "Usage: dsec exec [OPTIONS] SANDBOX COMMAND…" in shown
    assert all(str(status) in shown for status in (*EXITS, 124, 126, 127))
    assert "--timeout SECONDS" in shown


def test_help_of_everything_lists_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    app(["help"], standalone_mode=False)

    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in ENTRIES)
    assert all(name in shown for name in VARIABLES)


def test_help_of_no_command_names_the_nearest() -> None:
    with pytest.raises(Exception, match="did you mean 'exec'"):
        app(["help", "exce"], standalone_mode=False)


# ---- variables -----------------------------------------------------------------------------------


def test_variables_are_those_that_the_service_and_the_client_read() -> None:
    assert set(SERVICE_VARIABLES) | {"DSEC_URL", "DSEC_TOKEN", "DSEC_PROJECT", "DSEC_NODE", "DSEC_CONFIG"} == set(
        VARIABLES
    )


def test_a_variable_with_a_letter_wrong_is_told_with_the_right_one() -> None:
    found = unknown_variables(["DSEC_TOKNE", "DSEC_SOMETHING_ELSE_ENTIRELY", "DSEC_URL", "DSEC_TEST_SEED", "PATH"])

    assert found == {"DSEC_TOKNE": "DSEC_TOKEN", "DSEC_SOMETHING_ELSE_ENTIRELY": None}


# ---- logs, top -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pieces", "lines", "shown"),
    [
        (["a\nb\nc\n"], 2, "b\nc\n"),
        (["a\nb\nc"], 2, "b\nc"),
        (["a\nb", "c\nd\n", "e\n"], 2, "d\ne\n"),
        (["a\n", "b\n"], 5, "a\nb\n"),
        (["a\n"], 0, ""),
        (["no end"], 1, "no end"),
        (["x", "y", "z"], 1, "xyz"),
        (["\n\n\n"], 2, "\n\n"),
        (["a\n\n"], 1, "\n"),
        ([], 3, ""),
    ],
)
def test_a_tail_is_the_last_lines(pieces: list[str], lines: int, shown: str) -> None:
    chunks, at = [], 0
    for piece in pieces:
        chunks.append(Chunk("stdout", at, piece.encode(), piece))
        at += len(piece)

    kept = logs._cut(chunks, lines)

    assert "".join(chunk.text for chunk in kept) == shown
    assert not kept or kept[-1].offset + len(kept[-1].data) == at


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("1.5m", 90), ("2h", 7_200), ("1d", 86_400)])
def test_times_ago_are_read(text: str, seconds: float) -> None:
    assert logs._seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "-1m", "yesterday", "1w"])
def test_what_is_no_time_ago_is_wrong_usage(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        logs._seconds(text)


def _sandbox(id: str, **known: object) -> Row:
    fields: dict[str, object] = dict.fromkeys(Row.__dataclass_fields__, None)
    return Row(**{**fields, "id": id, "age_s": 1.0, **known})  # type: ignore[arg-type]


def test_sandboxes_are_sorted_the_most_first_and_the_unknown_last() -> None:
    rows = [
        _sandbox("a", cpu_percent=1.0),
        _sandbox("b"),
        _sandbox("c", cpu_percent=50.0),
        _sandbox("d", cpu_percent=0.0),
    ]

    assert [row.id for row in ordered(rows, "cpu")] == ["c", "a", "d", "b"]
    assert [row.id for row in ordered([_sandbox("z", name="b"), _sandbox("y", name="a"), _sandbox("x")], "name")] == [
        "y",
        "z",
        "x",
    ]


# ---- completion ----------------------------------------------------------------------------------


def test_without_a_service_completion_is_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for url in ("unix:///nowhere/api.sock", "http://127.0.0.1:1", "nonsense"):
        monkeypatch.setenv("DSEC_URL", url)

        assert completion.complete_sandbox("") == []
        assert completion.complete_environment("b") == []
    assert capsys.readouterr() == ("", "")


def test_only_plain_words_are_completed() -> None:
    assert completion._matching(["box", "b$(reboot)", "b;x", None, "bax.1", "box"], "b") == ["box", "bax.1"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_is_printed_for_each_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    app(["completion", shell], standalone_mode=False)

    assert f"_DSEC_COMPLETE=complete_{shell}" in capsys.readouterr().out.replace(" complete_fish", "=complete_fish")


def test_bash_takes_the_script_and_completes_with_it(tmp_path: Path) -> None:
    program = tmp_path / "dsec"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m dsec "$@"\n')
    program.chmod(0o755)
    script = completion._SCRIPTS["bash"] + (
        "COMP_WORDS=(dsec doc) COMP_CWORD=1; _dsec_completion dsec; echo ${COMPREPLY[@]}\n"
    )
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "DSEC_URL": "unix:///nowhere/api.sock"}

    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False, env=environment
    )

    assert (done.stdout, done.stderr) == ("doctor\n", "")


def test_commands_are_loaded_without_the_client() -> None:
    code = (
        "import sys, dsec.cli.main; dsec.cli.main.app(['completion', 'bash'], standalone_mode=False);"
        "print({'asyncio', 'aiohttp', 'msgspec', 'pydantic', 'rich', 'dsec.sdk.client'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout.splitlines()[-1] == "set()"


def test_ctrl_c_while_loading_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    real = builtins.__import__

    def interrupted(name: str, *arguments: object, **more: object) -> object:
        if name == "dsec.cli.main":
            raise KeyboardInterrupt
        return real(name, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", interrupted)

    with pytest.raises(SystemExit) as ended:
        enter()

    assert ended.value.code == 130


def test_ctrl_c_before_the_work_begins_leaves_nothing_unawaited(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        """Never begun."""

    def interrupt(coroutine: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("asyncio.run", interrupt)
    with pytest.raises(KeyboardInterrupt):
        console.run_async(work())
    gc.collect()  # a warning here would be an error


def test_a_machine_that_sleeps_is_shown_as_that() -> None:
    shown = _cells(_sandbox("a", state="paused", memory_bytes=0, asleep=True))

    assert (shown[2], shown[4]) == ("paused (asleep)", "0 B")
    assert _cells(_sandbox("a", state="paused"))[2] == "paused"
