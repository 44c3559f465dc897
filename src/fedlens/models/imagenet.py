"""Finds the file of a timm model's ImageNet weights: in the cache of the Hugging Face Hub, or by a download."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from fedlens.core.errors import ConfigError, DataError, one_line, text_of
from fedlens.core.user_objects import methods
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
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache

    for name in FILES:
        cached = try_to_load_from_cache(repository, name)
        if isinstance(cached, str):
            return Path(cached)
    folder = Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"
    if not downloads_allowed():
        raise ConfigError(
            f"the ImageNet weights {repository} ({FILES[0]}) are not in the cache {folder}",
            where=_WHERE,
            hint="download them with --download, or run(download=True); or set model.weights to a file",
        )
    try:
        return Path(hf_hub_download(repository, FILES[0]))
    except Exception as error:  # of any kind: the network's, the disk's, the server's
        reason = f"{type(error).__name__}: {one_line(next(iter(text_of(error).splitlines()), ''))}"
        raise DataError(
            f"the ImageNet weights {repository} ({FILES[0]}) cannot be downloaded: {reason}",
            where=_WHERE,
            hint=f"check the network, or put the file into {folder}, or set model.weights to a file",
        ) from error


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
