"""Writes an experiment on a user's own data: the dataset as it was checked, and usual settings for its kind."""

from __future__ import annotations

import math
import os
import re
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedlens.base.errors import ConfigError
from fedlens.base.printable import printable
from fedlens.base.shell_command import inline_toml
from fedlens.data.formats.common_settings import check_command
from fedlens.files.atomic_files import refused, write_durably

_SMALL = 64  # pixels of the longer side of images for which a small network is enough
_CLIENTS = 4  # of the partition, if the data name none
_HELD_OUT = 0.2  # the default of `data.dataset.test`
_STEPS, _MOST_EPOCHS = 20, 10  # of a client in a round: fewer steps teach a new model next to nothing

_TEXT = """\
# Written by: {command}
# Model, rounds and learning rate are a start: change them to suit your data.
name = {name}
rounds = 20

[data]
dataset = {dataset}
partition = {partition}
{augment}
[model]
name = {model}

{task}[select]
name = "all"

[local]
{local}# {why}
epochs = {epochs}
batch_size = {batch}
"""
_SGD = "lr = 0.1\n"
# For models with batch normalization, which fails on a last batch of one image.
_ADAMW, _ADAMW_BOXES = (f'optimizer = "adamw"\nlr = {lr}\nlast_batch = "drop"\n' for lr in (0.001, 0.002))
_VIEWS = 'augment = [{ name = "random-resized-crop", scale = [0.2, 1.0] }, "flip"]\n'


def dataset_table(dataset: Mapping[str, Any]) -> str:
    """The table `data.dataset` as examples write it.

    >>> dataset_table({"name": "image-folder", "path": "scans"})
    '{ name = "image-folder", path = "scans" }'
    """
    return f"{{ {inline_toml(dataset)[1:-1]} }}"


def recipe_text(dataset: Mapping[str, Any], facts: Mapping[str, Any], file: Path) -> str:
    """The text of an experiment on a checked dataset.

    Args:
        dataset: the table `data.dataset`.
        facts: those of `fedlens.data.formats.scan.Scan.facts`.
        file: the file of the experiment. If it is in another folder, paths become absolute.

    The partition is that of the clients in the data, or else four equal ones. The model follows the kind of targets.
    The local epochs are the fewest, at most 10, with which a client of median size makes 20 steps a round.
    """
    settings = {key: value for key, value in dataset.items() if key != "name"}
    # A comment in TOML has one line, and no control characters.
    command = printable(check_command(str(dataset["name"]), settings, write=file), line_feeds=False)
    if file.parent.resolve() != Path.cwd():
        named = [key for key in ("path", "table") if os.path.exists(str(dataset.get(key, "")))]
        dataset = {**dataset, **{key: os.path.abspath(dataset[key]) for key in named}}
    size = facts.get("training", {})
    small = max(size.get("width", 0), size.get("height", 0)) <= _SMALL
    model, local, batch, augment, task = "small-cnn" if small else "resnet18", _ADAMW, 16, "", ""
    if "boxes" in facts:
        model, local, batch = "yolov5n", _ADAMW_BOXES, 8
    elif "pixels" in facts:
        model, batch = "unet", 8
    elif not facts.get("classes"):
        model, augment, task = "resnet20" if small else "resnet18", _VIEWS, '[task]\nname = "simsiam"\n\n'
    elif small:
        local = _SGD
    images = training_images(dataset, facts)
    epochs, steps = local_epochs(images, batch, drop="last_batch" in local)
    counted = f"{images:,} training images" if images > 1 else "1 training image"
    return _TEXT.format(
        command=command,
        name=inline_toml(re.sub(r"[^A-Za-z0-9_.-]+", "-", file.stem).strip("-.") or "own-data"),
        dataset=dataset_table(dataset),
        partition=dataset_table(
            {"name": "natural"} if facts.get("clients") else {"name": "iid", "clients": _CLIENTS}
        ),
        augment=augment,
        model=inline_toml(model),
        task=task,
        local=local,
        why=f"The median client has about {counted}: {epochs * steps:,} steps a round.",
        epochs=epochs,
        batch=batch,
    )


def training_images(dataset: Mapping[str, Any], facts: Mapping[str, Any]) -> int:
    """About how many images the median client trains on, at least 1.

    >>> training_images({"test": 0.5}, {"images": 18, "clients": {"mercy": 2, "north": 10, "oak": 6}})
    3
    """
    images: int = facts["images"]
    kept = facts["splits"].get("train", 0) / max(images, 1) if "splits" in facts else None
    if kept is None:
        kept = 1 - float(dataset.get("test", _HELD_OUT))
    clients = facts.get("clients")
    median: float = statistics.median(clients.values()) if clients else images / _CLIENTS
    return max(1, round(kept * median))


def local_epochs(images: int, batch: int, drop: bool = False) -> tuple[int, int]:
    """(epochs, steps of each) of a client with so many training images: the fewest epochs for 20 steps, at most 10.

    `drop` is true if the last batch of an epoch is left out unless it is full.

    >>> local_epochs(32, 8), local_epochs(31, 8, drop=True), local_epochs(5, 8), local_epochs(500, 16)
    ((5, 4), (7, 3), (10, 1), (1, 32))
    """
    steps = max(1, images // batch if drop else math.ceil(images / batch))
    return min(math.ceil(_STEPS / steps), _MOST_EPOCHS), steps


def check_writable(file: Path) -> None:
    """Raises `ConfigError` if an experiment cannot be written to `file`, or something is there already."""
    if file.suffix != ".toml":
        hint = "experiments end in .toml"
        raise ConfigError(f"'{file.name}' does not end in .toml", where="--write", hint=hint)
    if file.exists() or file.is_symlink():
        raise ConfigError(f"{file} already exists", where="--write", hint="choose another name, or remove it")
    if not file.parent.is_dir():
        hint = "make it, or write the file elsewhere"
        raise ConfigError(f"the folder {file.parent} does not exist", where="--write", hint=hint)


def write_recipe(dataset: Mapping[str, Any], facts: Mapping[str, Any], file: Path) -> None:
    """Writes an experiment on a checked dataset; see `recipe_text`.

    Raises `ConfigError` if the file exists, and `RunFailed` if it cannot be written.
    """
    check_writable(file)
    try:
        write_durably(file, recipe_text(dataset, facts, file).encode())  # never replaces a file
    except OSError as error:
        raise refused(error, file.name, file) from error
