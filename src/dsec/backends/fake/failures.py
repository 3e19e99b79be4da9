"""What the fake agent answers instead of a result."""

from __future__ import annotations


class AgentFailure(Exception):
    """Becomes an ERR frame."""

    def __init__(self, code: str, message: str, errno: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.errno = errno


def file_failure(errno: str, path: bytes) -> AgentFailure:
    return AgentFailure("file", f"{path.decode('utf-8', 'replace')}: {errno}", errno)
