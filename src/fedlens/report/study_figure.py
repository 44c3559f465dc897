"""A figure of a study: its panels, its caption and its gaps, for papers and for the page."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import Field

from fedlens.base.errors import DataError
from fedlens.report import pictures
from fedlens.report.figures import Figure
from fedlens.report.panel_pictures import Panel, panel_picture
from fedlens.report.render import Plot

_LETTERS, _LINE = 21, 0.12  # of caveats above a picture: letters an inch, and the height of a line in inches
Columns: TypeAlias = Annotated[int, Field(ge=1, le=8)]  # panels beside each other


@dataclass(frozen=True)
class StudyFigure:
    """One figure, with two renderers.

    Attributes:
        caption: what the panels show, as sentences.
        gaps: what is missing: failed runs, and runs that are not done.
        picture: makes the picture for papers; called inside `pictures.style`.
        plots: makes the plots of the page, one a panel.
        panels: what a figure of panels shows; empty for another one.
        caveats: sentences before the caption, which stand above the picture too: what the figure does not show.
    """

    title: str
    caption: str
    gaps: Sequence[str]
    picture: Callable[[], Any]
    plots: Callable[[], Sequence[Plot]]
    panels: Sequence[Panel] = ()
    caveats: Sequence[str] = ()

    @classmethod
    def of_panels(
        cls,
        title: str,
        caption: str,
        panels: Sequence[Panel],
        gaps: Sequence[str] = (),
        columns: int | None = None,
    ) -> StudyFigure:
        """The figure of panels that `figures` describes. Panels of a single title need none."""
        shown = [replace(panels[0], title="")] if len(panels) == 1 else list(panels)
        return cls(
            title,
            caption,
            gaps,
            lambda: panel_picture(shown, columns),
            lambda: _plots(shown, columns == 1),
            shown,
        )

    def draw(self, path: Path) -> Path:
        """Draws the figure into a .png, .pdf or .svg file, and returns its path.

        The same results give the same bytes. Raises `ConfigError` if matplotlib is not installed or the name has
        another ending, and `RunFailed` if the file cannot be written.
        """
        with pictures.style():
            pictures.check_suffix(path)
            picture = self.picture()
            if self.caveats:
                lines = textwrap.wrap(" ".join(self.caveats), int(_LETTERS * picture.get_figwidth()))
                picture.set_figheight(picture.get_figheight() + _LINE * len(lines))
                picture.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=6)
            return pictures.save(picture, path)


def _plots(panels: Sequence[Panel], below: bool) -> list[Plot]:
    names = {line.name for panel in panels if isinstance(panel, Figure) for line in panel.series if line.name}
    shape = "tall" if below or len(panels) == 1 else "low"
    return [Plot.of(panel, legend=len(names) > 1, shape=shape) for panel in panels]


def no_values(title: str, gaps: Sequence[str]) -> DataError:
    """The error for a figure that no run has values for."""
    return DataError(f"no run has values for the figure '{title}'", hint=" ".join(gaps) or None)
