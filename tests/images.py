"""Archives, image layouts and trees for tests of storage and image."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dsec.image.scan import tree_digest


def member(
    name: str, content: bytes | None = None, *, type: bytes = tarfile.REGTYPE, **fields: Any
) -> tuple[Any, bytes]:
    """One member of an archive: a file with content, or whatever `type` and `fields` say."""
    info = tarfile.TarInfo(name)
    info.type = type
    info.mode = 0o755 if type == tarfile.DIRTYPE else 0o644
    for key, value in fields.items():
        setattr(info, key, value)
    data = content or b""
    info.size = fields.get("size", len(data))
    return info, data


def directory(name: str, **fields: Any) -> tuple[Any, bytes]:
    return member(name, type=tarfile.DIRTYPE, **fields)


def symlink(name: str, target: str, **fields: Any) -> tuple[Any, bytes]:
    return member(name, type=tarfile.SYMTYPE, linkname=target, **fields)


def hardlink(name: str, target: str, **fields: Any) -> tuple[Any, bytes]:
    return member(name, type=tarfile.LNKTYPE, linkname=target, **fields)


def tar_of(members: Iterable[tuple[Any, bytes]], *, format: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format) as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


class Layout:
    """An OCI image layout written by the test itself."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.manifests: list[dict[str, Any]] = []
        (root / "blobs" / "sha256").mkdir(parents=True)
        (root / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        self.write_index()

    def blob(self, data: bytes, media_type: str) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        (self.root / "blobs" / "sha256" / digest).write_bytes(data)
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}

    def json_blob(self, value: Any, media_type: str) -> dict[str, Any]:
        return self.blob(json.dumps(value).encode(), media_type)

    def image(
        self,
        layers: Iterable[bytes],
        *,
        name: str | None = None,
        run: dict[str, Any] | None = None,
        architecture: str = "amd64",
        listed: bool = True,
    ) -> dict[str, Any]:
        """Add an image; its descriptor. Layers are given as they are to be stored."""
        config = {"os": "linux", "architecture": architecture, "config": run or {}}
        manifest = self.json_blob(
            {
                "schemaVersion": 2,
                "config": self.json_blob(config, "application/vnd.oci.image.config.v1+json"),
                "layers": [self.blob(layer, "application/vnd.oci.image.layer.v1.tar") for layer in layers],
            },
            "application/vnd.oci.image.manifest.v1+json",
        )
        manifest["platform"] = {"os": "linux", "architecture": architecture}
        if name is not None:
            manifest["annotations"] = {"org.opencontainers.image.ref.name": name}
        if listed:
            self.manifests.append(manifest)
            self.write_index()
        return manifest

    def write_index(self) -> None:
        (self.root / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": self.manifests}))

    def blob_path(self, descriptor: dict[str, Any]) -> Path:
        return self.root / "blobs" / "sha256" / str(descriptor["digest"]).removeprefix("sha256:")


def gzipped(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


def digest_of(path: Path) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return tree_digest(fd).digest
    finally:
        os.close(fd)


def listing(root: Path) -> dict[str, str]:
    """Relative path → content, link target or "/" for a directory."""
    found: dict[str, str] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = f"-> {path.readlink()}"
        elif path.is_dir():
            found[name] = "/"
        else:
            found[name] = path.read_text()
    return found
