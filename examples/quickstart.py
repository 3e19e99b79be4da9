"""The first steps: a sandbox, a command, a file.

.venv/bin/python examples/quickstart.py [environment [backend]]
"""

from __future__ import annotations

import sys

import dsec


def main(environment: str = "base", backend: str = "container") -> None:
    with dsec.Sandbox.create(environment, backend=backend, memory="512MiB") as sb:
        print(sb.exec("echo hello from && uname -s").stdout.split())

        # A command that fails is a result. With check=True it would be an exception.
        result = sb.exec("echo trouble >&2; exit 3")
        print(result.exit_code, result.stderr.strip())

        sb.files.write("/tmp/numbers", "3\n1\n2\n")
        print(sb.files.read("/tmp/numbers").split())

        # Output can be heard as it comes.
        sb.exec("seq 1 3", on_stdout=lambda text: print(text, end=""))


if __name__ == "__main__":
    main(*sys.argv[1:])
