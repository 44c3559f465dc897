"""Figures of the clients' data, without training: `populations` and `distributions`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from fedlens.base.errors import DataError
from fedlens.report.render import Plot
from fedlens.report.study_figure import Columns, StudyFigure
from fedlens.report.study_population_figures import (
    Panel,
    distribution_picture,
    distribution_plots,
    panels,
    population_picture,
    population_plots,
)
from fedlens.results.populations import read_populations
from fedlens.results.rows import Results

_CAPTIONS = {
    "bars": "Share of each class in the examples of each client.",
    "matrix": "Number of examples of each class at each client.",
    "classes": "Number of examples of each class, by the client that holds them.",
}


def populations_figure(
    study: Results,
    *,
    style: Literal["bars", "matrix", "classes"] = "bars",
    where: dict[str, Any] | None = None,
    dataset: str | list[str] | None = None,
    clients: int | None = None,
    columns: Columns | None = None,
) -> StudyFigure:
    """The classes of each client, one panel a case.

    Args:
        style: "bars" is hsu2019, figure 1; "matrix" fedcv, figures 3 and 11; "classes" fedcv, figure 10.
        where: the cases that are shown, by dimension: a value or a list of values.
        dataset: the data that are shown; all by default.
        clients: how many clients are shown, evenly spread over the sizes; all by default.
        columns: of panels beside each other.

    Raises `ConfigError` if no case has these data, and `DataError` if the populations were not made yet.
    """
    spec = {"style": style, "dataset": dataset, "clients": clients, "columns": columns}
    shown = shown_populations(study, spec, where)
    sampled = f" {clients} clients of each case are shown." if clients else ""
    caption = f"{_CAPTIONS[style]}{sampled} Seed {shown[0].population.seed}."
    return _figure("Classes of the clients", caption, shown, spec, population_picture, population_plots)


def distributions_figure(
    study: Results,
    *,
    counts: list[Literal["classes", "examples", "class", "test"]] | None = None,
    where: dict[str, Any] | None = None,
    dataset: str | list[str] | None = None,
    log: Literal["both", "x", "y", "none"] = "both",
) -> StudyFigure:
    """Counts from the largest down, one line a case (hsu2020, figures 2, 3 and 10).

    Args:
        counts: a panel each: "classes" and "examples" of a client, "class" and "test" for the training and the test
            examples of a class.
        where, dataset: as for `populations_figure`.
        log: which axes are logarithmic. Zeros are left out of a logarithmic axis, and counted in a note.

    Raises `ConfigError` if no case has these data, and `DataError` if the populations were not made yet.
    """
    spec = {"counts": counts or ["classes", "examples"], "dataset": dataset, "log": log}
    shown = shown_populations(study, spec, where)
    caption = f"Counts from the largest down, one line a case. Seed {shown[0].population.seed}."
    return _figure("Counts by rank", caption, shown, spec, distribution_picture, distribution_plots)


def shown_populations(
    study: Results, spec: Mapping[str, Any], where: Mapping[str, Any] | None
) -> list[Panel]:
    """The populations of the cases that a figure shows.

    Raises `ConfigError` if no case has these data, and `DataError` if the populations were not made yet.
    """
    if "populations" not in study.data:
        raise DataError(
            "data.json has no populations, which this figure shows",
            hint=f"run the study again: {study.info.command}",
        )
    populations = [
        each
        for each in read_populations(study.data["populations"])
        if all(_among(each.case.get(key), wanted) for key, wanted in (where or {}).items())
    ]
    return panels(populations, study.info.dimensions, spec)


def _among(value: Any, wanted: Any) -> bool:
    return value in wanted if isinstance(wanted, list | tuple) else bool(value == wanted)


def _figure(
    title: str,
    caption: str,
    shown: Sequence[Panel],
    spec: Mapping[str, Any],
    picture: Callable[[Sequence[Panel], Mapping[str, Any]], Any],
    plots: Callable[[Sequence[Panel], Mapping[str, Any]], list[Plot]],
) -> StudyFigure:
    return StudyFigure(title, caption, (), lambda: picture(shown, spec), lambda: plots(shown, spec))
