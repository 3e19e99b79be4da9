"""A lasting shell, a command that goes on in the background, a terminal.

.venv/bin/python examples/sessions.py [environment [backend]]
"""

from __future__ import annotations

import sys

import dsec


def main(environment: str = "base", backend: str = "container") -> None:
    with dsec.Sandbox.create(environment, backend=backend) as sb:
        # Directory and variables stay from one command to the next.
        shell = sb.session("main")
        shell.exec("cd /tmp && export GREETING=hello")
        print(shell.exec("echo $GREETING from && pwd").stdout.split())

        # A process goes on whatever becomes of this program; its id finds it again.
        process = sb.start(["cat"], stdin=True)
        again = sb.attach(process.id)
        again.write("written through the second one\n")
        again.close_stdin()
        print(process.wait().stdout, end="")

        with sb.pty(["cat"], cols=80, rows=24) as terminal:
            terminal.write("typed\n")
            print(terminal.read().decode().split()[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
