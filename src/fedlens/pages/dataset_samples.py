"""Samples of a dataset by class: rows of images, images with masks or boxes, and texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedlens.base.errors import ConfigError
from fedlens.base.format import many
from fedlens.core.random import Rng
from fedlens.data.augmentation.augment import AUGMENTS
from fedlens.data.augmentation.augmented import Chain
from fedlens.data.dataset import Dataset
from fedlens.observers.final_evaluation import scaled_down
from fedlens.pages.contact_sheet import sheet_of_views, tiled
from fedlens.settings.augment_chain import augment_chain
from fedlens.settings.config_source import Source, override
from fedlens.settings.resolve import resolve
from fedlens.tasks.picture import BLACK, boxes_drawn, captioned, enlarged, mask_picture
from fedlens.tasks.registry import TASKS

if TYPE_CHECKING:
    import torch

CLASSES, PICTURES = 100, 24  # rows of classes, and pictures of masks or boxes, at most
_FEW = 20  # classes up to which images are large and many
_SIDE, _SMALL = 128, 64  # pixels of an image in a row
_COLUMNS, _WIDTH = 12, 1400  # images in a row; pixels of a sheet
_TASKS = {"unlabelled": "simsiam"}  # a task with two views
_PLACED = ("segmentation", "detection")


@dataclass(frozen=True)
class Samples:
    """Random training examples of a dataset.

    Attributes:
        seed: of the choice.
        augment: augmentations that are applied to the images; None shows them as they are.
        views: how many augmentations of each image are shown below each other.
    """

    data: Dataset
    seed: int = 0
    augment: Chain | None = None
    views: int = 1

    @classmethod
    def of(cls, data: Dataset, seed: int = 0, augments: Sequence[str] = ()) -> Samples:
        """Samples after augmentations, each a name or a table in TOML, as `data.augment` has them.

        Images without labels have two views, as they have in training.

        Raises `ConfigError` for a wrong augmentation, one that does not fit the data, and any of texts.
        """
        if not augments:
            return cls(data, seed)
        if data.kind == "language":
            raise ConfigError(f"'{data.name}' is text, which is not augmented", where="--augment")
        task = resolve(TASKS, {"name": _TASKS.get(data.kind, data.kind)}, "task", Source({}))()
        source = override(Source({}), [f"augment.{k}={value}" for k, value in enumerate(augments)])
        tables = [t if isinstance(t, dict) else {"name": t} for t in source.values["augment"].values()]
        chosen = [resolve(AUGMENTS, table, "augment", source, lambda key: "--augment") for table in tables]
        return cls(data, seed, augment_chain(chosen, data, task)[0], task.views)

    def by_class(self, count: int | None = None) -> tuple[list[NDArray[np.uint8]], str]:
        """The pictures of examples of each class, and a sentence on what they show.

        Args:
            count: examples of a class; by default 3 with masks or boxes, 8 of up to 20 classes, else 4.
        """
        data, total = self.data, len(self.data.classes)
        if not total:
            return self.row("", count)
        placed = data.kind in _PLACED
        count = count or (3 if placed else 8 if total <= _FEW else 4)
        shown = np.unique(np.linspace(0, total - 1, min(total, CLASSES)).round().astype(np.int64))
        side = _SIDE if total <= _FEW else _SMALL
        table, rng = data.table(), Rng((self.seed, "samples")).numpy("classes")
        rows, picked, pictures = table.rows, list[int](), list[NDArray[np.uint8]]()
        for label in shown.tolist():
            of_class = rng.permutation(rows[table.marks == label]).tolist()
            if placed:
                missing = max(0, count - len(set(of_class) & set(picked)))
                picked += [row for row in of_class if row not in picked][:missing]
            elif of_class:
                pictures += self._pictures(np.array(of_class[:count]), data.classes[label], count, side)
        words = f"{count} random training images of each class"
        if len(shown) < total:
            words = f"{words[:-5]}of {len(shown)} of {total:,} classes, evenly spread"
        if placed:
            words = f"random training images, {count} or more of each class that has so many"
            if len(picked) > PICTURES:
                words = f"{PICTURES} of the {len(picked)} {words}"
            pictures = self._pictures(np.array(picked[:PICTURES], np.int64))
        return pictures, f"{data.name}: {words}; seed {self.seed}"

    def row(self, caption: str, count: int | None = None) -> tuple[list[NDArray[np.uint8]], str]:
        """The pictures of random examples of any class, by default 8, and a sentence on what they show."""
        order = Rng((self.seed, "samples")).numpy("row").permutation(len(self.data.train))[: count or 8]
        words = f"{self.data.name}: {many(len(order), 'random training image')} in a row"
        return self._pictures(order, caption, len(order)), f"{words}; seed {self.seed}"

    def texts(self, count: int | None = None) -> list[str]:
        """Random texts, by default 8, each with the class to predict if it has one.

        Raises `ConfigError` if the dataset has its tokens as numbers alone.
        """
        train, names = self.data.train, self.data.classes
        if self.data.vocabulary != len(names):
            raise ConfigError(
                f"the texts of '{self.data.name}' are numbers of tokens, and the dataset does not keep their words",
                hint="look at the files that it is read from",
            )
        letters = [{"newline": "\n", "space": " "}.get(name, name) for name in names]
        gap = "" if max(map(len, letters)) == 1 else " "
        rows = Rng((self.seed, "samples")).numpy("row").permutation(len(train))[: count or 8]
        shown = [[gap.join(letters[token] for token in train.inputs[row].tolist())] for row in rows]
        for text, row in zip(shown, rows, strict=True):
            text += (
                [letters[train.targets[row]]] if train.targets.ndim == 1 and train.targets[row] >= 0 else []
            )
        return [" -> ".join(json.dumps(part, ensure_ascii=False) for part in text) for text in shown]

    def _pictures(
        self, rows: NDArray[np.int64], caption: str = "", columns: int = 1, side: int = _SIDE
    ) -> list[NDArray[np.uint8]]:
        """One picture an image with masks or boxes, else one of all images, of up to `side` pixels, in rows."""
        data = self.data
        views, targets = self._examples(rows)
        if data.kind not in _PLACED:
            small = np.stack([[scaled_down(v, v.shape[0] * side**2) for v in each] for each in views])
            larger = max(1, side // max(small.shape[-2:]))
            shown = sheet_of_views(small.repeat(larger, -2).repeat(larger, -1), min(columns, _COLUMNS))
            return [captioned(shown, [(caption, BLACK)] if caption else [])]
        pictures = []
        for k, row in enumerate(rows.tolist()):
            image = scaled_down(views[k, 0], views[k, 0].size)
            files = data.train.files
            name = f"training image {row}" if files is None else files[row]
            about = " ".join(filter(None, [caption, name]))
            if data.kind == "segmentation":
                bare = captioned(enlarged(image), [(about, BLACK)])
                masked = mask_picture(image, {"classes": targets[k].numpy()}, data.classes)
                pictures.append(np.asarray(tiled([bare, masked], 2 * bare.shape[1])))
            else:
                boxes, labels = (part.numpy() for part in targets.of(k))
                drawn = Image.fromarray(boxes_drawn(image, boxes, labels, classes=data.classes))
                pictures.append(captioned(drawn, [(about, BLACK)]))
        return pictures

    def _examples(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.uint8], Any]:
        """(images uint8 [k, views, C, H, W], targets) of the examples at these positions."""
        import torch

        images, targets = self.data.train.take(rows).tensors().batch(torch.arange(len(rows)))
        apart: Sequence[torch.Tensor] = images.unbind(1) if images.dim() == 5 else [images]
        if self.augment is not None:
            apart = apart if len(apart) > 1 else [images] * self.views
            generator = Rng((self.seed, "samples")).torch("augment")
            moved = [self.augment(view, targets, generator) for view in apart]
            apart, targets = [view for view, _ in moved], moved[0][1]
        return torch.stack(list(apart), 1).numpy(), targets


def sheet(pictures: Sequence[NDArray[np.uint8]], about: str) -> Image.Image:
    """The pictures in rows, and the sentence below them."""
    return Image.fromarray(captioned(tiled(pictures, _WIDTH), [(about, BLACK)]))
