"""`dsec project`, `dsec quota`, `dsec audit`: whose sandboxes they are, and what binds them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsec.cli.completion import NETWORKS, SUBSTRATES, check_words, one_of
from dsec.cli.console import Json, age, client, put_json, run_async, say, settings, table, when
from dsec.cli.pages import command

if TYPE_CHECKING:
    from dsec.wire.iam import Caps, CapUse, Policy, Quota

app = typer.Typer(help="Projects: whose sandboxes they are, and what binds them.", no_args_is_help=True)
quota_app = typer.Typer(help="Quotas: what all sandboxes of a project may have together.", no_args_is_help=True)

Path = Annotated[str, typer.Argument(metavar="PATH", help="Such as /team/run-7.", show_default=False)]
_NONE = "none"  # on the command line: takes a cap or a rule away
_ANY = "any"  # the same of a rule


def create(path: Path, json: Json = False) -> None:
    """Make a project below one that you manage."""

    async def work() -> None:
        async with client() as c:
            made = await c.projects.create(path)
        if settings.json:
            put_json(made)
        else:
            say(f"made {made.path}")

    run_async(work())


def list_(
    below: Annotated[str | None, typer.Argument(metavar="PATH", help="Only this one and those below.")] = None,
    json: Json = False,
) -> None:
    """List the projects that you may read."""

    async def work() -> None:
        async with client() as c:
            found = await c.projects.list(below)
        if settings.json:
            put_json(found)
            return
        now = time.time()
        rows = [(p.path, age(now - p.created_at), p.created_by, _quota_text(p.quota) or "-") for p in found]
        table(("PATH", "AGE", "MADE BY", "QUOTA"), rows)

    run_async(work())


def show(path: Path, json: Json = False) -> None:
    """Show a project, its quota and its policy."""

    async def work() -> None:
        async with client() as c:
            found = await c.projects.get(path)
        if settings.json:
            put_json(found)
            return
        print(f"{found.path}, made {when(found.created_at)} by {found.created_by}")
        print(f"quota: {_quota_text(found.quota) or 'none of its own'}")
        print(f"policy: {_policy_text(found.policy) or 'none of its own'}")

    run_async(work())


def rm(path: Path, json: Json = False) -> None:
    """Remove a project without sandboxes, with its principals, grants and tokens."""

    async def work() -> None:
        async with client() as c:
            await c.projects.remove(path)
        if settings.json:
            put_json({"removed": [path]})
        else:
            say(f"removed {path}")

    run_async(work())


def policy(
    path: Path,
    substrate: Annotated[
        list[str] | None,
        typer.Option(metavar="SUBSTRATE", help="Only these. May be repeated.", autocompletion=one_of(*SUBSTRATES)),
    ] = None,
    network: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODE",
            help="Only these. May be repeated; any: whichever there are.",
            autocompletion=one_of(*NETWORKS, "any"),
        ),
    ] = None,
    environment: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only these; NAME* for a beginning. May be repeated.")
    ] = None,
    cpu: Annotated[str | None, typer.Option(metavar="CORES", help="At most, of each sandbox.")] = None,
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help="At most, of each sandbox.")] = None,
    disk: Annotated[str | None, typer.Option(metavar="SIZE", help="At most, of each sandbox.")] = None,
    ttl: Annotated[str | None, typer.Option(metavar="SECONDS", help="At most, until each is destroyed.")] = None,
    privilege_gain: Annotated[bool | None, typer.Option(help="Whether sandboxes may have it.")] = None,
    json: Json = False,
) -> None:
    """Change what each sandbox of a project, and of those below, must be like. `any` takes a rule away."""
    if substrate not in ([_ANY], [_NONE]):
        check_words(substrate, SUBSTRATES, "--substrate")
    if network != [_ANY]:
        check_words(network, NETWORKS, "--network")

    async def work() -> None:
        import msgspec

        from dsec.core.units import parse_size
        from dsec.wire.codec import from_toml
        from dsec.wire.iam import Policy

        given: dict[str, Any] = {}
        for name, value, read in (
            ("substrates", substrate, list),
            ("networks", network, list),
            ("environments", environment, list),
            ("cpu_max", cpu, float),
            ("memory_bytes_max", memory, parse_size),
            ("disk_bytes_max", disk, parse_size),
            ("ttl_running_s_max", ttl, float),
        ):
            if value is not None:
                # A mode of networks is called none.
                away = (_ANY, [_ANY]) if name == "networks" else (_NONE, [_NONE], _ANY, [_ANY])
                given[name] = None if value in away else _read(read, value, name)
        if privilege_gain is not None:
            given["privilege_gain"] = privilege_gain
        async with client() as c:
            before = (await c.projects.get(path)).policy
            merged = {name: value for name, value in (msgspec.to_builtins(before) | given).items() if value is not None}
            found = await c.projects.set_policy(path, from_toml(merged, Policy))
        if settings.json:
            put_json(found)
        else:
            say(f"the policy of {path}: {_policy_text(found.policy) or 'none of its own'}")

    run_async(work())


def quota_show(path: Path, json: Json = False) -> None:
    """Show every cap that binds a project, and what is used of each."""

    async def work() -> None:
        async with client() as c:
            found = await c.projects.quota(path)
        if settings.json:
            put_json(found)
            return
        if not found.binding:
            say(f"nothing caps {path}")
            return
        rows = [(use.cap, use.project, *_amounts(use)) for use in found.binding]
        table(("CAP", "OF", "USED", "UNDER WAY", "LIMIT"), rows)

    run_async(work())


def quota_set(
    path: Path,
    sandboxes: Annotated[str | None, typer.Option(metavar="COUNT", help="That live at once.")] = None,
    creates: Annotated[str | None, typer.Option(metavar="COUNT", help="Creations a second.")] = None,
    cpu: Annotated[str | None, typer.Option(metavar="CORES", help="Of all together, as asked for.")] = None,
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Of all together, as asked for.")] = None,
    disk: Annotated[str | None, typer.Option(metavar="SIZE", help="Of all together; each must say its own.")] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            metavar="SUBSTRATE",
            help="Only sandboxes of this substrate.",
            show_default=False,
            autocompletion=one_of(*SUBSTRATES),
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Change the caps of a project. What is not given stays; `none` takes a cap away."""
    check_words([backend] if backend is not None else None, SUBSTRATES, "--backend")

    async def work() -> None:
        import msgspec

        from dsec.core.units import parse_size
        from dsec.wire.codec import from_toml
        from dsec.wire.iam import Quota

        given: dict[str, Any] = {}
        for name, value, read in (
            ("sandboxes", sandboxes, int),
            ("creates_per_s", creates, int),
            ("cpu", cpu, float),
            ("memory_bytes", memory, parse_size),
            ("disk_bytes", disk, parse_size),
        ):
            if value is not None:
                given[name] = None if value == _NONE else _read(read, value, name)
        async with client() as c:
            whole = msgspec.to_builtins((await c.projects.get(path)).quota)
            part = whole if backend is None else whole.setdefault("substrates", {}).setdefault(backend, {})
            part.update(given)
            for name in [name for name, value in part.items() if value is None]:
                del part[name]
            whole["substrates"] = {name: caps for name, caps in whole.get("substrates", {}).items() if caps}
            found = await c.projects.set_quota(path, from_toml(whole, Quota))
        if settings.json:
            put_json(found)
        else:
            say(f"the quota of {path}: {_quota_text(found.quota) or 'none of its own'}")

    run_async(work())


def audit(
    principal: Annotated[str | None, typer.Option(metavar="ID", help="Only of this one, such as ci@/team.")] = None,
    limit: Annotated[int, typer.Option(metavar="COUNT", help="The newest so many.")] = 50,
    json: Json = False,
) -> None:
    """Show who changed what in projects that you manage, newest first."""

    async def work() -> None:
        async with client() as c:
            page = await c.audit(principal=principal, limit=limit)
        if settings.json:
            put_json(page)
            return
        if page.lost:
            say(f"{page.lost} entries could not be kept")
        rows = [(when(e.at), e.principal, e.project, e.action, str(e.status), e.target) for e in page.entries]
        table(("TIME", "PRINCIPAL", "PROJECT", "ACTION", "STATUS", "TARGET"), rows)

    run_async(work())


def whoami(json: Json = False) -> None:
    """Show who the service takes you for, and what you may do where."""

    async def work() -> None:
        async with client() as c:
            found = await c.whoami()
        if settings.json:
            put_json(found)
            return
        print(f"{found.id}, acting in {found.project}")
        now = time.time()
        rows = [
            (h.project, h.right, "" if h.expires_at is None else f"for {age(h.expires_at - now)}") for h in found.held
        ]
        table(("PROJECT", "RIGHT", ""), rows)

    run_async(work())


def _read(read: Any, value: Any, name: str) -> Any:
    from dsec.core.errors import InvalidArgumentError

    try:
        return read(value)
    except ValueError as error:
        raise InvalidArgumentError(f"{value!r} is no value for {name}") from error


def _amounts(use: CapUse) -> tuple[str, str, str]:
    from dsec.core.units import format_size

    size = use.cap.endswith("_bytes")
    return tuple(format_size(int(v)) if size else f"{v:g}" for v in (use.used, use.reserved, use.limit))  # type: ignore[return-value]


def _quota_text(quota: Quota) -> str:
    parts = _caps_texts(quota, "")
    for substrate, caps in quota.substrates.items():
        parts += _caps_texts(caps, f"{substrate}.")
    return ", ".join(parts)


def _caps_texts(caps: Caps, prefix: str) -> list[str]:
    from dsec.core.units import format_size
    from dsec.wire.iam import CAPS

    found = [(name, getattr(caps, name)) for name in CAPS if getattr(caps, name) is not None]
    return [f"{prefix}{name} {format_size(v) if name.endswith('_bytes') else f'{v:g}'}" for name, v in found]


def _policy_text(policy: Policy) -> str:
    import msgspec

    from dsec.core.units import format_size

    def shown(name: str, value: Any) -> str:
        if isinstance(value, (list, tuple)):
            return f"{name} {'|'.join(value)}"
        return f"{name} {format_size(value) if name.endswith('_bytes_max') else value}"

    return ", ".join(shown(name, value) for name, value in msgspec.to_builtins(policy).items())


def register(main: typer.Typer) -> None:
    command(main, audit)
    command(main, whoami)


command(app, create, of="project")
command(app, list_, "ls", of="project")
command(app, show, of="project")
command(app, rm, of="project")
command(app, policy, of="project")
command(quota_app, quota_show, "show", of="quota")
command(quota_app, quota_set, "set", of="quota")
