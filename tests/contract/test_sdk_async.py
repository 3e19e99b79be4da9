"""The asynchronous SDK against the real service, with the fake substrate behind it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest

import dsec
from dsec import errors
from tests.contract.sdk_service import RunningService
from tests.patience import with_a_limit


@pytest.fixture
async def client(service: RunningService) -> AsyncIterator[dsec.AsyncClient]:
    async with dsec.AsyncClient(service.url) as found:
        yield found


@pytest.fixture
async def sb(client: dsec.AsyncClient) -> AsyncIterator[dsec.AsyncSandbox]:
    async with await client.create("base", backend="fake") as found:
        yield found


# ---- sandboxes ----


async def test_a_sandbox_is_created_found_and_destroyed(client: dsec.AsyncClient) -> None:
    made = await client.create("base", backend="fake", name="one", labels={"run": "7"}, memory="64MiB")

    found = await client.list(labels={"run": "7"})
    assert [s.id for s in found] == [made.id]
    assert (made.info.name, made.info.memory_bytes) == ("one", 64 << 20)
    assert (await client.connect(made.id)).id == made.id

    await made.destroy()
    await made.destroy()

    assert await client.list(labels={"run": "7"}) == []
    assert (await client.get(made.id)).info.cause == "destroyed"
    with pytest.raises(errors.GoneError) as gone:
        await client.connect(made.id)
    assert gone.value.detail["cause"] == "destroyed"


async def test_a_list_gives_ended_ones_when_asked(client: dsec.AsyncClient) -> None:
    async with await client.create("base", backend="fake", labels={"l": "e"}) as sandbox:
        pass

    found = await client.list(labels={"l": "e"}, states=("gone", "running"))

    assert [s.id for s in found] == [sandbox.id]


async def test_lists_of_several_pages_are_put_together(client: dsec.AsyncClient) -> None:
    many = await client.create_many(23, "base", backend="fake", labels={"pages": "1"})

    found = await client.list(labels={"pages": "1"}, max_items=20)
    everything = await client.list(labels={"pages": "1"})

    assert len(found) == 20
    assert {s.id for s in everything} == {s.id for s in many if isinstance(s, dsec.AsyncSandbox)}
    await asyncio.gather(*(s.destroy() for s in everything))


async def test_the_same_key_gives_the_same_sandbox_and_another_request_is_refused(client: dsec.AsyncClient) -> None:
    first = await client.create("base", backend="fake", idempotency_key="k-1")
    second = await client.create("base", backend="fake", idempotency_key="k-1")

    assert first.id == second.id
    with pytest.raises(errors.IdempotencyError):
        await client.create("base", backend="fake", idempotency_key="k-1", cpu=2.0)
    await first.destroy()


async def test_many_are_created_in_one_request_with_a_result_each(client: dsec.AsyncClient) -> None:
    made = await client.create_many(20, "base", backend="fake", labels={"many": "1"})

    assert len(made) == 20
    assert all(isinstance(item, dsec.AsyncSandbox) for item in made)
    assert len({item.id for item in made if isinstance(item, dsec.AsyncSandbox)}) == 20
    for item in made:
        assert isinstance(item, dsec.AsyncSandbox)
        await item.destroy()


async def test_many_that_fail_give_an_error_each(client: dsec.AsyncClient) -> None:
    made = await client.create_many(3, "base", backend="microvm")

    assert [type(item) for item in made] == [errors.UnsupportedError] * 3


async def test_many_are_told_as_they_come(client: dsec.AsyncClient) -> None:
    seen = []
    async for item in client.iter_create(5, "base", backend="fake"):
        assert item.sandbox is not None
        seen.append(item.index)
        await item.sandbox.destroy()

    assert sorted(seen) == list(range(5))


async def test_what_is_not_there_has_its_own_error(client: dsec.AsyncClient) -> None:
    made = await client.create("base", backend="fake")
    other = made.id[:-1] + ("a" if made.id[-1] != "a" else "b")

    with pytest.raises(errors.SandboxNotFoundError):
        await client.get(other)
    with pytest.raises(errors.InvalidArgumentError):
        await client.get("nonsense")
    await made.destroy()


async def test_times_to_live_pause_and_metrics(sb: dsec.AsyncSandbox) -> None:
    assert (await sb.set_ttl(ttl_idle_s=60)).ttl_idle_s == 60
    assert (await sb.pause()).state == "paused"
    assert (await sb.resume()).state == "running"
    assert (await sb.metrics()).execs_live == 0
    assert (await sb.refresh()).state == "running"


async def test_what_a_sandbox_reaches_is_said_at_the_create_and_replaced_later(client: dsec.AsyncClient) -> None:
    rules = ["Packages.example", "*.mirror.example:80", "10.1.0.0/16:5432"]
    made = await client.create("base", backend="fake", network="proxied", egress=rules)

    assert (made.info.network, made.info.egress) == (
        "proxied",
        ["packages.example", "*.mirror.example:80", "10.1.0.0/16:5432"],
    )
    assert (await made.set_egress(["files.example:8000-8010"])).egress == ["files.example:8000-8010"]
    assert (await made.set_egress([])).egress == []
    assert (await made.set_egress(None)).egress is None
    assert (await made.refresh()).network == "proxied"
    with pytest.raises(errors.InvalidArgumentError, match="is a URL"):
        await made.set_egress(["https://packages.example/simple"])
    with pytest.raises(errors.InvalidArgumentError, match="must be a list"):
        await made.set_egress("packages.example")
    await made.destroy()


async def test_a_sandbox_without_a_network_takes_no_rules(client: dsec.AsyncClient, sb: dsec.AsyncSandbox) -> None:
    with pytest.raises(errors.SandboxStateError, match="reaches nothing"):
        await sb.set_egress(["packages.example"])
    with pytest.raises(errors.InvalidArgumentError, match="network proxied"):
        await client.create("base", backend="fake", egress=["packages.example"])
    with pytest.raises(errors.UnsupportedError):
        await client.create("base", backend="fake", network="routed")


async def test_a_sandbox_whose_create_was_cancelled_does_not_stay(client: dsec.AsyncClient) -> None:
    creating = asyncio.create_task(client.create("base", backend="fake", labels={"cancelled": "1"}))
    await asyncio.sleep(0)

    creating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creating

    assert await client.list(labels={"cancelled": "1"}) == []


async def test_a_started_sandbox_has_its_program_as_main(client: dsec.AsyncClient) -> None:
    ready = {"shell": "true", "timeout_s": 20}
    async with await client.create("base", backend="fake", start=True, ready=ready) as sandbox:
        told = await sandbox.main.info()
        await sandbox.main.signal("TERM")
        result = await sandbox.main.wait(60)

        assert (told.name, told.state, told.command) == ("main", "running", "sleep infinity")
        assert [e.id for e in await sandbox.execs()] == [sandbox.main.id]
        assert result.signal == 15


async def test_a_sandbox_that_was_not_started_has_no_main(sb: dsec.AsyncSandbox) -> None:
    with pytest.raises(errors.ExecNotFoundError):
        await sb.main.info()


async def test_a_sandbox_that_does_not_get_ready_tells_the_step(client: dsec.AsyncClient) -> None:
    with pytest.raises(errors.LaunchError) as failed:
        await client.create("base", backend="fake", start=True, ready=dsec.ReadyProbe(shell="exit 9", timeout_s=3.0))

    assert failed.value.step == "ready"
    assert "exit code 9" in failed.value.message


# ---- commands ----


async def test_a_command_gives_its_output_and_status(sb: dsec.AsyncSandbox) -> None:
    result = await sb.exec("echo out; echo err >&2; exit 3")

    assert (result.exit_code, result.stdout, result.stderr) == (3, "out\n", "err\n")
    assert not result.ok
    assert not result.truncated


async def test_a_short_command_costs_one_request(sb: dsec.AsyncSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    await sb.exec(["true"])
    asked: list[str] = []
    transport = sb._transport
    opened = transport._open

    def counted(method: str, path: str, *args: object, **more: object) -> object:
        asked.append(f"{method} {path}")
        return opened(method, path, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(transport, "_open", counted)

    assert (await sb.exec(["echo", "x"])).stdout == "x\n"
    assert asked == [f"POST /sandboxes/{sb.id}/execs"]


async def test_a_list_is_not_read_by_a_shell(sb: dsec.AsyncSandbox) -> None:
    assert (await sb.exec(["echo", "$HOME; ls"])).stdout == "$HOME; ls\n"


async def test_environment_directory_and_user_are_passed(sb: dsec.AsyncSandbox) -> None:
    result = await sb.exec("pwd; echo $X", cwd="/tmp", env={"X": "1 2"})

    assert result.stdout == "/tmp\n1 2\n"


@pytest.mark.parametrize("size", [0, 5, 1 << 20, 3_000_001])
async def test_stdin_is_given_whole(sb: dsec.AsyncSandbox, size: int) -> None:
    data = os.urandom(size)

    result = await sb.exec(["cat"], stdin=data)

    assert result.stdout_bytes == data


async def test_without_stdin_a_command_reads_end_of_file(sb: dsec.AsyncSandbox) -> None:
    assert (await sb.exec(["cat"], timeout_s=60)).stdout_bytes == b""


async def test_a_command_that_does_not_read_its_stdin_still_ends(sb: dsec.AsyncSandbox) -> None:
    result = await sb.exec(["true"], stdin=bytes(3 << 20), timeout_s=100)

    assert result.exit_code == 0


async def test_output_is_heard_as_it_comes(sb: dsec.AsyncSandbox) -> None:
    heard: list[tuple[str, str]] = []
    first = asyncio.Event()

    async def out(text: str) -> None:
        heard.append(("out", text))
        first.set()

    running = asyncio.create_task(
        sb.exec("echo one; echo two >&2; sleep 60", on_stdout=out, on_stderr=lambda t: heard.append(("err", t)))
    )
    await asyncio.wait_for(first.wait(), 60)

    assert not running.done()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ("out", "one\n") in heard


async def test_a_timeout_is_a_result_that_says_so(sb: dsec.AsyncSandbox) -> None:
    result = await with_a_limit(
        lambda limit_s: sb.exec("echo x; sleep 60", timeout_s=limit_s, grace_s=0.1), lambda result: result.stdout
    )

    assert result.timed_out
    assert not result.ok
    assert result.stdout == "x\n"


async def test_check_raises_with_the_result(sb: dsec.AsyncSandbox) -> None:
    with pytest.raises(dsec.CommandError) as caught:
        await sb.exec("echo why >&2; exit 4", check=True)

    assert caught.value.result.exit_code == 4
    assert "why" in str(caught.value)
    assert (await sb.exec("true", check=True)).ok


async def test_a_program_that_is_not_there_is_an_error_and_not_a_result(sb: dsec.AsyncSandbox) -> None:
    with pytest.raises(errors.InvalidArgumentError) as caught:
        await sb.exec(["no-such-program"])

    assert caught.value.detail["code"] == "command_not_found"


async def test_long_output_is_whole(sb: dsec.AsyncSandbox) -> None:
    result = await sb.exec("seq 1 200000")

    assert result.stdout == "".join(f"{n}\n" for n in range(1, 200_001))


async def test_above_the_record_head_and_tail_are_kept_and_said(sb: dsec.AsyncSandbox) -> None:
    whole = "".join(f"{n}\n" for n in range(1, 100_001))

    result = await sb.exec("seq 1 100000", record_bytes_max=10_000)

    assert result.truncated
    assert whole.startswith(result.stdout[:3_000])
    assert whole.endswith(result.stdout[-3_000:])
    missing = sum(gap.end - gap.start for gap in result.gaps)
    assert missing + len(result.stdout) == len(whole)


async def test_a_start_that_is_cancelled_before_its_answer_is_killed(
    client: dsec.AsyncClient, sb: dsec.AsyncSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = client._transport.call

    async def slow(method: str, path: str, *rest: Any, **more: Any) -> Any:
        answer = await call(method, path, *rest, **more)
        if method == "POST" and path.endswith("/execs"):
            await asyncio.Event().wait()
        return answer

    monkeypatch.setattr(client._transport, "call", slow)
    starting = asyncio.create_task(sb.start("sleep 1000"))
    await _until(sb, "running")

    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting

    assert [e.cause for e in await _until(sb, "ended")] == ["killed"]


async def test_a_cancelled_exec_is_killed(sb: dsec.AsyncSandbox) -> None:
    running = asyncio.create_task(sb.exec("sleep 1000"))
    await _until(sb, "running")

    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    assert [e.cause for e in await _until(sb, "ended")] == ["killed"]


async def test_a_callback_that_raises_kills_the_command_and_is_raised(sb: dsec.AsyncSandbox) -> None:
    def bad(text: str) -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        await sb.exec("echo x; sleep 1000", on_stdout=bad)

    assert [e.cause for e in await _until(sb, "ended")] == ["killed"]


async def _until(sb: dsec.AsyncSandbox, state: str) -> list[dsec.ExecInfo]:
    async with asyncio.timeout(60):
        while True:
            found = await sb.execs()
            if found and all(e.state == state for e in found):
                return found
            await asyncio.sleep(0.01)


async def test_secrets_reach_the_command_and_nothing_that_can_be_read_later(sb: dsec.AsyncSandbox) -> None:
    result = await sb.exec("echo $S", secrets={"S": "canary-7"})

    assert result.stdout == "canary-7\n"
    assert "canary-7" not in repr(await sb.execs())
    assert "canary-7" not in repr(await sb.refresh())


# ---- processes ----


async def test_a_process_is_fed_heard_and_waited_for(sb: dsec.AsyncSandbox) -> None:
    process = await sb.start(["cat"], stdin=True)
    await process.write("añ")
    await process.write(b"b\n")
    await process.close_stdin()
    await process.close_stdin()

    text = "".join([chunk.text async for chunk in process])
    result = await process.wait()

    assert text == result.stdout == "añb\n"
    assert result.exit_code == 0


async def test_waiting_and_iterating_work_in_any_order_and_again(sb: dsec.AsyncSandbox) -> None:
    process = await sb.start("echo a; echo b >&2")

    first = await process.wait()
    chunks = [chunk async for chunk in process]
    second = await process.wait()

    assert first == second
    assert sorted((c.stream, c.text) for c in chunks) == [("stderr", "b\n"), ("stdout", "a\n")]


async def test_another_client_attaches_at_an_offset(service: RunningService, sb: dsec.AsyncSandbox) -> None:
    process = await sb.start("echo 0123456789; cat", stdin=True)
    async for _ in process:
        break

    async with dsec.AsyncClient(service.url) as other:
        there = await (await other.connect(sb.id)).attach(process.id, 5)
        await there.write("more")
        await there.close_stdin()
        result = await there.wait()

    assert result.stdout == "56789\nmore"
    assert (await process.wait()).stdout == "0123456789\nmore"


async def test_what_is_on_record_can_be_read_without_waiting(sb: dsec.AsyncSandbox) -> None:
    process = await sb.start("echo a; sleep 1000")
    async for _ in process:
        break

    text = "".join([chunk.text async for chunk in process.output(follow=False)])

    assert text == "a\n"
    await process.kill()
    assert (await process.wait()).cause == "killed"


async def test_waiting_has_a_limit_and_the_command_goes_on(sb: dsec.AsyncSandbox) -> None:
    process = await sb.start("sleep 1000")

    with pytest.raises(errors.DeadlineError):
        await process.wait(0.05)

    assert (await process.info()).state == "running"
    await process.signal("TERM")
    assert (await process.wait()).signal == 15


async def test_an_exec_that_is_not_there_cannot_be_attached_to(sb: dsec.AsyncSandbox) -> None:
    with pytest.raises(errors.ExecNotFoundError):
        await sb.attach("exe_aaaaaaaaaaaaaaaa")


async def test_a_terminal_is_typed_into_and_read(sb: dsec.AsyncSandbox) -> None:
    async with await sb.pty(["cat"], cols=100, rows=30) as tty:
        await tty.write("hello\n")
        shown = b""
        while b"hello" not in shown:
            shown += await tty.read(3)
        await tty.resize(80, 24)

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(tty.read(), 0.05)  # a read that was given up loses nothing
        await tty.write("again\n")
        while b"again" not in shown:
            shown += await tty.read()

    assert (await tty.wait()).cause == "killed"
    assert await tty.read() == b""


# ---- sessions ----


async def test_a_session_keeps_directory_and_variables(sb: dsec.AsyncSandbox) -> None:
    shell = sb.session("main")
    await shell.exec("cd /tmp && export X=1")

    result = await shell.exec("pwd; echo $X")
    other = await sb.session("other").exec("echo [$X]")

    assert (result.stdout, other.stdout) == ("/tmp\n1\n", "[]\n")
    assert sorted(s.name for s in await sb.sessions()) == ["main", "other"]


async def test_a_session_that_was_left_by_exit_begins_anew(sb: dsec.AsyncSandbox) -> None:
    shell = sb.session("main")
    await shell.exec("export X=1")

    ended = await shell.exec("exit 5")
    after = await shell.exec("echo [$X]")

    assert (ended.exit_code, ended.session_ended) == (5, True)
    assert after.stdout == "[]\n"


async def test_a_closed_session_is_gone_and_closing_again_is_fine(sb: dsec.AsyncSandbox) -> None:
    async with sb.session("main") as shell:
        await shell.exec("export X=1")
    await shell.close()

    assert await sb.sessions() == []
