"""Whether a model, its keys and augmentations fit the kind of data and the task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fedlens.base.errors import ConfigError
from fedlens.base.registry import OwnSettings
from fedlens.base.summary_text import listed
from fedlens.core.dataset_info import DatasetInfo
from fedlens.models.prepare import Preparation
from fedlens.models.registry import MODELS, ModelEntry
from fedlens.settings.resolve import Resolved
from fedlens.tasks.task import Task


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


def prepared_for(task: Task, keys: Preparation | None) -> Preparation | None:
    """The keys of `[model]` that work on any model, without a classifier if the task trains none.

    Raises `ConfigError` if the task needs the classifier that `model.classifier` leaves out.
    """
    if task.classifier and keys is not None and not keys.classifier:
        raise ConfigError(
            "model.classifier = false leaves the model without outputs for the classes",
            where="model.classifier",
            hint="remove it, or set task.name = 'simsiam'",
        )
    if not task.classifier and keys is not None and keys.cache_features:
        raise ConfigError(
            "a task without labels sees other images in every step, so features cannot be kept",
            where="model.cache_features",
            hint="set model.cache_features = false",
        )
    return keys if task.classifier else (keys or Preparation()).varied(classifier=False)


SETTING = "vocabulary"


def with_vocabulary(model: Resolved, info: DatasetInfo) -> Resolved:
    """The model with the dataset's vocabulary in its setting `vocabulary`, if it has one and the user did not set it.

    Raises `ConfigError` if the user set a smaller one.
    """
    if info.vocabulary is None or SETTING not in model.settings:
        return model
    given = model.settings[SETTING]
    if given is None:
        return replace(model, settings={**model.settings, SETTING: info.vocabulary})
    if given < info.vocabulary:
        raise ConfigError(
            f"model.vocabulary is {given:,}, but '{info.name}' has tokens up to {info.vocabulary - 1:,}",
            where=f"model.{SETTING}",
            hint=f"leave model.vocabulary out, or set it to at least {info.vocabulary:,}",
        )
    return model


def refuse_image_settings(info: DatasetInfo, augments: Sequence[Resolved], model: Resolved) -> None:
    """Raises `ConfigError` for augmentations of texts, and for features of texts that are to be kept."""
    if info.kind != "language":
        return
    if augments:
        raise ConfigError(
            f"the augmentation '{augments[0].name}' changes images, but '{info.name}' is text",
            where="data.augment",
            hint="remove data.augment",
        )
    if model.shared is not None and model.shared.cache_features:
        raise ConfigError(
            f"features are kept of images only, but '{info.name}' is text",
            where="model.cache_features",
            hint="remove model.cache_features",
        )
