"""Finished pre-trainings in the user's cache folder, so that several studies share one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlens import __version__
from fedlens.base.errors import FedlensError
from fedlens.files.caches import user_cache
from fedlens.results.run import Run
from fedlens.run.build import build, data_directory
from fedlens.run.run_description import data_digest
from fedlens.settings.config import read_config
from fedlens.settings.config_source import Source
from fedlens.settings.plan import plan
from fedlens.studies.planned import PlannedRun

if TYPE_CHECKING:
    from fedlens.run.session import Session

_LEFT_OUT = shutil.ignore_patterns("checkpoint*", "states", "recordings", "images", ".*")


def cached_folder(run: PlannedRun) -> Path:
    """The folder of a pre-training in the cache: by the digest of its settings, and by the version of fedlens."""
    return user_cache("pretrained") / f"{run.digest}-{__version__}"


def take_cached(run: PlannedRun, directory: Path, data_dir: Path | None, session: Session) -> bool:
    """Copies a finished pre-training from the cache into its run directory; false if the cache has none.

    The images and labels must be those that it was trained on: another content of the data folder, or another sampler
    of images, makes another pre-training.
    """
    folder = cached_folder(run)
    if not (folder / "model.safetensors").is_file():
        return False
    with suppress(FedlensError, OSError, shutil.Error):  # then it is trained
        found, digest = Run.open(folder), _digest(run.settings, data_dir, session)
        if found.status != "finished" or found.environment.get("data_sha256") != digest:
            return False
        part = directory.with_name(f".{directory.name}.{os.getpid()}.part")
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(folder, part)
        shutil.rmtree(directory, ignore_errors=True)
        part.rename(directory)
        return True
    return False


def keep_cached(run: PlannedRun, directory: Path) -> None:
    """Copies a finished pre-training into the cache. A cache that cannot be written costs a training later."""
    folder = cached_folder(run)
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    with suppress(OSError, shutil.Error):
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(directory, part, ignore=_LEFT_OUT)
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
    shutil.rmtree(part, ignore_errors=True)


def _digest(settings: Mapping[str, Any], data_dir: Path | None, session: Session) -> str:
    """SHA-256 of the images and labels that the settings name."""
    source = Source(dict(settings))
    planned = plan(read_config(source.values, source.locate), source)
    built = build(planned, data_directory(data_dir), False, session=session)
    try:
        return data_digest(built)
    finally:
        built.engine.close()
