"""Small root file systems for containers, made of programs of this machine: a shell, a few tools, Python."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from dsec.core.spec import Environment
from dsec.image.environments import EnvironmentStore
from dsec.image.records import EnvironmentRecord
from dsec.storage.layers import LayerKind, LayerRecord
from dsec.wire.environments import EnvironmentInfo

_PROGRAMS: Final = """
bash cat chmod chown cp dd echo env false grep head id kill ln ls mkdir mkfifo mknod mount mv nproc ps readlink rm sed
seq setsid sh sleep sort stat stty tail tee test timeout touch tr true umount unshare wc yes
"""
_LEFT_OUT: Final = (
    "__pycache__", "config-", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "site-packages", "dist-packages", "test",
    "tkinter", "turtledemo", "unittest",
)  # fmt: skip


def make_root(directory: Path, *, python: bool = True) -> Path:
    """A root file system in a new directory. Some 60 MB with Python, made in a second."""
    for name in ("bin", "etc", "home", "root", "tmp", "usr/bin", "usr/lib", "var/tmp"):
        (directory / name).mkdir(parents=True)
    (directory / "tmp").chmod(0o1777)
    (directory / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/home:/bin/sh\n")
    (directory / "etc/group").write_text("root:x:0:\nuser:x:1000:\nstaff:x:50:user\n")
    programs = [Path(found) for name in _PROGRAMS.split() if (found := shutil.which(name))]
    for program in programs:
        shutil.copy2(program, directory / "bin" / program.name)
    _copy_libraries(directory, [*programs, *(_copy_python(directory) if python else [])])
    return directory


def _copy_python(directory: Path) -> list[Path]:
    """The running interpreter, with its library beside it where it looks for it; what of it needs shared objects."""
    interpreter, library = Path(os.path.realpath(sys.executable)), Path(sysconfig.get_path("stdlib"))
    shutil.copy2(interpreter, directory / "usr/bin/python3")
    shutil.copytree(
        library,
        directory / "usr/lib" / library.name,
        ignore=lambda _, names: {name for name in names if name.startswith(_LEFT_OUT)},
    )
    return [interpreter, *(library / "lib-dynload").glob("*.so")]


def _copy_libraries(directory: Path, programs: Iterable[Path]) -> None:
    listed = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=False).stdout
    for library in {word for word in listed.split() if word.startswith("/") and not word.endswith(":")}:
        target = directory / library.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(library, target)


def plant_environment(state: Path, name: str, tree: Path) -> None:
    """Puts a tree into a store as it is: with what a build would leave out, such as device nodes. Moves the tree."""
    store = EnvironmentStore(state)
    digest = os.urandom(32).hex()
    with store.layers.staging() as staged, store.layers.publishing():
        (staged / "layer").mkdir()
        shutil.move(tree, staged / "layer" / "tree")
        record = LayerRecord(digest=digest, kind=LayerKind.DIRECTORY, size_bytes=0, entries=0, created_at=time.time())
        store.layers.publish(staged / "layer", record)
        info = EnvironmentInfo(
            name=name, layers=(digest,), size_bytes=0, created_at=time.time(), source="planted", kind="directory"
        )
        store.put(EnvironmentRecord(build_key=digest, info=info))
    store.resolve(Environment(name))
