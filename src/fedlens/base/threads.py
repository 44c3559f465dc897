"""Work in threads: a function of many items, and the next items of an iterator computed ahead."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import islice
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_threads(
    function: Callable[[Item], Result], items: Iterable[Item], threads: int | None = None
) -> list[Result]:
    """`function` of each item, in the order of the items. By default one thread for each core of this process.

    >>> map_threads(len, ["a", "bcd"])
    [1, 3]
    """
    count, waiting = threads or own_cores(), [*items]
    # Handing one item over takes longer than reading the header of a file or decoding a small image.
    size = max(1, min(16, len(waiting) // (4 * count)))
    chunks = [waiting[at : at + size] for at in range(0, len(waiting), size)]
    with ThreadPoolExecutor(count) as pool:
        return [result for done in pool.map(lambda chunk: [*map(function, chunk)], chunks) for result in done]


def usable_cores() -> int:
    """The number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Share:
    cores: int | None = None


def share_cores(cores: int) -> None:
    """Limits this process to a share of the cores, because other workers use the rest."""
    _Share.cores = max(1, cores)


def own_cores() -> int:
    """The number of cores that this process may use besides other workers; `usable_cores` if it is alone."""
    return usable_cores() if _Share.cores is None else min(_Share.cores, usable_cores())


_END: Any = object()


class ReadAhead(Iterator[Item], Generic[Item]):
    """The items of an iterator, with up to `count` of them computed ahead in a thread.

    The thread starts with the first item and computes one after the other, in order. An error of the iterator is raised
    where its item is read. `close` ends the thread, after the item that it is computing.

    Args:
        items: what is read; nothing else may read it.
        count: how many items are computed ahead, at least 1.
        then: applied to each item in the thread that reads it.

    >>> squares = ReadAhead((n * n for n in range(3)), count=1)
    >>> list(squares)
    [0, 1, 4]
    """

    def __init__(self, items: Iterator[Any], count: int, then: Callable[[Any], Item] | None = None) -> None:
        self.count, self.then = count, then
        self.most: int | None = None  # how many items are computed in all, if that is known
        self._items = items
        self._submitted = 0
        self._queue: deque[Future[Any]] = deque()
        self._thread: ThreadPoolExecutor | None = None
        self._closed = False

    def __next__(self) -> Item:
        if self._closed:
            raise StopIteration
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="fedlens-read-ahead")
        try:
            # One for now, and `count` to be computed while the caller works on it.
            while len(self._queue) <= self.count and self._submitted != self.most:
                self._queue.append(self._thread.submit(next, self._items, _END))
                self._submitted += 1
            item = self._queue.popleft().result() if self._queue else _END
            if item is not _END:
                return item if self.then is None else self.then(item)
        except BaseException:
            self.close()
            raise
        self.close()
        raise StopIteration

    def close(self) -> None:
        """Ends the thread. Further items are neither computed nor read."""
        self._closed = True
        self._queue.clear()
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
            self._thread = None

    def __del__(self) -> None:
        # A thread that waits for work would outlive its reader. The reader may itself be in that thread's last item.
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)


def first(items: Iterator[Item], count: int | None, ending: ExitStack) -> Iterator[Item]:
    """The first `count` items, or all. No more than these are computed ahead, and the thread ends with `ending`.

    >>> with ExitStack() as ending:
    ...     list(first(iter("abc"), 2, ending))
    ['a', 'b']
    """
    if isinstance(items, ReadAhead):
        items.most = count
        ending.enter_context(closing(items))
    return islice(items, count)
