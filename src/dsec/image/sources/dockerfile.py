"""A Dockerfile, built by buildah, which does this well; what comes out is an OCI image layout.

Its RUN lines run by buildah's isolation and with its network, as root of this machine: not in a sandbox of ours.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections import deque
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Final

from dsec.core import limits
from dsec.core.errors import HostError, InvalidArgumentError, UnsupportedError
from dsec.image.recipes import RECIPE_VERSION
from dsec.image.registry.accounts import accounts_file
from dsec.image.scan import tree_digest
from dsec.image.sources.tarball import open_file
from dsec.wire.environments import DockerfileSource, OciSource

_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_TAIL_LINES: Final = 15
_NAME: Final = "localhost/dsec-build:latest"  # in a store of its own that goes with the build
_PASSED: Final = ("HOME", "XDG_RUNTIME_DIR", "SSL_CERT_FILE", "SSL_CERT_DIR")
_POLICY: Final = '{"default": [{"type": "insecureAcceptAnything"}]}'  # what buildah's own package sets


def buildah_program() -> str | None:
    return shutil.which("buildah", path=_PATH)


@cache
def buildah_version(program: str) -> str | None:
    """None when it does not run."""
    try:
        done = subprocess.run(
            [program, "--version"], stdin=subprocess.DEVNULL, capture_output=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    words = done.stdout.decode(errors="replace").split()
    return words[2] if done.returncode == 0 and len(words) > 2 else None


def build_key(source: DockerfileSource) -> str:
    """Names the directory's content and the request; not what base images and downloads are by now."""
    try:
        root = os.open(source.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise InvalidArgumentError(f"cannot open the directory {source.path!r}: {error.strerror}") from error
    try:
        digest = tree_digest(root).digest
    finally:
        os.close(root)
    words = [str(RECIPE_VERSION), str(source.owner), digest, source.file or "", source.target or ""]
    if source.file is not None and source.file.startswith("/"):
        with open_file(source.file) as file:
            words.append(hashlib.file_digest(file, "sha256").hexdigest())
    words += [f"{name}={value}" for name, value in sorted(source.arguments.items())]
    return hashlib.sha256("\0".join(["dockerfile", *words]).encode()).hexdigest()


def to_layout(
    source: DockerfileSource,
    work: Path,
    *,
    log: Callable[[str], None],
    environ: Mapping[str, str],
    insecure: tuple[str, ...],
) -> OciSource:
    """Build below `work`; what is built instead. `insecure`: registries that base images may come from in clear.

    Raises HostError when buildah is missing or fails, InvalidArgumentError for a Dockerfile that is not there.
    """
    program = buildah_program()
    if program is None:
        raise HostError(
            "buildah is not installed", hint="apt install buildah; or build the image elsewhere and pull it"
        )
    if os.geteuid() != 0:
        raise UnsupportedError("building a Dockerfile needs root", hint="run the node as root, or pull the image")
    file = Path(source.path) / (source.file or _dockerfile(source.path))
    if not file.is_file():
        raise InvalidArgumentError(f"there is no {file}")
    store = work / "buildah"
    for directory in (store, work / "tmp"):
        directory.mkdir()
    (store / "policy.json").write_text(_POLICY)
    (store / "registries.conf").write_text(_registries(insecure))
    base = [program, f"--root={store / 'root'}", f"--runroot={store / 'run'}", f"--storage-driver={_driver(work)}"]
    base += [f"--registries-conf={store / 'registries.conf'}"]
    environment = _environment(environ, work)
    command = [*base, "build", f"--signature-policy={store / 'policy.json'}", "--format=oci", f"--tag={_NAME}"]
    command += ["--timestamp=0", f"--file={file}"]
    command += [f"--target={source.target}"] if source.target else []
    command += [f"--build-arg={name}={value}" for name, value in sorted(source.arguments.items())]
    try:
        _run([*command, source.path], environment, log)
        layout = work / "image"
        policy = f"--signature-policy={store / 'policy.json'}"
        _run([*base, "push", policy, "--format=oci", _NAME, f"oci:{layout}:built"], environment, log)
    finally:
        # What it has mounted would outlive the directory.
        subprocess.run(
            [*base, "rm", "--all"], stdin=subprocess.DEVNULL, capture_output=True, env=environment, check=False
        )
    return OciSource(os.fspath(layout), None, source.owner)


def _environment(environ: Mapping[str, str], work: Path) -> dict[str, str]:
    found = {name: environ[name] for name in _PASSED if name in environ}
    found |= {name: value for name, value in environ.items() if name.lower().endswith("_proxy")}
    # Named only where it is there: buildah does not take a file that is not.
    if (accounts := accounts_file(environ)).exists():
        found["REGISTRY_AUTH_FILE"] = os.fspath(accounts)
    own = {"PATH": _PATH, "LC_ALL": "C.UTF-8", "TMPDIR": os.fspath(work / "tmp"), "BUILDAH_ISOLATION": _isolation()}
    return found | own


def _run(command: list[str], environment: dict[str, str], log: Callable[[str], None]) -> None:
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        while raw := process.stdout.readline(limits.BUILD_LOG_LINE_BYTES_MAX):
            line = raw.decode(errors="replace").rstrip()
            if line:
                tail.append(line)
                log(line)
    if process.returncode != 0:
        errors = [line for line in tail if line.lower().startswith("error")] or list(tail)[-3:]
        raise HostError(
            f"buildah failed with {process.returncode}: {'; '.join(errors)[:1000]}", detail={"log": [*tail]}
        )


def _dockerfile(directory: str) -> str:
    return next((name for name in ("Containerfile", "Dockerfile") if (Path(directory) / name).is_file()), "Dockerfile")


def _isolation() -> str:
    """With a runtime for containers if there is one, else by chroot and namespaces of its own."""
    return "oci" if any(shutil.which(name, path=_PATH) for name in ("crun", "runc")) else "chroot"


def _driver(work: Path) -> str:
    """overlay, but for directories that lie on an overlay themselves."""
    here = os.fspath(work.resolve())
    best, kind = "", ""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, found, *_ = line.split(" ")
        if (here == place or here.startswith(place.rstrip("/") + "/")) and len(place) >= len(best):
            best, kind = place, found
    return "vfs" if kind in ("overlay", "tmpfs", "fuse") else "overlay"


def _registries(insecure: tuple[str, ...]) -> str:
    """Short names are the hub's, as for our own pulls."""
    lines = ['unqualified-search-registries = ["docker.io"]']
    for host in insecure:
        lines += ["[[registry]]", f'location = "{host}"', "insecure = true"]
    return "\n".join(lines) + "\n"
