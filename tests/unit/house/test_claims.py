"""Each claim of a document that is an expression can be shown, contradicted and left open by some results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pytest
from scipy.optimize import linprog

from fedlens.results.claims import (
    CellTerm,
    ClaimComparison,
    check_claim,
    claim_verdicts,
    parse_claim,
    selected_cells,
)
from fedlens.results.rows import Results, Row, StudyInfo
from fedlens.results.words import shown_in_percent
from fedlens.studies.measured_metrics import refuse_unknown_metric
from fedlens.studies.reproductions import FOLDER, reproduction, stated_document
from fedlens.studies.study_plan import StudyPlan, dimension_labels
from tests.contract.contract_kit import nightly_but

SEEDS = (0, 1, 2)
BUDGETS = {"rounds": "round", "batches": "batches", "bytes": "bytes"}
Variable = tuple[str, str, str]  # method, case and metric
DOCUMENTS = [
    path for path in sorted(FOLDER.rglob("*.document.toml")) if "\nholds = " in path.read_text("utf-8")
]
NAMES = [path.relative_to(FOLDER).as_posix().removesuffix(".document.toml") for path in DOCUMENTS]


@dataclass(frozen=True)
class Claim:
    """A claim on the cells of a study, whose values are the variables of linear inequalities."""

    info: StudyInfo
    table: Mapping[str, Any]

    @property
    def counts(self) -> bool:
        """Whether its numbers are rounds."""
        return any("target" in kind for kind in self.table.get("at", {}))

    @property
    def metric(self) -> str:
        """The metric of cells that name none."""
        return self.table.get("metric") or self.info.metric or "test_accuracy"

    def variable(self, term: CellTerm, cell: tuple[str, Mapping[str, Any]]) -> Variable:
        return (cell[0], repr(dict(cell[1])), term.metric or self.metric)

    @cached_property
    def instances(self) -> list[tuple[ClaimComparison, list[Variable]]]:
        """Each comparison in each case, with the variables of its cells."""
        return [
            (one, [self.variable(term, cell) for term, cell in zip(one.terms, cells, strict=True)])
            for one in parse_claim(self.table["holds"])
            for cells in selected_cells(self.info, one)
        ]

    @cached_property
    def variables(self) -> list[Variable]:
        return list(dict.fromkeys(name for _, names in self.instances for name in names))

    def row(self, one: ClaimComparison, names: Sequence[Variable]) -> tuple[list[float], float]:
        """Coefficients and bound, turned so that the claim is `coefficients * values > bound`."""
        row = [0.0] * len(self.variables)
        for term, name in zip(one.terms, names, strict=True):
            row[self.variables.index(name)] += term.factor
        turn = 1.0 if one.sign.startswith(">") else -1.0
        return [turn * each for each in row], turn * one.bound

    def values(self, rows: Sequence[tuple[list[float], float]]) -> dict[Variable, float]:
        """Possible values of the variables that satisfy all rows by a margin, the largest one."""
        most = 9.0 * max(1.0, *(abs(bound) for _, bound in rows))
        highest = [1.0 if shown_in_percent(name[2]) and not self.counts else most for name in self.variables]
        solved = linprog(
            [*[0.0] * len(self.variables), -1.0],
            A_ub=[[*(-each for each in row), 1.0] for row, _ in rows],
            b_ub=[-bound for _, bound in rows],
            bounds=[*((0.0, each) for each in highest), (None, 0.2)],
        )
        margin = solved.x[-1] if solved.success else -1.0
        assert margin > 1e-4, f"no possible values satisfy it: {self.table['holds']!r}"
        return dict(zip(self.variables, solved.x, strict=False))

    def answer(self, values: Mapping[Variable, float], noise: Mapping[Variable, Sequence[float]]) -> str:
        """The verdict on results with these values, plus the noise of each seed."""
        entries, lines = [], []
        by_cell: dict[tuple[str, str], dict[str, Variable]] = {}
        for name in self.variables:
            by_cell.setdefault(name[:2], {})[name[2]] = name
        if "relative_target" in self.table.get("at", {}):  # a share of the centralized value
            by_cell |= {("centralized", case): {} for _, case in by_cell}
        cases = {repr(dict(case)): case for case in self.info.cases}
        for (method, case), metrics in by_cell.items():
            for k, seed in enumerate(SEEDS):
                digest = f"{method}/{case}/{seed}"
                entries.append(Row.planned(digest, digest, method, cases[case], {}, "final", seed))
                columns = {
                    metric: values[name] + (noise[name][k] if name in noise else 0.0)
                    for metric, name in metrics.items()
                }
                at = self.table.get("at", {})
                lines.append(made_line(digest, columns, at, method == "centralized", self.metric))
        info = StudyInfo(**{**vars(self.info), "entries": entries, "document": {"claims": [self.table]}})
        [verdict] = claim_verdicts(Results(info, {line.digest: line for line in lines}))
        return verdict.answer


def made_line(
    digest: str, values: Mapping[str, float], at: Mapping[str, float], central: bool, main: str
) -> Row:
    """A run with these values of metrics; of a claim about rounds to a target, with these rounds."""
    curve: dict[str, list[float | None]] = {metric: [value] for metric, value in values.items()}
    curve |= {column: [at.get(kind, 1.0)] for kind, column in BUDGETS.items()}
    target = at.get("target", at.get("relative_target"))
    if "changes" in at:
        up_and_down = range(int(at["changes"]) + 1)
        curve = {metric: [value * (k % 2) for k in up_and_down] for metric, value in values.items()}
    if target is not None:
        curve = {"round": [values.get(main, 1.0)], main: [1.0 if central else target]}
    return Row(digest, digest, "finished", None, 1, main, curve)


@pytest.mark.parametrize("name", nightly_but(NAMES[::5], NAMES))
def test_each_claim_can_have_each_answer(name: str) -> None:
    plan = StudyPlan.load(reproduction(name), "paper", check=False)
    document = stated_document(plan.source)
    study, cells = plan.source.settings, plan.cells
    info = StudyInfo(
        name, "", SEEDS, study.metric, 1, [], "", {method.name: method.label for method in cells.methods},
        dimension_labels(study, cells.cases), [dict(case.values) for case in cells.cases],
    )  # fmt: skip
    configs = [
        cells.made(m, c, cells.points(m)[0], "final").config for m in cells.methods for c in cells.cases[:1]
    ]
    for table in document["claims"]:
        if "holds" not in table:
            continue
        check_claim(table["holds"], info, f"{name}.document.toml")
        claim = Claim(info, table)
        for metric in {variable[2] for variable in claim.variables}:
            refuse_unknown_metric(configs, metric, f"{name}.document.toml")
        rows = [claim.row(*instance) for instance in claim.instances]
        shown = claim.values(rows)
        assert claim.answer(shown, {}) == "shows", table["holds"]
        first = {id(one): k for k, (one, _) in reversed([*enumerate(claim.instances)])}
        for k in first.values():  # each part of the expression can be wrong
            row, bound = rows[k]
            wrong = claim.values([([-each for each in row], -bound)])
            assert claim.answer(wrong, {}) == "does not show", table["holds"]
        noisy = claim.instances[0][1][0]
        size = 100.0 * (1.0 + max(abs(np.array([*shown.values(), *(bound for _, bound in rows)]))))
        assert claim.answer(shown, {noisy: (size, -size, 0.0)}) == "cannot tell", table["holds"]
