"""Items computed ahead: in order, no more than asked for, with their errors, and without a thread left."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from fedlens.base.threads import ReadAhead, first


class Source:
    """Counts up; knows how far it was read and from which threads."""

    def __init__(self, end: int = 10**6, wrong: int | None = None) -> None:
        self.read, self.end, self.wrong = 0, end, wrong
        self.threads: set[threading.Thread] = set()

    def items(self) -> Iterator[int]:
        while self.read < self.end:
            self.threads.add(threading.current_thread())
            if self.read == self.wrong:
                raise OSError(f"item {self.read} is unreadable")
            self.read += 1
            yield self.read - 1


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("fedlens-read-ahead")]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    gc.collect()
    for thread in readers():
        thread.join(5)
    assert not readers()


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("end", [0, 1, 5])
def test_items_come_in_order_and_end_where_the_iterator_ends(count: int, end: int) -> None:
    ahead = ReadAhead(Source(end).items(), count)
    assert list(ahead) == list(range(end))
    assert list(ahead) == []
    assert not readers()


def test_while_one_item_is_used_the_next_ones_are_computed_in_another_thread() -> None:
    source = Source()
    ahead = ReadAhead(source.items(), 3)
    assert source.read == 0
    assert next(ahead) == 0
    while source.read < 4:
        pass
    assert next(ahead) == 1
    assert threading.current_thread() not in source.threads
    ahead.close()
    assert 4 <= source.read <= 5
    assert not readers()
    assert list(ahead) == []


def test_no_more_items_are_computed_than_are_read() -> None:
    source = Source()
    with ExitStack() as ending:
        assert list(first(ReadAhead(source.items(), 3), 2, ending)) == [0, 1]
    assert source.read == 2
    with ExitStack() as ending:
        assert list(first(ReadAhead(source.items(), 3), 0, ending)) == []
    assert source.read == 2


def test_the_last_part_runs_in_the_thread_of_the_reader() -> None:
    seen = set()

    def square(item: int) -> int:
        seen.add(threading.current_thread())
        return item * item

    assert list(ReadAhead(Source(4).items(), 2, then=square)) == [0, 1, 4, 9]
    assert seen == {threading.current_thread()}


def test_an_error_is_raised_where_its_item_is_read_and_ends_the_thread() -> None:
    ahead = ReadAhead(Source(wrong=2).items(), 2)
    assert [next(ahead), next(ahead)] == [0, 1]
    with pytest.raises(OSError, match="item 2 is unreadable"):
        next(ahead)
    assert not readers()
    assert list(ahead) == []


def test_what_is_dropped_or_interrupted_leaves_no_thread() -> None:
    ahead = ReadAhead(Source().items(), 1)
    next(ahead)
    assert readers()
    del ahead  # the fixture waits for the thread

    def step() -> None:
        with ExitStack() as ending:
            for _ in first(ReadAhead(Source().items(), 1), 10, ending):
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        step()


def test_an_exit_in_the_iterator_is_the_readers() -> None:
    def leave() -> Iterator[int]:
        yield 0
        raise SystemExit(3)

    ahead = ReadAhead(leave(), 1)
    assert next(ahead) == 0
    with pytest.raises(SystemExit):
        next(ahead)
