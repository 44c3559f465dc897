"""The settings of a run of a study: a base with the study's settings on top, checked before anything starts."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedlens.base.errors import ConfigError
from fedlens.base.registry import import_name, load_target, settings_model
from fedlens.engines.registry import ENGINES
from fedlens.engines.traits import traits_of
from fedlens.results.rows import EFFECTIVE
from fedlens.settings.algorithm_check import algorithm_settings, check_algorithm
from fedlens.settings.config import Config, plain, read_config
from fedlens.settings.config_source import Source, find_beside, put_setting, read_source
from fedlens.settings.effective_rate import client_rate
from fedlens.settings.own_files import own_files
from fedlens.settings.plan import plan
from fedlens.studies.planned import PREFIX, PlannedRun, planned_weights, pretrained_weights, settings_text
from fedlens.studies.study_file import Places
from fedlens.studies.study_settings import Base


@dataclass(frozen=True)
class PlacedSetting:
    """A setting that a study puts over a base.

    Attributes:
        place: its file, line and key, for error messages.
    """

    key: str
    value: Any
    place: str


@dataclass(frozen=True)
class _Layered(Source):
    """Settings of a base with those of a study on top; `places` says where the latter stand."""

    places: Mapping[str, str] = field(default_factory=dict)
    below: Source = field(default_factory=lambda: Source({}))
    base_place: str = ""
    start: PlannedRun | None = None

    def locate(self, key: str) -> str:
        """The place in the study file, or in the base."""
        parts = key.split(".")
        for length in range(len(parts), 0, -1):
            place = self.places.get(".".join(parts[:length]))
            if place is not None:
                return place
        inner = [place for given, place in self.places.items() if given.startswith(f"{key}.")]
        if inner:
            return inner[0]
        return f"{self.base_place} {key}" if self.below.path is None else self.below.locate(key)


@dataclass(frozen=True)
class RunSettings:
    """Checked settings of a run without its seed and name.

    Attributes:
        values: nested tables, as `Experiment` takes them.
        config: the same with every setting filled in.
        files: SHA-256 of the user's Python files that they name, by path.
        start: the pre-training that they name.
    """

    values: Mapping[str, Any]
    config: Config
    text: str  # the values as JSON: equal for equal settings
    files: Mapping[str, str] = field(default_factory=dict)
    start: PlannedRun | None = None


class SettingsReader:
    """Makes the settings of runs, each combination once.

    Args:
        folder: of the study file; bases, and paths of data and weights, are relative to it.
        places: of the study's own settings.
        threads: of a run; None for those of the base, or else 1.
        check: whether to make each algorithm once, which finds settings that it refuses.
        starts: the pre-trainings of the study, by name.
    """

    def __init__(
        self,
        folder: Path,
        places: Places,
        threads: int | None = None,
        check: bool = True,
        starts: Mapping[str, PlannedRun] | None = None,
    ) -> None:
        self._folder, self._places, self._threads, self._check = folder, places, threads, check
        self._starts = starts or {}
        self._fitting: set[str] = set()
        self._bases: dict[str, Source] = {}
        self._made: dict[str, RunSettings] = {}

    def base(self, base: Base, place: str) -> Source:
        """The settings of a base. Raises `ConfigError` with `place` if it cannot be read."""
        key = settings_text(base)
        if key not in self._bases:
            self._bases[key] = self._read(base, place)
        return self._bases[key]

    def _read(self, base: Base, place: str) -> Source:
        if not isinstance(base, str):
            return Source(copy.deepcopy(base))
        beside = self._folder / base
        try:
            return read_source(str(beside) if base.endswith(".toml") and os.path.exists(beside) else base)
        except ConfigError as error:
            where = f" ({error.where})" if error.where else ""
            raise ConfigError(
                f"the base cannot be read: {error.what}{where}", where=place, hint=error.hint
            ) from None

    def make(self, base: Base, place: str, settings: Iterable[PlacedSetting]) -> RunSettings:
        """The settings of a run: `settings` over `base`, later ones over earlier ones.

        Raises `ConfigError` with the place of the setting in the study file if one is wrong.
        """
        listed = list(settings)
        key = settings_text([base, [[one.key, one.value] for one in listed]])
        if key not in self._made:
            self._made[key] = self._make(self.base(base, place), listed, place)
        return self._made[key]

    def given(self, base: Base, place: str, settings: Iterable[PlacedSetting]) -> Mapping[str, Any]:
        """The settings of a run as `make` puts them together, unchecked and without defaults."""
        layered = self._layered(self.base(base, place), list(settings), place)
        if layered.start is not None:
            put_setting(layered.values, "model.weights", f"{PREFIX}{layered.start.method}", set(), place)
        return layered.values

    def _make(self, base: Source, settings: list[PlacedSetting], place: str) -> RunSettings:
        rate = next((one for one in settings if one.key == EFFECTIVE), None)
        if rate is None:
            return self._checked(base, settings, place)
        twice = next((one for one in settings if one.key == "local.lr"), None)
        if twice is not None:
            raise ConfigError(
                f"'{EFFECTIVE}' sets local.lr, which is set too ({twice.place})",
                where=rate.place,
                hint="remove one of them",
            )
        if isinstance(rate.value, bool) or not isinstance(rate.value, int | float) or rate.value <= 0:
            raise ConfigError(
                f"'{EFFECTIVE}' is {rate.value!r}, but must be a number above 0", where=rate.place
            )
        others = [one for one in settings if one.key != EFFECTIVE]
        local = base.values.get("local")
        start = (
            []
            if isinstance(local, Mapping) and "lr" in local
            else [PlacedSetting("local.lr", 0.1, rate.place)]
        )
        momentum = self._checked(base, [*others, *start], place).config
        lr = client_rate(float(rate.value), momentum)
        return self._checked(base, [*others, PlacedSetting("local.lr", lr, rate.place)], place)

    def _checked(self, base: Source, settings: list[PlacedSetting], place: str) -> RunSettings:
        source = self._layered(base, settings, place)
        try:
            config = read_config(source.values, source.locate)
            planned = plan(config, source)
            full = planned.config
            if self._check and (key := settings_text(algorithm_settings(full))) not in self._fitting:
                check_algorithm(planned)
                self._fitting.add(key)
        except ConfigError as error:
            raise _without_options(error) from None
        _refuse_text(settings, full)
        filled = plain(full)
        values = _kept(source.values, filled)
        if (
            full.select is not None
            and config.select is not None
            and full.select["name"] != config.select["name"]
        ):
            values["select"] = filled["select"]  # what the algorithm brings
        alone = {key: value for key, value in values.items() if key not in ("name", "seed", "observe")}
        return RunSettings(values, full, settings_text(alone), own_files(values), source.start)

    def _layered(self, base: Source, settings: list[PlacedSetting], place: str) -> _Layered:
        values = copy.deepcopy(base.values)
        places: dict[str, str] = {}
        renamed: set[str] = set()
        for one in settings:
            before = _at(values, one.key)
            key = put_setting(values, one.key, copy.deepcopy(one.value), renamed, one.place)
            for other in [other for other in places if other.startswith(f"{key}.")]:
                del places[other]
            places[key] = one.place
            if isinstance(one.value, Mapping):
                places |= {f"{key}.{name}": one.place for name in one.value}
                if isinstance(before, Mapping) and before.get("name") != one.value.get("name"):
                    renamed.add(key)
        find_beside(values, self._folder, absolute=True)
        put_setting(values, "seed", 0, set(), "seeds")  # the seeds of bases are not used
        if places.keys().isdisjoint({"engine", "engine.name"}):
            by_study = {key.removeprefix("engine.") for key in places if key.startswith("engine.")}
            values["engine"] = self._engine(values.get("engine"), by_study)
        layered = _Layered(
            values, base.path, base.lines, frozenset(places), frozenset(renamed), places, base, place
        )
        start = pretrained_weights(
            _at(values, "model.weights"), self._starts, layered.locate("model.weights")
        )
        if start is None:
            return layered
        values["model"]["weights"] = planned_weights(start)
        return replace(layered, start=start)

    def _engine(self, given: Any, by_study: Set[str]) -> Any:
        """The engine of a run: one process, which gives the same bits as workers and leaves cores to other runs.

        Settings in `by_study` are kept, so that one that this engine lacks is an error.
        """
        table = {"name": given} if isinstance(given, str) else given if isinstance(given, Mapping) else {}
        traits = traits_of(table)
        if traits.place == "cluster" or not (traits.exact or traits.chooses) or table.get("group", 1) != 1:
            return given
        inline = settings_model(ENGINES.find("inline")).model_fields
        kept = {key: value for key, value in table.items() if key in inline or key in by_study}
        return {
            "threads": 1,
            **kept,
            **({"threads": self._threads} if self._threads else {}),
            "name": "inline",
        }


def with_seed(settings: RunSettings, seed: int, name: str) -> dict[str, Any]:
    """The settings of one run: those that seeds share, with its seed and name."""
    values = dict(settings.values)
    if "seeds" in values:  # those that follow from the seed of the base are replaced
        values = copy.deepcopy(values)
    put_setting(values, "seed", seed, set(), "seeds")
    return {**values, "name": name}


def _kept(values: Mapping[str, Any], full: Mapping[str, Any]) -> dict[str, Any]:
    """The given settings that the run has, without those of a replaced component of the base."""
    return {key: _like(value, full[key]) for key, value in values.items() if key in full}


def _like(value: Any, full: Any) -> Any:
    """The value in the form of TOML: a whole number becomes a float if the setting is a float."""
    if isinstance(value, Mapping) and isinstance(full, Mapping):
        return _kept(value, full)
    if isinstance(value, list | tuple):
        others = full if isinstance(full, list | tuple) and len(full) == len(value) else [None] * len(value)
        return [_like(item, other) for item, other in zip(value, others, strict=True)]
    if isinstance(full, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return worker_name(value) if callable(value) else value


def worker_name(thing: Any) -> str:
    """The name that a worker process imports a function or class by. Raises `ConfigError` if it cannot."""
    name = import_name(thing)
    try:
        # `__main__` of a worker is not this script or notebook.
        named = (inspect.isroutine(thing) or isinstance(thing, type)) and not name.startswith("__main__:")
        imported = load_target(name) if named else None
    except ConfigError:
        imported = None
    if imported is not thing:
        raise ConfigError(
            f"{name} cannot be imported by the processes that carry out the runs",
            where="base",
            hint="move the function or class to the top level of a module, and import it from there or name it as "
            "'FILE.py:NAME'",
        )
    return name


def _at(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values.get(part) if isinstance(values, Mapping) else None
    return values


def _refuse_text(settings: Iterable[PlacedSetting], config: Config) -> None:
    """Raises `ConfigError` for a string in place of a number or a boolean, which pydantic would convert."""
    full = plain(config)
    for one in settings:
        value = _at(full, one.key)
        if isinstance(one.value, str) and isinstance(value, int | float):
            kind = "true or false" if isinstance(value, bool) else "a number"
            raise ConfigError(
                f"'{one.key}' is '{one.value}', but must be {kind}", where=one.place, hint="remove the quotes"
            )


def _without_options(error: ConfigError) -> ConfigError:
    """The same error with a hint for a study file, where settings have no option `--set`."""
    if not error.hint or "--set" not in error.hint:
        return error
    import re

    hint = re.sub(r"(?:pass |add )?--set ([^\s=]+)=(\S+)", r'set "\1" = \2 in the study', error.hint)
    return ConfigError(error.what, where=error.where, hint=hint)
