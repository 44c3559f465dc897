"""The pictures for papers: what is drawn is read off the axes, and the files are opened."""

from __future__ import annotations

import builtins
import itertools
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedlens.base.errors import ConfigError, DataError, RunFailed
from fedlens.data.partition.partition import Partition
from fedlens.data.table import Table
from fedlens.pages.partition_page import write_captions
from fedlens.results.figures import picture, pictures
from fedlens.results.figures.chart import Axis, Chart, Panel, Series
from fedlens.results.figures.pictures import draw
from tests.unit.results.fake_run import class_counts, make_partition

ODD = (
    "$x_1^2$",
    "_hidden",
    "<b>bold</b>",
    "a class whose name is much too long for any axis",
    "new\nline",
    "",
)


def drawn(p: Partition, name: str) -> Any:
    """One of the pictures, laid out and not written."""
    mpl = pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'fedlens[plot]'")
    with mpl.rc_context(picture.STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        figure = picture.chart_picture(pictures.pictures(p)[name])
        figure.draw_without_rendering()
        return figure


def heights(axes: Any) -> np.ndarray:
    """[clients]: where the stacked bars end."""
    tops: dict[int, float] = {}
    for patch in axes.patches:
        at = round(patch.get_x() + patch.get_width() / 2)
        tops[at] = max(tops.get(at, 0), patch.get_y() + patch.get_height())
    return np.array([tops.get(k, 0) for k in range(max(tops) + 1)])


def test_every_file_is_written_and_can_be_opened(tmp_path: Path) -> None:
    p = make_partition(class_counts(5, 3), features={"blur": np.arange(5.0)})
    files = draw(p, tmp_path / "new" / "dir", ["png", "pdf"])
    names = {"class-bars", "emd", "features", "matrix", "ranks"}
    assert {path.name for path in files} == {f"{name}.{e}" for name in names for e in ("png", "pdf")}
    assert sorted(files) == sorted((tmp_path / "new" / "dir").iterdir())
    with Image.open(tmp_path / "new" / "dir" / "class-bars.png") as image:
        assert image.size == (1280, 620)
        assert [round(dots) for dots in image.info["dpi"]] == [200, 200]
        assert len(image.convert("RGB").getcolors(10**6)) > 3
    assert (tmp_path / "new" / "dir" / "emd.pdf").read_bytes().startswith(b"%PDF")


def test_the_same_partition_gives_the_same_bytes(tmp_path: Path) -> None:
    p = make_partition(class_counts(3, 3))
    one, two = (draw(p, tmp_path / name, ["pdf", "svg"]) for name in "ab")
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in two]


def test_bars_are_the_counts() -> None:
    counts = class_counts(10, 4, even=False) + 40
    figure = drawn(make_partition(counts, list("abcd")), "class-bars")
    (axes,) = figure.axes
    assert heights(axes).tolist() == counts.sum(axis=1).tolist()
    assert sorted(p.get_height() for p in axes.patches) == sorted(counts[counts > 0].tolist())
    assert axes.get_ylabel() == "examples"
    (legend,) = figure.legends
    assert [text.get_text().strip() for text in legend.get_texts()] == list("abcd")


def test_lopsided_bars_are_shares_below_the_sizes() -> None:
    counts = np.array([[1000, 1], [5, 5], [1, 2], [0, 0]])
    top, axes = drawn(make_partition(counts), "class-bars").axes
    assert heights(axes) == pytest.approx([1, 1, 1])
    assert heights(top).tolist() == [1001, 10, 3, 0]
    assert (top.get_yscale(), axes.get_ylabel()) == ("log", "share of its examples")


def test_few_cells_have_counts_and_all_have_shares() -> None:
    counts = np.array([[8, 0], [2, 4]])
    few = drawn(make_partition(counts, ["cat", "dog"], ids=("north", "south")), "matrix").axes[0]
    assert [text.get_text() for text in few.texts] == ["8", "0", "2", "4"]
    assert few.images[0].get_array().tolist() == [[1, 0], [1 / 3, 2 / 3]]
    assert [text.get_text() for text in few.get_yticklabels()] == ["north", "south"]
    many = drawn(make_partition(class_counts(60, 30)), "matrix").axes[0]
    assert not many.texts
    assert np.allclose(many.images[0].get_array().sum(axis=1), 1)
    assert (many.get_ylabel(), many.get_xlabel()) == ("60 clients, by main class", "30 classes")


def test_ranks_are_on_logarithmic_axes() -> None:
    counts = class_counts(40, even=False)
    examples, classes = drawn(make_partition(counts), "ranks").axes
    assert examples.lines[0].get_ydata().tolist() == sorted(counts.sum(axis=1), reverse=True)
    assert classes.lines[0].get_ydata().tolist() == sorted((counts > 0).sum(axis=1), reverse=True)
    assert {axes.get_xscale() for axes in (examples, classes)} == {"log"} == {examples.get_yscale()}
    assert not [t for t in examples.get_yticklabels() if "math" in t.get_text() or "$" in t.get_text()]


def test_the_histogram_has_the_weighted_mean() -> None:
    (axes,) = drawn(make_partition(np.array([[10, 0], [0, 30]])), "emd").axes
    assert {round(p.get_x(), 2): p.get_height() for p in axes.patches if p.get_height()} == {0.5: 1, 1.5: 1}
    assert axes.lines[0].get_xdata() == [0.75, 0.75]
    assert axes.texts[0].get_text() == "weighted mean 0.75"
    assert axes.get_xlim() == (-0.02, 2.02)


def test_an_excerpt_says_so() -> None:
    p = make_partition(class_counts(310, 120, even=False))
    bars, matrix = drawn(p, "class-bars"), drawn(p, "matrix")
    said = "60 of 310 clients, evenly spread over the sizes\n120 classes in 100 groups of 1 or 2 neighbours"
    assert bars.axes[1].get_title(loc="left") == said
    assert matrix.axes[0].get_title(loc="left") == "300 of 310 clients, evenly spread over the sizes"
    scale = bars.axes[-1]
    assert [text.get_text() for text in scale.get_yticklabels()][::5] == ["0", "119"]
    assert_tidy(bars)
    assert_tidy(matrix)


@pytest.mark.parametrize("name", ["class-bars", "matrix", "ranks", "emd", "features"])
def test_nothing_is_cut_off_or_laid_over_another(name: str) -> None:
    """Names of any kind: every text lies in its picture, and the names below an axis stand apart."""
    ids = tuple(f"<i>{'x' * 30} {k}" for k in range(20))
    features = {name: np.arange(20.0) for name in ("noise", "anything")}
    assert_tidy(drawn(make_partition(class_counts(20, 6), ODD, ids=ids, features=features), name))
    if name != "features":
        two = make_partition(np.array([[4000, 0, 0], [3, 1, 2]]), ids=("the north", "the south"))
        assert_tidy(drawn(two, name))


def assert_tidy(figure: Any) -> None:
    drawn_in, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert min(drawn_in.x0, drawn_in.y0) > -0.03
    assert drawn_in.x1 < width + 0.03
    assert drawn_in.y1 < height + 0.03
    for axes in figure.axes:
        left, right = sorted(axes.get_xlim())
        labels = zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
        shown = [text for at, text in labels if text.get_text() and left <= at <= right]
        if shown and shown[0].get_rotation() in (0, 90):
            boxes = [text.get_window_extent() for text in shown]
            assert not [a for a, b in itertools.pairwise(boxes) if a.x1 > b.x0]


def test_names_are_drawn_as_they_are() -> None:
    (legend,) = drawn(make_partition(class_counts(3, 6), ODD), "class-bars").legends
    assert not any(text.get_parse_math() for text in legend.get_texts())
    said = [text.get_text().strip() for text in legend.get_texts()]
    long = said[3]
    assert said == ["$x_1^2$", "_hidden", "<b>bold</b>", long, "new line", "class 5"]
    assert len(long) == 40
    assert "…" in long


def test_without_a_census_and_with_nothing(tmp_path: Path) -> None:
    uncounted = Partition.of_owners([0, 0, 2], 3)
    assert list(pictures.pictures(uncounted)) == ["ranks"]
    assert drawn(uncounted, "ranks").axes[0].get_title(loc="left") == "1 client without examples not shown"
    nothing = make_partition(np.zeros((2, 2), int))
    assert drawn(nothing, "emd").axes[0].get_title(loc="left") == "2 clients without classes not shown"
    for name in ("class-bars", "matrix", "ranks"):
        assert_tidy(drawn(nothing, name))
    with pytest.raises(DataError, match="no clients to draw"):
        draw(Partition((), np.empty(0, int), np.array([0])), tmp_path)


def test_marks_are_called_so() -> None:
    p = Partition.of_owners([0, 1], 2).counted(Table.of_sets([[0, 2], [1]]))
    assert drawn(p, "class-bars").axes[0].get_ylabel() == "marks"


@pytest.mark.parametrize("same", [0, 1, 5])
def test_equal_counts_have_marks_at_whole_numbers(same: int) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'fedlens[plot]'")
    line = Series([1, 2], [same, same], color="#112233")
    figure = picture.chart_picture(Chart("", "", [Panel("", "", Axis(), Axis("", "count"), [line])]))
    figure.draw_without_rendering()
    marks = figure.axes[0].get_yticks()
    assert len(marks)
    assert not any(marks % 1)


def test_matplotlib_is_an_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=re.escape("pip install 'fedlens[plot]'")):
        draw(make_partition(class_counts(2, 2)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(RunFailed, match=r"^the picture could not be written: .*another directory with --out"):
        draw(make_partition(class_counts(2, 2)), tmp_path / "file")


def captions(p: Partition, tmp_path: Path) -> dict[str, str]:
    text = write_captions(p, tmp_path / "new" / "captions.txt").read_text(encoding="utf-8")
    return dict(line.split(": ", 1) for line in text.splitlines() if line)  # type: ignore[misc]


def test_captions_stand_alone(tmp_path: Path) -> None:
    p = make_partition(class_counts(400, even=False), spec={"name": "own", "clients": 400, "alpha": 0.1})
    told = captions(p, tmp_path)
    assert list(told) == ["class-bars", "emd", "matrix", "ranks"]
    whole = f"digits, {len(p.indices):,} examples over 400 clients (own, alpha 0.1; digest {p.digest[:16]})."
    assert all(whole in caption for caption in told.values())
    assert "60 of 400 clients, evenly spread over the sizes" in told["class-bars"]
    assert p.census is not None
    assert f"weighted by size, {p.census.emd():.3f}." in told["emd"]
    few = captions(
        make_partition(np.array([[1, 2], [0, 0]]), features={"blur": np.array([0.0, 1.0])}), tmp_path
    )
    assert "1 client without examples not shown" in few["ranks"]
    assert "1 client without classes not shown" in few["emd"]
    assert "features" in few
