"""Stores: a directory on any mounted file system, a web server, an S3 bucket. Blocking; call them from threads.

A store is asked for whole small objects here; ranges of data objects are read by `dsec-loader`.
"""

from __future__ import annotations

import http.client
import os
import re
import secrets
import shutil
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Final, Protocol
from urllib.parse import SplitResult, quote, unquote, urlsplit

from dsec.core import limits
from dsec.core.errors import (
    InvalidArgumentError,
    NotFoundError,
    StorageError,
    UnavailableError,
    UnsupportedError,
)
from dsec.storage.locks import try_lock

_TIMEOUT_S: Final = 30.0
_ANSWER_S: Final = 600.0  # for an object whole, of at most STORE_OBJECT_BYTES_MAX
_PIECE_BYTES: Final = 1 << 20
_TRIES: Final = 5
_PAUSE_S: Final = 0.2
_PATH: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]*(/[A-Za-z0-9][A-Za-z0-9._:@-]*)*\Z")
_CREDENTIALS: Final = "check what the node may read there"
_DRAFTS: Final = ".drafts"  # of files of a directory store that are being written
_DRAFT_S_MAX: Final = 24 * 3600.0
_PRESIGNED_S: Final = 7 * 24 * 3600  # the longest that S3 signs for
_TEMPORARY_S: Final = 600.0  # what boto3 lets credentials of a role have left at least: a signature ends with them


class Place(Protocol):
    """Objects by path. Raises NotFoundError for one that is not there, UnavailableError when the store cannot be
    reached after some tries, StorageError otherwise (with a hint when credentials are refused)."""

    url: str

    def get(self, path: str) -> bytes:
        """A small object whole."""
        ...

    def size(self, path: str) -> int: ...

    def put(self, path: str, content: bytes) -> None:
        """Whole or not at all; replaces what has the name. Raises UnsupportedError where a store is read only."""
        ...

    def put_file(self, path: str, file: Path) -> None: ...

    def names(self, directory: str) -> list[str]:
        """Paths of the objects below `directory`, sorted; where a store cannot list, UnsupportedError."""
        ...

    def remove(self, path: str) -> None:
        """An object that is not there is fine."""
        ...

    def location(self, path: str) -> Location:
        """How the loader reads ranges of an object."""
        ...


class Location:
    """A file, or a URL that is good until `expires_at` (seconds since the epoch; None: always)."""

    __slots__ = ("expires_at", "path", "url")

    def __init__(self, *, path: str | None = None, url: str | None = None, expires_at: float | None = None) -> None:
        self.path = path
        self.url = url
        self.expires_at = expires_at


def open_place(url: str) -> Place:
    """The store at `file:///directory`, `http(s)://host/path` or `s3://bucket/prefix`."""
    parts = check_store_url(url)
    if parts.scheme == "file":
        return DirectoryPlace(Path(unquote(parts.path)))
    if parts.scheme == "s3":
        return BucketPlace(parts.netloc, parts.path.strip("/"))
    return WebPlace(url)


def check_store_url(url: str) -> SplitResult:
    """Raises InvalidArgumentError for what cannot be the URL of a store."""
    parts = urlsplit(url)
    if "@" in parts.netloc or parts.query or parts.fragment:
        # It would be in messages and on disks, where others read it.
        raise InvalidArgumentError(
            "the URL of a store has no user, password, query or fragment", hint="credentials are the node's own"
        )
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path.startswith("/"):
        return parts
    if parts.scheme in ("http", "https") and parts.hostname:
        return parts
    if parts.scheme == "s3" and parts.netloc:
        return parts
    raise InvalidArgumentError(
        f"{url[:200]!r} is not a store", hint="file:///directory, https://host/path or s3://bucket/prefix"
    )


def check_object_path(path: str) -> str:
    """Names in a store come from manifests that others wrote: none leads out of it."""
    if len(path) > limits.PATH_BYTES_MAX or not _PATH.match(path) or ".." in path.split("/"):
        raise InvalidArgumentError(f"{path[:200]!r} is not the path of an object")
    return path


class DirectoryPlace:
    """A directory, local or of a cluster's file system."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = f"file://{quote(os.fspath(root))}"

    def get(self, path: str) -> bytes:
        file = self._file(path)
        with self._errors(path):
            if file.stat().st_size > limits.STORE_OBJECT_BYTES_MAX:
                raise StorageError(f"{path} has more than {limits.STORE_OBJECT_BYTES_MAX} bytes")
            return file.read_bytes()

    def size(self, path: str) -> int:
        with self._errors(path):
            return self._file(path).stat().st_size

    def put(self, path: str, content: bytes) -> None:
        with self._writing(path) as file:
            file.write(content)

    def put_file(self, path: str, file: Path) -> None:
        with self._writing(path) as target, file.open("rb") as source:
            shutil.copyfileobj(source, target, 1 << 20)

    def names(self, directory: str) -> list[str]:
        below = self._file(directory)
        found = []
        for parent, _, files in os.walk(below):
            here = Path(parent)
            found += [os.fspath((here / name).relative_to(self.root)) for name in files if not name.startswith(".")]
        return sorted(found)

    def remove(self, path: str) -> None:
        with self._errors(path):
            self._file(path).unlink(missing_ok=True)

    def clean(self) -> None:
        """Remove what writers have left that were killed: this machine's at once, others' after a day."""
        with suppress(OSError):
            for draft in list((self.root / _DRAFTS).iterdir()):
                if _is_dead(draft):
                    draft.unlink(missing_ok=True)

    def location(self, path: str) -> Location:
        return Location(path=os.fspath(self._file(path)))

    def _file(self, path: str) -> Path:
        return self.root / check_object_path(path)

    @contextmanager
    def _writing(self, path: str) -> Iterator[IO[bytes]]:
        target = self._file(path)
        draft = self.root / _DRAFTS / f"{_boot_id()}-{secrets.token_hex(8)}"
        with self._errors(path):
            target.parent.mkdir(parents=True, exist_ok=True)
            draft.parent.mkdir(exist_ok=True)
            try:
                with draft.open("xb") as file:
                    _mark_as_live(file.fileno())
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
                draft.replace(target)
            finally:
                draft.unlink(missing_ok=True)

    @contextmanager
    def _errors(self, path: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise NotFoundError(f"the store {self.url} has no {path}") from error
        except PermissionError as error:
            raise StorageError(f"the store {self.url} refuses {path}: {error.strerror}", hint=_CREDENTIALS) from error
        except OSError as error:
            raise StorageError(f"the store {self.url} failed at {path}: {error.strerror}") from error


def clean_directory(url: str) -> None:
    """What killed writers have left in the store `file:///…`. It may be gone by now."""
    place = open_place(url)
    if isinstance(place, DirectoryPlace):
        place.clean()


def _boot_id() -> str:
    """Of this kernel: locks of its processes are seen by each other, also where a file system has no others."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _mark_as_live(fd: int) -> None:
    with suppress(OSError):  # a file system without locks: then it is a matter of age
        try_lock(fd)


def _is_dead(draft: Path) -> bool:
    if not draft.name.startswith(_boot_id()):
        return time.time() - draft.stat().st_mtime > _DRAFT_S_MAX
    fd = os.open(draft, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return try_lock(fd)
    except OSError:
        return time.time() - draft.stat().st_mtime > _DRAFT_S_MAX
    finally:
        os.close(fd)


class WebPlace:
    """A web server that knows ranges; read only."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        tls = urllib.request.HTTPSHandler(context=ssl.create_default_context())
        # No proxy, as the loader has none: a layer whose data cannot be read is better not attached.
        self._opener = urllib.request.build_opener(_NoRedirect, tls, urllib.request.ProxyHandler({}))

    def get(self, path: str) -> bytes:
        content: bytes = self._ask("GET", path, _read_in_time)
        if len(content) > limits.STORE_OBJECT_BYTES_MAX:
            raise StorageError(f"{path} has more than {limits.STORE_OBJECT_BYTES_MAX} bytes")
        return content

    def size(self, path: str) -> int:
        length = self._ask("HEAD", path, lambda answer: answer.headers.get("Content-Length"))
        if length is None or not length.isdigit():
            raise StorageError(f"the store {self.url} does not say how long {path} is")
        return int(length)

    def put(self, path: str, content: bytes) -> None:
        raise self._read_only()

    def put_file(self, path: str, file: Path) -> None:
        raise self._read_only()

    def names(self, directory: str) -> list[str]:
        raise UnsupportedError("a store on a web server cannot list what it has", hint="name what you want")

    def remove(self, path: str) -> None:
        raise self._read_only()

    def location(self, path: str) -> Location:
        return Location(url=self._url(path))

    def _url(self, path: str) -> str:
        return f"{self.url}/{quote(check_object_path(path))}"

    def _ask(self, method: str, path: str, read: Any) -> Any:
        last: Exception = OSError("no try")
        for attempt in range(_TRIES):
            if attempt:
                time.sleep(_PAUSE_S * 2**attempt)
            try:
                request = urllib.request.Request(self._url(path), method=method)
                with self._opener.open(request, timeout=_TIMEOUT_S) as answer:
                    return read(answer)
            except urllib.error.HTTPError as error:
                error.close()
                if error.code in (404, 410):
                    raise NotFoundError(f"the store {self.url} has no {path}") from error
                if error.code in (401, 403):
                    raise StorageError(f"the store {self.url} refuses {path}", hint=_CREDENTIALS) from error
                if error.code < 500 and error.code != 429:
                    raise StorageError(f"the store {self.url} answers {error.code} to {path}") from error
                last = error
            except (OSError, http.client.HTTPException) as error:
                last = error
        raise UnavailableError(f"the store {self.url} cannot be reached: {last}", retry_after_s=5.0)

    def _read_only(self) -> UnsupportedError:
        return UnsupportedError(
            f"{self.url} is read only", hint="publish to the directory or bucket that the web server serves"
        )


def _read_in_time(answer: Any) -> bytes:
    """One byte more than is taken, at most. A server that gives a byte now and then is not waited for."""
    deadline = time.monotonic() + _ANSWER_S
    content = bytearray()
    while piece := answer.read1(min(_PIECE_BYTES, limits.STORE_OBJECT_BYTES_MAX + 1 - len(content))):
        content += piece
        if time.monotonic() > deadline:
            raise TimeoutError(f"the answer is not complete after {_ANSWER_S:g} s")
    if answer.length and len(content) <= limits.STORE_OBJECT_BYTES_MAX:
        raise http.client.IncompleteRead(b"", answer.length)
    return bytes(content)


class BucketPlace:
    """An S3 bucket, by boto3 and its usual configuration (environment, ~/.aws, instance roles)."""

    def __init__(self, bucket: str, prefix: str) -> None:
        self.url = f"s3://{bucket}" + (f"/{prefix}" if prefix else "")
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        try:
            import boto3
            from botocore.config import Config
        except ImportError as error:
            raise UnsupportedError("S3 stores need boto3", hint="pip install boto3, where dsec is installed") from error
        self._session: Any = boto3.Session()
        # URLs would be signed by the second version otherwise, which servers and younger regions refuse.
        self._client: Any = self._session.client("s3", config=Config(signature_version="s3v4"))

    def get(self, path: str) -> bytes:
        with self._errors(path):
            answer = self._client.get_object(Bucket=self._bucket, Key=self._key(path))
            if answer["ContentLength"] > limits.STORE_OBJECT_BYTES_MAX:
                raise StorageError(f"{path} has more than {limits.STORE_OBJECT_BYTES_MAX} bytes")
            content: bytes = answer["Body"].read()
            return content

    def size(self, path: str) -> int:
        with self._errors(path):
            return int(self._client.head_object(Bucket=self._bucket, Key=self._key(path))["ContentLength"])

    def put(self, path: str, content: bytes) -> None:
        with self._errors(path):
            self._client.put_object(Bucket=self._bucket, Key=self._key(path), Body=content)

    def put_file(self, path: str, file: Path) -> None:
        with self._errors(path):
            self._client.upload_file(os.fspath(file), self._bucket, self._key(path))  # in parts, when it is large

    def names(self, directory: str) -> list[str]:
        found = []
        with self._errors(directory):
            pages = self._client.get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=self._bucket, Prefix=self._key(directory) + "/"):
                found += [entry["Key"].removeprefix(self._prefix) for entry in page.get("Contents", ())]
        return sorted(found)

    def remove(self, path: str) -> None:
        with self._errors(path):
            self._client.delete_object(Bucket=self._bucket, Key=self._key(path))

    def location(self, path: str) -> Location:
        """Signed for a week, or for as long as the credentials of a role are good: the loader needs none.

        Raises StorageError when there are no credentials, UnavailableError when they cannot be fetched.
        """
        parameters = {"Bucket": self._bucket, "Key": self._key(path)}
        with self._errors(path):
            url = self._client.generate_presigned_url("get_object", Params=parameters, ExpiresIn=_PRESIGNED_S)
            temporary = self._session.get_credentials().get_frozen_credentials().token is not None
        return Location(url=url, expires_at=time.time() + (_TEMPORARY_S if temporary else _PRESIGNED_S))

    def _key(self, path: str) -> str:
        return self._prefix + check_object_path(path)

    @contextmanager
    def _errors(self, path: str) -> Iterator[None]:
        from boto3.exceptions import S3UploadFailedError
        from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, PartialCredentialsError

        try:
            try:
                yield
            except S3UploadFailedError as error:  # it tells in words what another error says
                raise error.__context__ or error from None
        except (NoCredentialsError, PartialCredentialsError) as error:
            raise StorageError(
                f"the node has no credentials for the store {self.url}",
                hint="boto3's usual ones: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, ~/.aws, or the machine's role",
            ) from error
        except ClientError as error:
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            if status == 404:
                raise NotFoundError(f"the store {self.url} has no {path}") from error
            if status in (401, 403):
                raise StorageError(f"the store {self.url} refuses {path}", hint=_CREDENTIALS) from error
            raise StorageError(f"the store {self.url} failed at {path}: status {status}") from error
        except BotoCoreError as error:
            raise UnavailableError(f"the store {self.url} cannot be reached: {error}", retry_after_s=5.0) from error
        except (OSError, S3UploadFailedError) as error:
            raise StorageError(f"the store {self.url} failed at {path}: {error}") from error


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A store that sends us elsewhere could send us to the host's own services."""

    def redirect_request(self, *_: Any) -> None:
        return None
