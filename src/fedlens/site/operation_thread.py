"""The thread in which a site computes and writes, so that its heartbeats go on."""

from __future__ import annotations

import asyncio
import ctypes
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

_T = TypeVar("_T")
_PATIENCE = 10.0  # seconds for one step of PyTorch


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
            thread, error = ctypes.c_ulong(self._thread.ident or 0), ctypes.py_object(SystemExit)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, error)
        self._thread.join(_PATIENCE)
