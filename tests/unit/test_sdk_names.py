"""What `import dsec` costs and offers; the blocking SDK mirrors the asynchronous one."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dsec
from dsec.image import recipes
from dsec.sdk import sync

ROOT = Path(__file__).resolve().parents[2]
PAIRS = [
    "Client",
    "Connection",
    "Environments",
    "Files",
    "Process",
    "Pty",
    "Sandbox",
    "Session",
    "Tokens",
    "Watch",
]
RENAMED = {"__aenter__": "__enter__", "__aexit__": "__exit__", "__aiter__": "__iter__"}


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout


def test_importing_dsec_loads_nothing_heavy() -> None:
    loaded = python("import sys, dsec; print(*sorted(sys.modules))").split()

    heavy = {"aiohttp", "asyncio", "msgspec", "typer", "rich", "uvloop", "ssl", "tarfile", "dsec.sdk"}
    assert heavy.isdisjoint(loaded)


def test_no_name_of_the_sdk_loads_aiohttp_before_the_first_call() -> None:
    code = "import sys, dsec; [getattr(dsec, n) for n in dsec._NAMES]; dsec.Client('http://x'); dsec.AsyncClient()"

    assert "aiohttp" not in python(f"{code}; print(*sys.modules)").split()


def test_importing_dsec_loads_few_modules() -> None:
    """What a program that imports it waits for; a time would be the machine's."""
    code = "import sys; before = len(sys.modules); import dsec; print(len(sys.modules) - before)"

    assert int(python(code)) < 60


def test_every_name_can_be_had() -> None:
    for name in dsec._NAMES:
        assert getattr(dsec, name) is not None
        assert name in dir(dsec)
    assert dsec.errors.CommandError is dsec.CommandError
    with pytest.raises(AttributeError):
        dsec.nothing_of_this_name  # noqa: B018


def test_types_are_told_for_exactly_the_names_that_exist() -> None:
    text = (ROOT / "src/dsec/__init__.py").read_text()
    block = text[text.index("if TYPE_CHECKING:") : text.index("# Name →")]
    told = {m for m in re.findall(r" as (\w+)\n", block) if m not in ("errors", "_records")} | {"SandboxInfo"}

    assert told == set(dsec._NAMES)


def test_the_blocking_sdk_is_what_its_generator_makes() -> None:
    subprocess.run([sys.executable, "tools/derive_sync.py", "--check"], cwd=ROOT, check=True, timeout=120)


@pytest.mark.parametrize("name", PAIRS)
def test_both_sdks_have_the_same_methods_signatures_and_docstrings(name: str) -> None:
    blocking, asynchronous = getattr(sync, name), getattr(dsec, f"Async{name}")
    methods = {
        key: value
        for key, value in vars(asynchronous).items()
        if (not key.startswith("_") or key in RENAMED)
        and (callable(value) or isinstance(value, property | classmethod))
    }

    assert methods
    for key, there in methods.items():
        here = vars(blocking)[RENAMED.get(key, key)]
        assert isinstance(here, property) == isinstance(there, property), key
        if isinstance(there, property):
            assert _words(there.__doc__) == _words(here.__doc__), key
            continue
        if isinstance(there, classmethod):
            here, there = here.__func__, there.__func__
        assert not inspect.iscoroutinefunction(here), key
        assert list(inspect.signature(here).parameters) == list(inspect.signature(there).parameters), key
        assert _defaults(here) == _defaults(there), key
        if not key.startswith("_"):
            assert there.__doc__, f"{name}.{key} says nothing"
            assert _words(there.__doc__) == _words(here.__doc__), key


def _defaults(function: object) -> list[object]:
    return [p.default for p in inspect.signature(function).parameters.values()]  # type: ignore[arg-type]


def _words(text: str | None) -> str:
    text = re.sub(r"\bAsync(?=[A-Z])|\basync |\bawait ", "", text or "")
    text = text.replace("; they may be coroutine functions", "; in the calling thread")
    return " ".join(text.split())


def test_the_usual_base_is_the_same_for_callers_and_for_the_image_builder() -> None:
    assert tuple(dsec.BASE_PACKAGES) == tuple(recipes.BASE_PACKAGES)


def test_the_help_of_the_command_is_quick_and_loads_no_client() -> None:
    code = "import sys; sys.argv = ['dsec', '--help']\nfrom dsec.cli.main import main\n"
    loaded = (
        python(f"{code}try: main()\nexcept SystemExit: pass\nprint('MODULES', *sys.modules)")
        .split("MODULES")[1]
        .split()
    )

    assert {"aiohttp", "asyncio", "dsec.sdk.client"}.isdisjoint(loaded)
    assert len(loaded) < 300  # it takes as long as loading these; a time would be the machine's
