"""The pre-trainings that the tables `[pretrained.NAME]` of a study describe."""

from __future__ import annotations

from fedlens.base.errors import ConfigError, nearest
from fedlens.studies.expansion import run_key
from fedlens.studies.planned import PlannedRun
from fedlens.studies.run_settings import PlacedSetting, SettingsReader, with_seed
from fedlens.studies.study_file import StudySource


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
