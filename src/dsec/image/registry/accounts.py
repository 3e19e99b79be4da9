"""Accounts at registries, from the files and helpers of docker and podman. Passwords are in no repr and no message.

$REGISTRY_AUTH_FILE, else $DOCKER_CONFIG/config.json, else ~/.docker/config.json, of the user that the service runs as.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from dsec.core.errors import InvalidArgumentError, StorageError
from dsec.core.image_names import DOCKER_HUB, ImageName
from dsec.core.limits import MIB
from dsec.wire import codec

_FILE_BYTES_MAX: Final = MIB
_ANSWER_BYTES_MAX: Final = 64 * 1_024
_HELPER_S: Final = 30.0
_HELPER: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
_HUB_KEYS: Final = (DOCKER_HUB, "index.docker.io", "registry-1.docker.io")
_HUB_HELPER_KEY: Final = "https://index.docker.io/v1/"  # what docker itself asks its helpers for
_TOKEN_USER: Final = "<token>"  # a helper's way to say that the secret is an identity token
_NONE: Final = "credentials not found"


@dataclass(frozen=True, slots=True)
class Account:
    """Who we are at a registry: user and password, or an identity token, or a token that is used as it is."""

    user: str = ""
    password: str = field(default="", repr=False)
    identity_token: str = field(default="", repr=False)
    registry_token: str = field(default="", repr=False)

    def basic(self) -> str | None:
        """For an Authorization header; None when there is no password."""
        if not self.user or not self.password:
            return None
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


class _Auth(msgspec.Struct):
    auth: str | None = None
    username: str | None = None
    password: str | None = None
    identitytoken: str | None = None
    registrytoken: str | None = None


class _File(msgspec.Struct, rename={"cred_helpers": "credHelpers", "creds_store": "credsStore"}):
    auths: dict[str, _Auth] | None = None
    cred_helpers: dict[str, str] | None = None
    creds_store: str | None = None


class _HelperAnswer(msgspec.Struct, rename="pascal"):
    username: str = ""
    secret: str = ""


class Accounts:
    """Read when it is asked, so that a login takes effect at once."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """`environ` says where the file is, and what helpers run with."""
        self._environ = environ
        self._file = accounts_file(environ)

    def find(self, image: ImageName) -> Account | None:
        """For pulling or pushing `image`. Raises StorageError when the file or a helper is broken."""
        file = self._read()
        if file is None:
            return None
        keys = list(_keys(image))
        helpers = {_normal(key): name for key, name in (file.cred_helpers or {}).items()}
        for key in keys:
            if helper := helpers.get(key):
                return self._ask(helper, image.host)
        if file.creds_store and (account := self._ask(file.creds_store, image.host)) is not None:
            return account
        auths = {_normal(key): auth for key, auth in (file.auths or {}).items()}
        for key in keys:
            if key in auths and (account := self._account(auths[key], key)) is not None:
                return account
        return None

    def _read(self) -> _File | None:
        try:
            fd = os.open(self._file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(f"cannot read the credentials in {self._file}: {error.strerror}") from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise StorageError(f"{self._file} is not a file")
        with os.fdopen(fd, "rb") as file:
            content = file.read(_FILE_BYTES_MAX + 1)
        if len(content) > _FILE_BYTES_MAX:
            raise StorageError(f"{self._file} has more than {_FILE_BYTES_MAX} bytes")
        try:
            return codec.from_json(content, _File)
        except InvalidArgumentError as error:
            raise StorageError(f"{self._file} does not hold credentials as docker writes them") from error

    def _account(self, auth: _Auth, key: str) -> Account | None:
        user, password = auth.username or "", auth.password or ""
        if auth.auth:
            try:
                user, _, password = base64.b64decode(auth.auth, validate=True).decode().partition(":")
            except (binascii.Error, ValueError):
                # The cause would show what could not be decoded.
                raise StorageError(f"the credentials for {key} in {self._file} are not base64") from None
            password = password.rstrip("\0")
        if not (password or auth.identitytoken or auth.registrytoken):
            return None  # docker leaves an empty entry where a helper has the password
        return Account(user, password, auth.identitytoken or "", auth.registrytoken or "")

    def _ask(self, name: str, host: str) -> Account | None:
        """What `docker-credential-NAME` has for the registry."""
        program = shutil.which(f"docker-credential-{name}", path=self._environ.get("PATH")) if _valid(name) else None
        if program is None:
            raise StorageError(
                f"the credential helper docker-credential-{name[:64]} is not installed", hint=f"{self._file} names it"
            )
        done, answer = self._run(program, _HUB_HELPER_KEY if host == DOCKER_HUB else host)
        if done != 0:
            if _NONE.encode() in answer:
                return None
            raise StorageError(f"docker-credential-{name} failed with {done} for {host}")  # its words may hold secrets
        try:
            found = codec.from_json(answer, _HelperAnswer)
        except InvalidArgumentError:
            raise StorageError(f"docker-credential-{name} gave no credentials that can be understood") from None
        if found.username == _TOKEN_USER:
            return Account(identity_token=found.secret)
        return Account(found.username, found.secret) if found.secret else None

    def _run(self, program: str, key: str) -> tuple[int, bytes]:
        # A file and not a pipe: what outlives the helper and holds its output does not hold us.
        with tempfile.TemporaryFile() as out:
            with subprocess.Popen(
                [program, "get"],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.DEVNULL,
                env=dict(self._environ),
                start_new_session=True,
            ) as process:
                assert process.stdin is not None
                with suppress(BrokenPipeError):
                    process.stdin.write(key.encode() + b"\n")
                    process.stdin.close()
                try:
                    code = process.wait(_HELPER_S)
                except subprocess.TimeoutExpired:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, 9)
                    raise StorageError(f"{Path(program).name} gave no answer within {_HELPER_S:g} s") from None
            out.seek(0)
            return code, out.read(_ANSWER_BYTES_MAX)


def accounts_file(environ: Mapping[str, str]) -> Path:
    if named := environ.get("REGISTRY_AUTH_FILE"):
        return Path(named)
    directory = environ.get("DOCKER_CONFIG")
    return Path(directory) / "config.json" if directory else Path.home() / ".docker" / "config.json"


def _keys(image: ImageName) -> Iterator[str]:
    """How a file may name the account, the most particular first: podman has accounts for parts of a registry."""
    for host in _HUB_KEYS if image.host == DOCKER_HUB else (image.host,):
        parts = image.path.split("/")
        for count in range(len(parts), 0, -1):
            yield f"{host}/{'/'.join(parts[:count])}"
        yield host


def _normal(key: str) -> str:
    """`https://index.docker.io/v1/` and `index.docker.io` are the same registry."""
    key = key.removeprefix("https://").removeprefix("http://").rstrip("/")
    return re.sub(r"/v[12]\Z", "", key)


def _valid(name: str) -> bool:
    return _HELPER.match(name) is not None
