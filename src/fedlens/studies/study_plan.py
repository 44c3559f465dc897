"""The plan of a study: all its runs, and the runs that are due now."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fedlens.base.errors import ConfigError, nearest
from fedlens.base.format import many, with_own_parts
from fedlens.results.figures.study_figures import check_figures
from fedlens.results.rows import Row, StudyInfo, needs_runs
from fedlens.results.tables import check_planned_tables
from fedlens.settings.config import plain
from fedlens.settings.keys import changing, diff
from fedlens.studies.cells import StudyCells, pretraining_runs
from fedlens.studies.expansion import Case, Expansion, Method, short_key, shown_settings, shown_value
from fedlens.studies.measured_metrics import (
    asked_metrics,
    refuse_analyses,
    refuse_unknown_metric,
    refuse_unmeasured,
)
from fedlens.studies.planned import DueRun, PlannedRun, after_pretraining
from fedlens.studies.reproductions import check_claims, paper_of, stated_document, study_command
from fedlens.studies.run_settings import PlacedSetting, RunSettings, SettingsReader
from fedlens.studies.scale_differences import ChangedSetting, caveats, scale_differences
from fedlens.studies.study_file import StudySource, read_study
from fedlens.studies.study_settings import StudySettings
from fedlens.studies.tuning import (
    chosen_point,
    effort,
    number_of_points,
    number_of_tuning_runs,
    refuse_rungs,
    tuning_due,
    tuning_runs,
    tuning_seeds,
)

Values = Mapping[str, Any]


@dataclass(frozen=True)
class StudyPlan:
    """A study with checked settings and runs. The plan and the results so far determine the due runs.

    >>> study = {"base": "digits", "set": {"rounds": 2}, "seeds": [0, 1], "grid": {"local.lr": [0.1, 0.3]}}
    >>> plan = StudyPlan.load(study)
    >>> [run.key for run in plan.runs]
    ['fedavg-lr0.1-seed0', 'fedavg-lr0.1-seed1', 'fedavg-lr0.3-seed0', 'fedavg-lr0.3-seed1']
    >>> len(plan.due({})), plan.info({}).cases
    (4, [{'local.lr': 0.1}, {'local.lr': 0.3}])
    """

    source: StudySource
    cells: StudyCells
    command: str

    @classmethod
    def load(cls, study: str | Path | Values, scale: str | None = None, check: bool = True) -> StudyPlan:
        """The plan of a study file, or of the same settings in Python, at a scale.

        The settings of every run are checked; with `check = False` only as far as counting the runs needs. Raises
        `ConfigError` with file, line and key if one is wrong.
        """
        return cls.of(read_study(study, scale), check)

    @classmethod
    def of(cls, source: StudySource, check: bool = True) -> StudyPlan:
        """The plan of a study whose own settings are checked. Raises `ConfigError` if a run has a wrong one."""
        cells = _cells(source, check)
        if check:
            _refuse_other_data(cells, source)
            _refuse_equal(cells, source)
            refuse_rungs(cells, source.places)
            _refuse_evaluations(cells, source)
            refuse_analyses(cells, source)
        plan = cls(source, cells, study_command(source.places.path, source.places.scale))
        plan.refuse_baseline()
        if check:
            _refuse_outputs(plan)
        return plan

    @property
    def name(self) -> str:
        """The name of the study."""
        return self.source.settings.name

    @property
    def scale(self) -> str:
        """The scale; "" without scales."""
        return self.source.places.scale

    @property
    def baseline(self) -> str:
        """The method that the others are compared with."""
        return self.source.settings.baseline or self.cells.methods[0].name

    def refuse_baseline(self) -> None:
        """Raises `ConfigError` if the baseline is not a method of the study."""
        names = [method.name for method in self.cells.methods]
        if self.baseline not in names:
            raise ConfigError(
                f"the baseline '{self.baseline}' is not a method of the study",
                where=self.source.places.locate("baseline"),
                hint=nearest(self.baseline, names),
            )

    @cached_property
    def runs(self) -> Sequence[PlannedRun]:
        """The runs that do not depend on results: the tuning runs, or all runs without tuning."""
        if not self.trains:
            return []
        return self.final_runs({}) if self.cells.tune is None else tuning_runs(self.cells)

    @cached_property
    def number_of_runs(self) -> Mapping[str, int]:
        """The number of tuning runs, of final runs, and of pre-trainings if it has any, by role."""
        if not self.trains:
            return {"tune": 0, "final": 0}
        tuning = [number_of_tuning_runs(self.cells, method) for method in self.cells.methods]
        # Without refitting, only the methods that have nothing to tune have further runs.
        finals = sum(len(self.cells.seeds) for number in tuning if self.refits or not number)
        numbers = {"tune": sum(tuning) * len(self.cells.cases), "final": finals * len(self.cells.cases)}
        return numbers | ({"pretrain": len(self.pretraining)} if self.pretraining else {})

    @cached_property
    def pretraining(self) -> Sequence[PlannedRun]:
        """The pre-trainings that runs start from, in the order of the cells."""
        found = {made.start.digest: made.start for made in self.cells.finals if made.start is not None}
        return list(found.values()) if self.trains else []

    @property
    def refits(self) -> bool:
        """Whether the final runs differ from the tuning runs; true without tuning."""
        tune = self.cells.tune
        return tune is None or tune.refit or tune.seeds is not None

    def due(self, lines: Mapping[str, Row]) -> list[DueRun]:
        """The runs that must be carried out now, each once; empty when the study is complete.

        Args:
            lines: the results so far, by digest.
        """
        if not self.trains:
            return []
        tuning = tuning_due(self.cells, lines) if self.cells.tune is not None else []
        finals = [DueRun(run) for run in self.final_runs(lines) if _to_do(run, lines)]
        return after_pretraining([*tuning, *finals], lines)

    @property
    def trains(self) -> bool:
        """Whether the study has runs: false if its figures and tables show only data and models."""
        return needs_runs(self.source.settings.figures, self.source.settings.tables)

    def final_runs(self, lines: Mapping[str, Row]) -> list[PlannedRun]:
        """The final runs of the cells whose point is chosen."""
        runs: list[PlannedRun] = []
        for method, case in self.cells.pairs if self.trains else ():
            point = chosen_point(self.cells, method, case, lines)
            if point is not None:
                runs += self.cells.final_runs(method, case, point)
        return runs

    def refuse_unmeasured(self, line: Row) -> None:
        """Raises `ConfigError` if a run that has ended shows that no run measures the metric of the study."""
        settings = self.source.settings
        if any(run.digest == line.digest for run in self.pretraining):
            return
        refuse_unmeasured(line, settings.metric, self.source.places.locate("metric"))

    def _share(self, lines: Mapping[str, Row]) -> float | None:
        """The share of the training data that tuning runs hold out; None if it differs from run to run."""
        assert self.cells.tune is not None
        shares = {run.settings["data"]["validation"] for run in self.runs}
        return shares.pop() if len(shares) == 1 else None if shares else self.cells.tune.share

    def info(self, lines: Mapping[str, Row]) -> StudyInfo:
        """The content of study.json at these results: what is compared, and the runs so far."""
        study, tune = self.source.settings, self.cells.tune
        tuning: dict[str, Any] = {}
        if tune is not None:
            seeds = {name: list(seeds) for name, seeds in self.cells.tuning_seeds.items()}
            used = {seed for listed in seeds.values() for seed in listed}
            first = self.cells.methods[0]
            tuning = {
                "on": tune.on,
                "seeds": sorted(used),
                "seeds_by_method": seeds,
                "share": self._share(lines),
                "budget": number_of_points(first) * len(seeds[first.name]),
                "own_seeds": used.isdisjoint(study.seeds),
                "refit": tune.refit,
                "untuned": [m.name for m in self.cells.methods if not number_of_tuning_runs(self.cells, m)],
                "halving": study.stop.halving if study.stop is not None else None,
                "first": study.stop.first if study.stop is not None else None,
            }
        runs = [*self.runs, *self.final_runs(lines)] if tune is not None else self.runs
        return StudyInfo(
            name=study.name,
            title=study.title,
            seeds=list(study.seeds),
            metric=study.metric,
            last=study.last,
            targets=list(study.target),
            baseline=self.baseline,
            methods={method.name: method.label for method in self.cells.methods},
            dimensions=dimension_labels(study, self.cells.cases),
            cases=[dict(case.values) for case in self.cells.cases],
            grids={
                method.name: {key: list(values) for key, values in method.tuned.values.items()}
                for method in self.cells.methods
            }
            if tune is not None
            else {},
            tuning=tuning,
            figures=list(study.figures),
            tables=list(study.tables),
            scale=self.scale,
            smaller=[list(row) for row in self.differences],
            document=self._document,
            command=self.command,
            notes=[*study.notes, *effort(self.cells)],
            entries=[run.entry for run in runs],
            stop_diverged=study.stop is not None and study.stop.diverged,
            files={name: sha256 for run in runs for name, sha256 in run.files.items()},
            analyses=list(study.analyses),
            caveats=list(self.caveats),
            paper=asdict(paper) if (paper := paper_of(self.source.places.path)) else {},
            pretrained=[run.entry for run in self.pretraining],
            pretrained_labels={
                run.method: (study.pretrained or {})[run.method].label or run.method
                for run in self.pretraining
            },
        )

    @property
    def _document(self) -> dict[str, Any]:
        """The paper's numbers and claims, and the first that stands for each method and case of the paper."""
        document, cases = stated_document(self.source), self.source.settings.cases or {}
        stand_ins = {
            "methods": {one.own: one.name for one in reversed(self.cells.methods) if one.own != one.name},
            "cases": {one.stands_for: name for name, one in reversed(cases.items()) if one.stands_for},
        }
        return document | ({"stand_ins": stand_ins} if document and any(stand_ins.values()) else {})

    @cached_property
    def paper(self) -> StudyCells | None:
        """The cells of the scale "paper"; None at that scale without changes, and for a study without scales."""
        same = self.scale == "paper" and not self.source.places.changed
        return None if same or not self.scale else _cells(self.source.paper, False)

    @cached_property
    def differences(self) -> Sequence[ChangedSetting]:
        """What differs from the scale "paper"."""
        return [] if self.paper is None else scale_differences(self.cells, self.paper)

    @cached_property
    def caveats(self) -> Sequence[str]:
        """The sentences of every caption: what the runs do not show."""
        return [] if self.paper is None else caveats(self.cells, self.paper, self.scale, self.trains)

    def with_command(self, command: str) -> StudyPlan:
        """The same plan with the command that makes its results."""
        return replace(self, command=command)


def dimension_labels(study: StudySettings, cases: Sequence[Case]) -> dict[str, str]:
    """The label of each dimension of the cases, in order."""
    keys = list(dict.fromkeys(key for case in cases for key in case.values))
    return {key: study.labels.get(key, short_key(key, keys)) for key in keys}


def _of_paper(plan: StudyPlan, info: StudyInfo) -> StudyInfo:
    """The methods, dimensions and cases of the scale "paper", by whose names claims are written."""
    paper = plan.paper or plan.cells
    methods = {method.name: method.label for method in paper.methods}
    dimensions, cases = dimension_labels(paper.settings, paper.cases), [case.values for case in paper.cases]
    return replace(info, methods=methods, dimensions=dimensions, cases=cases, document={})


def _to_do(run: PlannedRun, lines: Mapping[str, Row]) -> bool:
    """Whether a run has rounds left: a failed run is not repeated, a stopped one continues."""
    line = lines.get(run.digest)
    return line is None or line.status == "stopped"


def _cells(source: StudySource, check: bool) -> StudyCells:
    study, places = source.settings, source.places
    threads = study.threads if "threads" in study.model_fields_set else None
    starts = pretraining_runs(source, SettingsReader(source.folder, places, threads, check))
    reader = SettingsReader(source.folder, places, threads, check, starts)
    base = (study.base, places.locate("base"))
    common = [PlacedSetting(key, value, places.locate("set", key)) for key, value in study.set.items()]
    default = label = "method"
    if study.methods is None:
        values = {"algorithm": "fedavg", **reader.base(*base).values}
        keys = ("algorithm", "client", "server", "aggregate")
        changed, *parts = [study.set.get(f"{key}.name", study.set.get(key, values.get(key))) for key in keys]
        name = changed.get("name") if isinstance(changed, Mapping) else changed
        default = name if isinstance(name, str) else default
        label = with_own_parts(default, *parts)
    expansion = Expansion(study, places, default, label)
    seeds = tuning_seeds(study, expansion.methods, places)
    return StudyCells(study, expansion.methods, expansion.cases, reader, base, common, seeds)


def _refuse_other_data(cells: StudyCells, source: StudySource) -> None:
    """Raises `ConfigError` if the methods of a case have different data."""
    if not source.settings.same_data:
        return
    for case in cells.cases:
        first: tuple[Method, dict[str, Any]] | None = None
        for method in cells.methods:
            for point in cells.points(method):
                seen = _data_of(cells.made(method, case, point, "final"))
                if first is None:
                    first = (method, seen)
                for key, *both in diff(first[1], seen):
                    one, other = map(shown_value, both)
                    setting = next((s for s in method.settings if _part_of(key, s.key)), None)
                    place = method.base[1] if method.base else source.places.locate("methods", method.table)
                    methods = f"the methods '{first[0].name}' and '{method.name}'"
                    which = f"the points of '{method.name}'" if first[0] is method else methods
                    raise ConfigError(
                        f"{which} differ in the data they see: {key} is {one} and {other}",
                        where=setting.place if setting else place,
                        hint="set it for both, or allow it with same_data = false",
                    )


def _refuse_evaluations(cells: StudyCells, source: StudySource) -> None:
    """Raises `ConfigError` for a metric that no run has, and for `last` above the number of evaluations."""
    last, places = source.settings.last, source.places
    if not needs_runs(source.settings.figures, source.settings.tables):
        return
    configs = [made.config for made in cells.finals]
    refuse_unknown_metric(configs, source.settings.metric, places.locate("metric"))
    for config in configs:
        every = config.evaluation.every
        # Of a trained model: each `every` rounds, and after the last.
        evaluations = -(-config.rounds // every)
        if last > max(1, evaluations):
            more = (
                f", or evaluation.every to at most {config.rounds // last}" if last <= config.rounds else ""
            )
            raise ConfigError(
                f"'last' is {last}, but a run of {many(config.rounds, 'round')} has {many(evaluations, 'evaluation')} "
                f"(evaluation.every = {every})",
                where=places.locate("last"),
                hint=f"set last to at most {evaluations}{more}",
            )


def _part_of(key: str, table: str) -> bool:
    return key == table or key.startswith(f"{table}.") or table.startswith(f"{key}.")


def _data_of(made: RunSettings) -> dict[str, Any]:
    tables = plain(made.config)
    return changing({key: tables[key] for key in ("data", "seeds")}, "bits")


def _refuse_outputs(plan: StudyPlan) -> None:
    """Raises `ConfigError` for `[[tables]]` and `[[figures]]` that no results could fill, with file and line."""
    info, places = plan.info({}), plan.source.places
    if info.document.get("claims"):
        check_claims(plan.source, _of_paper(plan, info))
    try:
        check_planned_tables(info)
        check_figures(info)
        for metric, key in asked_metrics(info.figures, info.tables):
            refuse_unknown_metric((made.config for made in plan.cells.finals), metric, key)
    except ConfigError as error:
        match = re.match(r"(tables|figures)(?:\[(\d+)\])?\.?(.*)", error.where or "")
        if match is None:
            raise
        kind, number, key = match.groups()
        where = places.locate_listed(kind, None if number is None else int(number), key)
        raise ConfigError(error.what, where=where, hint=error.hint) from None


def _refuse_equal(cells: StudyCells, source: StudySource) -> None:
    """Raises `ConfigError` if two cells, or two points of one, have the same settings. Checks every setting."""
    seen: dict[str, tuple[Method, Case, Mapping[str, Any]]] = {}
    for method, case in cells.pairs:
        for point in cells.points(method):
            text = cells.made(method, case, point, "final").text
            if cells.tune is not None:
                cells.made(method, case, point, "tune")
            if text in seen:
                raise _equal(seen[text], (method, case, point), source)
            seen[text] = (method, case, point)


def _equal(
    one: tuple[Method, Case, Mapping[str, Any]],
    other: tuple[Method, Case, Mapping[str, Any]],
    source: StudySource,
) -> ConfigError:
    (method, case, point), (method2, case2, point2) = one, other
    places, hint = source.places, "set what distinguishes them, or remove one"
    if method is not method2:
        what = f"the methods '{method.name}' and '{method2.name}'"
        where = places.locate("methods", method2.table)
    elif case is not case2:
        key = next(key for key in case2.values if case.values.get(key) != case2.values[key])
        what = (
            f"the cases {shown_settings(case.values)} and {shown_settings(case2.values)} of '{method.name}'"
        )
        where = places.locate("cases", str(case2.values["case"])) if key == "case" else case2.grid[0].place
    else:
        what = f"the points {shown_settings(point)} and {shown_settings(point2)} of '{method.name}'"
        where, hint = next(iter(method.tuned.places.values())), "remove one"
    return ConfigError(f"{what} have the same settings", where=where, hint=hint)
