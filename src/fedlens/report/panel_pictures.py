"""Draws the panels of a figure beside and below each other, for papers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from fedlens.report.downsample import short
from fedlens.report.figures import Figure, ValueMap
from fedlens.report.pictures import Axes, Picture, draw_figure, new_picture, percent_mark

Panel: TypeAlias = Figure | ValueMap

_LEGEND_LINE = 0.15  # inches
_LETTERS = 11  # of labels, for each inch of an axis
_VALUES_NAMED = 120  # cells of a map, each with its value written in it


def panel_picture(panels: Sequence[Panel], columns: int | None = None) -> Picture:
    """Panels row by row, with one legend below; needs `pictures.style`. They are of one kind and share their scales.

    Args:
        columns: at most 3 if it is not given.
    """
    wide = min(columns or (2 if len(panels) in (2, 4) else 3), len(panels))
    tall = -(-len(panels) // wide)
    maps = isinstance(panels[0], ValueMap)
    width = (4.4, 6.4, 8.4)[min(wide, 3) - 1] + 2.0 * max(wide - 3, 0)
    names = [name for panel in panels if isinstance(panel, Figure) for name in panel.x.names]
    tilted = sum(map(len, names)) / len(panels) > _LETTERS * width / wide
    row = (2.5 if wide > 1 else 2.7) + 0.035 * max(map(len, names), default=0) * tilted
    picture = new_picture(width, 0.4 + row * tall)
    grid = np.ravel(picture.subplots(tall, wide, squeeze=False))
    for k, (axes, panel) in enumerate(zip(grid, panels, strict=False)):
        if isinstance(panel, ValueMap):
            image = _draw_values(axes, panel)
        else:
            draw_figure(axes, panel)
            # Panels share their scales, so the titles of the axes stand at the edge alone.
            axes.set_ylabel(panel.y.title if k % wide == 0 else "")
            axes.set_xlabel(panel.x.title if k + wide >= len(panels) else "")
            if tilted:
                axes.tick_params(axis="x", rotation=30)
                for label in axes.get_xticklabels():
                    label.set(ha="right", rotation_mode="anchor")
        if panel.title:
            axes.set_title(panel.title, loc="left", fontsize=8)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    if maps:
        first = panels[0]
        assert isinstance(first, ValueMap)
        form = percent_mark if first.share else None
        bar = picture.colorbar(image, ax=list(grid), aspect=30, pad=0.01, format=form)
        bar.set_label(first.value_title)
        bar.outline.set_visible(False)
        return picture
    _add_legend(picture, grid[: len(panels)], panels, width)
    return picture


def _add_legend(picture: Picture, grid: Any, panels: Sequence[Panel], width: float) -> None:
    """One legend of all panels, below them, in the order of the series."""
    from matplotlib.collections import PathCollection

    named: dict[str, Any] = {}
    for axes in grid:
        handles, names = axes.get_legend_handles_labels()
        named = dict(zip(names, handles, strict=True)) | named
    if len(named) > 1:
        order = [f" {line.name}" for panel in panels if isinstance(panel, Figure) for line in panel.series]
        names = [name for name in dict.fromkeys(order) if name in named]
        across = max(1, min(len(names), int(width * 15 / (max(map(len, names)) + 6))))
        lines = -(-len(names) // across)  # more than a few would squeeze the panels
        picture.set_figheight(picture.get_figheight() + _LEGEND_LINE * max(0, lines - 3))
        handles = [named[name] for name in names]
        legend = picture.legend(handles, names, loc="outside lower center", handlelength=2.4, ncols=across)
        for handle in legend.legend_handles:
            if isinstance(handle, PathCollection):
                handle.set_sizes([22])  # where sizes say something, that of the first marker says nothing


def _draw_values(axes: Axes, figure: ValueMap) -> Any:
    from matplotlib.colors import Normalize

    shown = np.ma.masked_invalid(figure.values)
    norm = Normalize(*figure.limits)
    image = axes.imshow(
        shown, cmap="Blues", norm=norm, aspect="auto", interpolation="nearest", origin="lower"
    )
    axes.spines[:].set_visible(False)
    axes.set_facecolor("#f3f4f6")
    for scale, names, title in (
        (axes.xaxis, figure.columns, figure.column_title),
        (axes.yaxis, figure.rows, figure.row_title),
    ):
        scale.set_ticks(range(len(names)), [short(name, 18) for name in names])
        scale.set_label_text(title)
    if sum(len(name) + 2 for name in figure.columns) > 40:
        axes.tick_params(axis="x", rotation=90)
    if figure.values.size <= _VALUES_NAMED:
        for (row, column), value in np.ndenumerate(figure.values):
            if not math.isnan(value):
                color = "white" if norm(value) > 0.55 else "black"
                words = f"{100 * value:.1f}" if figure.share else f"{value:.3g}"
                axes.text(column, row, words, ha="center", va="center", color=color, fontsize=6)
    return image
