"""Debian packages, installed by mmdebstrap from the sources that this machine's own apt uses."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from dsec.core.errors import CapacityError, DsecError, HostError, InvalidArgumentError, UnsupportedError
from dsec.core.limits import BUILD_LOG_LINE_BYTES_MAX
from dsec.image.recipes import DEBIAN_ENV, DPKG_OPTIONS, RECIPE_VERSION
from dsec.image.records import ImageConfig
from dsec.image.sources import directory
from dsec.image.sources.apt import AptSource, host_sources, host_suite, proxy_settings
from dsec.image.stage import Attributes, Stage
from dsec.storage.space import require_free
from dsec.storage.trees import remove_tree
from dsec.wire.environments import DebianSource, DirectorySource

_TAIL_LINES: Final = 15
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Of the machine it was made on, or of the making; a sandbox gets its own where it needs one.
_RESIDUE: Final = (
    b"etc/hostname",
    b"etc/resolv.conf",
    b"etc/apt/apt.conf.d/99mmdebstrap",
    b"var/cache/ldconfig/aux-cache",
)

# No working directory: each command begins in the home of the user that it runs as.
CONFIG: Final = ImageConfig(env=dict(DEBIAN_ENV))


def build_key(source: DebianSource) -> str:
    """Names the request, not the packages' versions: the same request is built once, until asked to refresh."""
    words = ["debian", str(RECIPE_VERSION), source.suite or host_suite(), source.variant, *sorted(set(source.packages))]
    return hashlib.sha256("\0".join(words).encode()).hexdigest()


def fill(
    source: DebianSource, stage: Stage, work: Path, *, log: Callable[[str], None], proxies: Mapping[str, str]
) -> ImageConfig:
    """Install into a directory below `work` and move the result into `stage`; `log` gets each line as it comes.

    Raises InvalidArgumentError for a package that does not exist, HostError when the machine cannot do it.
    """
    host = host_suite()
    suite = source.suite or host
    sources = host_sources(suite, host=host)
    tree = work / "debian"
    install(source, suite, sources, work, log=log, proxies=proxies)
    directory.fill(DirectorySource(path=os.fspath(tree)), stage)
    remove_tree(tree)
    _settle(stage, sources)
    return CONFIG


def install(
    source: DebianSource,
    suite: str,
    sources: tuple[AptSource, ...],
    work: Path,
    *,
    log: Callable[[str], None],
    proxies: Mapping[str, str],
    hooks: Sequence[str] = (),
) -> None:
    """Into `work`/debian. `hooks`: more options of mmdebstrap."""
    if os.geteuid() != 0:
        raise UnsupportedError(
            "installing Debian packages needs root", hint="run the node as root, or build from a tar file"
        )
    program = shutil.which("mmdebstrap", path=_PATH)
    if program is None:
        raise HostError("mmdebstrap is not installed", hint="apt-get install mmdebstrap")
    mirrors = work / "dsec.sources"
    mirrors.write_text("\n".join(item.text() for item in sources))
    (work / "tmp").mkdir()
    command = [program, "--mode=root", "--format=directory", "--verbose", f"--variant={source.variant}"]
    command += [f"--dpkgopt={option}" for option in DPKG_OPTIONS]
    # The store is closed to all but root, so apt cannot drop to its own user.
    command += [f"--aptopt={line}" for line in ('APT::Sandbox::User "root";', *proxy_settings())]
    if source.packages:
        command.append(f"--include={','.join(sorted(set(source.packages)))}")
    command += hooks
    command += ["--", suite, os.fspath(work / "debian"), os.fspath(mirrors)]
    environment = {"PATH": _PATH, "LC_ALL": "C.UTF-8", "HOME": "/root", "TMPDIR": os.fspath(work / "tmp"), **proxies}
    _run(command, environment, work, log)


def _run(command: list[str], environment: dict[str, str], work: Path, log: Callable[[str], None]) -> None:
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        while raw := process.stdout.readline(BUILD_LOG_LINE_BYTES_MAX):
            line = raw.decode(errors="replace").rstrip()
            if line:
                tail.append(line)
                log(line)
            try:
                require_free(work)
            except CapacityError:
                process.terminate()  # it removes its mounts first
                raise
    if process.returncode != 0:
        raise _failure(process.returncode, list(tail))


def _failure(code: int, tail: list[str]) -> DsecError:
    missing = next(
        (line for line in tail if "Unable to locate package" in line or "has no installation candidate" in line), None
    )
    if missing is not None:
        return InvalidArgumentError(missing.removeprefix("E: "), hint="apt-cache search finds names of packages")
    errors = [line for line in tail if line.startswith("E: ")] or tail[-3:]
    return HostError(f"mmdebstrap failed with {code}: {'; '.join(errors)[:1000]}", detail={"log": tail})


def _settle(stage: Stage, sources: tuple[AptSource, ...]) -> None:
    """Leave nothing of this machine inside: its name, its resolver, its proxies, its passwords."""
    for path in _RESIDUE:
        stage.remove(path)
    stage.clear(b"etc/apt/sources.list.d")
    stage.remove(b"etc/apt/sources.list")
    text = "\n".join(item.without_credentials().text() for item in sources).encode()
    stage.file(b"etc/apt/sources.list.d/debian.sources", Attributes(0o644), io.BytesIO(text))
