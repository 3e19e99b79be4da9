"""What makes a connection to a port usable where a socket is expected, such as in http.client."""

from __future__ import annotations

import io
from typing import IO, Any

from dsec.core.errors import InvalidArgumentError


class SocketLike:
    """The names that sockets have, for what expects one."""

    def read(self, max_bytes: int = 65_536) -> bytes:
        raise NotImplementedError

    def write(self, data: bytes) -> None:
        raise NotImplementedError

    def write_eof(self) -> None:
        raise NotImplementedError

    def recv(self, bufsize: int) -> bytes:
        """As `socket.recv`: at most `bufsize` bytes, empty at end-of-file."""
        return self.read(bufsize)

    def sendall(self, data: bytes) -> None:
        """As `socket.sendall`."""
        self.write(data)

    def shutdown(self, how: int) -> None:
        """As `socket.shutdown` with SHUT_WR (or SHUT_RDWR): the other side reads end-of-file."""
        if how:
            self.write_eof()

    def makefile(
        self,
        mode: str = "r",
        buffering: int | None = None,
        *,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
    ) -> IO[Any]:
        """As `socket.makefile`: a file over the connection; "r", "w" or "rw", with "b" for bytes instead of text.

        Closing the file leaves the connection open, as with sockets. Raises InvalidArgumentError for another mode.
        """
        if not mode or set(mode) - set("rwb"):
            raise InvalidArgumentError(f"mode {mode[:20]!r} is not r, w or rw, with b for bytes")
        reads, writes = "r" in mode or "w" not in mode, "w" in mode
        raw = _Raw(self, reads=reads, writes=writes)
        if buffering == 0:
            if "b" not in mode:
                raise InvalidArgumentError("text is always buffered")
            return raw  # type: ignore[return-value]
        size = buffering if buffering is not None and buffering > 1 else io.DEFAULT_BUFFER_SIZE
        buffer: Any
        if reads and writes:
            buffer = io.BufferedRWPair(raw, raw, size)
        else:
            buffer = io.BufferedReader(raw, size) if reads else io.BufferedWriter(raw, size)
        return buffer if "b" in mode else io.TextIOWrapper(buffer, encoding or "utf-8", errors, newline)


class _Raw(io.RawIOBase):
    def __init__(self, connection: SocketLike, *, reads: bool, writes: bool) -> None:
        self._connection = connection
        self._reads, self._writes = reads, writes

    def readable(self) -> bool:
        return self._reads

    def writable(self) -> bool:
        return self._writes

    def readinto(self, buffer: Any) -> int:
        piece = self._connection.read(len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)

    def write(self, data: Any) -> int:
        self._connection.write(bytes(data))
        return len(data)
