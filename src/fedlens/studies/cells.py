"""The cells of a study, its pre-trainings, and the settings of their runs, independent of results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fedlens.base.errors import ConfigError, nearest
from fedlens.results.rows import Role
from fedlens.studies.expansion import Case, Method, run_key
from fedlens.studies.planned import PREFIX, PlannedRun, Point
from fedlens.studies.run_settings import PlacedSetting, RunSettings, SettingsReader, with_seed
from fedlens.studies.study_file import StudySource
from fedlens.studies.study_settings import Base, StudySettings, TuneSettings


@dataclass(frozen=True)
class StudyCells:
    """Methods and cases, and the run of any of their points.

    Attributes:
        seeds: of the final runs.
        tuning_seeds: by method; empty without tuning.
    """

    settings: StudySettings
    methods: Sequence[Method]
    cases: Sequence[Case]
    reader: SettingsReader
    base: tuple[Base, str]
    common: Sequence[PlacedSetting]  # over the base, for all runs
    tuning_seeds: Mapping[str, Sequence[int]] = field(default_factory=dict)
    _made: dict[tuple[str, str, str, Role], RunSettings] = field(default_factory=dict, repr=False)
    _runs: dict[tuple[str, str, str, Role, int], PlannedRun] = field(default_factory=dict, repr=False)

    @property
    def seeds(self) -> Sequence[int]:
        """The seeds of the final runs."""
        return self.settings.seeds

    @property
    def tune(self) -> TuneSettings | None:
        """How points are chosen; None without tuning."""
        return self.settings.tune

    def method(self, name: str) -> Method:
        """The method of this name."""
        return next(method for method in self.methods if method.name == name)

    def points(self, method: Method) -> Sequence[Point]:
        """The points that tuning chooses among; one empty point without."""
        return method.tuned.points

    @property
    def pairs(self) -> list[tuple[Method, Case]]:
        """Each method in each case, case by case."""
        return [(method, case) for case in self.cases for method in self.methods]

    @property
    def finals(self) -> Iterator[RunSettings]:
        """The distinct settings of the final runs of all points. Raises `ConfigError` as `made` does."""
        seen: set[int] = set()
        for method, case in self.pairs:
            for point in self.points(method):
                made = self.made(method, case, point, "final")
                if id(made) not in seen:
                    seen.add(id(made))
                    yield made

    def made(self, method: Method, case: Case, point: Point, role: Role) -> RunSettings:
        """The settings of the runs of a point, without a seed. Raises `ConfigError` if one is wrong."""
        key = (method.name, _text(case.values), _text(point), role)
        if key not in self._made:
            self._made[key] = self._make(method, case, point, role)
        return self._made[key]

    def given(self, method: Method, case: Case) -> Mapping[str, Any]:
        """The settings that the runs of a method in a case share, as nested tables, without defaults and unchecked."""
        return self.reader.given(*(method.base or case.base or self.base), self._layers(method, case, {}))

    def _layers(self, method: Method, case: Case, point: Point) -> list[PlacedSetting]:
        tuned = [
            PlacedSetting(key, value, method.tuned.places.get(key, "[tune]")) for key, value in point.items()
        ]
        layers = [*self.common, *case.settings, *method.settings, *case.grid, *tuned]
        return [self._of_case(one, case) for one in layers]

    def _make(self, method: Method, case: Case, point: Point, role: Role) -> RunSettings:
        base, place = method.base or case.base or self.base
        layers = self._layers(method, case, point)
        made = self.reader.make(base, place, layers)
        share = self._share(made, role)
        if share is None:
            return made
        return self.reader.make(
            base, place, [*layers, PlacedSetting("data.validation", share, "[tune] share")]
        )

    def _of_case(self, setting: PlacedSetting, case: Case) -> PlacedSetting:
        """The setting; weights of a pre-training that has others in this case become those."""
        if setting.key != "model.weights" or not isinstance(setting.value, str):
            return setting
        table = (self.settings.pretrained or {}).get(setting.value.removeprefix(PREFIX))
        named = table is not None and setting.value.startswith(PREFIX)
        other = table.cases.get(str(case.values.get("case"))) if named and table is not None else None
        return setting if other is None else replace(setting, value=other)

    def _share(self, made: RunSettings, role: Role) -> float | None:
        """The share of validation data that a role needs; None for the share of the base."""
        if self.tune is None:
            return None
        given = made.config.data.validation
        if role == "tune" or not self.tune.refit:
            return None if given > 0 else self.tune.share
        # Clients are measured on their held-out examples, so these runs keep them.
        measured = made.config.data.validation_from == "client"
        return 0.0 if given > 0 and not measured else None

    def run(self, method: Method, case: Case, point: Point, role: Role, seed: int) -> PlannedRun:
        """A run of a point. Raises `ConfigError` if its settings are wrong."""
        place = (method.name, _text(case.values), _text(point), role, seed)
        if place not in self._runs:
            key = run_key(method.name, case.values, point, role, seed)
            made = self.made(method, case, point, role)
            settings = with_seed(made, seed, key)
            run = PlannedRun(
                method.name, dict(case.values), dict(point), role, seed, settings, key, made.files, made.start
            )
            self._runs[place] = run
        return self._runs[place]

    def final_runs(self, method: Method, case: Case, point: Point) -> list[PlannedRun]:
        """The runs that give the results of a cell at a chosen point, one a seed."""
        return [self.run(method, case, point, "final", seed) for seed in self.seeds]


def _text(values: Mapping[str, Any]) -> str:
    return repr(list(values.items()))


def pretraining_runs(source: StudySource, reader: SettingsReader) -> dict[str, PlannedRun]:
    """The run of each table `[pretrained.NAME]`, by name.

    Raises `ConfigError` if a setting or the name of a case is wrong, or if a pre-training names another one.
    """
    runs: dict[str, PlannedRun] = {}
    for name, table in (source.settings.pretrained or {}).items():
        keys = ("pretrained", name)
        unknown = [case for case in table.cases if case not in (source.settings.cases or {})]
        if unknown:
            raise ConfigError(
                f"the study has no case '{unknown[0]}'",
                where=source.places.locate(*keys, "cases", unknown[0]),
                hint=nearest(unknown[0], source.settings.cases or {}),
            )
        settings = [
            PlacedSetting(key, value, source.places.locate(*keys, "set", key))
            for key, value in table.set.items()
        ]
        made = reader.make(table.base, source.places.locate(*keys, "base"), settings)
        key = run_key(name, {}, {}, "pretrain", table.seed)
        values = with_seed(made, table.seed, key)
        runs[name] = PlannedRun(name, {}, {}, "pretrain", table.seed, values, key, made.files)
    return runs
