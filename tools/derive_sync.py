"""Writes src/dsec/sdk/sync.py: the blocking SDK, derived from the asynchronous one.

    .venv/bin/python tools/derive_sync.py            write it
    .venv/bin/python tools/derive_sync.py --check    say whether it is up to date

Every public class `AsyncX` of the modules below becomes `X`, with the same methods, signatures and docstrings.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SDK = ROOT / "src" / "dsec" / "sdk"
TARGET = SDK / "sync.py"
MODULES = (
    "process",
    "pty",
    "sessions",
    "files",
    "ports",
    "screen",
    "environments",
    "layers",
    "volumes",
    "machines",
    "tokens",
    "projects",
    "grants",
    "snapshots",
    "jobs",
    "groups",
    "sandbox",
    "client",
)
EXTRA_BASES = {"AsyncConnection": "SocketLike, "}
ENTER_EXIT = {"__aenter__": "__enter__", "__aexit__": "__exit__", "__aiter__": "__iter__"}
Function = ast.FunctionDef | ast.AsyncFunctionDef

HEADER = '''"""The blocking SDK. Derived from the asynchronous one by tools/derive_sync.py; changes belong there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dsec.sdk.blocking import Blocking, portal, unwrap
from dsec.sdk.socketlike import SocketLike
'''

FOOTER = """

def wrap(value: Any) -> Any:
    \"\"\"Asynchronous objects as blocking ones, also in a list; anything else as it is.\"\"\"
    if isinstance(value, list):
        return [wrap(item) for item in value]
    kind = _KINDS.get(type(value))
    return value if kind is None else kind._of(value)


def create_many(
    count: int,
    environment: str | Environment = "base",
    *,
    idempotency_key: str | None = None,
    timeout_s: float = limits.CREATE_TIMEOUT_S_DEFAULT,
    queue_s: float = 0.0,
    client: Client | None = None,
    **options: Unpack[CreateOptions],
) -> list[Sandbox | DsecError]:
    \"\"\"`count` sandboxes alike: for each, in order, the sandbox or the error that it failed with.\"\"\"
    return Sandbox.create_many(
        count,
        environment,
        idempotency_key=idempotency_key,
        timeout_s=timeout_s,
        queue_s=queue_s,
        client=client,
        **options,
    )


_KINDS: dict[type, Any] = {
%s
}
"""


def main() -> int:
    text = formatted(derive())
    if "--check" in sys.argv[1:]:
        if TARGET.read_text() == text:
            return 0
        print("src/dsec/sdk/sync.py is not what tools/derive_sync.py makes: run it", file=sys.stderr)
        return 1
    TARGET.write_text(text)
    return 0


def derive() -> str:
    imports: list[str] = []
    classes: list[str] = []
    names: list[str] = []
    for module in MODULES:
        tree = ast.parse((SDK / f"{module}.py").read_text())
        imports += [*import_lines(tree), *own_names(module, tree)]
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name.startswith("Async"):
                names.append(node.name)
                imports.append(f"from dsec.sdk.{module} import {node.name}")
                classes.append(derive_class(node))
    kinds = "\n".join(f"    {name}: {blocking(name)}," for name in names)
    return HEADER + "\n".join(dict.fromkeys(imports)) + "\n\n" + "\n\n".join(classes) + FOOTER % kinds


def import_lines(tree: ast.Module) -> list[str]:
    """All that a module imports; what turns out not to be needed is taken out again afterwards."""
    found: list[ast.stmt] = []
    for node in tree.body:
        found += node.body if isinstance(node, ast.If) else [node]
    return [
        ast.unparse(node)
        for node in found
        if isinstance(node, ast.Import | ast.ImportFrom) and "Async" not in ast.unparse(node).replace("AsyncGen", "")
    ]


def own_names(module: str, tree: ast.Module) -> list[str]:
    """Constants and aliases of a module that its signatures may use."""
    found = []
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and not target.id.startswith("_"):
            found.append(f"from dsec.sdk.{module} import {target.id}")
    return found


def derive_class(node: ast.ClassDef) -> str:
    name = blocking(node.name)
    if any("dataclass" in ast.unparse(d) for d in node.decorator_list):
        body = [derive_field(item) for item in node.body if isinstance(item, ast.AnnAssign)]
    else:
        body = [derive_method(node.name, item) for item in node.body if isinstance(item, Function) and public(item)]
    doc = docstring(node, 4)
    bases = f"{EXTRA_BASES.get(node.name, '')}Blocking[{node.name}]"
    return f"class {name}({bases}):\n{doc}\n" + "\n\n".join(body)


def public(node: Function) -> bool:
    return not node.name.startswith("_") or node.name in ENTER_EXIT or node.name == "__init__"


def derive_field(node: ast.AnnAssign) -> str:
    name, kind = ast.unparse(node.target), blocking(ast.unparse(node.annotation))
    value = f"value: {kind} = wrap(self._async.{name})\n        return value"
    return f"    @property\n    def {name}(self) -> {kind}:\n        {value}"


def derive_method(owner: str, node: Function) -> str:
    if node.name == "__init__":
        # Only a client is made by its users; the rest comes from methods.
        if owner != "AsyncClient":
            return ""
        return f"    def __init__({signature(node)}) -> None:\n        self._async = {owner}({passed(node)})"
    if node.name == "__aenter__":
        return "    def __enter__(self) -> Self:\n        portal().run(self._async.__aenter__())\n        return self"
    if node.name == "__aexit__":
        call = "portal().run(self._async.__aexit__(*error))"
        return f"    def __exit__(self, *error: object) -> None:\n        {call}"
    decorators = [ast.unparse(d) for d in node.decorator_list]
    head = "".join(f"    @{d}\n" for d in decorators)
    head += f"    def {ENTER_EXIT.get(node.name, node.name)}({signature(node)}) -> {returns(node)}:\n"
    return head + docstring(node, 8) + f"        {derive_body(owner, node, decorators)}"


def derive_body(owner: str, node: Function, decorators: list[str]) -> str:
    target = f"{owner}.{node.name}" if "classmethod" in decorators else f"self._async.{node.name}"
    if "property" in decorators:
        return given(node, target)
    if not isinstance(node, ast.AsyncFunctionDef):
        return given(node, f"{target}({passed(node)})")
    if is_generator(node):
        items = f"portal().iterate({target}({passed(node)}))"
        if wraps(node):
            return f"for item in {items}:\n            yield wrap(item)"
        return f"return {items}"
    if any(is_callback(a) for a in arguments(node)):
        call = f"portal().run_calling(lambda bridge: {target}({passed(node, bridge=True)}))"
    else:
        call = f"portal().run({target}({passed(node)}))"
    return call if returns(node) == "None" else given(node, call)


def wraps(node: Function) -> bool:
    return bool(re.search(r"\bAsync(?!Generator|Iterator)[A-Z]", ast.unparse(node.returns) if node.returns else ""))


def given(node: Function, value: str) -> str:
    if not wraps(node):
        return f"return {value}"
    return f"result: {returns(node)} = wrap({value})\n        return result"


def is_generator(node: Function) -> bool:
    return node.returns is not None and ast.unparse(node.returns).startswith("AsyncGenerator")


def returns(node: Function) -> str:
    text = ast.unparse(node.returns) if node.returns else "None"
    text = re.sub(r"^AsyncGenerator\[(.*), None\]$", r"Iterator[\1]", text)
    return blocking(text)


def arguments(node: Function) -> list[ast.arg]:
    return [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]


def is_callback(argument: ast.arg) -> bool:
    """By its type; aliases of such types are called …Callback."""
    written = ast.unparse(argument.annotation) if argument.annotation else ""
    return "Callable" in written or "Callback" in written


def signature(node: Function) -> str:
    return blocking(ast.unparse(node.args))


def passed(node: Function, *, bridge: bool = False) -> str:
    """The arguments, handed on by name where they may be."""

    def value(argument: ast.arg) -> str:
        annotation = ast.unparse(argument.annotation) if argument.annotation else ""
        if "Async" in annotation:
            return f"unwrap({argument.arg})"
        return f"bridge({argument.arg})" if bridge and is_callback(argument) else argument.arg

    positional = [value(a) for a in [*node.args.posonlyargs, *node.args.args] if a.arg not in ("self", "cls")]
    named = [f"{a.arg}={value(a)}" for a in node.args.kwonlyargs]
    rest = [f"**{node.args.kwarg.arg}"] if node.args.kwarg else []
    return ", ".join([*positional, *named, *rest])


def docstring(node: ast.ClassDef | Function, indent: int) -> str:
    text = ast.get_docstring(node, clean=False)
    if text is None:
        return ""
    quoted = text.replace("\\", "\\\\")
    return f'{" " * indent}"""{blocking_words(quoted)}"""\n'


def blocking_words(text: str) -> str:
    for old, new in (("async with await ", "with "), ("async with", "with"), ("async for", "for"), ("await ", "")):
        text = text.replace(old, new)
    text = text.replace("; they may be coroutine functions", "; in the calling thread")
    return blocking(text)


def blocking(text: str) -> str:
    return re.sub(r"\bAsync(?=[A-Z])", "", text)


def formatted(text: str) -> str:
    """Unneeded imports taken out, sorted, laid out: what ruff makes of it."""
    # F811: the same name may have been imported by several modules.
    for command in (["check", "--fix-only", "--select", "F401,F811,I"], ["format"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--quiet", "--stdin-filename", str(TARGET), "-"]
        text = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    return text


if __name__ == "__main__":
    raise SystemExit(main())
