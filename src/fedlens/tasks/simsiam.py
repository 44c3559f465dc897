"""SimSiam: Chen and He 2021 (arXiv 2011.10566); chen2022, Eq. 7 and 8."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from fedlens.core.dataset_info import DatasetInfo
from fedlens.core.measured import Measured
from fedlens.tasks.self_supervised import SelfSupervised, mlp

Width = Annotated[int, Field(ge=1, le=65536)]


@dataclass(frozen=True, kw_only=True)
class SimSiam(SelfSupervised):
    """Similarity of two views: each predicts the embedding of the other, without a gradient through the target.

    Equation: D(p, z) = - <p / |p|, z / |z|>                             (chen2022, Eq. 7)
        loss = 1/2 D(p1, stopgrad(z2)) + 1/2 D(p2, stopgrad(z1))         (chen2022, Eq. 8)

    with z = projector(encoder(x)) and p = predictor(z). The projector has three linear layers, the predictor two with
    a narrow one between them, as in section 3 of Chen and He. Each view has batch statistics of its own.

    Args:
        width: units of the projector and of the embedding, d; 2,048 in the paper for ResNet-50.
        bottleneck: units of the predictor's hidden layer; 512 there.
        stop_gradient: false leaves the gradient through the targets, with which embeddings collapse.
        predictor: false leaves out the predictor, without which embeddings collapse.

    Metrics:
        loss: the mean of the loss over images, between -1 and 1.
        embedding_deviation, embedding_rank, alignment: see `SelfSupervised`.

    >>> task = SimSiam(width=8, bottleneck=4)
    >>> net = task.network(nn.Flatten(), 12)
    >>> outputs = task.outputs(net, torch.randn(6, 2, 3, 2, 2), None)
    >>> outputs["z"].shape, bool(task.loss(outputs, None).abs() <= 1)
    (torch.Size([6, 2, 8]), True)
    """

    metric_names: ClassVar[tuple[str, ...]] = ("loss", "embedding_deviation", "embedding_rank", "alignment")
    totals: ClassVar[frozenset[str]] = SelfSupervised.totals | {"loss"}
    collapse_advice: ClassVar[str | None] = (
        "stronger augmentations (data.augment), or a larger task.width; "
        "task.predictor and task.stop_gradient must be on"
    )
    width: int = 512
    bottleneck: int = 128
    stop_gradient: bool = True
    predictor: bool = True

    def network(self, encoder: nn.Module, features: int) -> nn.Module:
        """The encoder with projector and predictor: [n, 2, C, H, W] -> `z` and `p`, both [n, 2, d]."""
        return SimSiamNet(encoder, features, self.width, self.bottleneck if self.predictor else None)

    def loss(
        self,
        outputs: Mapping[str, Tensor],
        targets: Any,
        weights: Tensor | None = None,
        normalize: bool = True,
    ) -> Tensor:
        """The mean of Eq. 8 over the images of the batch; targets and weights are not used."""
        return self._losses(outputs).mean()

    def _losses(self, outputs: Mapping[str, Tensor]) -> Tensor:
        """[n]"""
        z = outputs["z"].detach() if self.stop_gradient else outputs["z"]
        (p1, p2), (z1, z2) = outputs["p"].unbind(1), z.unbind(1)
        return -(F.cosine_similarity(p1, z2) + F.cosine_similarity(p2, z1)) / 2

    def output_values(self, info: DatasetInfo) -> int:
        """The values of `z` and `p`, of both views."""
        return 4 * self.width

    def measure(self, outputs: Mapping[str, Tensor], targets: Any) -> Measured:
        """The sums of `SelfSupervised`, and `loss` float64."""
        found = super().measure(outputs, targets)
        return Measured({**found.sums, "loss": self._losses(outputs).double().sum()})

    def metrics(self, measured: Measured) -> dict[str, float]:
        """The metrics that the class lists."""
        n = int(measured.sums["examples"])
        return {"loss": float(measured.sums["loss"]) / n, **super().metrics(measured)}


class SimSiamNet(nn.Module):
    """Encoder, projector and predictor; `p` is `z` without a predictor."""

    def __init__(self, encoder: nn.Module, features: int, width: int, bottleneck: int | None) -> None:
        super().__init__()
        self.encoder = encoder
        self.projector = mlp([features, width, width, width], norm=True, last_norm=True)
        self.predictor = nn.Identity() if bottleneck is None else mlp([width, bottleneck, width], norm=True)

    def forward(self, views: Tensor) -> dict[str, Tensor]:
        """`z` and `p`, both [n, 2, d], from the two views [n, 2, C, H, W]."""
        z = [self.projector(self.encoder(view)) for view in views.unbind(1)]
        return {"z": torch.stack(z, 1), "p": torch.stack([self.predictor(each) for each in z], 1)}


def simsiam(
    *,
    width: Annotated[Width, Field(description="units of the projector, and of the embedding")] = 512,
    bottleneck: Annotated[Width, Field(description="units of the predictor's hidden layer")] = 128,
    stop_gradient: Annotated[bool, Field(description="no gradient through the targets")] = True,
    predictor: Annotated[bool, Field(description="put the predictor in front of the loss")] = True,
) -> SimSiam:
    """SimSiam (Chen and He 2021)."""
    return SimSiam(width=width, bottleneck=bottleneck, stop_gradient=stop_gradient, predictor=predictor)
