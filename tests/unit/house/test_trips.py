"""The four trips through the source in docs/architecture.md, followed in a run."""

from __future__ import annotations

import importlib
import re
import sys
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedlens import Experiment

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "src" / "fedlens"
_LINE = re.compile(r"\d+\. `([\w/]+)\.py`: `([\w.]+)` (.+)")

SETTINGS = """
rounds = 1
[data]
dataset = {{ name = "image-folder", path = "{path}" }}
partition = {{ name = "iid", clients = 2 }}
augment = "flip"
validation = 0.3
validation_from = "client"
[model]
name = "linear"
[local]
lr = 0.1
batch_size = 100
[evaluation]
clients = "all"
[engine]
name = "inline"
"""


def trips() -> dict[str, list[tuple[str, str, str]]]:
    """The module, the name and the text of each line, by the first words of a trip."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.partition("\n## Four trips\n")[2].partition("\n## ")[0]
    found = {}
    for trip in section.split("\n### ")[1:]:
        lines = re.findall(r"^\d+\. .+(?:\n   +.+)*", trip, re.MULTILINE)
        matches = [_LINE.fullmatch(re.sub(r"\s+", " ", line)) for line in lines]
        assert all(matches), lines
        found[trip.partition(":")[0]] = [(m[1], m[2], m[3]) for m in matches if m]
    return found


TRIPS = trips()


def thing(module: str, name: str) -> Any:
    """The function, class or method of this name, which the module defines itself."""
    path = f"fedlens.{module.replace('/', '.')}"
    found: Any = importlib.import_module(path)
    for part in name.split("."):
        found = vars(found)[part]
    assert found.__module__ == path
    return found


@pytest.mark.parametrize("trip", TRIPS)
def test_what_a_trip_names_is_in_the_module_that_it_names(trip: str) -> None:
    for module, name, text in TRIPS[trip]:
        thing(module, name)
        source = (SOURCE / f"{module}.py").read_text()
        for other in re.findall(r"`([\w.]+)`", text):
            assert re.search(rf"\b{other.rpartition('.')[2]}\b", source), (module, other)


def test_there_are_four_trips_of_at_most_ten_lines() -> None:
    assert list(TRIPS) == ["An image", "An update", "A metric", "A setting"]
    assert all(0 < len(lines) <= 10 for lines in TRIPS.values())


def codes(part: Any) -> Iterator[CodeType]:
    """The code of a function; of a class, of `__call__` or else of its public and private methods."""
    members = vars(part) if isinstance(part, type) else {"__call__": part}
    for name, member in members.items():
        if isinstance(member, FunctionType) and (
            name == "__call__" or not ("__call__" in members or name.startswith("__"))
        ):
            yield from nested(member.__code__)


def nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from nested(constant)


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """The lines of the trips that a run enters and leaves, in its order."""
    folder = tmp_path_factory.mktemp("trips")
    pixels = np.random.RandomState(0).randint(0, 256, (20, 8, 8, 3), np.uint8)
    for at, image in enumerate(pixels):
        path = folder / "images" / "ab"[at % 2] / f"{at}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    (folder / "run.toml").write_text(SETTINGS.format(path=folder / "images"))
    lines = {(module, name) for lines in TRIPS.values() for module, name, _ in lines}
    by_code = {code: line for line in lines for code in codes(thing(*line))}
    passed: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event in ("call", "return") and (line := by_code.get(frame.f_code)):
            passed.append(line)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        Experiment.load(folder / "run.toml", ["server.lr=0.5"]).run(folder / "run")
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return passed


@pytest.mark.report_page
@pytest.mark.parametrize("trip", TRIPS)
def test_a_run_goes_from_each_line_of_a_trip_to_the_next(trip: str, events: list[tuple[str, str]]) -> None:
    """At least once, it leaves or enters one and then the next, and no later line of the trip between them."""
    lines = [(module, name) for module, name, _ in TRIPS[trip]]
    for at, (line, following) in enumerate(pairwise(lines), 1):
        passed = [event for event in events if event == line or event in lines[at:]]
        assert (line, following) in pairwise(passed), f"{line} does not lead to {following}"
