"""The measurements of the last round on the test data, in the file `evaluation.npz` of a run directory.

Reading it needs NumPy alone, so that a report is written without PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlens.files.arrays_file import named, parts_of, read_arrays, rewrite_without_images, write_arrays

FORMAT = "fedlens-evaluation-1"
WORST = 24  # mistakes with their images
PIXELS = 1_440_000  # bytes of all images: as PNG in base64 they take less than 2 MB of a page
_MISTAKE = ("index", "truth", "answer", "confidence")


@dataclass(frozen=True, eq=False)
class FinalEvaluation:
    """The measurements of a round on the test data.

    Args:
        round: the round of the model.
        kind: the kind of the dataset, such as "classification".
        classes: the names of the classes.
        input_shape: of one example, such as (C, H, W).
        sums: the task's sums over the test data, by name; int64 or float64.
        mistakes: of the most confidently wrong examples, the most confident first: `index`, the position in the test
            data, `truth` and `answer`, int64 [k], and `confidence`, float64 [k]. Empty if the task has none.
        images: uint8 [k, C, h, w], their images, smaller than the originals if those are large; None if they are left
            out.
        clients: the names of the clients that were measured, where the task keeps their sums.
        of_clients: the task's sums at each of these clients, [k, ...] by name.
    """

    round: int
    kind: str
    classes: tuple[str, ...]
    input_shape: tuple[int, ...]
    sums: Mapping[str, NDArray[Any]]
    mistakes: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    images: NDArray[np.uint8] | None = None
    clients: tuple[str, ...] = ()
    of_clients: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Writes the file atomically. Raises `RunFailed` if the disk refuses.

        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "evaluation.npz"
        >>> sums = {"confusion": np.array([[3, 1], [0, 2]])}
        >>> FinalEvaluation(7, "classification", ("cat", "dog"), (1, 8, 8), sums).write(path)
        >>> FinalEvaluation.read(path).sums["confusion"].tolist()
        [[3, 1], [0, 2]]
        """
        about = {
            "round": self.round,
            "kind": self.kind,
            "classes": list(self.classes),
            "input_shape": list(self.input_shape),
            "clients": list(self.clients),
        }
        arrays = named("sums", self.sums) | named("mistakes", self.mistakes) | named("of", self.of_clients)
        write_arrays(
            path, FORMAT, about, arrays if self.images is None else {**arrays, "images": self.images}
        )

    @classmethod
    def read(cls, path: Path) -> FinalEvaluation:
        """Reads what `write` wrote. Raises `RunDirectoryError` if the file is missing or corrupt."""
        return read_arrays(path, FORMAT, _checked)


def remove_images(path: Path) -> None:
    """Rewrites the file at `path` without its images, if it has any; a corrupt file is removed.

    Raises `RunFailed` if the disk refuses.

    >>> remove_images(Path("no such file"))
    """

    def without(kept: FinalEvaluation) -> FinalEvaluation | None:
        return None if kept.images is None else replace(kept, images=None)

    rewrite_without_images(path, FinalEvaluation.read, without)


def _checked(about: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> FinalEvaluation:
    """Raises `ValueError` for arrays that do not belong together."""
    classes = tuple(map(str, about["classes"]))
    clients = tuple(map(str, about.get("clients", ())))
    sums, mistakes, of_clients = (parts_of(name, arrays) for name in ("sums", "mistakes", "of"))
    wrong = [name for name, a in arrays.items() if a.dtype.kind not in "iuf"]
    if mistakes:
        k = mistakes["index"].shape
        wrong += [name for name in _MISTAKE if mistakes[name].shape != k or len(k) != 1]
        wrong += [] if np.isfinite(mistakes["confidence"]).all() else ["confidence"]
        for name in ("truth", "answer"):
            at = mistakes[name]
            wrong += [name] if at.dtype != np.int64 or ((at < 0) | (at >= len(classes))).any() else []
    images = arrays.get("images")
    if images is not None:
        form = images.dtype == np.uint8 and images.ndim == 4 and images.shape[1] in (1, 3) and images.size
        wrong += [] if form and len(images) == len(mistakes["index"]) else ["images"]
    wrong += [name for name, a in of_clients.items() if a.shape[:1] != (len(clients),)]
    if wrong:
        raise ValueError(f"the values of '{wrong[0]}' are not valid")
    shape = tuple(int(size) for size in about["input_shape"])
    known = int(about["round"]), str(about["kind"]), classes, shape
    return FinalEvaluation(*known, sums, mistakes, images, clients, of_clients)


def most_confident(rows: Mapping[str, NDArray[Any]], most: int = WORST) -> dict[str, NDArray[Any]]:
    """The rows with the highest `confidence`, at most `most`; of equal ones, those with the lowest `index`.

    >>> rows = {"index": np.array([5, 2, 9]), "confidence": np.array([0.5, 0.9, 0.9])}
    >>> most_confident(rows, 2)["index"].tolist()
    [2, 9]
    """
    order = np.lexsort((rows["index"], -rows["confidence"]))[:most]
    return {name: values[order] for name, values in rows.items()}


def scaled_down(image: NDArray[np.uint8], room: int) -> NDArray[np.uint8]:
    """An image uint8 [C, H, W] at its own size if it takes at most `room` bytes, else smaller in both directions.

    Of an image with other than 1 or 3 channels, the first is kept.

    >>> scaled_down(np.zeros((3, 300, 600), np.uint8), PIXELS // WORST).shape
    (3, 100, 200)
    """
    from PIL import Image  # here, because reading does not need it

    shown = image if len(image) in (1, 3) else image[:1]
    channels, height, width = shown.shape
    if height * width <= (pixels := room // channels):
        return shown
    scale = (pixels / (height * width)) ** 0.5
    wide = min(max(1, int(width * scale)), pixels)
    size = (wide, min(max(1, int(height * scale)), pixels // wide))
    planes = [Image.fromarray(channel).resize(size, Image.Resampling.BOX) for channel in shown]
    return np.stack([np.asarray(plane) for plane in planes])
