"""A workspace from a commit: the work tree, and of the repository what the commit needs, and nothing after it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from dsec.core.errors import DeadlineError, InvalidArgumentError
from dsec.image.environments import EnvironmentStore
from dsec.image.sources import git
from dsec.image.stage import Stage
from dsec.image.worker import build_now
from dsec.wire.environments import BuildRequest, GitSource, History

SECRET = "the fix is on line 42"
WHO = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}


class Repository:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = 1_000_000_000
        path.mkdir(parents=True)
        self("init", "-q", "-b", "trunk")

    def __call__(self, *words: str) -> str:
        self._at += 100
        dates = {"GIT_AUTHOR_DATE": f"{self._at} +0000", "GIT_COMMITTER_DATE": f"{self._at} +0000"}
        env = {**os.environ, **WHO, **dates, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
        done = subprocess.run(["git", *words], cwd=self.path, env=env, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def commit(self, name: str, content: str, message: str = "change") -> str:
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        (self.path / name).write_text(content)
        self("add", "-A")
        self("commit", "-q", "-m", message)
        return self("rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    """With a future: commits, branches and tags after the task's commit, which is the third."""
    found = Repository(tmp_path / "repository")
    found.commit("a", "1")
    second = found.commit("src/b", "2")
    found("tag", "v2")
    found("tag", "-a", "v2-signed", "-m", "two")
    found.commit("src/c", "3", "task")
    found("tag", "task")
    found.commit("src/c", SECRET, f"fixed: {SECRET}")
    found("tag", "v4")
    found("tag", "-a", "late", "-m", SECRET, second)
    found("checkout", "-q", "-b", "side", "v2")
    found.commit("side", SECRET)
    found("checkout", "-q", "trunk")
    return found


@pytest.fixture
def work(tmp_path: Path) -> Path:
    path = tmp_path / "work"
    path.mkdir()
    return path


def checked_out(source: GitSource, work: Path) -> Path:
    with Stage(work / "tree", owner=source.owner) as stage:
        config = git.fill(source, stage, work, log=lambda line: None, proxies={})
        stage.finish()
    assert config.workdir == source.path
    assert not (work / "git").exists()
    return work / "tree" / source.path.strip("/")


def source_of(repository: Repository, commit: str = "task", **options: object) -> GitSource:
    return GitSource(url=f"file://{repository.path}", commit=repository("rev-parse", f"{commit}^{{commit}}"), **options)  # type: ignore[arg-type]


def ask(place: Path, *words: str) -> str:
    env = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    done = subprocess.run(["git", *words], cwd=place, env=env, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def objects(place: Path) -> set[str]:
    return set(ask(place, "cat-file", "--batch-all-objects", "--batch-check=%(objectname)").split())


def contents(place: Path) -> str:
    """All that git can be made to show, from the objects themselves."""
    found = []
    for oid in objects(place):
        kind = ask(place, "cat-file", "-t", oid)
        found.append(ask(place, "cat-file", "-p", oid) if kind != "tree" else oid)
    return "\n".join(found)


def test_the_commit_is_checked_out_and_git_sees_no_change(repository: Repository, work: Path) -> None:
    place = checked_out(source_of(repository), work)

    assert (place / "src/c").read_text() == "3"
    assert not (place / "side").exists()
    times = {path.lstat().st_mtime for path in place.rglob("*") if path.name != "index"}
    assert times == {float(ask(place, "show", "-s", "--format=%ct"))}
    index = (place / ".git/index").stat()
    assert ask(place, "status", "--porcelain") == ""
    assert (place / ".git/index").stat().st_ino == index.st_ino  # it had nothing to write, for it had nothing to read
    assert ask(place, "rev-parse", "HEAD") == repository("rev-parse", "task")
    assert ask(place, "branch", "--show-current") == "main"


def test_only_ancestors_and_their_tags_are_left(repository: Repository, work: Path) -> None:
    place = checked_out(source_of(repository), work)

    assert ask(place, "log", "--all", "--format=%s").split() == ["task", "change", "change"]
    assert ask(place, "tag").split() == ["task", "v2", "v2-signed"]
    assert ask(place, "describe", "--tags", "HEAD~1") == "v2-signed"
    assert ask(place, "remote") == ""
    assert ask(place, "reflog") == ""
    assert SECRET not in contents(place)
    assert objects(place) == {line.split()[0] for line in ask(place, "rev-list", "--objects", "--all").splitlines()}
    assert repository("rev-parse", "v4") not in objects(place)


def test_without_history_there_is_the_commit_alone(repository: Repository, work: Path) -> None:
    place = checked_out(source_of(repository, history=History.NONE), work)

    assert ask(place, "log", "--all", "--format=%s") == "task"
    assert ask(place, "tag") == ""
    assert len([oid for oid in objects(place) if ask(place, "cat-file", "-t", oid) == "commit"]) == 1
    assert ask(place, "status", "--porcelain") == ""
    assert SECRET not in contents(place)


def test_a_depth_cuts_the_history(repository: Repository, work: Path) -> None:
    place = checked_out(source_of(repository, depth=2), work)

    assert ask(place, "log", "--all", "--format=%s").split() == ["task", "change"]


def test_everything_is_kept_when_asked(repository: Repository, work: Path) -> None:
    place = checked_out(source_of(repository, history=History.KEEP), work)

    assert ask(place, "rev-parse", "HEAD") == repository("rev-parse", "task")
    assert "late" in ask(place, "tag").split()
    assert SECRET in contents(place)


@pytest.mark.parametrize("history", [History.ANCESTORS, History.NONE])
@pytest.mark.parametrize("depth", [None, 2])
def test_a_server_that_gives_no_commit_by_its_name_is_asked_for_everything_which_goes_again(
    repository: Repository, work: Path, monkeypatch: pytest.MonkeyPatch, history: History, depth: int | None
) -> None:
    run = git._Git.run

    def refusing(self: git._Git, *words: str, stdin: bytes = b"") -> None:
        if words[0] == "fetch" and words[-1] == source.commit:
            raise InvalidArgumentError("git fetch failed: Server does not allow request for unadvertised object")
        run(self, *words, stdin=stdin)

    source = source_of(repository, history=history, depth=depth)
    monkeypatch.setattr(git._Git, "run", refusing)

    place = checked_out(source, work)

    commits = 1 if history is History.NONE else depth or 3
    assert len(ask(place, "log", "--all", "--format=%H").split()) == commits
    assert SECRET not in contents(place)
    assert repository("rev-parse", "v4") not in objects(place)


def test_hooks_and_settings_of_the_repository_are_not_used(repository: Repository, work: Path, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    for name in ("post-checkout", "pre-commit", "reference-transaction", "post-index-change", "update"):
        hook = repository.path / ".git/hooks" / name
        hook.parent.mkdir(exist_ok=True)
        hook.write_text(f"#!/bin/sh\ntouch {mark}\n")
        hook.chmod(0o755)
    for key in ("core.fsmonitor", "uploadpack.packObjectsHook", "filter.evil.smudge", "core.sshCommand", "core.pager"):
        repository("config", key, f"touch {mark}")
    (repository.path / ".gitattributes").write_text("* filter=evil\n")
    repository("-c", "core.fsmonitor=false", "-c", "filter.evil.smudge=cat", "add", "-A")
    repository("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "commit", "-q", "-m", "evil")
    mark.unlink(missing_ok=True)

    place = checked_out(source_of(repository, "HEAD"), work)

    assert (place / ".gitattributes").exists()
    assert not mark.exists()
    assert not (place / ".git/hooks").exists()


def test_a_server_cannot_send_git_to_another_protocol(repository: Repository, work: Path) -> None:
    """As a redirect would, from https to services of this machine."""
    (work / "tree").mkdir()
    for protocol in ("http", "https"):
        git_of = git._Git(work / "tree", work / "home", protocol, log=lambda line: None, proxies={})
        with pytest.raises(InvalidArgumentError, match="transport 'file' not allowed"):
            git_of.run("ls-remote", f"file://{repository.path}")


def test_a_link_in_the_tree_leads_nowhere_outside(repository: Repository, work: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    (repository.path / "out").symlink_to(tmp_path / "precious")
    commit = repository.commit("more", "1")

    place = checked_out(source_of(repository, commit), work)

    assert (place / "out").is_symlink()
    assert (tmp_path / "precious").read_text() == "x"


@pytest.mark.parametrize(
    ("url", "commit"),
    [
        ("ssh://host/x", "0" * 40), ("ext::sh -c id", "0" * 40), ("https://me:pw@host/x", "0" * 40),
        ("http://host.example/x", "0" * 40), ("/srv/x", "0" * 40), ("file:///srv/x", "main"), ("file:///x", "--all"),
        ("https://host/x y", "0" * 40), ("file:///srv/x", "0" * 39), ("git://host/x", "0" * 40),
    ],
)  # fmt: skip
def test_what_is_no_repository_or_commit_is_refused(url: str, commit: str) -> None:
    with pytest.raises(InvalidArgumentError):
        GitSource(url=url, commit=commit)


@pytest.mark.parametrize("path", ["workspace", "/", "/a/../b", "/../x"])
def test_a_work_tree_lies_inside(path: str) -> None:
    with pytest.raises(InvalidArgumentError):
        GitSource(url="file:///x", commit="0" * 40, path=path)


def test_what_cannot_be_had_is_said(repository: Repository, work: Path, tmp_path: Path) -> None:
    for url, commit in ((f"file://{repository.path}", "1" * 40), (f"file://{tmp_path}/nothing", "1" * 40)):
        with pytest.raises(InvalidArgumentError, match="has no commit"):
            checked_out(GitSource(url=url, commit=commit), work)
        for path in list(work.iterdir()):
            subprocess.run(["rm", "-rf", path], check=True)
    blob = repository("rev-parse", "task:a")
    with pytest.raises(InvalidArgumentError):
        checked_out(GitSource(url=f"file://{repository.path}", commit=blob), work)


def test_it_takes_a_bounded_time(repository: Repository, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = work.parent / "bin" / "git"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nsleep 1000 & sleep 1000\n")
    program.chmod(0o755)
    monkeypatch.setattr(git, "_PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setattr(git.limits, "GIT_TIMEOUT_S", 0.3)

    with pytest.raises(DeadlineError):
        checked_out(source_of(repository), work)


def test_it_is_built_like_any_source(repository: Repository, tmp_path: Path) -> None:
    store = EnvironmentStore(tmp_path / "state")
    request = BuildRequest(name="repo:task", source=source_of(repository))

    info = build_now(store, request, lambda event: None)

    assert (info.name, info.workdir, len(info.layers)) == ("repo:task", "/workspace", 1)
    assert build_now(store, request, lambda event: None) == info
