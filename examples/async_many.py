"""Many sandboxes at once, each with a task of its own.

.venv/bin/python examples/async_many.py [environment [backend [count]]]
"""

from __future__ import annotations

import asyncio
import sys

import dsec


async def solve(sb: dsec.AsyncSandbox, task: int) -> str:
    async with sb:  # destroyed at the end, whatever happens
        result = await sb.exec(f"echo task {task} done", timeout_s=60)
        return result.stdout.strip()


async def main(environment: str = "base", backend: str = "container", count: str = "8") -> None:
    async with dsec.AsyncClient() as client, asyncio.TaskGroup() as group:
        tasks = []
        # One request for all; each is used as soon as it is there.
        async for made in client.iter_create(int(count), environment, backend=backend, memory="128MiB"):
            if made.sandbox is None:
                print(f"sandbox {made.index}: {made.error}")
            else:
                tasks.append(group.create_task(solve(made.sandbox, made.index)))
    for line in sorted(task.result() for task in tasks):
        print(line)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
