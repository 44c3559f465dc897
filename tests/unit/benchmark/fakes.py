"""Contestants and peers that train nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.peer import Peer
from fedlens.benchmark.interleave import Measurement
from fedlens.benchmark.limit import Workload, linear

TINY = Workload(
    "tiny", linear, clients=6, examples=20, shape=(1, 28, 28), cohort=3, batch=10, keep_memory=False
)

# A driver that takes 0.25, 0.5, 0.75, ... seconds, as it says.
GOOD = """
import sys
print('{"ready": true}', flush=True)
for number, line in enumerate(sys.stdin, 1):
    assert line == "round\\n"
    print('{"seconds": %s}' % (number / 4), flush=True)
"""


class Fake:
    """Takes the seconds that it is told, and writes down when it is asked."""

    def __init__(self, name: str, seconds: Iterator[float], log: list[str]) -> None:
        self.name, self.seconds, self.log, self.about = name, seconds, log, {"name": name}

    def round(self) -> float:
        self.log.append(self.name)
        return next(self.seconds)

    def close(self) -> None:
        self.log.append(f"{self.name} ends")


def measurement(
    name: str, seconds: Callable[[], Iterator[float]], log: list[str], **more: str
) -> Measurement:
    return Measurement(name, more.get("kind", "fedlens"), lambda: Fake(name, seconds(), log))  # type: ignore[arg-type]


def peer(driver: Path, source: str, **more: tuple[str, ...]) -> Peer:
    driver.write_text(source, encoding="utf-8")
    requirements = more.get("requirements", ("nothing==1",))
    return Peer("toy", "Toy 1", "1", requirements, driver, (("cores", 1), (1, "cores")))
