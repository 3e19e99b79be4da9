"""Of any repository, nothing but the ancestors of a commit can be read from the workspace made of it."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from dsec.image.sources import git
from dsec.image.stage import Stage
from dsec.storage.trees import remove_tree
from dsec.wire.environments import GitSource, History

OID = re.compile(r"[0-9a-f]{40}")
ENVIRONMENT = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}

# Each commit: its parents among those before it, as steps back, and whether it has a tag, plain or signed late.
commits = st.lists(
    st.tuples(st.lists(st.integers(1, 4), max_size=2, unique=True), st.sampled_from(["", "plain", "early", "late"])),
    min_size=2,
    max_size=9,
)


def ask(place: Path, *words: str, stdin: str = "") -> str:
    done = subprocess.run(
        ["git", *words], cwd=place, env=ENVIRONMENT, check=True, capture_output=True, text=True, input=stdin
    )
    return done.stdout


def make(place: Path, history: list[tuple[list[int], str]]) -> list[str]:
    """The repository, by fast-import; its commits in order. Some are on branches, some only in the log of one."""
    place.mkdir()
    ask(place, "init", "-q", "-b", "trunk")
    stream = []
    for number, (steps, tag) in enumerate(history):
        parents = [number - step for step in steps if step <= number]
        at = 1_000_000_000 + number
        words = f"commit {number}"
        stream.append(
            f"commit refs/heads/b{number}\nmark :{number + 1}\ncommitter a <a@b> {at} +0000\ndata {len(words)}\n{words}"
        )
        stream += [f"{'merge' if place else 'from'} :{parent + 1}" for place, parent in enumerate(parents)]
        stream.append(f"M 644 inline f{number}\ndata {len(words)}\n{words}\n")
        if tag == "plain":
            stream.append(f"reset refs/tags/t{number}\nfrom :{number + 1}\n")
        elif tag:
            when = at if tag == "early" else at + 1_000
            stream.append(f"tag t{number}\nfrom :{number + 1}\ntagger a <a@b> {when} +0000\ndata 4\nlate")
    ask(place, "fast-import", "--quiet", stdin="\n".join(stream) + "\n")
    return [ask(place, "rev-parse", f"b{number}").strip() for number in range(len(history))]


def readable(place: Path) -> set[str]:
    """Every object that is there, loose or packed, and every name of one that is written anywhere beside them."""
    there = set(ask(place, "cat-file", "--batch-all-objects", "--unordered", "--batch-check=%(objectname)").split())
    written = set()
    for path in (place / ".git").rglob("*"):
        if path.is_file() and "objects" not in path.parts and path.name != "shallow":
            written |= set(OID.findall(path.read_text(errors="replace")))
    return there | written


@given(history=commits, data=st.data())
@settings(max_examples=6)
def test_nothing_but_ancestors_is_readable(history: list[tuple[list[int], str]], data: st.DataObject) -> None:
    place = Path(tempfile.mkdtemp(prefix="dsec-git-"))
    try:
        made = make(place / "source", history)
        commit = data.draw(st.sampled_from(made))
        kept = data.draw(st.sampled_from([History.ANCESTORS, History.NONE]))
        source = GitSource(url=f"file://{place}/source", commit=commit, history=kept)
        with Stage(place / "tree") as stage:
            git.fill(source, stage, place, log=lambda line: None, proxies={})
            stage.finish()

        limit = ["--max-count=1"] if kept is History.NONE else []
        allowed = {
            line.split()[0] for line in ask(place / "source", "rev-list", "--objects", *limit, commit).splitlines()
        }
        found = readable(place / "tree/workspace")
        tags = ask(place / "tree/workspace", "for-each-ref", "--format=%(objectname) %(taggerdate:unix)", "refs/tags")
        date = int(ask(place / "source", "show", "-s", "--format=%ct", commit))
        signed = [line.split() for line in tags.splitlines()]
        assert all(len(words) == 1 or int(words[1]) <= date for words in signed)
        assert found - {words[0] for words in signed if len(words) == 2} <= allowed
        assert commit in found
        for other in set(made) - allowed:
            done = subprocess.run(
                ["git", "cat-file", "-e", other],
                cwd=place / "tree/workspace",
                env=ENVIRONMENT,
                check=False,
                stderr=subprocess.DEVNULL,
            )
            assert done.returncode != 0
    finally:
        remove_tree(place)
