# ruff: noqa: PTH101, PTH104, PTH106, PTH108, PTH116, PTH120, PTH208
"""Attempts of root inside a sandbox to get more of a volume or dataset than was given. Runs there, by itself.

Each is refused with an error of the kernel, or the line says what it reached.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import stat
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

libc = ctypes.CDLL(None, use_errno=True)
AT_FDCWD = -100
MS_REMOUNT, MS_BIND, MS_MOVE = 0x20, 0x1000, 0x2000


def call(number: int, *arguments: object) -> int:
    result = int(libc.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def mount(source: str, target: str, kind: str | None, flags: int) -> None:
    if libc.mount(source.encode(), target.encode(), kind and kind.encode(), ctypes.c_ulong(flags), None) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def attributes(path: str, clear: int) -> None:
    call(442, AT_FDCWD, path.encode(), 0, struct.pack("<4Q", 0, clear, 0, 0), ctypes.c_size_t(32))


def device(directory: str) -> str:
    path = f"{directory}/null"
    os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    fd = os.open(path, os.O_RDWR)
    os.close(fd)
    return "opened a device"


def set_user_id(directory: str) -> str:
    program = f"{directory}/raise"
    Path(program).write_bytes(Path("/usr/bin/id").read_bytes())
    os.chmod(program, 0o4755)
    done = subprocess.run([program, "-u"], user=1000, group=1000, extra_groups=[], capture_output=True, text=True)
    if done.stdout.strip() == "0":
        return "became root"
    raise PermissionError(errno.EPERM, f"remained {done.stdout.strip()}")


def above(directory: str) -> str:
    """Beyond the top of the mount there must be the sandbox's own directory."""
    inside = os.stat(os.path.dirname(directory))
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    found = os.stat("..", dir_fd=fd)
    os.close(fd)
    if (found.st_dev, found.st_ino) == (inside.st_dev, inside.st_ino):
        raise PermissionError(errno.EPERM, "'..' is the sandbox's own")
    return f"'..' is {os.listdir(f'{directory}/..')[:5]}"


def by_handle(directory: str) -> str:
    """A handle of inode 2, the top of the host's ext4."""
    handle = struct.pack("<IiII", 8, 1, 2, 0)
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    buffer = ctypes.create_string_buffer(handle, 64)
    call(304, fd, buffer, os.O_RDONLY | os.O_DIRECTORY)
    return "opened by handle"


def ioctl(directory: str, number: int, argument: bytes) -> str:
    path = f"{directory}/flagged"
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.ioctl(fd, number, argument)
    finally:
        os.close(fd)
    return "done"


def moved_away(directory: str) -> str:
    os.rename(directory, f"{directory}.away")
    return "renamed the mount point"


def removed(directory: str) -> str:
    os.rmdir(directory)
    return "removed the mount point"


def written(path: str) -> str:
    with open(path, "ab") as file:
        file.write(b"x")
    return "wrote"


def given_away(directory: str, id: int) -> str:
    path = f"{directory}/given"
    Path(path).write_text("x")
    os.chown(path, id, id)
    return f"gave a file to {id}"


def unmounted(directory: str, flags: int) -> str:
    if libc.umount2(directory.encode(), flags) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return "unmounted"


def attempts(volume: str, image: str, dataset: str) -> dict[str, Callable[[], object]]:
    quota = struct.pack("<IIIII8s", 0x200, 0, 0, 77, 0, b"")
    found: dict[str, Callable[[], object]] = {
        "write a file of a dataset": lambda: written(f"{dataset}/one.txt"),
        "make a file in a dataset": lambda: written(f"{dataset}/new"),
        "change a mode in a dataset": lambda: os.chmod(f"{dataset}/one.txt", 0o777),
        "remove from a dataset": lambda: os.unlink(f"{dataset}/one.txt"),
        "remount a dataset": lambda: mount("none", dataset, None, MS_REMOUNT | MS_BIND),
        "clear read-only of a dataset": lambda: attributes(dataset, 0x1),
        "clear nodev of a volume": lambda: attributes(volume, 0x4),
        "clear nosuid of a volume": lambda: attributes(volume, 0x2),
        "bind a dataset elsewhere": lambda: mount(dataset, "/mnt", None, MS_BIND),
        "move a dataset": lambda: mount(dataset, "/mnt", None, MS_MOVE),
        "unmount a dataset": lambda: unmounted(dataset, 0),
        "detach a volume": lambda: unmounted(volume, 2),
        "mount over a volume": lambda: mount("tmpfs", volume, "tmpfs", 0),
        "copy the mount of a dataset": lambda: call(428, AT_FDCWD, dataset.encode(), 1),
    }
    for name, directory in (("volume", volume), ("image", image)):
        found |= {
            f"a device in a {name}": lambda d=directory: device(d),
            f"a set-user-id program in a {name}": lambda d=directory: set_user_id(d),
            f"above a {name}": lambda d=directory: above(d),
            f"by handle from a {name}": lambda d=directory: by_handle(d),
            f"an immutable file in a {name}": lambda d=directory: ioctl(d, 0x40086602, struct.pack("<q", 0x10)),
            f"another project for a file of a {name}": lambda d=directory: ioctl(d, 0x401C5820, quota),
            f"rename a {name}": lambda d=directory: moved_away(d),
            f"remove a {name}": lambda d=directory: removed(d),
            f"a file of the agent in a {name}": lambda d=directory: given_away(d, 65_536),
            f"an id of the host in a {name}": lambda d=directory: given_away(d, 0x7000_0000),
        }
    # Only where nobody else would have to wait if it were allowed.
    found["freeze an image"] = lambda: ioctl(image, 0xC0045877, bytes(4))
    return found


def main() -> None:
    verdicts = {}
    for name, attempt in attempts(*sys.argv[1:]).items():
        try:
            verdicts[name] = f"reached: {attempt()}"
        except OSError as error:
            verdicts[name] = f"refused: {errno.errorcode.get(error.errno or 0, error.errno)}"
    print(json.dumps(verdicts))


if __name__ == "__main__":
    main()
