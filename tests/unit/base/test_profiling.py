from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fedlens.base.profiling import recording, scope, scoped


def test_scopes_go_to_the_recorder_of_their_thread_and_to_nobody_afterwards() -> None:
    seen: list[str] = []

    @contextmanager
    def record(name: str) -> Iterator[None]:
        seen.append(f"{name} begins")
        yield
        seen.append(f"{name} ends")

    def elsewhere() -> None:
        with scope("of another thread"):
            pass

    with recording(record):
        with scope("outer"), scope("inner"):
            pass
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        for item in scoped("data", [1]):
            seen.append(str(item))
    with scope("later"):
        pass
    assert seen == [
        "outer begins", "inner begins", "inner ends", "outer ends",
        "data begins", "data ends", "1", "data begins", "data ends",
    ]  # fmt: skip


def test_without_a_recorder_nothing_is_made() -> None:
    items = [1, 2]
    assert scoped("data", items) is items
    assert scope("forward") is scope("backward")
