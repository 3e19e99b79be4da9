"""A file system of its own in a file of fixed size: ext4 on a loop device. For every state directory there is.

The device is there as long as somebody has it open or mounted; the kernel takes it away with the last one.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import struct
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec.core.errors import CapacityError, HostError, StorageError
from dsec.core.limits import QUOTA_BYTES_PER_INODE, QUOTA_INODES_MIN
from dsec.storage.syscalls import check_syscall

IMAGE_NAME: Final = "disk.img"
_CONTROL: Final = Path("/dev/loop-control")
_SYS: Final = Path("/sys/block")
_GET_FREE: Final = 0x4C82
_CONFIGURE: Final = 0x4C0A
_GET_STATUS: Final = 0x4C05
_AUTOCLEAR: Final = 4
_DIRECT_IO: Final = 16
_INFO: Final = struct.Struct("<QQQQQIIII64s64s32sQQ")
_CONFIG: Final = struct.Struct(f"<II{_INFO.size}s64x")
_BLOCK: Final = 4096
_GROUP_BLOCKS: Final = 32_768  # of one block group: a bitmap has a bit for each
_JOURNAL_BYTES: Final = 4 << 20  # the smallest that mkfs makes
_INODE_BYTES: Final = 256
_RESERVED_BLOCKS: Final = 4096  # or a fiftieth: the kernel keeps them for what it has promised to write
_MKFS_S: Final = 120.0
_RACES_MAX: Final = 64  # others take the free device first
_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432  # the same numbers on every architecture
_NOSUID_NODEV_NOEXEC: Final = 0x2 | 0x4 | 0x8


def inodes_of(size_bytes: int) -> int:
    """How many files a limit in bytes allows."""
    return max(QUOTA_INODES_MIN, size_bytes // QUOTA_BYTES_PER_INODE)


def make_image(path: Path, size_bytes: int, *, journal: bool, uid: int = 0, gid: int = 0) -> None:
    """A new sparse file with an empty file system in which `size_bytes` can be written. Its directory is the caller's
    to remove. Raises HostError without mkfs.ext4, CapacityError when the disk is too small, or StorageError.

    `journal`: it is to be whole after a power loss.
    """
    mkfs = find_mkfs()
    if mkfs is None:
        raise HostError("there is no mkfs.ext4", hint="apt install e2fsprogs")
    inodes = inodes_of(size_bytes)
    try:
        with path.open("xb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.truncate(_file_bytes(size_bytes, inodes, journal=journal))
    except OSError as error:
        if error.errno in (errno.EFBIG, errno.ENOSPC):
            raise CapacityError("the node's disk cannot hold a file of that size") from error
        raise StorageError(f"cannot make {path}: {error.strerror}") from error
    features = f"{'' if journal else '^'}has_journal,^resize_inode,metadata_csum,extent,64bit"
    words = [mkfs, "-q", "-F", "-t", "ext4", "-b", str(_BLOCK), "-m", "0", "-N", str(inodes), "-I", str(_INODE_BYTES)]
    words += ["-O", features, "-E", f"lazy_itable_init=1,nodiscard,root_owner={uid}:{gid}"]
    if journal:
        words += ["-J", f"size={_JOURNAL_BYTES >> 20}"]
    try:
        done = subprocess.run(
            [*words, str(path)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_MKFS_S,
            check=False,
            env={"MKE2FS_CONFIG": os.devnull, "PATH": os.defpath, "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StorageError(f"mkfs.ext4 failed: {error}") from error
    if done.returncode != 0:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise StorageError(f"mkfs.ext4 failed: {said[-1][:200] if said else done.returncode}")


def _file_bytes(size_bytes: int, inodes: int, *, journal: bool) -> int:
    """With room for the tables, so that the limit is what can be written."""
    blocks = -(-size_bytes // _BLOCK) + -(-inodes * _INODE_BYTES // _BLOCK)
    blocks += _JOURNAL_BYTES // _BLOCK if journal else 0
    blocks += min(blocks // 49 + 1, _RESERVED_BLOCKS)
    groups = blocks // _GROUP_BLOCKS + 1
    # Each group has two bitmaps, and some have copies of the superblock and of all descriptors of 64 bytes; the inode
    # tables are rounded up in each. A block of indices for each 1,360 blocks of a fragmented file is the user's affair.
    descriptors = -(-groups * 64 // _BLOCK)
    copies = min(groups, 2 + 3 * groups.bit_length())
    return (blocks + 16 + groups * 4 + copies * (descriptors + 1)) * _BLOCK


@dataclass(slots=True)
class LoopDevice:
    """An open device. Close it once it is mounted, or not needed any more."""

    fd: int
    path: str

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> LoopDevice:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


# Two devices on one file would be two file systems that know nothing of each other.
_attaching = threading.Lock()


def attach(image: Path) -> LoopDevice:
    """The device of an image: the one that it has, else a new one. Raises HostError when there is none to be had."""
    try:
        with _attaching, contextlib.ExitStack() as stack:
            file = os.open(image, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            stack.callback(os.close, file)
            return _attached(file) or _attach_new(image, file)
    except OSError as error:
        raise HostError(f"no loop device for {image}: {error.strerror}", hint="is the module loop loaded?") from error


def _attached(file: int) -> LoopDevice | None:
    wanted = os.fstat(file)
    for device in sorted(_SYS.glob("loop*/loop/backing_file")):
        found = _opened(Path("/dev", device.parent.parent.name))
        if found is None:
            continue
        status = _status(found.fd)
        if status is not None and status == (wanted.st_dev, wanted.st_ino):
            return found
        found.close()
    return None


def _opened(path: Path) -> LoopDevice | None:
    try:
        return LoopDevice(os.open(path, os.O_RDWR | os.O_CLOEXEC), str(path))
    except OSError:  # it goes away just now
        return None


def _status(fd: int) -> tuple[int, int] | None:
    """Device and inode of the file behind it; None when there is none (any more)."""
    buffer = bytearray(_INFO.size)
    try:
        fcntl.ioctl(fd, _GET_STATUS, buffer)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return None
        raise
    device, inode, *_ = _INFO.unpack(buffer)
    return _device_number(device), inode


def _device_number(encoded: int) -> int:
    """As the kernel packs it for this call, in the form of st_dev."""
    major, minor = (encoded & 0xFFF00) >> 8, (encoded & 0xFF) | ((encoded >> 12) & 0xFFF00)
    return os.makedev(major, minor)


def _attach_new(image: Path, file: int) -> LoopDevice:
    control = os.open(_CONTROL, os.O_RDWR | os.O_CLOEXEC)
    try:
        for _ in range(_RACES_MAX):
            number = fcntl.ioctl(control, _GET_FREE)
            device = _opened(Path(f"/dev/loop{number}"))
            if device is None:
                raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))
            if _configure(device, image, file):
                return device
            device.close()
    finally:
        os.close(control)
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))


def _configure(device: LoopDevice, image: Path, file: int) -> bool:
    """False when somebody else was faster."""
    name = os.fsencode(image)[:63]
    info = _INFO.pack(0, 0, 0, 0, 0, 0, 0, 0, _AUTOCLEAR | _DIRECT_IO, name, b"", b"", 0, 0)
    try:
        fcntl.ioctl(device.fd, _CONFIGURE, _CONFIG.pack(file, 0, info))
    except OSError as error:
        if error.errno == errno.EBUSY:
            return False
        device.close()
        raise
    return True


@contextlib.contextmanager
def mounted(device: LoopDevice) -> Iterator[int]:
    """A descriptor to the top of its file system, mounted nowhere. Raises OSError."""
    context = check_syscall("fsopen", _FSOPEN, ctypes.c_char_p(b"ext4"), 1)
    try:
        check_syscall(
            "fsconfig", _FSCONFIG, context, 1, ctypes.c_char_p(b"source"), ctypes.c_char_p(device.path.encode()), 0
        )
        check_syscall("fsconfig", _FSCONFIG, context, 0, ctypes.c_char_p(b"noinit_itable"), None, 0)
        check_syscall("fsconfig", _FSCONFIG, context, 6, None, None, 0)
        mount = check_syscall("fsmount", _FSMOUNT, context, 1, _NOSUID_NODEV_NOEXEC)
    finally:
        os.close(context)
    try:
        top = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=mount)
    finally:
        os.close(mount)
    try:
        yield top
    finally:
        os.close(top)


def find_mkfs() -> str | None:
    """Services have no /sbin in their PATH everywhere."""
    return shutil.which("mkfs.ext4", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
