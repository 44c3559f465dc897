"""What models and settings need to know of a dataset of texts, and the refusals of what texts do not have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fedlens.base.errors import ConfigError
from fedlens.core.dataset_info import DatasetInfo
from fedlens.settings.resolve import Resolved

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
