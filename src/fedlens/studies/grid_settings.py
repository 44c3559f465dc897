"""The schema of settings that have several values in a study: grids, random points and lists of points."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
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


def as_in_toml(value: Any) -> Any:
    """A value of Python as TOML would have it: lists for ranges, tuples, sets and arrays, numbers for those of NumPy.

    >>> as_in_toml({"seeds": range(2), "grid": {"local.lr": np.array([0.1, 0.3])}, "base": Path("my.toml")})
    {'seeds': [0, 1], 'grid': {'local.lr': [0.1, 0.3]}, 'base': 'my.toml'}
    """
    if isinstance(value, Mapping):
        return {key: as_in_toml(item) for key, item in value.items()}
    if isinstance(value, list | tuple | range):
        return [as_in_toml(item) for item in value]
    if isinstance(value, set | frozenset):
        return [as_in_toml(item) for item in sorted(value)]
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return str(value) if isinstance(value, Path) else value
