"""One HTTP exchange at a time: redirects, bounds, tries. Nothing here knows what a registry is.

Bodies are hostile: each is read up to a stated size. URLs are in messages without their query, which may be signed.
"""

from __future__ import annotations

import email.utils
import http.client
import ipaddress
import random
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from typing import IO, Any, Final
from urllib.parse import urljoin, urlsplit, urlunsplit

from dsec import __version__
from dsec.core.errors import LimitError, StorageError, UnavailableError

_TIMEOUT_S: Final = 30.0
_REDIRECTS_MAX: Final = 5
_URL_CHARS_MAX: Final = 16_384
_TRIES: Final = 6
_PAUSE_S: Final = 0.5
_PAUSE_S_MAX: Final = 60.0
_ANSWER_S: Final = 120.0  # for a small answer, whole
_PIECE_BYTES: Final = 65_536
_BROKEN: Final = (OSError, http.client.HTTPException)
_RETRIED: Final = (408, 425, 429, 500, 502, 503, 504)

Sleep = Callable[[float], None]


class BrokenError(Exception):
    """The connection, or an answer on it, broke in the middle; another try may help."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Answer:
    """The head of an answer; its body can be read until the exchange is left."""

    status: int
    headers: Message
    url: str
    _body: Any

    def read(self, size: int) -> bytes:
        """At most `size` bytes, as they come; nothing at the end. Raises BrokenError."""
        try:
            data: bytes = self._body.read1(size)
        except _BROKEN as error:
            raise BrokenError(f"the connection to {host_of(self.url)} broke: {_words(error)}") from error
        if not data and size and self._body.length:
            raise BrokenError(f"the connection to {host_of(self.url)} broke {self._body.length} bytes before the end")
        return data

    def whole(self, most: int) -> bytes:
        """Raises LimitError when it has more than `most` bytes, BrokenError."""
        deadline = time.monotonic() + _ANSWER_S
        content = bytearray()
        while piece := self.read(min(_PIECE_BYTES, most + 1 - len(content))):
            content += piece
            if len(content) > most:
                raise LimitError(f"an answer of {host_of(self.url)} has more than {most} bytes")
            if time.monotonic() > deadline:
                raise BrokenError(f"an answer of {host_of(self.url)} is not complete after {_ANSWER_S:g} s")
        return bytes(content)

    def header(self, name: str) -> str:
        return str(self.headers.get(name) or "")


class Web:
    """Requests to the hosts of one registry. `unverified`: their certificates are not looked at."""

    def __init__(self, *, unverified: bool = False) -> None:
        context = ssl.create_default_context()
        if unverified:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        handlers = (_Plain, urllib.request.HTTPSHandler(context=context))
        self._direct = urllib.request.build_opener(*handlers, urllib.request.ProxyHandler({}))
        self._proxied = urllib.request.build_opener(*handlers)  # as http_proxy, https_proxy and no_proxy say

    @contextmanager
    def ask(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        *,
        body: bytes | IO[bytes] | None = None,
        length: int | None = None,
        timeout_s: float = _TIMEOUT_S,
    ) -> Iterator[Answer]:
        """One exchange, redirects of GET and HEAD followed. Raises BrokenError, StorageError for a redirect refused.

        The Authorization header goes to the host that was asked, never to one that it sends us to.
        """
        first = check_url(url)
        for _ in range(_REDIRECTS_MAX + 1):
            with self._once(method, url, headers, body, length, timeout_s) as answer:
                target = answer.header("Location")
                if answer.status not in (301, 302, 303, 307, 308) or not target or method not in ("GET", "HEAD"):
                    yield answer
                    return
            url = urljoin(url, target)
            check_redirect(first, url)
            if origin(url) != origin(first):
                headers = {name: value for name, value in headers.items() if name.lower() != "authorization"}
        raise StorageError(f"{host_of(first)} redirects more than {_REDIRECTS_MAX} times")

    @contextmanager
    def _once(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | IO[bytes] | None,
        length: int | None,
        timeout_s: float,
    ) -> Iterator[Answer]:
        check_url(url)
        request = urllib.request.Request(url, method=method, data=body)
        request.add_header("User-Agent", f"dsec/{__version__}")
        for name, value in headers.items():
            request.add_unredirected_header(name, value)
        if length is not None:
            request.add_unredirected_header("Content-Length", str(length))
        if body is not None and "Content-Type" not in headers:
            request.add_unredirected_header("Content-Type", "application/octet-stream")
        opener = self._direct if is_loopback(url) else self._proxied
        try:
            opened = opener.open(request, timeout=timeout_s)
        except _BROKEN as error:
            if isinstance(getattr(error, "reason", error), ssl.SSLCertVerificationError):
                raise StorageError(
                    f"the certificate of {host_of(url)} is not trusted: {_words(error)}",
                    hint="install its authority on the node, or name the registry in [registries] insecure",
                ) from error
            raise BrokenError(f"{host_of(url)} cannot be reached: {_words(error)}") from error
        except ValueError as error:  # a host name or a header that cannot be
            raise StorageError(f"{host_of(url)} cannot be asked: {error}") from error
        with opened:
            yield Answer(opened.status, opened.headers, url, opened)


class Patience:
    """How often something is tried again, and how long we wait before. Progress gives all tries back."""

    def __init__(self, sleep: Sleep = time.sleep, *, tries: int = _TRIES) -> None:
        self._sleep = sleep
        self._tries = tries
        self._left = tries

    def progressed(self) -> None:
        self._left = self._tries

    def wait(self, error: BrokenError) -> None:
        """Before the next try. Raises UnavailableError when this was the last, or the host wants too long a rest."""
        self._left -= 1
        asked = error.retry_after_s
        if self._left <= 0 or (asked or 0) > _PAUSE_S_MAX:
            raise UnavailableError(
                str(error),
                hint="the node asks it, not this client: does the node reach it, and is its name right?",
                retry_after_s=asked or 5.0,
                detail={"tried": self._tries} if self._left <= 0 else None,  # a rest that is only too long may be taken
            ) from error
        pause: float = _PAUSE_S * 2 ** (self._tries - self._left - 1)
        self._sleep(max(asked or 0.0, min(pause, _PAUSE_S_MAX) * random.uniform(0.5, 1.0)))


def check_passing(answer: Answer) -> None:
    """Raises BrokenError for an answer that says to come again: too many requests, overload."""
    if answer.status in _RETRIED:
        said = "allows no more requests for now" if answer.status == 429 else f"answers {answer.status}"
        raise BrokenError(f"{host_of(answer.url)} {said}", retry_after_s=_retry_after(answer.header("Retry-After")))


def check_url(url: str) -> str:
    """Raises StorageError for what we do not ask: other schemes, credentials in it, nonsense."""
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and parts.hostname and "@" not in parts.netloc and parts.port != 0
    except ValueError:
        fine = False
    if not fine or len(url) > _URL_CHARS_MAX or any(not "!" <= char <= "~" for char in url):
        raise StorageError(f"a registry sends us to {url[:80]!r}, which is no place to go")
    return url


def check_redirect(asked: str, target: str) -> None:
    """Raises StorageError for a redirect to plain HTTP, or to services of this machine that others cannot reach."""
    check_url(target)
    if urlsplit(asked).scheme == "https" and urlsplit(target).scheme != "https":
        raise StorageError(f"{host_of(asked)} redirects from https to http")
    check_outward(asked, target)


def check_outward(asked: str, target: str) -> None:
    """Raises StorageError when a host sends us to services of this machine. Those there may, and each to itself,
    for a registry in a container of this machine may have any name."""
    if origin(asked) != origin(target) and not is_loopback(asked) and _is_inward(target):
        raise StorageError(f"{host_of(asked)} sends us to {host_of(target)}, an address of this machine")


def origin(url: str) -> tuple[str, str, int]:
    parts = urlsplit(url)
    return parts.scheme, (parts.hostname or "").lower(), parts.port or (443 if parts.scheme == "https" else 80)


def host_of(url: str) -> str:
    """For messages."""
    return urlsplit(url).netloc[:255]


def shown(url: str) -> str:
    """For messages: without a query, which may be a signature."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc, parts.path, "", ""))[:500]


def is_loopback(url: str) -> bool:
    host = (urlsplit(url).hostname or "").lower().rstrip(".")
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_inward(url: str) -> bool:
    """Loopback and link-local: the latter is where clouds keep their machines' credentials. Names are resolved."""
    if is_loopback(url):
        return True
    host = urlsplit(url).hostname or ""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False  # a proxy may know it
    addresses = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
    return any(address.is_loopback or address.is_link_local or address.is_unspecified for address in addresses)


def _retry_after(text: str) -> float | None:
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None


def _words(error: BaseException) -> str:
    if isinstance(error, urllib.error.URLError):
        return str(error.reason)[:200]
    return str(error)[:200] or type(error).__name__


class _Plain(urllib.request.HTTPErrorProcessor):
    """Every status is an answer; redirects are ours to follow."""

    def http_response(self, request: Any, response: Any) -> Any:
        return response

    https_response = http_response
