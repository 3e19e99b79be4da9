"""What the blocking SDK stands on: an event loop in a thread of its own, and objects that hand their work to it."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from typing import Any, Final, Generic, Self, TypeVar

T = TypeVar("T")
A = TypeVar("A")
_CANCEL_WAIT_S: Final = 15.0  # for a cancelled call to kill its command, say


class Portal:
    """Runs coroutines in its thread; the caller waits. Ctrl-C cancels what the caller waits for."""

    def __init__(self) -> None:
        self._loop = _new_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="dsec", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        done, cancel = self._start(coroutine)
        try:
            return done.result()
        except BaseException:
            _cancelled(done, cancel)
            raise

    def run_calling(self, make: Callable[[Callable[[Any], Any]], Coroutine[Any, Any, T]]) -> T:
        """Runs `make(bridge)`; callbacks wrapped by `bridge` run in the caller's thread; the loop waits."""
        calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

        def bridge(callback: Callable[..., Any] | None) -> Callable[..., Any] | None:
            return None if callback is None else _bridged(callback, calls)

        done, cancel = self._start(make(bridge))
        done.add_done_callback(lambda _: calls.put(None))
        try:
            while (call := calls.get()) is not None:
                call()
            return done.result()
        except BaseException:
            _cancelled(done, cancel, calls)
            raise

    def iterate(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        """Lazily; leaving it early closes the generator."""
        try:
            while True:
                try:
                    item = self.run(_next(items))
                except StopAsyncIteration:
                    return
                yield item
        finally:
            self.run(items.aclose())

    def _start(self, coroutine: Coroutine[Any, Any, T]) -> tuple[concurrent.futures.Future[T], Callable[[], None]]:
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("the blocking SDK was called from its own loop; use the asynchronous one there")
        done: concurrent.futures.Future[T] = concurrent.futures.Future()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            task = self._loop.create_task(coroutine)
            tasks.append(task)
            self._tasks.add(task)
            task.add_done_callback(finish)

        def finish(task: asyncio.Task[T]) -> None:
            self._tasks.discard(task)
            if task.cancelled():
                done.cancel()
                done.set_running_or_notify_cancel()
            elif (error := task.exception()) is not None:
                done.set_exception(error)
            else:
                done.set_result(task.result())

        def cancel() -> None:
            self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])

        self._loop.call_soon_threadsafe(begin)
        return done, cancel

    def close(self) -> None:
        """Cancels what still runs, closes connections, ends the thread."""
        if self._loop.is_closed():
            return
        with contextlib.suppress(Exception):
            self.run(self._wind_up())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5.0)
        if not self._thread.is_alive():
            self._loop.close()

    async def _wind_up(self) -> None:
        others = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.wait_for(asyncio.gather(*others, return_exceptions=True), 5.0)
        await self._loop.shutdown_asyncgens()
        await self._loop.shutdown_default_executor()


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def _next(items: AsyncGenerator[T, None]) -> T:
    return await anext(items)


def _bridged(callback: Callable[..., Any], calls: queue.SimpleQueue[Callable[[], None] | None]) -> Callable[..., Any]:
    async def called(*args: Any) -> Any:
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def call() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(callback(*args))
            except Exception as error:
                done.set_exception(error)

        calls.put(call)
        return await asyncio.wrap_future(done)

    return called


def _cancelled(
    done: concurrent.futures.Future[Any],
    cancel: Callable[[], None],
    calls: queue.SimpleQueue[Callable[[], None] | None] | None = None,
) -> None:
    """Ends what runs and waits for its end, bounded; a second Ctrl-C ends the waiting."""
    if not done.done():
        cancel()
        concurrent.futures.wait([done], timeout=_CANCEL_WAIT_S)


_portal: Portal | None = None
_portal_lock = threading.Lock()
_abandoned: list[Portal] = []  # of a parent process: kept, so that nothing in them is closed from here


def portal() -> Portal:
    global _portal
    with _portal_lock:
        if _portal is None:
            _portal = Portal()
            atexit.register(_portal.close)
        return _portal


def _after_fork() -> None:
    # A forked child has the parent's loop without its thread.
    global _portal, _portal_lock
    _portal_lock = threading.Lock()
    if _portal is not None:
        atexit.unregister(_portal.close)
        _abandoned.append(_portal)
        _portal = None


os.register_at_fork(after_in_child=_after_fork)


class Blocking(Generic[A]):
    """A blocking object around its asynchronous one, which is at `.asynchronous`."""

    _async: A

    @classmethod
    def _of(cls, asynchronous: A) -> Self:
        self = cls.__new__(cls)
        self._async = asynchronous
        return self

    @property
    def asynchronous(self) -> A:
        """The same thing for asynchronous code. Its connections are apart."""
        return self._async

    def __repr__(self) -> str:
        return repr(self._async).replace("<Async", "<", 1)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._async is other._async

    def __hash__(self) -> int:
        return hash(id(self._async))


def unwrap(value: Any) -> Any:
    return value._async if isinstance(value, Blocking) else value
