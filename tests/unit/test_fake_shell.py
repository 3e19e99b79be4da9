"""The fake sandbox's shell does what its tests count on."""

from __future__ import annotations

import asyncio

import pytest

from dsec.backends.fake.files import ROOT, FileTree
from dsec.backends.fake.process import Context, KilledError, NullSource, Process, ShellExit
from dsec.backends.fake.shell import Shell


class Kept:
    def __init__(self) -> None:
        self.data = b""

    async def write(self, data: bytes) -> None:
        self.data += data


def shell() -> tuple[Shell, Kept, Kept]:
    out, err = Kept(), Kept()
    files = FileTree(lambda: 0)
    context = Context(files, asyncio.sleep, 42)
    return Shell(Process(context, {b"HOME": b"/root"}, b"/tmp", ROOT, NullSource(), out, err)), out, err


@pytest.mark.parametrize(
    ("text", "out", "code"),
    [
        ("echo a   b", "a b\n", 0),
        ("echo 'a   b' \"c $X d\" e\\ f", "a   b c  d e f\n", 0),
        ("X=1; echo $X ${X}2 '$X'", "1 12 $X\n", 0),
        ("X=1 Y=2 env", "HOME=/root\nX=1\nY=2\n", 0),
        ("false; echo $?", "1\n", 0),
        ("true && echo yes || echo no", "yes\n", 0),
        ("false && echo yes || echo no", "no\n", 0),
        ("false || false", "", 1),
        ("seq 100 | head -n 2", "1\n2\n", 0),
        ("yes | head -c 3", "y\ny", 0),
        ("printf 'a%sb\\n' 1 2", "a1b\na2b\n", 0),
        ("echo x > f; echo y >> f; cat f; wc -c < f", "x\ny\n4\n", 0),
        ("echo gone 2>/dev/null >/dev/null", "", 0),
        ("no-such-command 2>/dev/null", "", 127),
        ("no-such-command 2>&1", "sh: no-such-command: not found\n", 127),
        ("cd /; pwd; cd tmp/../etc; pwd", "/\n/etc\n", 0),
        ("cd /missing", "", 2),
        ("sh -c 'cd /; exit 3'; echo $?; pwd", "3\n/tmp\n", 0),
        ("mkdir -p a/b; touch a/b/c; mv a/b/c a/d; ls a; rm -r a; test -e a", "b\nd\n", 1),
        ("ln -s f l; echo 1 > f; cat l; test -f l && echo file", "1\nfile\n", 0),
        ("echo a\necho b", "a\nb\n", 0),
        ("echo $$", "42\n", 0),
        ("head -c 5 /dev/zero | wc -c", "5\n", 0),
        ("sleep 0.01 & wait; echo done", "done\n", 0),
        ("'unclosed", "", 2),
        ("seq x", "", 2),
    ],
)
async def test_a_script_gives(text: str, out: str, code: int) -> None:
    script, kept, _ = shell()

    assert await script.run(text.encode()) == code
    assert kept.data.decode() == out


async def test_exit_and_kill_end_the_shell() -> None:
    script, _, _ = shell()

    with pytest.raises(ShellExit) as ended:
        await script.run(b"exit 300; echo no")
    assert ended.value.code == 300 & 255
    with pytest.raises(KilledError) as killed:
        await script.run(b"kill -TERM $$")
    assert killed.value.signal == 15


async def test_what_goes_wrong_is_said_on_stderr() -> None:
    script, out, err = shell()

    assert await script.run(b"cat /missing; ls /missing") == 1

    assert out.data == b""
    assert err.data == b"cat: /missing: ENOENT\nls: /missing: ENOENT\n"
