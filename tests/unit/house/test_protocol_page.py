"""docs/beyond-averaging.md: its drawings are those of their generator, and fit; its formulas are what runs count."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from fedlens import Experiment
from fedlens.algorithms.registry import ALGORITHMS
from fedlens.data.vertical.feature_partition import FeaturePartition, load_partition
from tools.protocol_figures import FOLDER, PROTOCOLS, Protocol, Send, drawing

PAGE = Path(__file__).parents[3] / "docs" / "beyond-averaging.md"
OTHERS = ("dsgd", "push-sum", "gradient-tracking", "split-relay", "splitfed", "fedgkt", "fedma", "vertical")
SVG = "{http://www.w3.org/2000/svg}"
WIDEST = 8.2  # pixels of a letter, about


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
def test_a_drawing_is_the_generators_and_the_page_shows_it(protocol: Protocol) -> None:
    text = (FOLDER / f"{protocol.name}.svg").read_text(encoding="utf-8")
    assert text == drawing(protocol), "run: python -m tools.protocol_figures"
    assert PAGE.read_text(encoding="utf-8").count(f'--8<-- "figures/{protocol.name}.svg"') == 1


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
def test_nothing_in_a_drawing_is_cut_off_or_runs_into_its_neighbour(protocol: Protocol) -> None:
    svg = ElementTree.fromstring(drawing(protocol))
    width, height = (float(value) for value in svg.attrib["viewBox"].split()[2:])
    boxes = []
    for box in svg.iter(f"{SVG}rect"):
        x, y, wide, tall = (float(box.attrib[name]) for name in ("x", "y", "width", "height"))
        assert x >= 0
        assert x + wide <= width
        assert y >= 0
        assert y + tall <= height
        if box.attrib["class"] != "again":
            boxes.append((x, y, x + wide, y + tall))
    for k, (x, y, right, low) in enumerate(boxes):
        assert not any(x < r and left < right and y < b and top < low for left, top, r, b in boxes[:k])
    places = [float(x.attrib["x1"]) for x in svg.iter(f"{SVG}line") if x.attrib["class"] == "lane"]
    for row in protocol.rows:
        for send in row:
            if isinstance(send, Send):
                assert len(send.text) * WIDEST < abs(places[send.source] - places[send.target])


def test_the_page_links_every_protocol_beyond_averaging() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert set(OTHERS) <= set(ALGORITHMS)
    for name in OTHERS:
        assert f"(algorithms/{name}.md)" in text, name
    # Sections of the page say where a protocol's drawing is: each has a drawing or lists algorithms below one.
    sections = re.split(r"^## ", text, flags=re.M)[1:-1]
    assert [section.count("--8<--") for section in sections] == [1] * len(PROTOCOLS)


# ---- what a round costs, with the letters of the page: N peers, K clients, E n images, C classes, sizes M, M_1, a, b

EN, K, N, C, T = 1437 * 2, 4, 4, 10, 3  # all digits twice; push-sum and tracking take T steps
FIRST, MIDDLE, LAST = 4 * 200 * 65, 4 * 200 * 201, 4 * 10 * 201  # layers of `mlp` on digits
M, A, B = FIRST + MIDDLE + LAST, 4 * 200, 4 * 200
H = 2 * FIRST  # with the momentum
TWO_CUTS = EN * (A + B) + K * (FIRST + LAST)
HALF = EN * A / 2


def nightly(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.nightly)


@pytest.mark.parametrize(
    ("algorithm", "up", "down", "peer"),
    [
        ({"name": "dsgd"}, 0, 0, 2 * N * M),
        nightly({"name": "dsgd", "topology": "complete"}, 0, 0, N * (N - 1) * M),
        nightly({"name": "dsgd", "topology": {"name": "exponential", "one_peer": True}}, 0, 0, N * M),
        ({"name": "push-sum"}, 0, 0, T * 2 * N * (M + 8)),
        ({"name": "gradient-tracking"}, 0, 0, 2 * T * 2 * N * M),
        ({"name": "split-relay", "cut": "2"}, EN * (A + 8) + H, EN * A + H, (K - 1) * H),
        ({"name": "splitfed", "cut": "2"}, EN * (A + 8) + K * FIRST, EN * A + K * FIRST, 0),
        ({"name": "splitfed", "cut": ["2", "4"]}, TWO_CUTS, TWO_CUTS, 0),
        nightly({"name": "splitfed", "cut": ["2", "4"], "activations": "float16"}, TWO_CUTS - HALF, TWO_CUTS - HALF, 0),
        ({"name": "fedma", "gamma": 1.0, "max_width": 1}, K * (M + 8 * C), K * (M + FIRST + MIDDLE + 8 * 400), 0),
        ({"name": "fedgkt", "client": "mlp", "cut": "2"}, EN / 2 * (A + 4 * C + 8), EN / 2 * 4 * C, 0),
    ],
    ids=lambda given: "-".join(map(str, given.values())) if isinstance(given, dict) else "",
)  # fmt: skip
def test_a_round_costs_what_the_page_says(
    algorithm: dict[str, Any], up: float, down: float, peer: float, tmp_path: Path
) -> None:
    steps = {"steps": T} if algorithm["name"] in ("push-sum", "gradient-tracking") else {"epochs": 2}
    momentum = {} if algorithm["name"] == "gradient-tracking" else {"momentum": 0.9}
    made = Experiment(
        rounds=2, model="mlp", algorithm=algorithm, engine="inline",
        local={"lr": 0.05, "batch_size": 120} | steps | momentum,
        data={"dataset": "digits", "partition": {"name": "iid", "clients": K}},
        **({"select": {"clients_per_round": K}} if up else {}),
    ).run(tmp_path / "run", report=False)  # fmt: skip
    line = made.metrics[2]  # the relay hands on no optimizer at the beginning of its first round
    assert line.get("bytes_peer", 0) == peer
    assert 0 <= line["bytes_up"] - up < 5_000  # requests have a few bytes of their own
    assert 0 <= line["bytes_down"] - down < 5_000


def test_vertical_learning_costs_what_the_page_says(tmp_path: Path) -> None:
    made = Experiment(
        rounds=2, model="linear", algorithm="vertical", engine="inline",
        local={"lr": 0.05, "batch_size": 120, "epochs": 2},
        data={"dataset": "digits", "parties": {"split": "quadrants", "overlap": 0.8}},
    ).run(tmp_path / "run", report=False)  # fmt: skip
    partition = load_partition(made.directory / "partition.npz")
    assert isinstance(partition, FeaturePartition)
    (own, *others), m = partition.sizes().tolist(), len(partition.shared)
    once = 32 * (K - 1) * 2 * own + 32 * sum(others) + 8 * m * (K - 1)
    assert [line["bytes_peer"] for line in made.metrics[1:]] == [
        8 * 2 * m * C * (K - 1) + x for x in (once, 0)
    ]
    assert made.metrics[2]["bytes_up"] == 0
