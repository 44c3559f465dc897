"""Finds the file of a timm model's ImageNet weights: in the cache of the Hugging Face Hub, or by a download."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from fedlens.base.errors import ConfigError
from fedlens.base.signatures import methods
from fedlens.files.caches import hub_file
from fedlens.models.backbone import WithBackbone
from fedlens.models.user_models import downloads_allowed

_WHERE = "model.weights"
FILES = ("model.safetensors", "pytorch_model.bin")
"""What timm's repositories call the file of weights, the preferred one first."""


def imagenet_file(module: nn.Module) -> Path:
    """The file of ImageNet weights that timm publishes for this module, from the cache or downloaded.

    Raises `ConfigError` if none is published, or if it is not in the cache and downloads are not allowed; and
    `DataError` if the download fails.
    """
    repository = repository_of(module)
    if repository is None:
        raise ConfigError(
            "no ImageNet weights are known for this model",
            where=_WHERE,
            hint="choose a model of timm ('fedlens list models' names its source), or set model.weights to a file",
        )
    return hub_file(repository, FILES, "the ImageNet weights", _WHERE, downloads_allowed())


def repository_of(module: nn.Module) -> str | None:
    """The repository of the Hugging Face Hub with the module's ImageNet weights; None if timm names none.

    Of a network with a backbone, they are those of the classifier that the backbone is the body of.
    """
    if isinstance(module, WithBackbone) and module.body is not None:
        import timm

        published = timm.models.get_pretrained_cfg(module.body)
        return None if published is None else published.hf_hub_id
    config: Any = methods(module, ["pretrained_cfg"]).get("pretrained_cfg")
    return (config.get("hf_hub_id") or None) if isinstance(config, Mapping) else None
