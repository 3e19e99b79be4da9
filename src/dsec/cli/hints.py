"""What to try next, where an error does not say so itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from dsec.core.errors import DsecError

# By the reason in `detail["code"]`, else by the error's own code.
_NEXT: Final = {
    "unavailable": "is the service running? `dsec up` starts this machine's, `dsec doctor` looks for what is wrong",
    "sandbox_not_found": "`dsec ls` shows the sandboxes that live; other projects' are never shown",
    "gone": "`dsec ls --all` shows what has ended, and why",
    "environment_not_found": "`dsec env ls` shows what there is; `dsec env build base --debian` makes the usual one",
    "command_not_found": "is it in the environment, and in PATH? `dsec shell SANDBOX` lets you look",
    "not_executable": "`dsec exec SANDBOX ls -l PATH` shows its mode; scripts need a first line such as #!/bin/sh",
    "cwd_not_found": "it is a directory of the sandbox: `dsec exec SANDBOX mkdir -p DIR` makes it",
    "user_not_found": "`dsec exec SANDBOX cat /etc/passwd` lists its users; a number works without an entry",
    "argument_too_long": "write it to a file in the sandbox, or give it by --stdin",
    "session_busy": "a command runs in it: wait for its end, or use another --session",
    "invalid_argument": "`dsec help COMMAND` says what each option takes",
    "limit_exceeded": "docs/reference/limits.md lists the bounds",
    "path_not_found": "paths are the sandbox's own and absolute; `dsec exec SANDBOX ls PATH` shows what is there",
    "file_error": "`dsec exec SANDBOX ls -ld PATH` shows owner and mode; --user acts as somebody else",
    "exec_not_found": "`dsec logs SANDBOX` shows the commands on record",
    "session_not_found": "the first command with --session NAME begins one",
    "sandbox_state": "`dsec ls --all` shows its state; wait, or make a new one",
    "not_found": "the command with `ls` in place of this one lists what there is",
    "conflict": "choose another name, or remove what has this one",
    "unauthenticated": "pass --token, or set DSEC_TOKEN; `dsec token create NAME` on the service's machine makes one",
    "forbidden": "`dsec whoami` shows your rights; who manages the project can give more: `dsec grant add`",
    "no_capacity": "`dsec top` shows what uses the room; `dsec rm` frees it",
    "quota_exceeded": "`dsec quota show PROJECT` shows what uses it; `dsec rm` frees it",
    "resume_no_memory": "`dsec top` shows what uses the memory; `dsec pause` or `dsec rm` others",
    "deadline_exceeded": "try again with a longer --timeout; `dsec top` shows how busy it is",
    "launch_failed": "`dsec doctor` tries a container of its own; the service's log has the details",
    "sandbox_fault": "the sandbox has failed: make a new one; `dsec ls --all` keeps its cause for a day",
    "unsupported": "`dsec doctor -v` shows what this node can do",
    "storage": "look at the disk of the service's state directory: `df -h`, `dsec doctor`",
    "protocol": "are client and service of one version? `dsec doctor` compares them",
}
_DEFAULT: Final = "`dsec doctor` looks for what is wrong with this machine"


# What a service or a client that is older or newer than the other may end with.
_OF_OTHER_VERSIONS: Final = ("protocol", "not_found", "internal", "invalid_argument")


def next_step(error: DsecError) -> str:
    reason = str(error.detail.get("code"))
    if error.code in _OF_OTHER_VERSIONS and not error.hint and (versions := _versions()):
        return versions
    return error.hint or _NEXT.get(reason) or _NEXT.get(error.code) or _DEFAULT


def _versions() -> str | None:
    from dsec import __version__
    from dsec.cli.asking import ask
    from dsec.cli.console import settings

    there = ask("/v1/health", settings.url, settings.token).get("version", __version__)
    if there == __version__:
        return None
    return f"the service is dsec {str(there)[:40]} and this is {__version__}: use one version, `dsec doctor` says how"
