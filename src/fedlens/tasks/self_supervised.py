"""The base class of tasks without labels: two views of an image are to have similar embeddings."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlens.base.errors import ConfigError
from fedlens.core.dataset_info import DatasetInfo, Kind
from fedlens.core.measured import Measured
from fedlens.core.protocol import ModelSpec
from fedlens.core.tree import Tree
from fedlens.tasks.picture import BLACK, captioned, enlarged
from fedlens.tasks.task import Task, present

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_LEAST = 3
_RANKED = 1024  # values of an embedding up to which its covariance is computed
ENCODER = "encoder"  # the name of the model in the module that is trained


class SelfSupervised(Task):
    """Trains an encoder on images without labels; labels of a dataset are left aside.

    The model loses its classifier, and its features [n, d] enter further layers. What is exported is the encoder: its
    leaves have the names that they have in the model, so `model.weights` of another run takes them.

    Metrics:
        embedding_deviation: `sqrt(d) mean_j std_j` of the normalized embeddings z / |z| in R^d. It is 1 if they are
            spread evenly over the sphere, and 0 if all images have the same one: a collapse (Chen and He 2021,
            section 4.1). Left out for fewer than four images.
        embedding_rank: `exp(- sum_j p_j log p_j)` with the eigenvalues p_j of the covariance of the normalized
            embeddings, divided by their sum (Roy and Vetterli 2007): how many directions the embeddings spread in.
            Near 1 they have collapsed to a line, which the deviation does not show if a batch normalization follows.
            Left out for more than 1,024 values, and for fewer than three values or four images.
        alignment: the mean cosine similarity of the embeddings of two views of an image.
    """

    kind: ClassVar[Kind] = "unlabelled"
    score: str | None = None
    views: ClassVar[int] = 2
    classifier: ClassVar[bool] = False
    full_gradients: ClassVar[bool] = False
    errors: ClassVar[frozenset[str]] = frozenset({"loss"})
    unstacked: ClassVar[str] = "the loss of an image depends on the other images of its batch"
    sends: ClassVar[str] = "sums over the embeddings of its images"
    totals: ClassVar[frozenset[str]] = frozenset({"examples", "aligned", "sum", "squares"})
    example: ClassVar[str] = "image"

    def validate(self, info: DatasetInfo) -> None:
        """Raises `ConfigError` for text; images of every kind are accepted."""
        if info.kind == "language":
            raise ConfigError(
                f"the task {type(self).__name__} is for images, but the dataset '{info.name}' is text",
                where="task.name",
                hint="choose a dataset of images",
            )

    @abstractmethod
    def network(self, encoder: nn.Module, features: int) -> nn.Module:
        """The module that is trained, with the encoder as its submodule `encoder`; `features` is d."""

    def wrap(self, model: ModelSpec) -> ModelSpec:
        """The model with `network` around it."""
        return replace(model, wrapper=partial(_wrapped, self))

    def export(self, tree: Tree) -> Tree:
        """The leaves of the encoder, by their names in the model."""
        start = f"{ENCODER}."
        return {name.removeprefix(start): leaf for name, leaf in tree.items() if name.startswith(start)}

    def measure(self, outputs: Mapping[str, Tensor], targets: Any) -> Measured:
        """The sums of a batch.

        `examples` int64; `aligned` float64, the sum of the cosines of the two views; `sum` and `squares` float64 [d],
        of the normalized embeddings of the first views and of their squares; `products` float64 [d, d], of their
        products, up to 1,024 values.
        """
        first, second = (F.normalize(view.float(), dim=1).double() for view in outputs["z"].unbind(1))
        sums = {
            "examples": torch.tensor(len(first)),
            "aligned": (first * second).sum(),
            "sum": first.sum(0),
            "squares": first.square().sum(0),
        }
        if first.shape[1] <= _RANKED:
            sums["products"] = first.t() @ first
        return Measured(sums)

    def condensed(self, measured: Measured) -> Measured:
        """The measurements without `products`, so without the rank."""
        return _without_products(measured)

    def recorded(self, measured: Measured, classes: int) -> Measured:
        """The measurements without `products`."""
        return _without_products(measured)

    def metrics(self, measured: Measured) -> dict[str, float]:
        """The metrics that the class lists."""
        sums = measured.sums
        n = int(sums["examples"])
        # Fewer images, or directions, tell nothing of a collapse: one image has no deviation at all.
        several = n > _LEAST
        ranked = "products" in sums and several and len(sums["sum"]) >= _LEAST
        variance = (sums["squares"] / n - (sums["sum"] / n).square()).clamp(min=0)
        return present(
            {
                "embedding_deviation": math.sqrt(len(variance)) * float(variance.sqrt().mean())
                if several
                else None,
                "embedding_rank": _rank(sums["products"] / n, sums["sum"] / n) if ranked else None,
                "alignment": float(sums["aligned"]) / n,
            }
        )

    def predict(self, outputs: Tensor) -> Mapping[str, Tensor]:
        """`features` float [n, d], of the exported encoder."""
        return {"features": outputs}

    def row(
        self, prediction: Mapping[str, NDArray[np.float32]], classes: Sequence[str], top: int = 5
    ) -> dict[str, Any]:
        """One column for each feature."""
        return {f"feature_{k}": float(value) for k, value in enumerate(prediction["features"])}

    def draw(
        self,
        image: NDArray[np.uint8],
        prediction: Mapping[str, NDArray[Any]],
        target: Any = None,
        classes: Sequence[str] = (),
    ) -> NDArray[np.uint8]:
        """uint8 [H, W, 3]: the image above the number and the norm of its features."""
        features = prediction["features"]
        norm = float((features.astype(float) ** 2).sum() ** 0.5)
        return captioned(enlarged(image), [(f"{len(features):,} features, norm {norm:.3g}", BLACK)])

    def random_targets(
        self, n: int, classes: int, input_shape: Sequence[int], generator: torch.Generator
    ) -> Tensor:
        """Targets without content, uint8 [n, 0]."""
        return torch.zeros(n, 0, dtype=torch.uint8)


def _without_products(measured: Measured) -> Measured:
    return Measured({name: value for name, value in measured.sums.items() if name != "products"})


def _rank(products: Tensor, mean: Tensor) -> float:
    """The effective rank of the covariance E[z z^T] - E[z] E[z]^T; 1 if it is 0."""
    values = torch.linalg.eigvalsh(products - torch.outer(mean, mean)).clamp(min=0)
    if float(values.sum()) <= torch.finfo(torch.float64).tiny:
        return 1.0
    shares = values / values.sum()
    return math.exp(-float(torch.special.xlogy(shares, shares).sum()))


def _wrapped(task: SelfSupervised, encoder: nn.Module, model: ModelSpec) -> nn.Module:
    """The network of the task around this encoder."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        mode = encoder.training
        features = encoder.eval()(torch.zeros(1, *model.input_shape))
        encoder.train(mode)
    if not isinstance(features, Tensor) or features.dim() != 2:
        form = list(features.shape) if isinstance(features, Tensor) else f"a {type(features).__name__}"
        raise ConfigError(
            f"without its classifier, the model '{model.name}' returns {form} for one image, but must return [1, d]",
            where="model.name",
            hint="choose another model, such as 'resnet20'",
        )
    return task.network(encoder, features.shape[1])


def mlp(widths: Sequence[int], norm: bool, last_norm: bool = False) -> nn.Sequential:
    """Linear layers of these widths with ReLU between them, and batch normalization before each ReLU if `norm`.

    With `last_norm`, the outputs are normalized too, without scale and shift.

    >>> [type(layer).__name__ for layer in mlp([4, 3, 2], norm=True)]
    ['Linear', 'BatchNorm1d', 'ReLU', 'Linear']
    """
    layers: list[nn.Module] = []
    for place, (inputs, outputs) in enumerate(pairwise(widths)):
        last = place == len(widths) - 2
        normalized = last_norm if last else norm
        layers.append(nn.Linear(inputs, outputs, bias=not normalized))
        if normalized:
            layers.append(nn.BatchNorm1d(outputs, affine=not last))
        if not last:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)
