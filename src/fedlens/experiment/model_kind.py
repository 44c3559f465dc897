"""Refuses a model of the zoo on data that it is not for."""

from __future__ import annotations

from typing import Any

from fedlens.core.dataset_info import DatasetInfo
from fedlens.core.errors import ConfigError
from fedlens.core.registry import OwnSettings
from fedlens.core.summary_text import listed
from fedlens.models.registry import MODELS, ModelEntry


def refuse_other_kind(name: str, factory: Any, info: DatasetInfo) -> None:
    """Raises `ConfigError` if the model of this name is for another kind of data, such as a classifier on masks.

    A model of a user's own is not judged by its name: its outputs are tried.

    >>> refuse_other_kind("unet", None, DatasetInfo("street", "segmentation", ("road", "sky"), (3, 64, 64)))
    """
    entry = MODELS.entries.get(name)
    if isinstance(factory, OwnSettings) or not isinstance(entry, ModelEntry) or entry.fits(info.kind):
        return
    rows = MODELS.entries.items()
    fitting = [other for other, row in rows if isinstance(row, ModelEntry) and row.fits(info.kind)]
    raise ConfigError(
        f"the model '{name}' is for {entry.task}, but the dataset '{info.name}' is for {info.kind}",
        where="model.name",
        hint=f"take one of these models: {listed(fitting, 5)}" if fitting else "take a model of your own",
    )
