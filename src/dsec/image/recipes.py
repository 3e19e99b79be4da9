"""What the environments that dsec makes itself consist of."""

from __future__ import annotations

from typing import Final

RECIPE_VERSION: Final = 2  # raised when the same request leads to another tree; part of every build key

BASE_NAME: Final = "base"
BASE_PACKAGES: Final = (
    "bash",
    "build-essential",
    "ca-certificates",
    "coreutils",
    "git",
    "less",
    "netbase",  # /etc/services and /etc/protocols, which test suites look things up in
    "procps",
    "python-is-python3",
    "python3",
    "python3-dev",
    "python3-pip",
    "python3-venv",
    "tzdata",
)
"""A place to build and test ordinary Python projects in. Built at set-up by `dsec env build base --debian …`."""

DEBIAN_ENV: Final = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
}

# Nobody reads manuals in a sandbox, and they are a fifth of the files. Licences stay: they must.
DPKG_OPTIONS: Final = (
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/locale/*",
    "path-include=/usr/share/locale/locale.alias",
)
