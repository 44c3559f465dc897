"""What a page makes of a panel: the box at a point, the legend, and the views."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest

from fedlens.pages.plotly_figures import draw, legend, views
from fedlens.results.figures.chart import Axis, Cells, Panel, Series, matrix

ROUND, SCORE = Axis("round", "count"), Axis("accuracy", "share")
SENT, CLASSES = Axis("bytes sent", "bytes"), Axis("client", "hidden")
LINE = Series([1, 2], [0.25, 0.5], "FedAvg <1>")


def box(panel: Panel) -> Any:
    """The template of the first series."""
    return draw(panel)["data"][0]["hovertemplate"]


@pytest.mark.parametrize(
    ("panel", "template"),
    [
        (Panel("", "", ROUND, SCORE, [LINE]), "round %{x:,d}<br>accuracy %{y:.2%}"),
        (Panel("", "", SENT, Axis(), [LINE]), "bytes sent %{x:.3~s}B<br>%{y:.4~g}"),
        (Panel("", "", ROUND, SCORE, [LINE], unified=True), "%{y:.2%}"),
        (
            Panel("", "", ROUND, SCORE, [replace(LINE, name="")]),
            "round %{x:,d}<br>accuracy %{y:.2%}<extra></extra>",
        ),
        (
            Panel("", "", ROUND, SCORE, [replace(LINE, texts=["a", "b"])]),
            "<b>%{text}</b><br>accuracy %{y:.2%}",
        ),
        (
            Panel("", "", ROUND, SCORE, [replace(LINE, texts=["a", "b"], kind="dots")]),
            "<b>%{text}</b><br>round %{x:,d}<br>accuracy %{y:.2%}",
        ),
        (
            Panel("", "", SCORE, CLASSES, [replace(LINE, texts=["a", "b"], kind="bar")], stacked="across"),
            "client <b>%{text}</b><br>accuracy %{x:.2%}",
        ),
    ],
)
def test_the_box_at_a_point_follows_from_the_axes(panel: Panel, template: str) -> None:
    assert box(panel) == template


def test_the_box_of_all_series_has_the_place_as_its_title() -> None:
    axis = draw(Panel("", "", ROUND, SCORE, [LINE], unified=True))["layout"]["xaxis"]
    assert axis["unifiedhovertitle"] == {"text": "round %{x:,d}"}


@pytest.mark.parametrize(
    ("heights", "stacked", "marks"),
    [([1, 3], "", 1), ([None, 5], "", 1), ([1, 40], "", None), ([1, 3], "up", 1), ([1, 4], "up", None)],
)
def test_small_counts_have_marks_at_whole_numbers(
    heights: list[int | None], stacked: Literal["", "up"], marks: int | None
) -> None:
    bars = [Series([1, 2], [0, 2], "a", "bar"), Series([1, 2], heights, "b", "bar")]
    layout = draw(Panel("", "", Axis(), Axis("clients", "count"), bars, stacked=stacked))["layout"]
    assert (layout["xaxis"].get("dtick"), layout["yaxis"].get("dtick")) == (None, marks)


def test_a_scale_of_small_counts_has_marks_at_whole_numbers() -> None:
    def bar(top: float) -> Any:
        cells = Cells(np.eye(2) * top, ["a", "b"], ["c", "d"], "examples", (0.0, top), "count")
        return draw(matrix("", "", cells, Axis(), Axis()))["data"][0]["colorbar"]

    assert (bar(1.0).get("dtick"), bar(40.0).get("dtick")) == (1, None)


def test_a_legend_has_each_name_once_and_none_of_what_belongs_to_another() -> None:
    band = Series([1, 2, 2, 1], [0, 0, 1, 1], LINE.name, "band", "#112233")
    best = Series([2], [0.5], "best", "cross", group=LINE.name)
    panel = Panel("", "", ROUND, SCORE, [band, LINE, best, Series([1], [1], "a", "open")])
    assert [(key.name, key.shape) for key in legend([panel, panel])] == [
        ("FedAvg &lt;1&gt;", "line"),
        ("a", "ring"),
    ]
    many = [replace(LINE, name=str(k)) for k in range(25)]
    assert legend([replace(panel, series=many)]) == []


def test_a_view_changes_what_differs() -> None:
    other = Panel("", "", SENT, SCORE, [replace(LINE, x=[10, 20])], view="data")
    first, second = views(Panel("", "", ROUND, SCORE, [LINE], view="rounds", others=[other]))
    assert [first["label"], second["label"]] == ["rounds", "data"]
    assert (first["data"]["x"], second["data"]["x"]) == ([[1, 2]], [[10, 20]])
    assert "y" not in second["data"]
    assert second["layout"]["xaxis"]["title"] == {"text": "bytes sent"}
    assert views(other) == []


def test_a_mark_of_a_matrix_stands_at_the_name_that_it_has() -> None:
    # plotly puts a mark at the number 0 to the category "0", which is the last one here.
    cells = Cells(np.zeros((3, 2)), ["6", "3", "0"], ["1", "2"], "cosine", (0, 1), "number")
    drawn = draw(matrix("", "", cells, Axis("round"), Axis("layer")))
    for name in ("x", "y"):
        axis = drawn["layout"][f"{name}axis"]
        assert axis["tickvals"] == axis["ticktext"] == drawn["data"][0][name]
