"""One registry, as one account: manifests, blobs and uploads of its repositories."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Final, TypeVar
from urllib.parse import parse_qsl, urlencode, urljoin, urlsplit, urlunsplit

import msgspec

from dsec.core import limits
from dsec.core.errors import InvalidArgumentError, LimitError, NotFoundError, StorageError, UnavailableError
from dsec.core.image_names import DOCKER_HUB, ImageName, is_digest
from dsec.image.registry.accounts import Account, Accounts
from dsec.image.registry.challenges import Challenge, Token, fetch_token, parse_challenges
from dsec.image.registry.web import (
    Answer,
    BrokenError,
    Patience,
    Sleep,
    Web,
    check_outward,
    check_passing,
    check_url,
    host_of,
    is_loopback,
    origin,
    shown,
)
from dsec.wire import codec

T = TypeVar("T")

_HUB_ENDPOINT: Final = "registry-1.docker.io"
_ERROR_BYTES_MAX: Final = 64 * 1_024
_PROBE_S: Final = 10.0
_COMMIT_S: Final = 600.0  # a registry may hash and move a blob before it answers
MANIFEST_TYPES: Final = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)


class RegistrySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an operator may set about registries."""

    insecure: tuple[str, ...] = ()  # HOST[:PORT] of those that may be asked in clear, or with any certificate
    cache_bytes: int = limits.IMAGE_CACHE_BYTES_DEFAULT  # of blobs of images kept on this node's disk


DEFAULT_SETTINGS: Final = RegistrySettings()


@dataclass(frozen=True, slots=True)
class Manifest:
    """As the registry has it: the digest is that of these bytes."""

    digest: str
    content: bytes
    media_type: str


class _Error(msgspec.Struct):
    code: str = ""
    message: str = ""


class _Errors(msgspec.Struct):
    errors: list[_Error] = []


class Registry:
    """Calls are made again when the connection breaks or the registry is busy. Safe for use by many threads.

    Raises NotFoundError, StorageError when it refuses or answers nonsense, UnavailableError after some tries.
    """

    def __init__(
        self,
        image: ImageName,
        accounts: Accounts,
        *,
        push: bool = False,
        settings: RegistrySettings = DEFAULT_SETTINGS,
        sleep: Sleep = time.sleep,
    ) -> None:
        """For the repository of `image`; others may be read from, for mounting their blobs."""
        self.image = image
        self._accounts = accounts
        self._sleep = sleep
        self._insecure = image.host in settings.insecure
        self._web = Web(unverified=self._insecure)
        self._scopes = [f"repository:{image.path}:{'pull,push' if push else 'pull'}"]
        self._mutex = threading.Lock()
        self._root_mutex = threading.Lock()
        self._base: str | None = None
        self._challenge: Challenge | None = None
        self._account: Account | None = None
        self._tokens: dict[tuple[str, ...], Token] = {}

    # ---- manifests and blobs ------------------------------------------------------------------

    def manifest(self, reference: str) -> Manifest:
        """By tag or digest. What a digest names is compared with it."""

        def read(answer: Answer) -> Manifest:
            content = answer.whole(limits.IMAGE_MANIFEST_BYTES_MAX)
            return Manifest(_manifest_digest(reference, content, answer), content, _type(answer))

        headers = {"Accept": ", ".join(MANIFEST_TYPES)}
        try:
            return self._call("GET", f"manifests/{reference}", read, headers=headers)
        except NotFoundError as error:
            mark = "@" if is_digest(reference) else ":"
            raise NotFoundError(f"there is no image {self.image.repository}{mark}{reference}") from error

    def put_manifest(self, reference: str, content: bytes, media_type: str) -> str:
        """Give `reference` to an image whose blobs are there; its digest."""
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"

        def read(answer: Answer) -> str:
            said = answer.header("Docker-Content-Digest")
            if said and said != digest:
                raise StorageError(f"{self.image.host} has made another manifest of ours")
            return digest

        headers = {"Content-Type": media_type}
        return self._call("PUT", f"manifests/{reference}", read, headers=headers, body=content, length=len(content))

    def has_blob(self, digest: str) -> bool:
        try:
            return self._call("HEAD", f"blobs/{digest}", lambda answer: True)
        except NotFoundError:
            return False

    @contextmanager
    def blob(self, digest: str, *, start: int = 0) -> Iterator[Answer]:
        """Its bytes from `start` on, if the registry can do that: look at the status (200 or 206). One try.

        Raises BrokenError where another try may help, beside what other calls raise.
        """
        headers = {"Range": f"bytes={start}-"} if start else {}
        headers["Accept-Encoding"] = "identity"
        with self._exchange("GET", self._url(f"blobs/{digest}"), headers) as answer:
            if answer.status == 416 and start:
                yield answer
                return
            self._check(answer)
            yield answer

    # ---- uploads ------------------------------------------------------------------------------

    def mount(self, digest: str, path: str) -> str | None:
        """Take a blob over from another repository of the registry. None when it is here now; else an upload's URL."""
        query = urlencode({"mount": digest, "from": path})
        scopes = [*self._scopes, f"repository:{path}:pull"]
        return self._call("POST", f"blobs/uploads/?{query}", self._opened, body=b"", length=0, scopes=scopes)

    def open_upload(self) -> str:
        """The URL of an upload."""
        url = self._call("POST", "blobs/uploads/", self._opened, body=b"", length=0)
        if url is None:
            raise StorageError(f"{self.image.host} has a blob that it was not told of")
        return url

    def _opened(self, answer: Answer) -> str | None:
        return None if answer.status == 201 else self._location(answer)

    def append(self, url: str, offset: int, piece: bytes) -> str:
        """One piece of an upload; the URL for the next. One try: ask `uploaded` after an error, then go on there."""
        headers = {"Content-Range": f"{offset}-{offset + len(piece) - 1}", "Content-Type": "application/octet-stream"}
        with self._exchange("PATCH", url, headers, body=piece, length=len(piece), timeout_s=_COMMIT_S) as answer:
            if answer.status == 416:
                raise BrokenError(f"{host_of(answer.url)} has another part of the upload")
            self._check(answer)
            return self._location(answer)

    def uploaded(self, url: str) -> tuple[str, int]:
        """The URL to go on with, and how many bytes have arrived. Raises NotFoundError when the upload is gone."""

        def read(answer: Answer) -> tuple[str, int]:
            first, dash, last = answer.header("Range").removeprefix("bytes=").partition("-")
            if not dash or first != "0" or not last.isdigit():
                return self._location(answer), 0
            # "0-0" is what registries say of an upload with nothing, and of one with a byte.
            return self._location(answer), int(last) + 1 if int(last) else 0

        return self._call("GET", url, read)

    def commit(self, url: str, digest: str, body: bytes | IO[bytes] = b"", length: int = 0) -> None:
        """The rest of an upload, and what all of it must hash to. One try."""
        parts = urlsplit(url)
        query = urlencode([*parse_qsl(parts.query, keep_blank_values=True), ("digest", digest)])
        url = urlunsplit((parts.scheme, parts.netloc, parts.path, query, ""))
        headers = {"Content-Type": "application/octet-stream"}
        with self._exchange("PUT", url, headers, body=body, length=length, timeout_s=_COMMIT_S) as answer:
            self._check(answer)

    def cancel(self, url: str) -> None:
        """What has arrived of an upload is not wanted. Errors are of no matter: registries forget uploads anyway."""
        try:
            with self._exchange("DELETE", url, {}):
                pass
        except (BrokenError, StorageError, UnavailableError):
            return

    def _location(self, answer: Answer) -> str:
        target = answer.header("Location")
        if not target:
            raise StorageError(f"{host_of(answer.url)} does not say where to upload to")
        url = check_url(urljoin(answer.url, target))
        if urlsplit(answer.url).scheme == "https" and urlsplit(url).scheme != "https":
            # Behind a proxy that ends TLS, a registry knows no better than http; its own host is meant.
            if urlsplit(url).hostname != urlsplit(answer.url).hostname:
                raise StorageError(f"{host_of(answer.url)} wants uploads in clear")
            url = urlunsplit(("https", urlsplit(answer.url).netloc, *urlsplit(url)[2:]))
        check_outward(answer.url, url)
        return url

    # ---- one call -----------------------------------------------------------------------------

    def patience(self) -> Patience:
        return Patience(self._sleep)

    def _call(
        self,
        method: str,
        path: str,
        read: Callable[[Answer], T],
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        length: int | None = None,
        scopes: list[str] | None = None,
    ) -> T:
        patience = self.patience()
        while True:
            try:
                url = path if "://" in path else self._url(path)
                with self._exchange(method, url, headers or {}, body=body, length=length, scopes=scopes) as answer:
                    self._check(answer)
                    return read(answer)
            except BrokenError as error:
                patience.wait(error)

    @contextmanager
    def _exchange(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        *,
        body: bytes | IO[bytes] | None = None,
        length: int | None = None,
        scopes: list[str] | None = None,
        timeout_s: float = 60.0,
    ) -> Iterator[Answer]:
        """With what it takes to be let in. A token that is refused is replaced once."""
        wanted = scopes or self._scopes
        for last in (False, True):
            sent = self._authorization(url, wanted)
            start = body.tell() if body is not None and not isinstance(body, bytes) else 0
            with self._web.ask(
                method, url, {**headers, **sent}, body=body, length=length, timeout_s=timeout_s
            ) as answer:
                # Only the registry itself may ask for our account: not where it sends us, for blobs or uploads.
                if answer.status != 401 or last or origin(answer.url) != origin(self._root()):
                    yield answer
                    return
                self._refused(answer, wanted)
            if body is not None and not isinstance(body, bytes):
                body.seek(start)

    def _authorization(self, url: str, scopes: list[str]) -> dict[str, str]:
        if origin(url) != origin(self._root()):
            return {}
        with self._mutex:
            if self._challenge is None:
                return {}
            if self._account is not None and self._account.registry_token:
                return {"Authorization": f"Bearer {self._account.registry_token}"}
            if self._challenge.scheme == "basic":
                basic = self._account.basic() if self._account is not None else None
                return {"Authorization": basic} if basic else {}
            key = tuple(scopes)
            token = self._tokens.get(key)
            if token is None or token.good_until < time.monotonic():
                token = fetch_token(
                    self._web,
                    self._challenge,
                    scopes,
                    self._account,
                    registry=self._root(),
                    patience=self.patience(),
                )
                self._tokens[key] = token
            return {"Authorization": f"Bearer {token.value}"}

    def _refused(self, answer: Answer, scopes: list[str]) -> None:
        """Remember what is asked for; the account is read again, as somebody may have logged in."""
        found = parse_challenges([str(value) for value in answer.headers.get_all("WWW-Authenticate") or []])
        with self._mutex:
            self._tokens.pop(tuple(scopes), None)
            self._account = self._accounts.find(self.image)
            bearer = [challenge for challenge in found if challenge.scheme == "bearer"]
            basic = [challenge for challenge in found if challenge.scheme == "basic"]
            chosen = (bearer or basic)[:1]
            self._challenge = chosen[0] if chosen else None

    def _check(self, answer: Answer) -> None:
        """Raises unless the answer is a success."""
        if 200 <= answer.status < 300:
            return
        check_passing(answer)
        said = _said(answer)
        if answer.status == 404:
            raise NotFoundError(f"{self.image.repository} has no such thing{said}")
        if answer.status in (401, 403):
            how = "our account" if self._account is not None else "without an account"
            raise StorageError(
                f"{host_of(answer.url)} refuses {self.image.path}, {how}{said}",
                hint=f"log in as the user of the service (docker login {self.image.host}), "
                "or set REGISTRY_AUTH_FILE for it",
            )
        raise StorageError(f"{shown(answer.url)} answers {answer.status}{said}")

    # ---- where it is --------------------------------------------------------------------------

    def _url(self, path: str) -> str:
        return f"{self._root()}/v2/{self.image.path}/{path}"

    def _root(self) -> str:
        with self._root_mutex:
            if self._base is None:
                self._base = self._find()
            return self._base

    def _find(self) -> str:
        """https; http for loopback, and where nothing answers https at a registry that the operator trusts so.

        No account is used before it is known.
        """
        host = _HUB_ENDPOINT if self.image.host == DOCKER_HUB else self.image.host
        secure, plain = check_url(f"https://{host}"), f"http://{host}"
        if is_loopback(secure):
            return self._first_of(plain, secure)
        return self._first_of(secure, plain) if self._insecure else secure

    def _first_of(self, *roots: str) -> str:
        patience = self.patience()
        while True:
            last = BrokenError(f"{self.image.host} does not answer as a registry")
            for root in roots:
                try:
                    with self._web.ask("GET", f"{root}/v2/", {}, timeout_s=_PROBE_S) as answer:
                        if answer.status != 400:  # what a server says that wants TLS
                            return root
                except BrokenError as error:
                    last = error
            patience.wait(last)


def _manifest_digest(reference: str, content: bytes, answer: Answer) -> str:
    said = reference if is_digest(reference) else answer.header("Docker-Content-Digest")
    if said and not is_digest(said):
        raise StorageError(f"{host_of(answer.url)} names a manifest {said[:80]!r}")
    algorithm = said.partition(":")[0] if said else "sha256"
    digest = f"{algorithm}:{hashlib.new(algorithm, content).hexdigest()}"
    if said and said != digest:
        raise StorageError(f"the manifest {said[:19]}… of {host_of(answer.url)} has another digest: {digest[:19]}…")
    return digest


def _type(answer: Answer) -> str:
    return answer.header("Content-Type").partition(";")[0].strip()[:200]


def _said(answer: Answer) -> str:
    """The registry's own words, if it has any."""
    if not answer.header("Content-Type").startswith("application/json"):
        return ""
    try:
        found = codec.from_json(answer.whole(_ERROR_BYTES_MAX), _Errors).errors[:1]
    except (BrokenError, InvalidArgumentError, LimitError):
        return ""
    words = " ".join(f"{error.code} {error.message}" for error in found)
    return f": {' '.join(words.split())[:300]}" if words.strip() else ""
