"""Which apt sources an environment is made from, and that no secret of the machine gets into it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsec.core.errors import HostError, InvalidArgumentError
from dsec.image.sources.apt import AptSource, host_sources, host_suite
from dsec.wire.environments import DebianSource

DEB822 = """\
# a comment
Types: deb deb-src
URIs: http://user:secret@mirror.example/debian
Suites: bookworm bookworm-updates
Components: main contrib
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 abc

Types: deb
URIs: http://mirror.example/security
Suites: bookworm-security
Components: main
Signed-By: /usr/share/keyrings/k.gpg

Types: deb-src
URIs: http://mirror.example/source-only
Suites: bookworm
Components: main

Types: deb
Enabled: no
URIs: http://mirror.example/off
Suites: bookworm
Components: main

Types: deb
URIs: http://vendor.example/
Suites: cloud-sdk
Components: main
"""


def etc_with(tmp_path: Path, **files: str) -> Path:
    (tmp_path / "sources.list.d").mkdir()
    for name, text in files.items():
        stem, _, suffix = name.rpartition("_")
        path = tmp_path / ("sources.list" if name == "sources_list" else f"sources.list.d/{stem}.{suffix}")
        path.write_text(text)
    return tmp_path


def test_sources_of_the_suite_are_taken_and_others_left(tmp_path: Path) -> None:
    found = host_sources("bookworm", host="bookworm", etc=etc_with(tmp_path, debian_sources=DEB822))

    assert [source.uris for source in found] == [
        ("http://user:secret@mirror.example/debian",),
        ("http://mirror.example/security",),
    ]
    assert found[0].suites == ("bookworm", "bookworm-updates")
    assert found[0].components == ("main", "contrib")
    assert found[0].signed_by == "\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n abc"
    assert found[1].signed_by == "/usr/share/keyrings/k.gpg"


def test_one_line_sources_are_read(tmp_path: Path) -> None:
    text = """
# deb http://off.example/ bookworm main
deb [arch=amd64 signed-by=/k.gpg] http://a.example/debian bookworm main non-free  # comment
deb-src http://a.example/debian bookworm main
  deb http://b.example/debian bookworm-updates main
"""
    found = host_sources("bookworm", host="bookworm", etc=etc_with(tmp_path, sources_list=text, extra_list=text))

    assert found[:2] == (
        AptSource(("http://a.example/debian",), ("bookworm",), ("main", "non-free"), "/k.gpg"),
        AptSource(("http://b.example/debian",), ("bookworm-updates",), ("main",)),
    )
    assert len(found) == 4


def test_another_suite_comes_from_the_same_mirrors(tmp_path: Path) -> None:
    found = host_sources("trixie", host="bookworm", etc=etc_with(tmp_path, debian_sources=DEB822))

    assert [source.suites for source in found] == [("trixie", "trixie-updates"), ("trixie-security",)]


def test_a_machine_without_sources_says_so(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="no source"):
        host_sources("bookworm", host="bookworm", etc=etc_with(tmp_path))


def test_what_goes_into_the_environment_has_no_credentials(tmp_path: Path) -> None:
    found = host_sources("bookworm", host="bookworm", etc=etc_with(tmp_path, debian_sources=DEB822))

    text = found[0].without_credentials().text()

    assert "secret" not in text
    assert "URIs: http://mirror.example/debian" in text
    assert "secret" in found[0].text()  # the build itself needs them


def test_the_suite_of_the_machine_is_read_from_os_release(tmp_path: Path) -> None:
    path = tmp_path / "os-release"
    path.write_text('# x\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nVERSION_CODENAME="bookworm"\n')

    assert host_suite(path) == "bookworm"


@pytest.mark.parametrize("text", ["", "ID=alpine\n", 'X="open'])
def test_a_machine_without_a_suite_says_what_to_do(tmp_path: Path, text: str) -> None:
    path = tmp_path / "os-release"
    path.write_text(text)

    with pytest.raises(HostError) as error:
        host_suite(path)
    assert "--suite" in (error.value.hint or "")


@pytest.mark.parametrize(
    "package", ["--help", "a b", "a,b", "?essential", "~prequired", "/etc/passwd", "", "A", "a;b", "a\n"]
)
def test_what_is_no_package_is_refused(package: str) -> None:
    with pytest.raises(InvalidArgumentError):
        DebianSource((package,))


@pytest.mark.parametrize("package", ["g++", "libc6:amd64", "python3.11", "git=1:2.39.2-1.1+deb12u1~x"])
def test_what_is_a_package_is_taken(package: str) -> None:
    assert DebianSource((package,)).packages == (package,)
