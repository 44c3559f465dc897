"""Small files in the layouts of published datasets, for the tests of their readers."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fedlens.data.download import Resource

People = Mapping[str, tuple[list[Any], list[Any]]]


def leaf(people: People, **more: Any) -> dict[str, Any]:
    """What LEAF writes of users with their (x, y)."""
    return {
        "users": list(people),
        "num_samples": [len(y) for _, y in people.values()],
        "user_data": {name: {"x": x, "y": y} for name, (x, y) in people.items()},
        **more,
    }


def write_leaf(folder: Path, content: Any, name: str = "all_data_0_niid_0_keep_0_train_9.json") -> Path:
    """One JSON file of a split, written as LEAF's scripts write it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")
    return path


def write_photo(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (64, 64)) -> None:
    """A JPEG file of one colour."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path, format="JPEG", quality=95)


def shown(image: np.ndarray) -> tuple[int, ...]:
    """The mean colour of an image [3, H, W], to the nearest ten: JPEG changes it a little."""
    return tuple(int(round(value, -1)) for value in image.mean(axis=(1, 2)))


def zipped(source: Path) -> Callable[[Resource, Path], Path]:
    """In place of `fetch`: "fetches" an archive with everything below the folder `source`."""

    def fetch(resource: Resource, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        archive = folder / resource.name
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
            for path in sorted(path for path in source.rglob("*") if path.is_file()):
                packed.write(path, path.relative_to(source).as_posix())
        return archive

    return fetch
