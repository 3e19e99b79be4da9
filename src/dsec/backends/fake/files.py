"""A tree of files in memory: modes, owners, symlinks, and watchers that are told of every change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from dsec.backends.fake.failures import file_failure
from dsec.core.limits import NAME_BYTES_MAX, PATH_BYTES_MAX
from dsec.wire.agent import FileStat, WatchEvent

_LINKS_MAX: Final = 40
_DIRECTORIES: Final = (b"bin", b"dev", b"etc", b"home", b"root", b"run", b"tmp", b"usr", b"var")
_READ, _WRITE, _SEARCH = 4, 2, 1


@dataclass(frozen=True, slots=True)
class User:
    """Whose rights a file operation has."""

    uid: int = 0
    gid: int = 0


ROOT: Final = User()


class Node:
    """One file, directory or symlink."""

    __slots__ = ("data", "entries", "gid", "kind", "mode", "mtime_ns", "target", "uid")

    def __init__(
        self, kind: str, mode: int, *, user: User = ROOT, now_ns: int = 0, target: bytes | None = None
    ) -> None:
        self.kind = kind
        self.mode = mode
        self.uid = user.uid
        self.gid = user.gid
        self.mtime_ns = now_ns
        self.data = bytearray() if kind == "file" else None
        self.entries: dict[bytes, Node] | None = {} if kind == "directory" else None
        self.target = target


def copy_of(node: Node) -> Node:
    made = Node(node.kind, node.mode, user=User(node.uid, node.gid), now_ns=node.mtime_ns, target=node.target)
    made.data = None if node.data is None else bytearray(node.data)
    made.entries = None if node.entries is None else {name: copy_of(entry) for name, entry in node.entries.items()}
    return made


@dataclass(frozen=True, slots=True)
class Place:
    """Where a path leads: `node` is None when only the last name is missing."""

    parent: Node
    name: bytes
    node: Node | None
    path: bytes  # without symlinks


@dataclass(slots=True)
class Watcher:
    path: bytes
    recursive: bool
    notify: Callable[[WatchEvent], None]


class FileTree:
    """Raises AgentFailure `file` with the errno that a real file system would give."""

    __slots__ = ("_now_ns", "_root", "_watchers", "used_bytes")

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self._watchers: list[Watcher] = []
        self.used_bytes = 0
        now = now_ns()
        self._root = Node("directory", 0o755, now_ns=now)
        for name in _DIRECTORIES:
            self._children(self._root)[name] = Node("directory", 0o755, now_ns=now)
        self._children(self._root)[b"tmp"].mode = 0o1777
        self._children(self._root)[b"root"].mode = 0o700

    def copy(self, now_ns: Callable[[], int]) -> FileTree:
        """The same files, on their own from now on; a file of several names becomes several."""
        made = FileTree(now_ns)
        made._root = copy_of(self._root)
        made.used_bytes = self.used_bytes
        return made

    # -- reading -----------------------------------------------------------------------------------

    def stat(self, path: bytes, *, follow: bool = True, user: User = ROOT) -> FileStat:
        place = self._existing(path, follow=follow, user=user)
        assert place.node is not None
        return stat_of(place.name or b"/", place.node)

    def list(self, path: bytes, *, user: User = ROOT) -> list[FileStat]:
        node = self._directory(path, user)
        _allow(node, _READ, user, path)
        return [stat_of(name, child) for name, child in sorted(self._children(node).items())]

    def read(self, path: bytes, *, user: User = ROOT) -> tuple[FileStat, bytearray]:
        """The live content: what is written later is seen."""
        place = self._existing(path, follow=True, user=user)
        node = place.node
        assert node is not None
        _allow(node, _READ, user, path)
        if node.data is None:
            raise file_failure("EISDIR" if node.kind == "directory" else "EINVAL", path)
        return stat_of(place.name, node), node.data

    def walk(self, path: bytes, *, user: User = ROOT) -> Iterator[tuple[bytes, Node]]:
        """(relative path, node) of everything below a directory, parents first; or of the one file."""
        place = self._existing(path, follow=True, user=user)
        assert place.node is not None
        if place.node.entries is None:
            yield place.name, place.node
            return
        yield from self._walk(b"", place.node)

    def exists(self, path: bytes) -> bool:
        try:
            return self._resolve(path, follow=True, user=ROOT).node is not None
        except Exception:
            return False

    # -- changing ----------------------------------------------------------------------------------

    def write(
        self,
        path: bytes,
        data: bytes,
        *,
        offset: int | None = None,
        append: bool = False,
        mode: int | None = None,
        parents: bool = False,
        user: User = ROOT,
    ) -> None:
        if parents:
            self._make_parents(path, user)
        place = self._resolve(path, follow=True, user=user)
        node, created = place.node, place.node is None
        if node is None:
            _allow(place.parent, _WRITE, user, path)
            node = Node("file", 0o644, user=user)
            self._children(place.parent)[place.name] = node
        else:
            _allow(node, _WRITE, user, path)
        if node.data is None:
            raise file_failure("EISDIR" if node.kind == "directory" else "EINVAL", path)
        before = len(node.data)
        if append:
            node.data += data
        elif offset is None:
            node.data = bytearray(data)
        else:
            node.data.extend(bytes(max(0, offset - len(node.data))))
            node.data[offset : offset + len(data)] = data
        self.used_bytes += len(node.data) - before
        node.mtime_ns = self._now_ns()
        if mode is not None:
            node.mode = mode & 0o7777
        if created:
            self._notify("created", place.path)
        self._notify("modified", place.path)

    def check_writable(self, path: bytes, *, parents: bool, user: User) -> None:
        """Raises as `write` would, and changes nothing but missing parents."""
        if parents:
            self._make_parents(path, user)
        place = self._resolve(path, follow=True, user=user)
        if place.node is None:
            _allow(place.parent, _WRITE, user, path)
        elif place.node.data is None:
            raise file_failure("EISDIR" if place.node.kind == "directory" else "EINVAL", path)
        else:
            _allow(place.node, _WRITE, user, path)

    def mkdir(self, path: bytes, *, parents: bool, mode: int = 0o755, user: User = ROOT) -> None:
        if parents:
            self._make_parents(path, user)
        place = self._resolve(path, follow=True, user=user)
        if place.node is not None:
            if parents and place.node.entries is not None:
                return
            raise file_failure("EEXIST", path)
        self._add(place, Node("directory", mode & 0o7777, user=user, now_ns=self._now_ns()), path, user)

    def symlink(self, path: bytes, target: bytes, *, user: User = ROOT) -> None:
        place = self._resolve(path, follow=False, user=user)
        if place.node is not None:
            raise file_failure("EEXIST", path)
        node = Node("symlink", 0o777, user=user, now_ns=self._now_ns(), target=target)
        self._add(place, node, path, user)

    def remove(self, path: bytes, *, recursive: bool, missing_ok: bool, user: User = ROOT) -> None:
        try:
            place = self._existing(path, follow=False, user=user)
        except Exception as error:
            if missing_ok and getattr(error, "errno", None) in ("ENOENT", "ENOTDIR"):
                return
            raise
        node = place.node
        assert node is not None
        if not place.name:
            raise file_failure("EBUSY", path)
        _allow(place.parent, _WRITE, user, path)
        if node.entries and not recursive:
            raise file_failure("ENOTEMPTY", path)
        for _, child in self._walk(b"", node) if node.entries is not None else [(b"", node)]:
            self.used_bytes -= len(child.data or b"")
        del self._children(place.parent)[place.name]
        self._notify("deleted", place.path, directory=node.entries is not None)

    def move(self, source: bytes, target: bytes, *, replace: bool, user: User = ROOT) -> None:
        old = self._existing(source, follow=False, user=user)
        new = self._resolve(target, follow=False, user=user)
        if not old.name:
            raise file_failure("EBUSY", source)
        _allow(old.parent, _WRITE, user, source)
        _allow(new.parent, _WRITE, user, target)
        if new.node is not None:
            self._check_replaceable(old, new, target, replace)
        if new.path.startswith(old.path + b"/"):
            raise file_failure("EINVAL", target)
        assert old.node is not None
        del self._children(old.parent)[old.name]
        self._children(new.parent)[new.name] = old.node
        self._notify("moved", new.path, source=old.path, directory=old.node.entries is not None)

    def chmod(self, path: bytes, mode: int, *, user: User = ROOT) -> None:
        place = self._existing(path, follow=True, user=user)
        assert place.node is not None
        if user.uid not in (0, place.node.uid):
            raise file_failure("EPERM", path)
        place.node.mode = mode & 0o7777
        self._notify("attributes", place.path)

    def chown(self, path: bytes, *, uid: int | None, gid: int | None, follow: bool) -> None:
        place = self._existing(path, follow=follow, user=ROOT)
        assert place.node is not None
        place.node.uid = place.node.uid if uid is None else uid
        place.node.gid = place.node.gid if gid is None else gid
        self._notify("attributes", place.path)

    def watch(self, path: bytes, recursive: bool, notify: Callable[[WatchEvent], None]) -> Watcher:
        self._directory(path, ROOT)
        watcher = Watcher(self._existing(path, follow=True, user=ROOT).path, recursive, notify)
        self._watchers.append(watcher)
        return watcher

    def unwatch(self, watcher: Watcher) -> None:
        if watcher in self._watchers:
            self._watchers.remove(watcher)

    # -- paths -------------------------------------------------------------------------------------

    def _resolve(self, path: bytes, *, follow: bool, user: User) -> Place:
        check_path(path)
        todo = [part for part in reversed(path.split(b"/")) if part not in (b"", b".")]
        trail: list[tuple[bytes, Node]] = []  # from the root down
        links = 0
        while todo:
            name = todo.pop()
            if name == b"..":
                del trail[-1:]
                continue
            here = trail[-1][1] if trail else self._root
            if here.entries is None:
                raise file_failure("ENOTDIR", path)
            _allow(here, _SEARCH, user, path)
            child = here.entries.get(name)
            if child is None:
                if todo:
                    raise file_failure("ENOENT", path)
                return Place(here, name, None, _join(trail, name))
            if child.target is not None and (todo or follow):
                links += 1
                if links > _LINKS_MAX:
                    raise file_failure("ELOOP", path)
                if child.target.startswith(b"/"):
                    trail.clear()
                todo.extend(part for part in reversed(child.target.split(b"/")) if part not in (b"", b"."))
                continue
            trail.append((name, child))
        if not trail:
            return Place(self._root, b"", self._root, b"")
        if path.endswith(b"/") and trail[-1][1].entries is None:
            raise file_failure("ENOTDIR", path)
        parent = trail[-2][1] if len(trail) > 1 else self._root
        return Place(parent, trail[-1][0], trail[-1][1], _join(trail[:-1], trail[-1][0]))

    def _existing(self, path: bytes, *, follow: bool, user: User) -> Place:
        place = self._resolve(path, follow=follow, user=user)
        if place.node is None:
            raise file_failure("ENOENT", path)
        return place

    def _directory(self, path: bytes, user: User) -> Node:
        node = self._existing(path, follow=True, user=user).node
        if node is None or node.entries is None:
            raise file_failure("ENOTDIR", path)
        return node

    def _make_parents(self, path: bytes, user: User) -> None:
        parts = [part for part in path.split(b"/") if part]
        for count in range(1, len(parts)):
            parent = b"/" + b"/".join(parts[:count])
            place = self._resolve(parent, follow=True, user=user)
            if place.node is None:
                self._add(place, Node("directory", 0o755, user=user, now_ns=self._now_ns()), parent, user)

    def _add(self, place: Place, node: Node, path: bytes, user: User) -> None:
        if len(place.name) > NAME_BYTES_MAX:
            raise file_failure("ENAMETOOLONG", path)
        _allow(place.parent, _WRITE, user, path)
        self._children(place.parent)[place.name] = node
        self._notify("created", place.path, directory=node.entries is not None)

    def _check_replaceable(self, old: Place, new: Place, target: bytes, replace: bool) -> None:
        assert old.node is not None
        assert new.node is not None
        if not replace:
            raise file_failure("EEXIST", target)
        if new.node.entries is not None:
            if old.node.entries is None:
                raise file_failure("EISDIR", target)
            if new.node.entries:
                raise file_failure("ENOTEMPTY", target)
        elif old.node.entries is not None:
            raise file_failure("ENOTDIR", target)
        self.used_bytes -= len(new.node.data or b"")

    @staticmethod
    def _children(node: Node) -> dict[bytes, Node]:
        assert node.entries is not None
        return node.entries

    def _walk(self, prefix: bytes, node: Node) -> Iterator[tuple[bytes, Node]]:
        for name, child in sorted(self._children(node).items()):
            path = prefix + name
            yield path, child
            if child.entries is not None:
                yield from self._walk(path + b"/", child)

    def _notify(self, kind: str, path: bytes, *, source: bytes | None = None, directory: bool = False) -> None:
        for watcher in list(self._watchers):
            inside = _below(path, watcher)
            origin = None if source is None else _below(source, watcher)
            if inside is not None and source is not None and origin is None:
                watcher.notify(WatchEvent(kind="created", path=inside, directory=directory))
            elif inside is not None:
                watcher.notify(WatchEvent(kind=kind, path=inside, source=origin, directory=directory))
            elif origin is not None:
                watcher.notify(WatchEvent(kind="deleted", path=origin, directory=directory))


def check_path(path: bytes) -> None:
    if not path.startswith(b"/") or b"\0" in path:
        raise file_failure("EINVAL", path)
    if len(path) > PATH_BYTES_MAX or any(len(part) > NAME_BYTES_MAX for part in path.split(b"/")):
        raise file_failure("ENAMETOOLONG", path[:80])


def stat_of(name: bytes, node: Node) -> FileStat:
    size = len(node.data) if node.data is not None else len(node.target or b"")
    return FileStat(
        name=name,
        kind=node.kind,
        size=size,
        mode=node.mode,
        uid=node.uid,
        gid=node.gid,
        mtime_ns=node.mtime_ns,
        target=node.target,
    )


def _join(trail: list[tuple[bytes, Node]], name: bytes) -> bytes:
    return b"".join(b"/" + part for part, _ in trail) + b"/" + name


def _below(path: bytes, watcher: Watcher) -> bytes | None:
    if not path.startswith(watcher.path + b"/"):
        return None
    relative = path[len(watcher.path) + 1 :]
    return relative if watcher.recursive or b"/" not in relative else None


def _allow(node: Node, right: int, user: User, path: bytes) -> None:
    if user.uid == 0:
        return
    shift = 6 if node.uid == user.uid else 3 if node.gid == user.gid else 0
    if not (node.mode >> shift) & right:
        raise file_failure("EACCES", path)
