"""Snapshots of what studies show: each kind of table and figure with each of its options, frames, and the page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import chdir
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from fedlens.data.partition.partition import Partition
from fedlens.pages.study_page import write_study_page
from fedlens.results.data_json import CasePopulation, CellCost, cost_values, population_values
from fedlens.results.figures.study_figures import study_figure
from fedlens.results.frames import cell_rows, cells_table, run_rows, to_csv, to_pandas
from fedlens.results.rows import LINES, Results, Row, write_data, write_info, write_lines
from fedlens.results.study_table import StudyTable
from fedlens.results.tables import study_table, study_tables
from tests.snapshots.analysis_rows import ROWS
from tests.snapshots.figures import of_study
from tests.snapshots.kit import Snapshots, as_text
from tests.snapshots.page_text import page_snapshot, page_text
from tests.unit.results.study_curves_fake import ALPHA, by_alpha, line, tuned
from tests.unit.results.study_fake import results_of

AVG, BETTER = [0.70, 0.72, 0.71, 0.74, 0.69], [0.75, 0.78, 0.76, 0.77, 0.75]
NEAR, WORSE = [0.71, 0.70, 0.73, 0.72, 0.70], [0.64, 0.66, 0.63, 0.69, 0.62]
SCORES = {
    0.1: {"fedavg": AVG, "fedavgm": BETTER, "fedprox": NEAR, "centralized": [0.9, 0.91, 0.9, 0.92, 0.9]},
    1.0: {"fedavg": BETTER, "fedavgm": WORSE, "fedprox": [*BETTER[:4], "out of memory"],
          "centralized": [0.91, 0.92, 0.9, 0.92, 0.93]},
    100.0: {"fedavg": [0.8] * 5, "fedavgm": [0.82] * 5, "fedprox": [0.8, 0.81, None, None, None],
            "centralized": [0.93] * 5},
}  # fmt: skip
CURVES = {
    "fedavg": [[0.1, 0.2, 0.4, 0.5], [0.1, 0.4, 0.4, 0.6]],
    "fedavgm": [[0.3, 0.5, 0.6, 0.8], [0.3, 0.55, 0.6, 0.8]],
    "fedprox": [[0.1, 0.2, 0.3, 0.35], [0.1, 0.2, 0.3, 0.45]],
    "centralized": [[0.6, 0.7, 0.8, 0.9], [0.6, 0.7, 0.8, 0.9]],
}
DOCUMENT: dict[str, Any] = {
    "source": "A report (2020)",
    "labels": {"fedavgm": "FedAvgM of the report"},
    "values": [
        {"method": "fedavg", "metric": "test_accuracy", "case": {ALPHA: 0.1}, "value": 0.75, "where": "table 1"},
        {"method": "fedavgm", "metric": "test_accuracy", "case": {ALPHA: 0.1}, "low": 0.76, "where": "figure 2"},
        {"method": "fedavgm", "metric": "test_accuracy", "case": {ALPHA: 1.0}, "about": 0.8, "where": "text"},
        {"method": "centralized", "metric": "test_accuracy", "case": {ALPHA: 0.1}, "value": 0.95, "where": "4.1"},
        {"method": "gone", "metric": "test_accuracy", "case": {ALPHA: 1.0}, "value": 0.5, "where": "table 1"},
    ],
    "claims": [
        {"text": "Momentum helps.", "where": "section 4", "holds": "fedavgm > fedavg where alpha < 1"},
        {"text": "It never harms.", "where": "section 4", "holds": "fedavgm > fedavg"},
        {"text": "It is near the bound.", "where": "table 1", "holds": "fedavg >= 90 % of centralized"},
    ],
}  # fmt: skip


def losses() -> Results:
    """Losses: one that is not finite at the end, one that is small, and one cell without a measurement."""
    made = results_of(
        {"fedavg": [[2.1, 0.412], [2.0, 0.398], [2.2, 0.405]], "fedavgm": [[1.9, 0.377], [1.8, math.nan], [2.0, 0.38]],
         "fedprox": [0.00041, 0.00043, 0.00039]},
        metric="test_loss", targets=[0.4],
    )  # fmt: skip
    lines = {
        key: replace(run, curve={**run.curve, "test_accuracy": run.curve["test_loss"]})
        for key, run in made.lines.items()
    }
    return replace(made, lines=lines)


def over_clients() -> Results:
    """The columns over clients, of a method that measured them and of one that did not."""
    made = results_of({"fedavg": AVG[:3], "fedavgm": BETTER[:3]})
    spread = {"clients_accuracy_mean": 0.01, "clients_accuracy_std": -0.6, "clients_accuracy_worst_decile": -0.2,
              "clients_accuracy_mean_before": -0.05}  # fmt: skip

    def measured(key: str) -> Any:
        run = made.lines[key]
        more = {name: [run.curve["test_accuracy"][-1] + by] for name, by in spread.items()}
        return replace(run, curve={**run.curve, **more}) if key.startswith("fedavg-") else run

    return replace(made, lines={key: measured(key) for key in made.lines})


def full(**info: Any) -> Results:
    """Means, failures, runs to come, ties and one winner, at three alphas."""
    return results_of(SCORES, facts={"effective_lr": 0.1, "emd": 1.5}, **info)


def of_data() -> Results:
    """A study with the data of its clients, the costs of its models, analyses and two datasets."""
    labels = [[0, 0, 1, 1, 1, 2, 2, 0, 3], [0, 1, 2, 3, 0, 1, 2, 3, 0]]
    owners = [[0, 0, 0, 1, 1, 2, 2, 2, 2], [0, 0, 0, 1, 1, 1, 2, 2, 2]]
    populations = [
        CasePopulation.of(
            Partition.of_owners(own, 3, dataset="four").counted(of),
            {ALPHA: alpha},
            test=np.array([4, 3, 2, 1]),
        )
        for own, of, alpha in zip(owners, labels, (0.1, 1.0), strict=True)
    ]
    scores = {alpha: {"small": AVG[:2], "large": BETTER[:2]} for alpha in (0.1, 1.0)}
    made = results_of(
        scores, facts={"parameters": 900.0, "multiply_adds": 2e6, "emd": 0.8}, analyses=list(ROWS)
    )
    costs = [
        CellCost(
            "", m, case, m, [3, 8, 8], 4, parameters, parameters - frozen, 90, 1_500_000, 4, memory, 2_100_000
        )
        for m, parameters, frozen, memory in (("small", 100, 0, 2_000_000), ("large", 900, 800, None))
        for case in made.info.cases
    ]
    lines = {}
    for k, (key, run) in enumerate(made.lines.items()):
        facts = {**run.facts, "emd": 1.2 if "0.1" in key else 0.3}
        lines[key] = replace(
            run, facts=facts, analyses={name: _moved(rows, k) for name, rows in ROWS.items()}
        )
    return Results(
        made.info, lines, {"populations": population_values(populations), "costs": cost_values(costs)}
    )


def _moved(rows: Any, by: int) -> list[dict[str, Any]]:
    """Rows of another run: numbers that are not whole are a little larger."""
    return [
        {key: value + by / 100 if isinstance(value, float) else value for key, value in row.items()}
        for row in rows
    ]


def chosen(**info: Any) -> Results:
    """A tuned study whose final runs have the best points of the tuning, one of them at the end of its grid."""
    made = tuned(**{"metric": "test_accuracy", **info})
    rates = {"fedavg": 0.1, "fedavgm": 1.0}
    entries = []
    for entry in made.info.entries:
        point = {"effective_lr": rates[entry.method]}
        if entry.method == "fedavgm":
            point["algorithm.momentum"] = 0.9
        entries.append(replace(entry, point=point) if entry.role == "final" else entry)
    grid = {"effective_lr": [0.003, 0.01, 0.03, 0.1, 0.3, 1.0]}
    whole = {
        "grids": {"fedavg": grid, "fedavgm": {**grid, "algorithm.momentum": [0.7, 0.9, 0.97]}},
        "tuning": {"on": "validation", "share": 0.1, "seeds": [100, 101], "own_seeds": True, "budget": 18},
    }
    return replace(made, info=replace(made.info, entries=entries, **{**whole, **info}))


# The tables of each kind, under the name of their snapshot: results, and what a study file says.
TABLES: dict[str, tuple[Any, dict[str, Any]]] = {
    "summary": (full, {"kind": "summary"}),
    "summary-clients": (over_clients, {"kind": "summary", "metric": "clients_accuracy_worst_decile"}),
    "summary-deviation": (full, {"kind": "summary", "spread": "deviation", "digits": 2, "title": "Deviations"}),
    "summary-plain": (full, {"kind": "summary", "spread": "none", "compare": False, "name": "plain"}),
    "summary-cases": (full, {"kind": "summary", "rows": "cases", "methods": ["fedavg", "fedavgm"]}),
    "summary-where": (full, {"kind": "summary", "where": {ALPHA: [0.1, 1.0]}, "metric": "test_accuracy"}),
    "summary-one-seed": (lambda: results_of({"fedavg": [0.7], "fedavgm": [0.8]}), {"kind": "summary"}),
    "summary-losses": (losses, {"kind": "summary"}),
    "summary-unmeasured": (full, {"kind": "summary", "metric": "test_lss"}),
    "summary-tuned": (chosen, {"kind": "summary"}),
    "summary-tuned-on-one-seed": (lambda: chosen(tuning={"on": "validation", "share": 0.1, "seeds": [100],
                                                         "own_seeds": True, "budget": 9}), {"kind": "summary"}),
    "summary-document": (lambda: full(document=DOCUMENT), {"kind": "summary"}),
    "summary-document-cases": (lambda: full(document=DOCUMENT), {"kind": "summary", "rows": "cases"}),
    "summary-without-document": (lambda: full(document=DOCUMENT), {"kind": "summary", "document": False}),
    "summary-caveats": (lambda: full(caveats=["A tenth of the rounds."], last=2), {"kind": "summary"}),
    "differences": (full, {"kind": "differences"}),
    "differences-baseline": (full, {"kind": "differences", "baseline": "fedprox", "digits": 1}),
    "differences-losses": (losses, {"kind": "differences"}),
    "differences-few-seeds": (lambda: results_of({"fedavg": AVG[:4], "far": [0.9, 0.93, 0.91, 0.92]}),
                              {"kind": "differences"}),
    "choices": (chosen, {"kind": "choices"}),
    "choices-untuned": (lambda: chosen(tuning={"on": "validation", "share": 0.1, "seeds": [100, 101], "own_seeds": True,
                                               "budget": 18, "untuned": ["fedavg"]}), {"kind": "choices"}),
    "budgets": (lambda: results_of(CURVES), {"kind": "budgets", "rounds": [2, 4, 9], "batches": [25], "bytes": [3e6]}),
    "budgets-plain": (lambda: results_of({**CURVES, "fedadam": [[0.1, 0.2, 0.3, 0.4], "out of memory"]}),
                      {"kind": "budgets", "rounds": [1], "spread": "none"}),
    "targets": (lambda: results_of(CURVES, targets=[0.4, 0.7]),
                {"kind": "targets", "measures": ["rounds", "batches", "bytes"]}),
    "targets-row": (lambda: results_of(CURVES), {"kind": "targets", "targets": [0.4], "multipliers": "row"}),
    "targets-case": (lambda: results_of({0.1: CURVES, 1.0: CURVES}),
                     {"kind": "targets", "targets": [0.4], "multipliers": "case"}),
    "targets-baseline": (lambda: results_of(CURVES, targets=[0.5, 0.8]),
                         {"kind": "targets", "measures": ["rounds"], "multipliers": "baseline"}),
    "targets-relative": (lambda: results_of(CURVES),
                         {"kind": "targets", "targets": [0.5, 0.8], "relative": True, "to": "centralized",
                          "measures": ["rounds"], "multipliers": "none"}),
    "targets-losses": (losses, {"kind": "targets"}),
    "relative": (full, {"kind": "relative"}),
    "relative-cases": (lambda: full(document=DOCUMENT), {"kind": "relative", "to": "centralized", "rows": "cases"}),
    "datasets": (of_data, {"kind": "datasets"}),
    "efficiency": (of_data, {"kind": "efficiency", "memory": True, "gbit": 1.0}),
    "efficiency-of-models": (of_data, {"kind": "efficiency", "runs": False, "shape": [3, 8, 8], "classes": 4}),
}  # fmt: skip

# The figures of each kind, likewise.
FIGURES: dict[str, tuple[Any, dict[str, Any]]] = {
    "setting": (by_alpha, {"kind": "setting", "x": "alpha"}),
    "setting-relative": (lambda: by_alpha(centralized=True),
                         {"kind": "setting", "x": "alpha", "relative": True, "band": "range", "reverse": True}),
    "setting-centralized": (lambda: by_alpha(centralized=True),
                            {"kind": "setting", "x": "alpha", "band": "deviation", "y": [0.0, 1.0], "chance": 0.1}),
    "setting-categories": (lambda: by_alpha(document=DOCUMENT),
                           {"kind": "setting", "x": "alpha", "scale": "category", "title": "By alpha"}),
    "setting-bars": (by_alpha, {"kind": "setting", "x": "alpha", "scale": "category", "bars": True}),
    "setting-linear": (by_alpha, {"kind": "setting", "x": "alpha", "scale": "linear", "metric": "test_loss",
                                  "methods": ["fedavg"], "where": {"alpha": [0.1, 1.0]}}),
    "setting-tuned": (chosen, {"kind": "setting", "x": "effective_lr", "lines": ["method", "momentum"],
                               "panels": "alpha", "runs": "tune", "columns": 1}),
    "setting-emd": (of_data, {"kind": "setting", "x": "emd", "above": "emd"}),
    "setting-document": (lambda: by_alpha(document=DOCUMENT, caveats=["A tenth of the rounds."]),
                         {"kind": "setting", "x": "alpha"}),
    "setting-failures": (full, {"kind": "setting", "x": "alpha", "document": False}),
    "curves": (by_alpha, {"kind": "curves"}),
    "curves-batches": (lambda: by_alpha(centralized=True), {"kind": "curves", "x": "batches", "where": {"alpha": 0.1}}),
    "curves-bytes": (by_alpha, {"kind": "curves", "x": "bytes", "where": {"alpha": 0.1}, "band": "none"}),
    "curves-client": (by_alpha, {"kind": "curves", "x": "bytes_client", "where": {"alpha": 1.0}, "band": "range"}),
    "curves-examples": (by_alpha, {"kind": "curves", "x": "examples", "where": {"alpha": 1.0}, "y": [0.2, 0.9],
                                   "until": 3e5, "chance": 0.15}),
    "curves-loss": (by_alpha, {"kind": "curves", "metric": "test_loss", "lines": "alpha", "panels": "method",
                               "methods": ["fedavg"], "columns": 2, "runs": "final"}),
    "curves-failures": (lambda: results_of({**CURVES, "fedadam": [[0.1, 0.2, 0.3, 0.4], "out of memory"]}),
                        {"kind": "curves"}),
    "heat": (chosen, {"kind": "heat", "x": "effective_lr", "y": "alpha", "panels": "method", "columns": 2}),
    "heat-relative": (lambda: by_alpha(centralized=True),
                      {"kind": "heat", "x": "alpha", "y": "method", "relative": True, "runs": "final"}),
    "heat-loss": (chosen, {"kind": "heat", "x": "effective_lr", "y": "momentum", "metric": "validation_loss",
                           "where": {"alpha": 0.1}, "methods": ["fedavgm"]}),
    "effective-lr": (chosen, {"kind": "effective-lr"}),
    "effective-lr-some": (chosen, {"kind": "effective-lr", "lines": "momentum", "panels": "alpha", "chance": 0.2,
                                   "methods": ["fedavgm"], "where": {"alpha": 0.1}, "y": [0.0, 1.0], "columns": 1,
                                   "metric": "validation_loss", "runs": "tune"}),
    "populations": (of_data, {"kind": "populations"}),
    "populations-matrix": (of_data, {"kind": "populations", "style": "matrix", "clients": 2, "columns": 1}),
    "populations-classes": (of_data, {"kind": "populations", "style": "classes", "where": {ALPHA: 0.1},
                                      "dataset": "four"}),
    "distributions": (of_data, {"kind": "distributions", "counts": ["classes", "examples", "class", "test"]}),
    "distributions-linear": (of_data, {"kind": "distributions", "log": "none", "where": {ALPHA: 0.1},
                                       "dataset": ["four"]}),
    **{f"analysis-{name}": (of_data, {"kind": "analysis", "analysis": name}) for name in ROWS},
    "analysis-mean": (of_data, {"kind": "analysis", "analysis": "drift", "over": "mean", "number": 2, "columns": 1,
                                "where": {"alpha": 0.1}, "methods": ["small"]}),
}  # fmt: skip


def table_text(table: StudyTable) -> str:
    """A table in all its forms: on pages, and as Markdown, LaTeX and CSV."""
    html = page_text(table.to_html()).text()
    return "\n".join([html, table.to_markdown(), table.to_latex(), table.to_csv()])


def frames() -> str:
    """The rows of runs and of cells as CSV, the types of their pandas columns, and the table of cells."""
    made = [full(document=DOCUMENT), chosen(), losses(), over_clients()]
    parts = []
    for study in made:
        for rows in (run_rows(study), cell_rows(study)):
            types = " ".join(f"{name}:{kind}" for name, kind in to_pandas(rows).dtypes.items())
            few = [row for k, row in enumerate(rows) if k < 12 or k % 7 == 0]
            parts += [
                to_csv([{key: _short(value) for key, value in row.items()} for row in few]),
                types + "\n",
            ]
        parts.append(table_text(cells_table(study)))
    return "\n".join(parts)


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def of_a_study() -> str:
    """The tables of a whole study: those of its file, the claims of its document and the pre-trainings."""
    study = full(document=DOCUMENT, tables=[{"kind": "summary"}, {"kind": "summary"}])
    pretrained = [Row.planned(name, name, name, {}, {}, "pretrain", 0) for name in ("rotations", "moco")]
    info = replace(study.info, pretrained=pretrained, pretrained_labels={"rotations": "Rotations"})
    done = {"rotations": replace(line("rotations", 0.6, 0), version="1.0")}
    made = study_tables(Results(info, {**study.lines, **done}))
    return _joined({table.name: table_text(table) for table in made})


def page(study: Results) -> str:
    """The words of a study's page and the data of its figures."""
    with TemporaryDirectory() as place, chdir(place):
        folder = Path("study")
        folder.mkdir()
        write_info(folder, study.info)
        write_lines(folder / LINES, study.lines.values())
        if study.data:
            write_data(folder, study.data)
        return page_snapshot(write_study_page(folder))


def page_of_a_tuned_study() -> str:
    """The page of a study with every card."""
    more: dict[str, Any] = {
        "document": {**DOCUMENT, "values": DOCUMENT["values"][:2], "claims": []}, "caveats": ["A tenth of the rounds."],
        "command": "fedlens sweep study.toml", "smaller": [["rounds", "10,000", "200 rounds"]], "scale": "minutes",
        "notes": ["A note."], "last": 2, "figures": [{"kind": "effective-lr"}],
        "tables": [{"kind": "summary"}],
    }  # fmt: skip
    study = chosen(**more)
    lines = dict(study.lines)
    final = [entry.digest for entry in study.info.entries if entry.role == "final"]
    lines[final[0]] = replace(lines[final[0]], status="failed", reason="out of memory", rounds=40)
    lines[final[1]] = replace(lines[final[1]], facts={**lines[final[1]].facts, "warnings": 2}, device="cuda")
    lines[final[2]] = replace(lines[final[2]], device="cpu")
    del lines[final[3]]
    before = Row.planned("pre", "pre", "rotations", {}, {}, "pretrain", 0)
    info = replace(study.info, pretrained=[before], pretrained_labels={"rotations": "Rotations"})
    return page(replace(study, info=info, lines={**lines, "pre": line("pre", 0.6, 0)}))


def tables(kind: str) -> str:
    """The tables of a kind in all their forms."""
    return _joined(
        {
            name: table_text(study_table(made(), spec))
            for name, (made, spec) in TABLES.items()
            if spec["kind"] == kind
        }
    )


def figures(kind: str) -> str:
    """The data of the figures of a kind."""
    made = {
        name: study_figure(make(), spec) for name, (make, spec) in FIGURES.items() if spec["kind"] == kind
    }
    return as_text({name: of_study(figure) for name, figure in made.items()})


def _joined(texts: Mapping[str, str]) -> str:
    return "\n".join(f"==== {name} ====\n{text}" for name, text in texts.items())


def _of_data_alone() -> str:
    study = of_data()
    info = replace(study.info, figures=[{"kind": "populations"}], tables=[{"kind": "datasets"}])
    return page(replace(study, info=info))


SNAPSHOTS: Snapshots = {
    **{
        f"tables/{kind}.txt": partial(tables, kind)
        for kind in dict.fromkeys(s["kind"] for _, s in TABLES.values())
    },
    "tables/of-a-study.txt": of_a_study,
    "tables/frames.txt": frames,
    **{
        f"figures/study-{kind}.json": partial(figures, kind)
        for kind in dict.fromkeys(s["kind"] for _, s in FIGURES.values())
    },
    "pages/study-tuned.txt": page_of_a_tuned_study,
    "pages/study-of-data.txt": _of_data_alone,
    "pages/study-not-begun.txt": lambda: page(Results(by_alpha().info, {})),
}
