"""Classification: cross-entropy and accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fedlens.tasks.picture import BLACK, GREEN, RED, captioned, enlarged


@dataclass(frozen=True)
class Classification:
    """One class an image. Outputs are logits [n, classes], targets int64 [n].

    >>> task = Classification()
    >>> task.metrics(task.sums(torch.tensor([[2.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 0])))["accuracy"]
    0.5
    """

    score: str = "accuracy"  # the metric that a best model is chosen by; larger is better

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy in nats, a 0-dim tensor."""
        return F.cross_entropy(outputs, targets)

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The cross-entropy of each example, [n]; `loss` is their mean."""
        return F.cross_entropy(outputs, targets, reduction="none")

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """What adds up over batches: summed loss, correct predictions, examples."""
        return {
            "loss": float(F.cross_entropy(outputs, targets, reduction="sum")),
            "accuracy": float(torch.count_nonzero(outputs.argmax(1) == targets)),
            "examples": float(len(targets)),
        }

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Mean loss and accuracy from the sums."""
        return {name: sums[name] / sums["examples"] for name in ("loss", "accuracy")}

    def misfit(self, outputs: object, examples: int, classes: int) -> str | None:
        """The logits must be [n, classes]."""
        if isinstance(outputs, Tensor) and outputs.dim() == 2:
            n, logits = outputs.shape
            if n == examples and logits == classes:
                return None
        return f"[{examples}, {classes}]: one number a class"

    def random_targets(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Random targets for these outputs, int64 [n]; a trial of a model trains on them."""
        return torch.randint(outputs.shape[1], (len(outputs),), generator=generator)

    def predict(self, outputs: Tensor) -> dict[str, Tensor]:
        """`class`, int64 [n], the most probable class, and `scores`, float [n, classes], softmax probabilities.

        PyTorch's exporters trace it, and the names are those of the exported model's outputs.

        >>> Classification().predict(torch.tensor([[0.0, 0.0], [0.0, 1.0]]))["class"]
        tensor([0, 1])
        """
        return {"class": outputs.argmax(1), "scores": outputs.softmax(1)}

    def row(
        self, prediction: Mapping[str, NDArray[Any]], classes: Sequence[str], top: int = 5
    ) -> dict[str, Any]:
        """The prediction of one image as columns of predictions.csv: the `top` classes, each with its probability.

        Args:
            prediction: what `predict` returned for this image, as arrays: `class` [] and `scores` [classes].
            classes: the name of each class.

        >>> one = {"class": np.array(1), "scores": np.array([0.2, 0.5, 0.3])}
        >>> Classification().row(one, ["cat", "dog", "cow"], top=2)
        {'class': 'dog', 'score': 0.5, 'class_2': 'cow', 'score_2': 0.3}
        """
        scores, first = prediction["scores"], int(prediction["class"])
        others = [label for label in np.argsort(-scores, kind="stable").tolist() if label != first]
        columns: dict[str, Any] = {}
        for rank, label in enumerate([first, *others][:top], 1):
            end = "" if rank == 1 else f"_{rank}"
            columns |= {f"class{end}": classes[label], f"score{end}": round(float(scores[label]), 6)}
        return columns

    def draw(
        self,
        image: NDArray[np.uint8],
        prediction: Mapping[str, NDArray[Any]],
        target: int | None = None,
        classes: Sequence[str] = (),
    ) -> NDArray[np.uint8]:
        """uint8 [H, W, 3]: the image, at least 224 pixels wide, above the class, its probability, and the truth.

        Args:
            image: uint8 [C, H, W].
            prediction: what `predict` returned for this image, as arrays.
            target: the true class, if it is known; the text is green if the prediction is right, and red if not.
            classes: the name of each class; numbers by default.
        """
        label = int(prediction["class"])
        names = [classes[at] if classes else str(at) for at in (label, target) if at is not None]
        colour = BLACK if target is None else GREEN if target == label else RED
        lines = [(f"{names[0]}  {100 * float(prediction['scores'][label]):.1f} %", colour)]
        if target is not None:
            lines.append((f"truth: {names[1]}", BLACK))
        return captioned(enlarged(image), lines)
