"""The file `planned.json` in a run directory: the run of the plan, and the digests of its files."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from fedlens.base.errors import RunDirectoryError
from fedlens.files.atomic_files import read_regular, write_atomically
from fedlens.files.text_files import read_json
from fedlens.run.rundir import RunDir
from fedlens.settings.config import plain, read_config
from fedlens.settings.config_source import Source
from fedlens.settings.keys import changing, diff
from fedlens.studies.planned import PlannedRun

_WRITTEN_BY_RUN = ("data.dataset.", "task.", "model.weights_sha256")
FILE = "planned.json"
_CONFIG, _METRICS = "config.toml", "metrics.jsonl"


def write_planned(planned: PlannedRun, directory: Path, ended: bool) -> None:
    """Writes which run `directory` holds, and the SHA-256 of config.toml; if it `ended`, of metrics.jsonl too.

    Does nothing before the run has written its config.toml. Raises `RunFailed` if the disk refuses.
    """
    if not (directory / _CONFIG).is_file():
        return
    names = (_CONFIG, _METRICS) if ended and (directory / _METRICS).is_file() else (_CONFIG,)
    content = {"digest": planned.digest, "sha256": {name: _sha256(directory / name) for name in names}}
    write_atomically(directory / FILE, (json.dumps(content) + "\n").encode())


def check_directory(directory: Path, digest: str, settings: Mapping[str, Any] | None) -> None:
    """Raises `RunDirectoryError` if `directory` holds another run than this one, or if its files were edited by hand.

    Args:
        digest: of the planned run.
        settings: of the planned run; None if they are not known, and then a run that was killed at its start is not
            checked.
    """
    if not (directory / _CONFIG).is_file():
        if directory.is_dir() and any(entry.name != ".lock" for entry in directory.iterdir()):
            raise RunDirectoryError(
                "the directory of a run has files but no config.toml",
                where=str(directory),
                hint="move it away or delete it, and run the study again: it repeats the run",
            )
        return
    noted = _read(directory / FILE)
    if noted is None:  # killed before it was written
        if settings is not None and (different := different_settings(settings, directory)):
            raise _refused("the run directory holds another run", different, directory)
        return
    if noted["digest"] != digest:
        raise _refused(
            "the run directory holds another run", different_settings(settings, directory), directory
        )
    for name, sha256 in noted["sha256"].items():
        path = directory / name
        if path.is_file() and _sha256(path) == sha256:
            continue
        if name == _CONFIG:
            raise _refused(
                "config.toml of a run was edited", different_settings(settings, directory), directory
            )
        raise RunDirectoryError(
            f"{name} of a finished run was edited",
            where=str(path),
            hint="restore the file, or delete the run directory and run the study again: it repeats the run",
        )


def different_settings(settings: Mapping[str, Any] | None, directory: Path) -> list[tuple[str, Any, Any]]:
    """The settings in the config.toml of a run directory that differ from these: key, value there, value here.

    Settings that change no result, such as those of the engine, are left out. Empty if the settings are not known.
    """
    if settings is None:
        return []
    found, given = (
        changing(config, "experiment")
        for config in (RunDir.open(directory).read_config(), _resolved(settings))
    )
    # A run writes down what follows from data and files: the size of its images, its task, a digest.
    chosen = {key for key in found if key.startswith(_WRITTEN_BY_RUN)} - given.keys()
    different = (change for change in diff(found, given) if change[0] not in chosen)
    return sorted(different, key=itemgetter(0))


def _resolved(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as the run writes them into its config.toml."""
    import tomli_w

    from fedlens.settings.plan import plan

    source = Source(dict(settings))
    return tomllib.loads(tomli_w.dumps(plain(plan(read_config(source.values), source).config)))


def _refused(what: str, different: Sequence[tuple[str, Any, Any]], directory: Path) -> RunDirectoryError:
    shown = [
        f"{key} is {_shown(actual)} instead of {_shown(planned)}" for key, actual, planned in different[:3]
    ]
    more = f"; and {len(different) - 3} more" if len(different) > 3 else ""
    return RunDirectoryError(
        f"{what}{': ' if shown else ''}{'; '.join(shown)}{more}",
        where=str(directory / _CONFIG),
        hint="undo the edit, or delete the directory and run the study again: it repeats the run",
    )


def _shown(value: Any) -> str:
    return "not set" if value is None else json.dumps(value, default=str)


def _read(path: Path) -> dict[str, Any] | None:
    noted = read_json(path) or {}
    return noted if isinstance(noted.get("sha256"), dict) and "digest" in noted else None


def _sha256(path: Path) -> str:
    return hashlib.sha256(read_regular(path)).hexdigest()
