"""Files in and out: single ones, whole trees, and changes as they happen.

.venv/bin/python examples/files.py [environment [backend]]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import dsec


def main(environment: str = "base", backend: str = "container") -> None:
    with dsec.Sandbox.create(environment, backend=backend) as sb, tempfile.TemporaryDirectory() as directory:
        project = Path(directory) / "project"
        project.mkdir()
        (project / "a.txt").write_text("hello\n")

        sb.upload(project, "/work")  # the content of a directory goes below /work
        with sb.files.watch("/work") as changes:
            sb.exec("cat /work/a.txt /work/a.txt > /work/b.txt", check=True)
            print(next(iter(changes)).path)

        done = sb.download("/work", Path(directory) / "back")
        print(sorted(path.name for path in (Path(directory) / "back").iterdir()), done.skipped)
        print(sb.files.stat("/work/b.txt").size)


if __name__ == "__main__":
    main(*sys.argv[1:])
