"""Builds mkfs.erofs 1.9 from Debian's source package, where the system's own is too old to read tar files.

    .venv/bin/python tools/erofs.py          does nothing when there is a good one; about a minute otherwise

The upstream tarball is pinned by its hash; the package comes by this machine's own apt mirrors. The program is static,
has neither network code nor compression (layers are not compressed inside EROFS), and goes to native/target/tools.
Ends with 3, saying why, when it cannot be had: then layers are made from directories, by any mkfs.erofs.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Final

from dsec.core.errors import DsecError
from dsec.image.erofs import features
from dsec.image.sources.apt import host_sources, host_suite, proxy_settings

VERSION: Final = "1.9.4"
SHA256: Final = "7d135aa2550326a5acf20f53c518aea5a8900015ce50700044e40f818c31dd80"
TARGET: Final = Path(__file__).resolve().parent.parent / "native" / "target" / "tools" / "mkfs.erofs"
NEEDS: Final = frozenset({"--tar", "--aufs", "--mkfs-time", "--blobdev", "--chunksize"})
SUITES: Final = ("sid", "forky")  # whichever still has this version
PACKAGES: Final = ("autoconf", "automake", "dpkg-dev", "gcc", "libc6-dev", "libtool", "make", "pkg-config")
STEP_TIMEOUT_S: Final = 600
CONFIGURE: Final = (
    "--quiet",
    "--disable-fuse",
    "--disable-lz4",
    "--disable-lzma",
    "--without-selinux",
    "--without-libcurl",
    "--without-openssl",
    "--without-libxml2",
    "--without-json-c",
    "--without-libnl3",
    "--without-uuid",
    "--without-zlib",
    "--without-libzstd",
    "--without-libdeflate",
    "--without-xxhash",
)


class Impossible(Exception):
    """This machine cannot build it; the words say why."""


def main() -> int:
    if good(TARGET) or good_system():
        return 0
    print("setup: building mkfs.erofs (a minute)", file=sys.stderr, flush=True)
    try:
        build()
    except (Impossible, DsecError, OSError) as error:
        print(f"setup: mkfs.erofs {VERSION} cannot be built here: {error}", file=sys.stderr)
        return 3
    return 0


def good_system() -> bool:
    program = shutil.which("mkfs.erofs")
    return program is not None and good(Path(program))


def good(program: Path) -> bool:
    """Whether it reads tar files and layers. 1.8 does, and never ends when it merges: only the newer option tells."""
    return os.access(program, os.X_OK) and features(os.fspath(program)) >= NEEDS


def build() -> None:
    """1. what building needs  2. the source, checked  3. configure and make  4. put in place by one rename"""
    _install_packages()
    with tempfile.TemporaryDirectory(prefix="dsec-erofs-") as name:
        work = Path(name)
        tarball = _fetch(work)
        _run(["tar", "--extract", "--file", os.fspath(tarball)], work)
        source = work / f"erofs-utils-{VERSION}"
        _run(["./autogen.sh"], source)
        _run(["./configure", *CONFIGURE], source)
        for part in ("lib", "mkfs"):
            _run(["make", "-s", "-j2", "LDFLAGS=-all-static", "-C", part], source)
        program = source / "mkfs" / "mkfs.erofs"
        _run(["strip", os.fspath(program)], source)
        if not good(program):
            raise Impossible("the program that was built does not run, or lacks what layers need")
        TARGET.parent.mkdir(parents=True, exist_ok=True)
        waiting = TARGET.with_name(f".{TARGET.name}.{os.getpid()}")
        shutil.copy2(program, waiting)
        waiting.replace(TARGET)


def _install_packages() -> None:
    listed = subprocess.run(
        ["dpkg-query", "-W", "-f=${db:Status-Status} ${Package}\n", *PACKAGES],
        capture_output=True,
        text=True,
        check=False,
    )
    present = {line.removeprefix("installed ") for line in listed.stdout.splitlines() if line.startswith("installed ")}
    missing = [package for package in PACKAGES if package not in present]
    if not missing:
        return
    root = [] if os.geteuid() == 0 else ["sudo", "-n", "env"]
    options = ["-qq", "-y", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=300"]
    install = [*root, "apt-get", "install", *options, *missing]
    try:
        _run(install, Path("/"))
    except Impossible:
        _run([*root, "apt-get", "update", "-qq", "-o", "DPkg::Lock::Timeout=300"], Path("/"))
        _run(install, Path("/"))


def _fetch(work: Path) -> Path:
    """The upstream tarball out of the source package, by a private view of apt: the system's own lists stay."""
    reason = "no suite"
    for suite in SUITES:
        configuration = _private_apt(work / suite, suite)
        try:
            _run(["apt-get", "update", "-qq"], work, APT_CONFIG=os.fspath(configuration))
            _run(
                ["apt-get", "source", "-qq", "--download-only", "--only-source", "erofs-utils"],
                work,
                APT_CONFIG=os.fspath(configuration),
            )
        except Impossible as error:
            reason = str(error)
            continue
        for tarball in work.glob(f"erofs-utils_{VERSION}.orig.tar.*"):
            if hashlib.sha256(tarball.read_bytes()).hexdigest() == SHA256:
                return tarball
        reason = f"{suite} has another version than {VERSION}"
    raise Impossible(reason)


def _private_apt(place: Path, suite: str) -> Path:
    for directory in ("lists/partial", "cache/archives/partial", "sources.list.d", "preferences.d"):
        (place / directory).mkdir(parents=True)
    source = replace(host_sources(suite, host=host_suite())[0], suites=(suite,))  # its pockets have no source for us
    text = source.text().replace("Types: deb\n", "Types: deb-src\n")
    (place / "sources.list.d" / "source.sources").write_text(text)
    settings = {
        "Dir::State::Lists": place / "lists",
        "Dir::Cache": place / "cache",
        "Dir::Etc::SourceList": "/dev/null",
        "Dir::Etc::SourceParts": place / "sources.list.d",
        "Dir::Etc::PreferencesParts": place / "preferences.d",
        "APT::Sandbox::User": "root" if os.geteuid() == 0 else "",
    }
    lines = [*proxy_settings(), *(f'{key} "{value}";' for key, value in settings.items() if value)]
    configuration = place / "apt.conf"
    configuration.write_text("\n".join(lines) + "\n")
    return configuration


def _run(command: list[str], place: Path, **environment: str) -> None:
    """Raises Impossible with the last words of a command that failed."""
    try:
        done = subprocess.run(
            command,
            cwd=place,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=STEP_TIMEOUT_S,
            env={**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive", **environment},
        )
    except FileNotFoundError as error:
        raise Impossible(f"{command[0]} is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise Impossible(f"{command[0]} took more than {STEP_TIMEOUT_S} s") from error
    if done.returncode != 0:
        raise Impossible(f"`{' '.join(command[:4])}` failed: {(done.stderr or done.stdout).strip()[-300:]}")


if __name__ == "__main__":
    sys.exit(main())
