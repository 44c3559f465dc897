"""What `model.weights` can name: a file, a run, or a word. No import of torch."""

from __future__ import annotations

from fedlens.files.caches import HUB

IMAGENET, NONE, RUN = "imagenet", "none", "run:"
_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".tar")


def names_a_file(value: object) -> bool:
    """Whether a setting names a file, a run or a repository, and not a word such as 'DEFAULT' of torchvision.

    >>> [names_a_file(value) for value in ("resnet.pth", "./resnet", "run:runs/a", "hub:a", "DEFAULT", None)]
    [True, True, True, True, False, False]
    """
    if not isinstance(value, str):
        return False
    return value.startswith((RUN, HUB)) or "/" in value or "\\" in value or value.lower().endswith(_SUFFIXES)
