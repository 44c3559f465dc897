"""The schema of a study file, and of the same settings in Python. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

_OF_RUNS = {"seed": "the list 'seeds' has the seeds of the runs", "name": "the study names its runs"}


class FrozenTable(BaseModel):
    """A table of a study file. Keys that it does not name are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _settings(value: Any) -> Any:
    for key, reason in _OF_RUNS.items():
        if isinstance(value, Mapping) and key in value:
            raise ValueError(f"the table must not set '{key}': {reason}")
    return value


def _some(value: Any) -> Any:
    if isinstance(value, Mapping) and not value:
        raise ValueError('the table must name a setting and its values, such as "local.lr" = [0.1, 0.3]')
    return _settings(value)


def _values(value: Any) -> Any:
    if isinstance(value, list | tuple):
        if not value:
            raise ValueError("must have at least one value")
        twice = [item for number, item in enumerate(value) if item in value[:number]]
        if twice:
            raise ValueError(f"must not have the value {twice[0]!r} twice")
    return value


def number(value: Any) -> Any:
    """Returns the value. Raises `ValueError` for booleans, which pydantic accepts as 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("must be a number")
    return value


Number = Annotated[int | float | None, BeforeValidator(number)]


class Range(FrozenTable):
    """The values that [random] draws of one setting: between `low` and `high`, or out of `choices`."""

    low: Number = Field(None, description="the smallest value")
    high: Number = Field(None, description="the largest value")
    log: bool = Field(False, strict=True, description="draw the logarithm uniformly")
    choices: tuple[Any, ...] | None = Field(None, min_length=1, description="the values, instead of a range")

    @model_validator(mode="after")
    def _whole(self) -> Range:
        if self.choices is not None:
            if self.low is not None or self.high is not None or self.log:
                raise ValueError("the table must have either choices, or low and high")
            return self
        if self.low is None or self.high is None:
            raise ValueError("the table must have low and high, or choices")
        if self.low >= self.high:
            raise ValueError(f"the table must have a low below high, not {self.low} and {self.high}")
        if self.log and self.low <= 0:
            raise ValueError(f"the table must have a low above 0 with log = true, not {self.low}")
        return self


class RandomDraws(FrozenTable):
    """The `[random]` table: `number` points, each with a value of every range."""

    model_config = ConfigDict(extra="allow", frozen=True)
    __pydantic_extra__: dict[str, Range]

    number: int = Field(ge=1, le=100_000, description="how many points are drawn")
    seed: int = Field(0, ge=0, lt=2**63, description="of the draws")

    @property
    def ranges(self) -> Mapping[str, Range]:
        """The ranges by setting."""
        return self.__pydantic_extra__


def _random(value: Any) -> Any:
    if isinstance(value, Mapping):
        if "number" not in value:
            raise ValueError("the table must have the number of points, such as number = 12")
        if not set(value) - {"number", "seed"}:
            raise ValueError(
                'the table must name a setting and its range, such as "local.lr" = { low = 0.01, high = 0.3 }'
            )
        if "name" in value:
            raise ValueError(f"the table must not set 'name': {_OF_RUNS['name']}")
    return value


def _points(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        return value
    if not value:
        raise ValueError("must have at least one point")
    points = list(value)
    for point in points:
        _settings(point)
    names = [set(point) for point in points if isinstance(point, Mapping)]
    for number, keys in enumerate(names, 1):
        if not keys:
            raise ValueError(f"point {number} must name a setting")
        if keys != names[0]:
            other = sorted(keys ^ names[0])[0]
            raise ValueError(f"all points must have the same settings: '{other}' is not in all of them")
    twice = [number for number, point in enumerate(points, 1) if point in points[: number - 1]]
    if twice:
        raise ValueError(f"must not have the same point twice (number {twice[0]})")
    return points


Settings = Annotated[dict[str, Any], BeforeValidator(_settings)]
Grid = Annotated[dict[str, Annotated[list[Any], BeforeValidator(_values)]], BeforeValidator(_some)]
Draws = Annotated[RandomDraws, BeforeValidator(_random)]
Points = Annotated[list[dict[str, Any]], BeforeValidator(_points)]


def _named(value: Any) -> Any:
    if isinstance(value, Mapping) and not value:
        raise ValueError("the table must have at least one named table below it")
    if isinstance(value, Mapping) and "" in value:
        raise ValueError("the table must not have a table without a name")
    return value


def _numbers(value: Any) -> Any:
    values = [value] if isinstance(value, int | float) else value
    return [number(item) for item in values] if isinstance(values, list | tuple) else values


def _each_once(value: Any) -> Any:
    if isinstance(value, list | tuple):
        twice = [seed for number, seed in enumerate(value) if seed in value[:number]]
        if twice:
            raise ValueError(f"must not have the seed {twice[0]} twice: the same run would count as two")
    return value


def _by_name(value: Any) -> Any:
    return {name: {} for name in value} if isinstance(value, list | tuple) else value


def _kinds(value: Any) -> Any:
    if isinstance(value, list | tuple):
        for number, item in enumerate(value, 1):
            if isinstance(item, Mapping) and not isinstance(item.get("kind"), str):
                raise ValueError(f'entry {number} must have a kind, such as kind = "summary"')
    return value


Seed = Annotated[int, Field(ge=0, lt=2**63)]
Base = str | dict[str, Any]
Specs = Annotated[list[dict[str, Any]], BeforeValidator(_kinds)]


_StandsFor = Annotated[
    str | None,
    Field(
        description="at a smaller scale: its counterpart at the scale paper, of other data or another model"
    ),
]


class CaseSettings(FrozenTable):
    """A table `[cases.NAME]`: a condition that methods are compared in."""

    base: Base | None = Field(None, description="a recipe or a file instead of the study's")
    set: Settings = Field(default_factory=dict, description="settings over the base")
    stands_for: _StandsFor = None


class MethodSettings(FrozenTable):
    """A table `[methods.NAME]`: a row of the comparison."""

    label: str | None = Field(None, min_length=1, description="its name in tables and figures")
    base: Base | None = Field(None, description="a recipe or a file instead of the study's")
    set: Settings = Field(default_factory=dict, description="settings over the base")
    grid: Grid | None = Field(None, description="every combination of these values of settings")
    random: Draws | None = Field(None, description="points drawn at random, like the table [random]")
    points: Points | None = Field(None, description="a list of points instead of every combination")
    stands_for: _StandsFor = None

    @model_validator(mode="after")
    def _one_way(self) -> MethodSettings:
        if self.points is not None and (self.grid is not None or self.random is not None):
            raise ValueError("the table must have either points, or grid and random")
        return self


class PretrainedSettings(FrozenTable):
    """A table `[pretrained.NAME]`: a run whose final model runs start from, by `model.weights = "pretrained:NAME"`."""

    label: str | None = Field(None, min_length=1, description="its name in the table of pre-trainings")
    base: Base = Field(description="a recipe or a file")
    set: Settings = Field(default_factory=dict, description="settings over the base")
    seed: Seed = Field(0, description="`seed` of the run")
    cases: dict[str, str] = Field(
        default_factory=dict,
        description='weights that take its place in named cases: { cityscapes = "imagenet" }',
    )


class TuneSettings(FrozenTable):
    """The `[tune]` table."""

    on: Literal["validation"] = Field("validation", description="validation data of the training set")
    share: float = Field(
        0.1, gt=0, lt=1, description="`data.validation` of tuning runs, if the base holds out nothing"
    )
    seeds: Annotated[list[Seed], BeforeValidator(_each_once)] | None = Field(
        None,
        min_length=1,
        description="seeds for tuning; by default as many as `seeds`, from 100 on and without those that the results "
        "use; without `refit` those of the study",
    )
    budget: int | None = Field(
        None,
        ge=1,
        description="tuning runs of each method in each case. Without `seeds`, a method with fewer points gets more "
        "seeds for each point",
    )
    over: list[str] | None = Field(
        None,
        min_length=1,
        description="the tuned settings; by default those of the methods' grids, and those of [grid] and [random] "
        "outside `data.` and `seeds.`",
    )
    refit: bool = Field(
        True,
        strict=True,
        description="whether final runs train on all training data; false: they hold out the same share",
    )


class StopSettings(FrozenTable):
    """The `[stop]` table."""

    halving: int | None = Field(
        None, ge=2, description="keep one in this many points at each rung, by method and case"
    )
    first: int | None = Field(None, ge=1, description="rounds of the first rung")
    diverged: bool = Field(
        True, strict=True, description="stop a run whose loss diverged; it counts as the worst"
    )

    @model_validator(mode="after")
    def _both(self) -> StopSettings:
        if self.halving is not None and self.first is None:
            raise ValueError("the table must have 'first', the rounds of the first rung, with halving")
        if self.first is not None and self.halving is None:
            raise ValueError("the table must have 'halving' with 'first'")
        return self


class StudySettings(FrozenTable):
    """All settings of a study.

    >>> from fedlens.studies.study_file import read_study
    >>> study = read_study({"base": "digits", "seeds": [0, 1], "grid": {"local.lr": [0.1, 0.3]}}).settings
    >>> study.grid, study.threads
    ({'local.lr': [0.1, 0.3]}, 1)
    """

    name: str = Field(
        "study",
        min_length=1,
        pattern=r"^[^./\\][^/\\]*$",
        description="by default the name of the file",
    )
    title: str = Field("", description="a sentence at the top of the page")
    base: Base = Field(description="a recipe or a TOML file, relative to the study file")
    set: Settings = Field(default_factory=dict, description="settings over the base, for all runs")
    seeds: Annotated[list[Seed], BeforeValidator(_each_once)] = Field(
        [0], min_length=1, description="`seed` of the runs, the same for every method"
    )
    metric: str | None = Field(
        None, min_length=1, description="the compared metric; by default the main metric of the task"
    )
    last: int = Field(1, ge=1, description="the number of evaluations at the end whose mean is a final value")
    target: Annotated[list[float], BeforeValidator(_numbers)] = Field(
        [], description="values of the metric; the results count rounds, batches and bytes to each"
    )
    baseline: str | None = Field(
        None, description="the method that others are compared with; by default the first"
    )
    threads: int = Field(1, ge=1, le=1024, description="threads of a run")
    same_data: bool = Field(True, strict=True, description="refuse methods that differ in data.* or seeds.*")
    labels: dict[str, str] = Field(
        default_factory=dict, description="names of settings in tables and figures"
    )
    grid: Grid | None = Field(None, description="every combination of these values of settings")
    random: Draws | None = Field(None, description="points drawn at random")
    cases: Annotated[dict[str, CaseSettings], BeforeValidator(_named)] | None = Field(
        None, description="named conditions"
    )
    methods: Annotated[dict[str, MethodSettings], BeforeValidator(_named)] | None = Field(
        None, description="the rows, in order"
    )
    pretrained: Annotated[dict[str, PretrainedSettings], BeforeValidator(_named)] | None = Field(
        None, description='pre-trainings, which runs name as model.weights = "pretrained:NAME"'
    )
    analyses: Annotated[dict[str, dict[str, Any]], BeforeValidator(_by_name)] = Field(
        default_factory=dict,
        description="analyses of the final runs: a list of names, or a table of their settings such as "
        '{ "loss-surface" = { count = 200 } }',
    )
    tune: TuneSettings | None = Field(None, description="how each method's point is chosen")
    stop: StopSettings | None = Field(None, description="which runs end early")
    scales: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="smaller versions of the study"
    )
    figures: Specs = Field([], description="figures, each with a kind")
    tables: Specs = Field([], description="tables, each with a kind")
    notes: list[str] = Field([], description="sentences below the results")
