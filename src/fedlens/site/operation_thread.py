"""The thread in which a site computes and writes, so that its heartbeats go on."""

from __future__ import annotations

import asyncio
import ctypes
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

_T = TypeVar("_T")
_PATIENCE = 10.0  # seconds for one step of PyTorch


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Gives up what runs in the block after so many seconds: `TimeoutError` is raised at its next step in Python.

    A step of PyTorch is not interrupted. Raises `TimeoutError` at the end of the block, too, if the code in it has
    caught the first one.
    """
    if seconds is None:
        yield
        return
    lock, thread, state = threading.Lock(), threading.get_ident(), {"ended": False, "late": False}

    def interrupt() -> None:
        with lock:
            if not state["ended"]:
                state["late"] = True
                _raise_in(thread, TimeoutError)

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        while not state["ended"]:
            with suppress(TimeoutError), lock:  # it may be raised as late as here, once
                _raise_in(thread, None)
                state["ended"] = True
    if state["late"]:
        raise TimeoutError


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Raises an exception at the next step of a thread in Python; None takes back one that was not raised yet."""
    raised = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)


class OperationThread:
    """Runs functions one after the other, beside an event loop.

    A process that ends does not wait for an operation, which may take an hour and can be repeated: `close` gives it up.

    >>> async def doubled(thread: OperationThread) -> int:
    ...     return await thread.call(lambda: 2 * 21)
    >>> thread = OperationThread()
    >>> asyncio.run(doubled(thread))
    42
    >>> thread.close()
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._busy = False
        self._thread = threading.Thread(target=self._run, name="fedlens-operation", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # it holds what the function was given

    async def call(self, function: Callable[..., _T], *values: Any) -> _T:
        """The result of `function(*values)`; raises what it raises. If the caller is cancelled, the call goes on."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_T] = loop.create_future()

        def settle(error: BaseException | None, result: Any = None) -> None:
            if future.done():  # its caller was cancelled
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        def call() -> None:
            self._busy = True
            try:
                settled: tuple[Any, ...] = None, function(*values)
            except BaseException as error:  # such as SystemExit, which would end the thread
                settled = (error,)
            finally:
                self._busy = False  # before its caller knows
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(settle, *settled)

        self._calls.put(call)
        return await future

    def close(self) -> None:
        """Ends the thread; a function that runs is left by `SystemExit` at its next step in Python.

        Else the end of the interpreter would stop it in the middle of PyTorch's code, which aborts the process.
        """
        self._calls.put(None)
        if self._busy:
            _raise_in(self._thread.ident or 0, SystemExit)
        self._thread.join(_PATIENCE)
