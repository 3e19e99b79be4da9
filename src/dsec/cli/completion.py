"""Shell completion: the scripts, and what is completed from the service.

Each press of Tab runs us, so nothing heavy is loaded: no HTTP client and no event loop. Every failure is silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Final

import typer

from dsec.cli.asking import ask
from dsec.cli.pages import command

_SCRIPTS: Final = {
    "bash": """\
_dsec_completion() {
    local IFS=$'\\n'
    COMPREPLY=( $(env COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD=$COMP_CWORD \\
        _DSEC_COMPLETE=complete_bash "$1" 2>/dev/null) )
}
complete -o default -F _dsec_completion dsec
""",
    "zsh": """\
#compdef dsec
_dsec_completion() {
    eval "$(_TYPER_COMPLETE_ARGS="${words[1,$CURRENT]}" _DSEC_COMPLETE=complete_zsh dsec 2>/dev/null)"
}
compdef _dsec_completion dsec
""",
    "fish": """\
function _dsec_completion
    set -x _DSEC_COMPLETE complete_fish
    set -x _TYPER_COMPLETE_FISH_ACTION $argv[1]
    set -x _TYPER_COMPLETE_ARGS (commandline -cp)
    dsec 2>/dev/null
end
complete --command dsec --no-files --arguments "(_dsec_completion get-args)" --condition "_dsec_completion is-args"
""",
}


def register(app: typer.Typer) -> None:
    command(app, completion)


def completion(
    shell: Annotated[
        str,
        typer.Argument(
            help="bash, zsh or fish.",
            show_default=False,
            autocompletion=lambda incomplete: one_of(*_SCRIPTS)(incomplete),
        ),
    ],
) -> None:
    """Print the script that teaches a shell to complete dsec."""
    if shell not in _SCRIPTS:
        raise typer.BadParameter(f"there is none for {shell[:40]!r}; there are {', '.join(_SCRIPTS)}")
    print(_SCRIPTS[shell], end="")


SUBSTRATES: Final = ("container", "microvm", "fullvm", "fncall", "fake")
NETWORKS: Final = ("none", "proxied", "routed")
_OFFERED_NOWHERE: Final = ("fake", "routed")  # taken where they are said, and told to nobody
RIGHTS: Final = ("read", "use", "manage", "admin")
LEVELS: Final = ("debug", "info", "warning", "error")
EVENTS: Final = (
    "created", "running", "paused", "resumed", "rested", "snapshot", "rolled_back", "egress_denied", "destroyed",
    "expired", "failed", "returned", "node_joined", "node_suspect", "node_lost", "node_returned", "node_retired",
    "node_floods", "gap",
)  # fmt: skip


def one_of(*words: str) -> Callable[[str], list[str]]:
    """Of an option that takes one of these; no service is asked."""

    def complete(incomplete: str) -> list[str]:
        return _matching(_told(words), incomplete)

    return complete


def _told(words: Iterable[str]) -> list[str]:
    return [word for word in words if word not in _OFFERED_NOWHERE]


def check_words(given: Iterable[str] | None, words: Sequence[str], option: str) -> None:
    """Raises typer.BadParameter for what is none of them."""
    for word in given or ():
        if word not in words:
            raise typer.BadParameter(f"{word[:40]!r} is none of {', '.join(_told(words))}", param_hint=option)


def complete_sandbox(incomplete: str) -> list[str]:
    found = _get("/v1/sandboxes?limit=1000", "sandboxes")
    words = [word for sandbox in found for word in (sandbox.get("name"), sandbox.get("id")) if word]
    # Names first; an id is long, and is meant when it has been begun.
    return (
        _matching(words, incomplete) if incomplete.startswith("sbx") else _matching(_names(found) or words, incomplete)
    )


def complete_environment(incomplete: str) -> list[str]:
    return _matching([item.get("name") for item in _get("/v1/environments", "environments")], incomplete)


def complete_exec(context: typer.Context, incomplete: str) -> list[str]:
    sandbox = _id_of(str(context.params.get("sandbox") or ""))
    execs = _get(f"/v1/sandboxes/{sandbox}/execs", "execs") if sandbox else []
    return _matching(["latest", *(item.get("name") or item.get("id") for item in execs)], incomplete)


def complete_path(incomplete: str) -> list[str]:
    """`SANDBOX:` of a copy; local files are the shell's own."""
    return [] if ":" in incomplete or "/" in incomplete else [f"{name}:" for name in complete_sandbox(incomplete)]


def _names(found: list[dict[str, Any]]) -> list[str]:
    return [sandbox["name"] for sandbox in found if sandbox.get("name")]


def _id_of(name: str) -> str | None:
    if name.startswith("sbx_"):
        return name
    found = [sandbox for sandbox in _get("/v1/sandboxes?limit=1000", "sandboxes") if sandbox.get("name") == name]
    return str(found[0]["id"]) if len(found) == 1 else None


def _matching(words: list[Any], incomplete: str) -> list[str]:
    """Only what is safe for a shell: names and ids are; what a strange service answers may not be."""
    safe = (str(word) for word in words if str(word).replace("_", "").replace("-", "").replace(".", "").isalnum())
    return [word for word in dict.fromkeys(safe) if word.startswith(incomplete)]


def _get(path: str, field: str) -> list[dict[str, Any]]:
    """A list from the service that answers; none is started."""
    found = ask(path).get(field)
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []
