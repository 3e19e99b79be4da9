"""Unpacks a tar stream that a sandbox made: hostile input. Nothing is ever written outside the target directory.

Own parser instead of `tarfile`: that one reads extended headers of any size into memory, keeps every member, and
follows symbolic links that the archive itself made. Here each name is walked by descriptors that follow none.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from dsec.core.errors import InvalidArgumentError, LimitError, ProtocolError, StorageError
from dsec.sdk.holes import write_with_holes

_BLOCK: Final = 512
_EXTENDED_BYTES_MAX: Final = 1 << 20  # one pax or GNU header
_PATH_BYTES_MAX: Final = 4_095
_BODILESS: Final = frozenset((b"1", b"2", b"3", b"4", b"5", b"6"))  # their size field says nothing
_SKIPPED_SHOWN_MAX: Final = 1_000
_SECOND_NS: Final = 1_000_000_000
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(slots=True)
class Unpacked:
    """What came of an archive. `skipped` names what was left out and why, the first thousand."""

    bytes: int = 0
    entries: int = 0
    skipped: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Member:
    name: bytes
    kind: bytes
    size: int
    mode: int
    mtime_ns: int
    link: bytes


class Unpacker:
    """Feed it the stream; `finish` when it is over. Blocking: run it in a thread.

    Raises InvalidArgumentError where no directory can be, LimitError above `bytes_max` or `entries_max`, ProtocolError
    on what is no tar, StorageError on a failing disk. What had been unpacked until then stays.
    """

    def __init__(self, target: Path, *, bytes_max: int, entries_max: int) -> None:
        try:
            target.mkdir(parents=True, exist_ok=True)
            self._root = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise InvalidArgumentError(
                f"{target} cannot be a directory to write to: {error.strerror}",
                hint="name one of this machine that you may write to, or a path where nothing is yet",
            ) from error
        self.result = Unpacked()
        self._bytes_max, self._entries_max = bytes_max, entries_max
        self._read = 0
        self._modes: dict[bytes, tuple[int, int]] = {}  # of directories, set at the end: they may be read-only
        self._machine = self._run()
        self._wanted = next(self._machine)
        self._buffer = bytearray()
        self._ended = False

    def feed(self, data: bytes) -> None:
        self._buffer += data
        try:
            while not self._ended and len(self._buffer) >= self._wanted:
                piece = bytes(self._buffer[: self._wanted])
                del self._buffer[: self._wanted]
                self._wanted = self._machine.send(piece)
        except StopIteration:
            self._ended = True
        except OSError as error:
            raise StorageError(f"unpacking failed: {error.strerror}: {os.fsdecode(error.filename or b'')}") from error
        if self._ended:
            self._buffer.clear()

    def finish(self) -> Unpacked:
        """Raises ProtocolError when the archive is cut off."""
        if not self._ended:
            raise ProtocolError("the archive is cut off")
        for name, (mode, mtime_ns) in reversed(self._modes.items()):
            with contextlib.suppress(OSError), self._directory(_parts(name) or []) as descriptor:
                os.fchmod(descriptor, mode)
                os.utime(descriptor, ns=(mtime_ns, mtime_ns))
        return self.result

    def close(self) -> None:
        """Idempotent."""
        self._machine.close()
        if self._root >= 0:
            os.close(self._root)
            self._root = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- the stream: a generator that asks for a number of bytes and is sent them ----

    def _run(self) -> Generator[int, bytes, None]:
        name: bytes | None = None
        link: bytes | None = None
        pax: dict[str, bytes] = {}
        while True:
            header = yield _BLOCK
            if not any(header):
                return
            member = _parse_header(header)
            if member.kind in (b"L", b"K", b"x", b"g"):
                if member.size > _EXTENDED_BYTES_MAX:
                    raise ProtocolError(f"an extended header of {member.size} bytes in the archive")
                body = (yield _padded(member.size))[: member.size] if member.size else b""
                if member.kind == b"L":
                    name = body.rstrip(b"\0")
                elif member.kind == b"K":
                    link = body.rstrip(b"\0")
                elif member.kind == b"x":
                    pax = _parse_pax(body)
                continue
            _apply(member, name, link, pax)
            name, link, pax = None, None, {}
            yield from self._member(member)

    def _member(self, member: _Member) -> Generator[int, bytes, None]:
        self.result.entries += 1
        if self.result.entries > self._entries_max:
            raise LimitError(f"the archive has more than {self._entries_max} entries")
        has_body = member.kind in (b"0", b"\0", b"7")
        self.result.bytes += member.size if has_body else 0
        if self.result.bytes > self._bytes_max:
            raise LimitError(f"the archive holds more than {self._bytes_max} bytes")
        parts = _parts(member.name)
        if parts is None:
            self._skip(member.name, "its name leads out of the directory")
        elif has_body and parts:
            yield from self._file(parts, member)
            return
        elif parts:
            self._make(parts, member)
        if member.kind not in _BODILESS:
            yield from self._discard(member.size)

    def _discard(self, size: int) -> Generator[int, bytes, None]:
        left = _padded(size)
        self._read += left
        if self._read > self._bytes_max + (1 << 30):
            raise LimitError("the archive holds more than it may")
        while left:
            step = min(left, 128 * _BLOCK)
            yield step
            left -= step

    def _file(self, parts: list[bytes], member: _Member) -> Generator[int, bytes, None]:
        with self._parent(parts, member.name) as parent:
            if parent is None:
                yield from self._discard(member.size)
                return
            _clear(parent, parts[-1])
            # 0600 until it is whole; set-id bits of a sandbox's files are never taken over.
            file = os.open(parts[-1], _NEW_FILE, 0o600, dir_fd=parent)
            try:
                left, padding = member.size, _padded(member.size) - member.size
                while left:
                    step = min(left, 128 * _BLOCK)
                    piece = yield step if step < left else step + padding
                    write_with_holes(file, piece[:step])
                    left -= step
                os.ftruncate(file, member.size)
                os.fchmod(file, member.mode & 0o777)
                os.utime(file, ns=(member.mtime_ns, member.mtime_ns))
            finally:
                os.close(file)

    def _make(self, parts: list[bytes], member: _Member) -> None:
        with self._parent(parts, member.name) as parent:
            if parent is None:
                return
            if member.kind == b"5":
                self._make_directory(parent, parts, member)
            elif member.kind == b"2":
                self._make_symlink(parent, parts, member)
            elif member.kind == b"1":
                self._make_hardlink(parent, parts, member)
            else:
                self._skip(member.name, "it is neither a file, a directory nor a link")

    def _make_directory(self, parent: int, parts: list[bytes], member: _Member) -> None:
        try:
            os.mkdir(parts[-1], 0o700, dir_fd=parent)
        except FileExistsError:
            if not stat.S_ISDIR(os.stat(parts[-1], dir_fd=parent, follow_symlinks=False).st_mode):
                _clear(parent, parts[-1])
                os.mkdir(parts[-1], 0o700, dir_fd=parent)
        self._modes[b"/".join(parts)] = (member.mode & 0o777 | 0o700, member.mtime_ns)

    def _make_symlink(self, parent: int, parts: list[bytes], member: _Member) -> None:
        if not _stays_inside(parts[:-1], member.link):
            self._skip(member.name, "it is a symbolic link that leads out of the directory")
            return
        _clear(parent, parts[-1])
        os.symlink(member.link, parts[-1], dir_fd=parent)

    def _make_hardlink(self, parent: int, parts: list[bytes], member: _Member) -> None:
        source = _parts(member.link)
        if not source:
            self._skip(member.name, "it is a link to a file outside the directory")
            return
        with self._parent(source, member.link) as directory:
            if directory is None:
                return
            try:
                found = os.stat(source[-1], dir_fd=directory, follow_symlinks=False)
            except FileNotFoundError:
                self._skip(member.name, "it is a link to a file that is not in the archive")
                return
            if not stat.S_ISREG(found.st_mode):
                self._skip(member.name, "it is a hard link to what is not a regular file")
                return
            if source != parts:
                _clear(parent, parts[-1])
                os.link(source[-1], parts[-1], src_dir_fd=directory, dst_dir_fd=parent, follow_symlinks=False)

    # ---- directories by descriptor ----

    @contextlib.contextmanager
    def _parent(self, parts: list[bytes], shown: bytes) -> Iterator[int | None]:
        """The directory that holds the last part; None (and a note) when a link or a file is in the way."""
        with contextlib.ExitStack() as stack:
            try:
                found: int | None = stack.enter_context(self._directory(parts[:-1], make=True))
            except OSError as error:
                if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                    raise
                self._skip(shown, "a symbolic link or a file is on the way to it")
                found = None
            yield found

    @contextlib.contextmanager
    def _directory(self, parts: list[bytes], *, make: bool = False) -> Iterator[int]:
        descriptor = os.dup(self._root)
        try:
            for part in parts:
                try:
                    deeper = os.open(part, _DIRECTORY, dir_fd=descriptor)
                except FileNotFoundError:
                    if not make:
                        raise
                    os.mkdir(part, 0o755, dir_fd=descriptor)
                    deeper = os.open(part, _DIRECTORY, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = deeper
            yield descriptor
        finally:
            os.close(descriptor)

    def _skip(self, name: bytes, why: str) -> None:
        if len(self.result.skipped) < _SKIPPED_SHOWN_MAX:
            self.result.skipped.append(f"{name[:500].decode('utf-8', 'replace')}: {why}")


def _parts(name: bytes) -> list[bytes] | None:
    """The components of a name below the target; None when it leads out. Empty: the target itself."""
    if name.startswith(b"/") or b"\0" in name or len(name) > _PATH_BYTES_MAX:
        return None
    parts = [part for part in name.split(b"/") if part not in (b"", b".")]
    return None if b".." in parts else parts


def _stays_inside(directory: list[bytes], target: bytes) -> bool:
    """Whether a symbolic link in `directory`, which is no link itself, can only name something below the root.

    `..` may come first only: after a name it would be that of wherever the name leads, if that is a link too.
    """
    if not target or target.startswith(b"/") or b"\0" in target or len(target) > _PATH_BYTES_MAX:
        return False
    parts = [part for part in target.split(b"/") if part not in (b"", b".")]
    up = 0
    while up < len(parts) and parts[up] == b"..":
        up += 1
    return up <= len(directory) and b".." not in parts[up:]


def _clear(parent: int, name: bytes) -> None:
    """Makes way for a new entry. A directory is not removed for one: that raises."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=parent)


def _padded(size: int) -> int:
    return (size + _BLOCK - 1) // _BLOCK * _BLOCK


def _parse_header(block: bytes) -> _Member:
    # The checksum counts its own field as spaces.
    if _number(block[148:156]) != sum(block) - sum(block[148:156]) + 8 * 32:
        raise ProtocolError("a header of the archive has a wrong checksum")
    name = block[:100].split(b"\0", 1)[0]
    if block[257:263] == b"ustar\0" and (prefix := block[345:500].split(b"\0", 1)[0]):
        name = prefix + b"/" + name
    size = _number(block[124:136])
    return _Member(
        name=name,
        kind=block[156:157],
        size=size,
        mode=_number(block[100:108]) & 0o7777,
        mtime_ns=_number(block[136:148]) * _SECOND_NS,
        link=block[157:257].split(b"\0", 1)[0],
    )


def _number(raw: bytes) -> int:
    """Octal text, or base 256 with the first bit set (sizes of 8 GiB and more). Negative ones are refused."""
    try:
        value = int.from_bytes(raw[1:]) + ((raw[0] & 0x7F) << (8 * (len(raw) - 1))) if raw[0] & 0x80 else _octal(raw)
    except ValueError as error:
        raise ProtocolError("a header of the archive holds what is no number") from error
    if value >= 1 << 62:
        raise ProtocolError("a header of the archive holds an impossible number")
    return value


def _octal(raw: bytes) -> int:
    text = raw.strip(b" \0")
    return int(text, 8) if text else 0


def _parse_pax(body: bytes) -> dict[str, bytes]:
    """Records of the form `length key=value\\n`; the length counts itself."""
    found: dict[str, bytes] = {}
    at = 0
    while at < len(body):
        space = body.find(b" ", at, at + 21)
        try:
            end = at + int(body[at:space]) if space > 0 else -1
        except ValueError:
            end = -1
        key, equals, value = body[space + 1 : end - 1].partition(b"=")
        if not space < end <= len(body) or body[end - 1 : end] != b"\n" or not equals:
            raise ProtocolError("an extended header of the archive is malformed")
        found[key.decode("utf-8", "replace")] = value
        at = end
    return found


def _apply(member: _Member, name: bytes | None, link: bytes | None, pax: dict[str, bytes]) -> None:
    """What extended headers say about the member that follows them."""
    member.name = pax.get("path", name if name is not None else member.name)
    member.link = pax.get("linkpath", link if link is not None else member.link)
    try:
        if "size" in pax:
            member.size = int(pax["size"])
        if "mtime" in pax:
            member.mtime_ns = _nanoseconds(pax["mtime"])
    except ValueError as error:
        raise ProtocolError("an extended header of the archive holds what is no number") from error
    if not 0 <= member.size < 1 << 62:
        raise ProtocolError("an extended header of the archive holds an impossible size")
    if not 0 <= member.mtime_ns < 1 << 63:
        member.mtime_ns = 0


def _nanoseconds(text: bytes) -> int:
    """Of seconds with as many decimals as there are; raises ValueError. Before 1970 is as good as then."""
    seconds, _, decimals = text.partition(b".")
    return int(seconds) * _SECOND_NS + int((decimals + b"0" * 9)[:9])
