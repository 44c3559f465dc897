"""What stands in a report and on a partition's own page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedlens.data.partition.partition import Partition
from fedlens.data.table import Table
from fedlens.pages.partition_page import write_page
from tests.unit.pages.reading import Page, assert_self_contained, read_page
from tests.unit.results.fake_run import class_counts, make_partition

EVIL = "</script><script>alert(1)</script><b>&amp;\"'"


def page_of(p: Partition, tmp_path: Path) -> Page:
    html = write_page(p, tmp_path / "new" / "p.html").read_text(encoding="utf-8")
    assert_self_contained(html)
    return read_page(html)


def kind(page: Page, name: str) -> list[dict[str, Any]]:
    return [trace for trace in page.traces() if trace["type"] == name]


def test_all_pictures_of_a_few_clients(tmp_path: Path) -> None:
    counts = class_counts(10, even=False)
    page = page_of(make_partition(counts), tmp_path)
    bars = [trace for trace in kind(page, "bar") if trace.get("name")]
    assert np.array_equal(np.array([bar["y"] for bar in bars]).T, counts)
    assert bars[0]["text"] == [str(k) for k in range(10)]
    assert len({bar["marker"]["color"] for bar in bars}) == 10
    (heat,) = kind(page, "heatmap")
    assert np.allclose(heat["z"], counts / counts.sum(axis=1, keepdims=True), atol=6e-4)
    assert heat["y"] == [f"client {k} ({n:,} examples)" for k, n in enumerate(counts.sum(axis=1))]
    examples, classes = kind(page, "scatter")
    assert examples["y"] == sorted(counts.sum(axis=1), reverse=True)
    assert classes["y"] == sorted((counts > 0).sum(axis=1), reverse=True)
    assert examples["x"] == classes["x"] == list(range(1, 11))
    assert "Classes of each client" in page.words


def test_the_histogram_is_of_the_distances_with_their_weighted_mean(tmp_path: Path) -> None:
    page = page_of(make_partition(np.array([[10, 0], [0, 30]])), tmp_path)
    figure = page.figures[-1]
    # p = (1/4, 3/4), so |q - p| is 3/2 and 1/2, weighted by 1/4 and 3/4.
    (bar,) = figure["data"]
    assert {x: y for x, y in zip(bar["x"], bar["y"], strict=True) if y} == {0.525: 1, 1.525: 1}
    assert figure["layout"]["shapes"][0]["x0"] == 0.75
    assert figure["layout"]["annotations"][0]["text"] == "weighted mean 0.75"
    assert figure["layout"]["xaxis"]["range"] == [-0.02, 2.02]
    assert "Mean EMD (0 alike, 2 apart) 0.75" in page.words


def test_many_clients_are_an_excerpt_that_says_so(tmp_path: Path) -> None:
    counts = class_counts(500, 10, even=False)
    page = page_of(make_partition(counts), tmp_path)
    assert "Classes of 60 of 500 clients, evenly spread over the sizes" in page.words
    assert "Share of each class, 300 of 500 clients, evenly spread over the sizes" in page.words
    bars = [trace for trace in kind(page, "bar") if trace.get("name")]
    shown = [int(name) for name in bars[0]["text"]]
    sizes = counts.sum(axis=1)
    assert len(shown) == 60
    assert [sizes[shown[0]], sizes[shown[-1]]] == [sizes.max(), sizes.min()]
    shares = counts[shown] / np.maximum(sizes[shown], 1)[:, None]
    assert np.allclose(np.array([bar["y"] for bar in bars]).T, shares, atol=6e-5)
    views = [json.loads(value or "") for name, value in page.attributes if name == "data-data"]
    assert np.array_equal(np.array(views[1]["y"]).T, counts[shown])
    (heat,) = kind(page, "heatmap")
    assert np.array(heat["z"]).shape == (300, 10)
    assert np.allclose(np.sum(heat["z"], axis=1), 1, atol=6e-3)
    assert kind(page, "scatter")[0]["y"][-1] == sizes.min()
    assert "Smallest, median, largest" in page.words


def test_a_hundred_clients_are_all_there(tmp_path: Path) -> None:
    page = page_of(make_partition(class_counts(100)), tmp_path)
    assert len(kind(page, "bar")[0]["x"]) == 100


def test_a_thousand_classes_need_no_dense_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    owners, labels = rng.integers(0, 9275, 120_300), np.repeat(np.arange(1203), 100)
    p = Partition.of_owners(owners, 9275).counted(labels)
    asked: list[int] = []
    dense = type(p.census).dense
    monkeypatch.setattr(
        type(p.census), "dense", lambda census, rows: asked.append(len(rows)) or dense(census, rows)
    )
    page = page_of(p, tmp_path)
    assert max(asked) <= 300
    assert "1,203 classes in 100 groups of 12 or 13 neighbours" in page.words
    assert len([trace for trace in kind(page, "bar") if trace.get("name")]) == 100
    assert np.array(kind(page, "heatmap")[0]["z"]).shape == (300, 250)
    assert (tmp_path / "new" / "p.html").stat().st_size < 6_000_000


def test_lopsided_bars_are_shown_as_shares_first(tmp_path: Path) -> None:
    def views(counts: np.ndarray) -> list[str]:
        page = page_of(make_partition(counts), tmp_path)
        return [word for word in page.text.split("\n") if word in ("examples", "shares")][:2]

    assert views(np.array([[100, 3], [5, 5], [1, 2]])) == ["shares", "examples"]
    assert views(np.array([[5, 3], [5, 5], [1, 2]])) == ["examples", "shares"]


def test_zeros_are_counted_where_an_axis_cannot_show_them(tmp_path: Path) -> None:
    page = page_of(make_partition(np.array([[3, 1], [0, 0], [0, 4]])), tmp_path)
    words = page.words
    assert [trace["y"] for trace in kind(page, "scatter")] == [[4, 4], [2, 1]]
    assert "Examples and classes, by rank; 1 client without examples not shown" in words
    assert "Distance of each client from the population; 1 client without classes not shown" in words


def test_nobody_has_anything(tmp_path: Path) -> None:
    words = page_of(make_partition(np.zeros((3, 2), int)), tmp_path).words
    assert "Examples per client 0" in words
    assert "Mean EMD" not in words


def test_one_client(tmp_path: Path) -> None:
    words = page_of(make_partition(np.array([[3, 4]])), tmp_path).words
    assert "partitioned over 1 client by own" in words
    assert "Examples of each class (colour: share), the one client" in words


def test_no_client(tmp_path: Path) -> None:
    empty = Partition((), np.empty(0, int), np.array([0]))
    assert "Data per client" not in page_of(empty, tmp_path).words


def test_without_a_census_there_are_sizes(tmp_path: Path) -> None:
    page = page_of(replace(make_partition(class_counts(30, even=False)), census=None), tmp_path)
    assert "Only sizes are shown" in page.words
    assert {trace["type"] for trace in page.traces()} == {"scatter"}


def test_marks_are_called_so(tmp_path: Path) -> None:
    page = page_of(Partition.of_owners([0, 1], 2).counted(Table.of_sets([[0, 2], [1]])), tmp_path)
    assert "it has one mark for each" in page.words
    assert page.figures[0]["layout"]["yaxis"]["title"]["text"] == "marks"


def test_each_feature_has_a_strip_with_its_unit(tmp_path: Path) -> None:
    features = {"blur": np.linspace(0, 1, 5000), "mood": np.arange(5000.0)}
    counts = np.ones((5000, 1), int)
    page = page_of(make_partition(counts, features=features), tmp_path)
    blur, mood = page.figures[-2:]
    assert blur["layout"]["xaxis"]["title"]["text"] == "blur, standard deviation, pixels"
    assert mood["layout"]["xaxis"]["title"]["text"] == "mood"
    assert (len(mood["data"][0]["x"]), mood["data"][0]["x"][-1], mood["data"][0]["text"][-1]) == (
        2000,
        4999,
        "4999",
    )


def test_two_classes_of_one_name_stay_two(tmp_path: Path) -> None:
    (heat,) = kind(page_of(make_partition(np.array([[1, 2]]), ["cat", "cat"]), tmp_path), "heatmap")
    assert heat["x"] == ["cat", "cat (2)"]


def test_long_names_are_cut_on_the_axes_and_whole_below_the_mouse(tmp_path: Path) -> None:
    ids = tuple(f"hospital of the holy {k:03d} in the town" for k in range(40))
    page = page_of(
        make_partition(class_counts(40), [f"{k} {'x' * 90}" for k in range(10)], ids=ids), tmp_path
    )
    axis = page.figures[0]["layout"]["xaxis"]
    assert page.figures[0]["data"][0]["text"] == list(ids)
    assert max(map(len, axis["ticktext"])) <= 16
    assert len(axis["tickvals"]) == len(axis["ticktext"]) == 20
    assert max(len(text) for text in page.figures[1]["layout"]["xaxis"]["ticktext"]) <= 18


def test_nothing_that_a_user_names_becomes_markup(tmp_path: Path) -> None:
    p = make_partition(
        class_counts(2, 2),
        [EVIL, "plain"],
        ids=(EVIL, "b"),
        dataset=EVIL,
        spec={"name": EVIL, EVIL: {EVIL: EVIL}},
        features={EVIL: np.array([1.0, 2.0])},
    )
    page = page_of(p, tmp_path)
    assert not [script for script in page.scripts if "alert(1)" in script]
    assert kind(page, "bar")[0]["name"].startswith("&lt;/script&gt;")
    for trace in page.traces():
        for name in (*trace.get("x", []), *trace.get("y", []), trace.get("name"), *trace.get("text", [])):
            assert "<" not in str(name)
    for figure in page.figures:
        assert "<" not in str(figure["layout"].get("xaxis", {}).get("title"))
    assert page.words.count(EVIL) >= 5


def test_the_page_says_how_it_was_made(tmp_path: Path) -> None:
    p = make_partition(class_counts(3), spec={"name": "dirichlet", "alpha": 0.1, "size": None})
    words = page_of(p, tmp_path).words
    for said in ("digits", "partitioned over 3 clients by dirichlet", "alpha 0.1", "size not set", p.digest):
        assert said in words
    assert "Sizes: Gini coefficient 0" in words


def test_half_a_character_of_a_file_name_is_an_escape_on_the_page(tmp_path: Path) -> None:
    partition = make_partition(class_counts(3), spec={"name": "natural", "table": "Celle\udcff.csv"})
    assert "table Celle\\udcff.csv" in page_of(partition, tmp_path).words
