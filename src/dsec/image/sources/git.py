"""A commit of a git repository: its work tree, with a repository beside it that knows only what it may.

The node's git runs as root over what others have written. It gets no configuration but ours, no hooks, no helpers, no
prompts, the protocols that we name, and a bounded time; a repository's own settings are never read, for it is fetched
into a new one.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dsec.core import limits
from dsec.core.errors import DeadlineError, DsecError, HostError, InvalidArgumentError, Outcome, StorageError
from dsec.image.recipes import RECIPE_VERSION
from dsec.image.records import ImageConfig
from dsec.image.scan import walk
from dsec.image.sources import directory
from dsec.image.stage import Stage
from dsec.storage.space import require_free
from dsec.storage.trees import remove_tree
from dsec.wire.environments import DirectorySource, GitSource, History

_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_BRANCH: Final = "main"
_EVERYTHING: Final = "refs/everything"
_POLL_S: Final = 0.2
_TAIL_BYTES: Final = 1_000
_TAGS_MAX: Final = 100_000  # of a repository; each is a line of an answer that is read whole
_SETTINGS: Final = {
    "core.hooksPath": os.devnull,
    "core.fsmonitor": "false",
    "core.logAllRefUpdates": "false",
    "core.protectHFS": "true",
    "core.protectNTFS": "true",
    "fetch.fsckObjects": "true",
    "transfer.fsckObjects": "true",
    "fetch.recurseSubmodules": "false",
    "fetch.writeCommitGraph": "false",
    "credential.helper": "",
    "gc.auto": "0",
    "gc.writeCommitGraph": "false",
    "maintenance.auto": "false",
    "index.version": "2",
    "safe.directory": "*",  # a source of this node need not be root's
    "advice.detachedHead": "false",
    # Of history that is old and harmless; what is checked out is checked by git itself.
    **{
        f"fetch.fsck.{name}": "ignore"
        for name in (
            "zeroPaddedFilemode",
            "missingSpaceBeforeDate",
            "badTimezone",
            "badDate",
            "missingEmail",
            "badEmail",
        )
    },
}


def build_key(source: GitSource) -> str:
    """Names the commit and what is made of it; with everything kept, the request."""
    words = [RECIPE_VERSION, source.url, source.commit, source.path, source.history, source.depth, source.owner]
    return hashlib.sha256("\0".join(["git", *map(str, words)]).encode()).hexdigest()


def fill(
    source: GitSource, stage: Stage, work: Path, *, log: Callable[[str], None], proxies: Mapping[str, str]
) -> ImageConfig:
    """Check the commit out below `work` and copy it into `stage`.

    Raises InvalidArgumentError for a repository or commit that cannot be had, HostError without git, DeadlineError.
    """
    top = work / "git"
    tree = top / "root" / source.path.strip("/")
    tree.mkdir(parents=True)
    git = _Git(tree, top / "home", source.url.partition(":")[0], log=log, proxies=proxies)
    _fetch(git, source)
    tags = _kept_tags(git, source)
    git.run("checkout", "-q", "--no-recurse-submodules", "-B", _BRANCH, source.commit)
    if source.history is not History.KEEP:
        _forget(git, tags)
        _verify(git)
    _settle(git, source, top / "root")
    directory.fill(DirectorySource(path=os.fspath(top / "root"), owner=source.owner), stage)
    remove_tree(top)
    return ImageConfig(workdir=source.path)


def _fetch(git: _Git, source: GitSource) -> None:
    git.run("init", "-q", "--template=", f"--object-format={'sha1' if len(source.commit) == 40 else 'sha256'}")
    if source.history is History.KEEP:
        git.run("remote", "add", "origin", source.url)
        heads = ("+refs/heads/*:refs/remotes/origin/*", "+refs/tags/*:refs/tags/*")
        git.run("fetch", "-q", "--no-write-fetch-head", "origin", *heads)
        _ask(git, source, depth=None)
    else:
        _ask(git, source, depth=1 if source.history is History.NONE else source.depth)
    if git.read("cat-file", "-t", source.commit).strip() != b"commit":
        raise InvalidArgumentError(f"{source.commit} of {source.url} is no commit")


def _ask(git: _Git, source: GitSource, *, depth: int | None) -> None:
    """Only what the commit needs; from servers that do not give a commit by its name, everything, which goes again."""
    options = ["-q", "--no-tags", "--no-write-fetch-head", *([] if depth is None else [f"--depth={depth}"])]
    try:
        git.run("fetch", *options, source.url, source.commit)
        return
    except InvalidArgumentError as error:
        refused = error
    try:
        git.run("fetch", "-q", "--no-tags", "--no-write-fetch-head", source.url, f"+refs/*:{_EVERYTHING}/*")
        git.run("cat-file", "-e", f"{source.commit}^{{commit}}")
    except InvalidArgumentError:
        raise InvalidArgumentError(
            f"{source.url} has no commit {source.commit}, or is no repository: {refused.message}",
            hint="it is fetched by the node's git: can that reach it, and is the commit pushed?",
        ) from refused
    if depth is not None:
        # As if it had been given: the commits below are cut off, and go with what nothing refers to.
        border = _border(git, source.commit, depth)
        (git.repository / "shallow").write_bytes(b"".join(oid + b"\n" for oid in border))


def _border(git: _Git, commit: str, depth: int) -> list[bytes]:
    """The commits at `depth`, whose parents are not there any more."""
    border = [commit.encode()]
    for _ in range(depth - 1):
        lines = git.read("rev-list", "--no-walk", "--parents", *(oid.decode() for oid in border)).splitlines()
        parents = list(dict.fromkeys(oid for line in lines for oid in line.split()[1:]))
        if not parents:
            return []
        border = parents
    return border


def _kept_tags(git: _Git, source: GitSource) -> list[str]:
    """Tags on ancestors that say nothing later than the commit: builds read their version off them."""
    if source.history is not History.ANCESTORS or source.depth is not None:
        return []
    lines = git.read("ls-remote", "--tags", source.url).splitlines()
    if len(lines) > 2 * _TAGS_MAX:
        raise InvalidArgumentError(f"{source.url} has more than {_TAGS_MAX} tags", hint="use depth, or history none")
    targets: dict[bytes, bytes] = {}
    for line in lines:
        oid, _, name = line.partition(b"\t")
        targets[name.removesuffix(b"^{}")] = oid  # the line of what an annotated one points to comes second
    ancestors = set(git.read("rev-list", source.commit).split())
    names = [name.decode() for name, oid in targets.items() if oid in ancestors and _plain(name)]
    if not names:
        return []
    specs = "".join(f"+{name}:{name}\n" for name in names)
    git.run("fetch", "-q", "--no-tags", "--no-write-fetch-head", "--stdin", source.url, stdin=specs.encode())
    made = int(git.read("show", "-s", "--format=%ct", source.commit))
    found = git.read("for-each-ref", "--format=%(taggerdate:unix) %(refname)", "refs/tags").decode().splitlines()
    dated = [line.partition(" ") for line in found]
    return [tag for date, _, tag in dated if not date or int(date) <= made]


def _plain(name: bytes) -> bool:
    return name.startswith(b"refs/tags/") and name.isascii() and b"*" not in name and name.decode().isprintable()


def _forget(git: _Git, tags: list[str]) -> None:
    """All but the branch and those tags, and every object that they do not need."""
    kept = {f"refs/heads/{_BRANCH}", *tags}
    names = git.read("for-each-ref", "--format=%(refname)").decode().splitlines()
    doomed = "".join(f"delete {name}\n" for name in names if name not in kept)
    git.run("update-ref", "--stdin", stdin=doomed.encode())
    for name in ("FETCH_HEAD", "ORIG_HEAD", "description"):
        (git.repository / name).unlink(missing_ok=True)
    for name in ("logs", "hooks", "branches"):
        remove_tree(git.repository / name)
    git.run("reflog", "expire", "--expire=now", "--all")
    git.run("pack-refs", "--all", "--prune")
    git.run("repack", "-q", "-a", "-d", "--no-write-bitmap-index")
    git.run("prune", "--expire=now")


def _verify(git: _Git) -> None:
    """What is there is what the references need: all that a reader could find. Raises StorageError."""
    found = set(git.read("cat-file", "--batch-all-objects", "--batch-check=%(objectname)").split())
    needed = {line.split(b" ", 1)[0] for line in git.read("rev-list", "--objects", "--all").splitlines()}
    if found != needed:
        raise StorageError(f"{len(found - needed)} objects are left that the commit does not need")


def _settle(git: _Git, source: GitSource, root: Path) -> None:
    """One time for all files, which the index knows: git in a sandbox need not read them all to see no change."""
    git.run("config", "core.checkStat", "minimal")
    git.run("config", "core.trustctime", "false")
    made = int(git.read("show", "-s", "--format=%ct", source.commit)) * 10**9
    _set_times(root, made)
    git.run("update-index", "-q", "--refresh")
    _set_times(root, made)
    index = git.repository / "index"
    os.utime(index, ns=(made + 2 * 10**9, made + 2 * 10**9))  # younger than what it tells of


def _set_times(root: Path, at: int) -> None:
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for entry in walk(fd):
            os.utime(entry.name, ns=(at, at), dir_fd=entry.directory, follow_symlinks=False)
    finally:
        os.close(fd)


# ---- running git -----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Git:
    """The node's git in one repository, with all its commands within one bounded time."""

    tree: Path
    home: Path
    protocol: str  # and no other: a server must not send us from https to http, where services of this machine are
    log: Callable[[str], None]
    proxies: Mapping[str, str]
    deadline: float = field(default_factory=lambda: time.monotonic() + limits.GIT_TIMEOUT_S)

    @property
    def repository(self) -> Path:
        return self.tree / ".git"

    @property
    def settings(self) -> Path:
        return self.home / "config"

    def run(self, *words: str, stdin: bytes = b"") -> None:
        self.read(*words, stdin=stdin)

    def read(self, *words: str, stdin: bytes = b"") -> bytes:
        """What it says. Raises InvalidArgumentError with its complaint, DeadlineError, CapacityError."""
        program = shutil.which("git", path=_PATH)
        if program is None:
            raise HostError("git is not installed", hint="apt-get install git")
        if not self.home.exists():
            self.home.mkdir()
            self.settings.write_text(_settings())
        with tempfile.TemporaryFile(dir=self.home) as given, tempfile.TemporaryFile(dir=self.home) as said:
            with tempfile.TemporaryFile(dir=self.home) as complaints:
                given.write(stdin)
                given.seek(0)
                process = subprocess.Popen(
                    [program, *words],
                    cwd=self.tree,
                    env=self._environment(),
                    stdin=given,
                    stdout=said,
                    stderr=complaints,
                    start_new_session=True,
                )
                try:
                    code = self._wait(process)
                finally:
                    _end(process)
                complaints.seek(0)
                if code != 0:
                    raise self._failure(words[0], complaints.read()[-_TAIL_BYTES:])
            said.seek(0)
            return said.read()

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        while True:
            try:
                return process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                require_free(self.tree)
                if time.monotonic() > self.deadline:
                    raise DeadlineError(
                        f"git took more than {limits.GIT_TIMEOUT_S:g} s", outcome=Outcome.UNCHANGED
                    ) from None

    def _failure(self, command: str, complaint: bytes) -> DsecError:
        text = complaint.decode(errors="replace").strip()
        for line in text.splitlines():
            self.log(line)
        return InvalidArgumentError(f"git {command} failed: {' '.join(text.split())[-500:] or 'without a word'}")

    def _environment(self) -> dict[str, str]:
        return {
            "PATH": _PATH,
            "HOME": os.fspath(self.home),
            "LC_ALL": "C.UTF-8",
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": os.fspath(self.settings),  # also of what git itself starts
            "GIT_ATTR_NOSYSTEM": "1",
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_ASKPASS": "/bin/false",
            "SSH_ASKPASS": "/bin/false",
            "GIT_ALLOW_PROTOCOL": self.protocol,
            "GIT_NO_REPLACE_OBJECTS": "1",
            "GIT_NO_LAZY_FETCH": "1",
            "GIT_CEILING_DIRECTORIES": os.fspath(self.tree.parent),
            **self.proxies,
        }


def _settings() -> str:
    lines = []
    for key, value in _SETTINGS.items():
        section, _, name = key.rpartition(".")
        head, _, rest = section.partition(".")
        lines.append(f'[{head} "{rest}"]' if rest else f"[{head}]")
        lines.append(f"\t{name} = {value}")
    return "\n".join(lines) + "\n"


def _end(process: subprocess.Popen[bytes]) -> None:
    """It and all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
