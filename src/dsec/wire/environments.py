"""Building and describing environments: shared by node, API, SDK and CLI."""

from __future__ import annotations

import enum
import re
from typing import Final
from urllib.parse import urlsplit

import msgspec

from dsec.core import limits
from dsec.core.errors import InvalidArgumentError, LimitError
from dsec.core.ids import parse_name
from dsec.core.image_names import parse_image_name
from dsec.core.references import parse_digest, parse_reference, parse_tagged
from dsec.core.spec import check_path
from dsec.wire.errors import ErrorBody
from dsec.wire.images import ExportedImage
from dsec.wire.machines import MachineInfo

# Nothing that apt or mmdebstrap reads as an option, a pattern or a list.
_PACKAGE: Final = re.compile(r"[a-z0-9][a-z0-9+.-]+(:[a-z0-9]+)?(=[A-Za-z0-9.+~:-]+)?\Z")
_SUITE: Final = re.compile(r"[a-z][a-z0-9-]{0,62}\Z")
_STAGE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}\Z")
_ARGUMENT: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}\Z")
_STORE: Final = re.compile(r"(file:///|https?://|s3://)[!-~]+\Z")
_GIT_URL: Final = re.compile(r"(file:///|https?://)[!-~]+\Z")
_COMMIT: Final = re.compile(r"([0-9a-f]{40}|[0-9a-f]{64})\Z")
_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
GIT_PATH: Final = "/workspace"
_STORE_HINT: Final = "file:///directory, https://host/path or s3://bucket/prefix"


class Ownership(enum.StrEnum):
    """Whose the files of an environment are. A sandbox has ids 0 to 65,534 for them."""

    KEEP = "keep"  # as in the source; an id that does not fit is an error
    SQUASH = "squash"  # as in the source; ids that do not fit become nobody (65,534)
    ROOT = "root"  # everything belongs to root


class DirectorySource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="directory"):
    """A directory on the node, copied as it is now. Mount points inside are refused."""

    path: str
    owner: Ownership = Ownership.KEEP

    def __post_init__(self) -> None:
        _absolute(self.path)


class TarSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="tar"):
    """A tar file on the node: plain, gzip, xz or zstd. With `layer` it is a layer of an OCI image: what it marks as
    hidden (`.wh.`) hides what lies below it."""

    path: str
    owner: Ownership = Ownership.KEEP
    layer: bool = False

    def __post_init__(self) -> None:
        _absolute(self.path)


class OciSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="oci"):
    """An OCI image layout directory on the node. `reference` is needed when it holds several images."""

    path: str
    reference: str | None = None
    owner: Ownership = Ownership.KEEP

    def __post_init__(self) -> None:
        _absolute(self.path)


class DockerArchiveSource(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="docker-archive"
):
    """A tar file on the node with images, of `docker save`. `reference` is needed when it holds several."""

    path: str
    reference: str | None = None
    owner: Ownership = Ownership.KEEP

    def __post_init__(self) -> None:
        _absolute(self.path)


class RegistrySource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="registry"):
    """An image of a registry: `debian:12`, HOST/PATH:TAG or HOST/PATH@DIGEST, read with the accounts of the service."""

    image: str
    owner: Ownership = Ownership.KEEP

    def __post_init__(self) -> None:
        parse_image_name(self.image)


class DockerfileSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="dockerfile"):
    """A directory on the node with a Dockerfile, built by the node's buildah.

    Its RUN lines run as root of the node in the isolation of buildah, which is none against somebody who means harm.
    """

    path: str
    file: str | None = None  # relative to `path`, or absolute; None: Containerfile or Dockerfile
    target: str | None = None  # the stage to stop at
    arguments: dict[str, str] = {}  # for ARG lines
    owner: Ownership = Ownership.KEEP

    def __post_init__(self) -> None:
        _absolute(self.path)
        if self.file is not None:
            check_path(self.file)
        if self.target is not None and not _STAGE.match(self.target):
            raise InvalidArgumentError(f"{self.target[:80]!r} is not a stage of a Dockerfile")
        if sum(len(name) + len(value) for name, value in self.arguments.items()) > limits.ARGV_BYTES_MAX // 2:
            raise LimitError("the arguments of a Dockerfile are too long")
        for name, value in self.arguments.items():
            if not _ARGUMENT.match(name) or "\0" in value:
                raise InvalidArgumentError(f"{name[:80]!r} is not an argument of a Dockerfile")


class DebianSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="debian"):
    """Debian packages and all that they need, from the sources that the node's own apt uses."""

    packages: tuple[str, ...]
    suite: str | None = None  # None: the node's own
    variant: str = "minbase"  # or "extract": only unpacked, nothing installed, nothing essential added

    def __post_init__(self) -> None:
        if len(self.packages) > limits.IMAGE_PACKAGES_MAX:
            raise LimitError(f"at most {limits.IMAGE_PACKAGES_MAX} packages, not {len(self.packages)}")
        for package in self.packages:
            if not _PACKAGE.match(package):
                raise InvalidArgumentError(f"{package[:80]!r} is not the name of a Debian package")
        if self.suite is not None and not _SUITE.match(self.suite):
            raise InvalidArgumentError(f"{self.suite[:80]!r} is not a suite", hint="such as bookworm")
        if self.variant not in ("minbase", "extract"):
            raise InvalidArgumentError(f"variant must be minbase or extract, not {self.variant[:40]!r}")


class History(enum.StrEnum):
    """What of a repository's past is in a workspace."""

    ANCESTORS = "ancestors"  # of the commit, and nothing else
    NONE = "none"  # the commit's own tree, as the only commit
    KEEP = "keep"  # everything that the repository has: branches, tags, and what came after


class GitSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind", tag="git"):
    """A commit of a git repository, checked out at `path` with its repository beside it.

    Fetched by the node's git, without hooks and without the configuration of anybody. Remotes, logs of references and
    objects that the commit does not need are left out, unless `history` says so.
    """

    url: str  # https://…, or file:///… on the node
    commit: str  # its whole name
    path: str = GIT_PATH
    history: History = History.ANCESTORS
    depth: int | None = None  # of the history, in commits; None: all of it
    owner: Ownership = Ownership.ROOT

    def __post_init__(self) -> None:
        if not _GIT_URL.match(self.url) or len(self.url) > limits.PATH_BYTES_MAX or not _is_plain(self.url):
            raise InvalidArgumentError(
                f"{self.url[:200]!r} is no repository that can be built from",
                hint="https://host/path or file:///path, without a user name or password; http only of this machine",
            )
        if not _COMMIT.match(self.commit):
            raise InvalidArgumentError(f"{self.commit[:80]!r} is not the whole name of a commit", hint="40 hex digits")
        _absolute(self.path)
        if ".." in self.path.split("/") or self.path.strip("/") == "":
            raise InvalidArgumentError(f"{self.path[:80]!r} is no place for a work tree", hint="such as /workspace")
        if self.depth is not None and not 1 <= self.depth <= limits.GIT_DEPTH_MAX:
            raise LimitError(f"depth must be between 1 and {limits.GIT_DEPTH_MAX}, and is {self.depth}")


class StoreSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="store"):
    """An environment that was pushed to a store. Its content stays there, and is loaded as it is read.

    With the digest that the push told, or 12 digits of it or more, nothing else is taken, whatever the store says.
    """

    url: str
    environment: str  # its name in the store: NAME, or NAME:TAG
    digest: str | None = None

    def __post_init__(self) -> None:
        check_store(self.url)
        parse_tagged(self.environment)
        if self.digest is not None:
            parse_digest(self.digest)


TreeSource = DirectorySource | TarSource | OciSource | DebianSource | GitSource  # a tree is made of it
ImageSource = RegistrySource | DockerArchiveSource | DockerfileSource  # becomes an OciSource first
BuildSource = TreeSource | ImageSource | StoreSource


class BuildRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Make the environment `name` (NAME, or NAME:TAG) from `source`.

    A name that exists with the same content is success at once; with other content it is an error unless `replace`.
    """

    name: str
    source: BuildSource
    replace: bool = False
    refresh: bool = False  # build again even if this request was built before (newer packages, say)

    def __post_init__(self) -> None:
        parse_tagged(self.name)


class PushTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where an environment is pushed to: the URL of a store, made where there is none."""

    store: str

    def __post_init__(self) -> None:
        check_store(self.store)


class PushRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Put the environment `name`, and the layers that are not there, into a store; again: success."""

    name: str
    store: str

    def __post_init__(self) -> None:
        parse_reference(self.name)
        check_store(self.store)


class Role(enum.StrEnum):
    """What a part is in an environment. Later ones lie above, and hide, earlier ones."""

    BASE = "base"
    WORKSPACE = "workspace"
    TOOLKIT = "toolkit"


class EnvironmentPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a composed environment, and what it was when the environment was locked."""

    role: Role
    reference: str
    digest: str  # of the record
    layers: tuple[str, ...]  # digests, lowest first


class EnvironmentInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An environment as callers see it."""

    name: str  # NAME, or NAME:TAG where the tag is not "latest"
    digest: str = ""  # of the record: NAME@DIGEST means this one, whatever the name is given to later
    layers: tuple[str, ...]  # digests, lowest first
    size_bytes: int
    layer_bytes: tuple[int, ...] = ()  # of each layer, on this node's disk
    created_at: float  # seconds since the epoch
    source: str  # for people: "debian bookworm: python3, git"
    kind: str = "erofs"  # how its layers are stored: erofs | directory
    env: dict[str, str] = {}
    user: str | None = None
    workdir: str | None = None
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    parts: tuple[EnvironmentPart, ...] = ()  # of a composed one, lowest first
    follow: bool = False  # its parts are looked up at each create; otherwise they are locked
    nodes: tuple[str, ...] = ()  # that have it, in a list of a cluster


class EnvironmentPage(msgspec.Struct, frozen=True):
    environments: list[EnvironmentInfo] = []
    missing: list[str] = []  # nodes that did not answer


class EnvironmentRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str


class LoadFailure(msgspec.Struct, frozen=True):
    """Why content of a layer could not be had from its store, last. It is forgotten once the store gives again."""

    cause: str  # gone | denied | unreachable | unavailable | corrupt
    detail: str


class LayerUse(msgspec.Struct, frozen=True, kw_only=True):
    """What is here of a layer, and what has been read of it since it is loaded. A local layer is here whole."""

    digest: str
    store: str | None = None  # None: a local layer, of which no reads are counted
    loaded: bool = False  # from the store, as it is read; not yet, before the first sandbox
    size_bytes: int  # of its content
    present_bytes: int  # on this node's disk
    touched_bytes: int = 0  # wanted by somebody, in whole chunks
    read_bytes: int = 0  # given to readers
    fetched_bytes: int = 0  # from the store, compressed
    hits: int = 0  # reads that found all here
    misses: int = 0
    waiting: int = 0  # reads that wait for the store now
    errors: int = 0  # times that the store was given up for the moment
    corrupt: int = 0  # chunks that were not what was published
    failure: LoadFailure | None = None


class EnvironmentStats(msgspec.Struct, frozen=True, kw_only=True):
    """How much of an environment has been loaded."""

    name: str
    layers: tuple[LayerUse, ...]  # lowest first


class LayerTrace(msgspec.Struct, frozen=True, kw_only=True):
    digest: str
    chunks: int  # that were read, in order


class EnvironmentTrace(msgspec.Struct, frozen=True, kw_only=True):
    """What has been recorded into the stores of an environment's layers, for others to load first."""

    name: str
    layers: tuple[LayerTrace, ...]


class MachineBuild(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A Debian system with our agent, as the image `name` of full machines."""

    name: str
    packages: tuple[str, ...] = ()  # beside those that make it a system
    desktop: bool = False  # with X, a window manager and a terminal
    suite: str | None = None  # None: the node's own
    disk_bytes: int = 10 * limits.GIB  # of a machine that asks for no other

    def __post_init__(self) -> None:
        parse_name(self.name, "image name")
        DebianSource(packages=self.packages, suite=self.suite)  # says what is wrong with them
        if not limits.MACHINE_SYSTEM_BYTES_MIN <= self.disk_bytes <= limits.DISK_BYTES_MAX:
            raise LimitError("the disk of a Debian system must be between 4GiB and 64TiB")


class BuildEvent(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One line of the story of a build, a push or an export. `done` or `error` is the last."""

    kind: str  # progress | log | done | error
    # progress: wait | resolve | fetch | stage | digest | convert | verify | publish | cached | attach | pack | push
    stage: str | None = None
    message: str = ""
    environment: EnvironmentInfo | None = None  # done, of a build or a push
    exported: ExportedImage | None = None  # done, of an export
    machine: MachineInfo | None = None  # done, of an image of machines
    error: ErrorBody | None = None  # error


def check_store(url: str) -> None:
    """Raises InvalidArgumentError for what is not the URL of a store. No credentials, queries or fragments."""
    if len(url) > limits.PATH_BYTES_MAX or not _STORE.match(url):
        raise InvalidArgumentError(f"{url[:200]!r} is not a store", hint=_STORE_HINT)
    try:
        parts = urlsplit(url)
        wrong = "@" in parts.netloc or "?" in url or "#" in url or (parts.port == 0)
    except ValueError:
        wrong = True
    if wrong or (parts.scheme != "file" and not parts.hostname):
        raise InvalidArgumentError(f"{url[:200]!r} is not a store", hint=_STORE_HINT)


def is_on_node(url: str) -> bool:
    """Whether a store is a directory of the node."""
    return url.startswith("file:")


def _is_plain(url: str) -> bool:
    """Whether a URL names no account, and nobody on the way can change what comes."""
    try:
        parts = urlsplit(url)
        return "@" not in parts.netloc and (parts.scheme != "http" or parts.hostname in _LOOPBACK)
    except ValueError:
        return False


def _absolute(path: str) -> None:
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"the path of a source must be UTF-8, and is {path[:80]!r}") from error
    check_path(path)
    if not path.startswith("/"):
        raise InvalidArgumentError(f"the path of a source must be absolute, and is {path[:80]!r}")
