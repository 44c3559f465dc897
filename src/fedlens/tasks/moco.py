"""MoCo v2: He et al. 2020 (arXiv 1911.05722), Chen et al. 2020 (arXiv 2003.04297); chen2022, Eq. 9."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from fedlens.base.errors import ConfigError
from fedlens.core.dataset_info import DatasetInfo
from fedlens.core.tree import TreeSpec
from fedlens.tasks.self_supervised import SelfSupervised, mlp

QUEUE = ("queue", "next_place")


@dataclass(frozen=True, kw_only=True)
class MoCo(SelfSupervised):
    """Momentum contrast: a view is to be more similar to the other view of its image than to earlier images.

    Equation: loss = - log exp(q.k / T) / (exp(q.k / T) + sum_j exp(q.k_j / T))        (chen2022, Eq. 9)

    with q = head(encoder(view 1)), k = head'(encoder'(view 2)), both normalized, and k_j the keys of earlier batches,
    in a queue. The key encoder ' follows by w' <- m w' + (1 - m) w, before the keys of a step are computed. There is
    no gradient through keys.

    Batch normalization can tell the key of the same batch from those of the queue by its statistics alone (He et al.
    2020, section 3.3). With G = `bn_groups` > 1, each G-th of a batch has statistics of its own: query i is in group
    i // (n / G), key i in group i mod G. Batches have a random order, so this is the shuffle of the paper. The groups
    of a query and of its key share 1 / G of their images.

    In federated training the key encoder consists of buffers, which are averaged as running statistics are. The queue
    stays with its client: it is part of the client's state.

    Args:
        width: units of the head, and of the embedding, d.
        queue: the number of keys; 65,536 in the papers.
        momentum: m.
        temperature: T.
        bn_groups: G; 8 in the papers, the number of GPUs. With 1, query and key have statistics of the same images.

    Metrics: `embedding_deviation`, `embedding_rank` and `alignment`, see `SelfSupervised`. The loss depends on
        the queue, which the server does not have, so it is recorded for training alone.

    >>> task = MoCo(width=4, queue=16)
    >>> net = task.network(nn.Sequential(nn.Flatten(), nn.Linear(12, 6)), 6)
    >>> outputs = task.outputs(net, torch.randn(5, 2, 3, 2, 2), None)
    >>> outputs["logits"].shape, int(net.next_place)
    (torch.Size([5, 17]), 5)
    """

    metric_names: ClassVar[tuple[str, ...]] = ("embedding_deviation", "embedding_rank", "alignment")
    # Embeddings that are alike lower the loss too, if they move: keys of earlier steps are then less similar.
    collapse_advice: ClassVar[str | None] = (
        "a smaller task.queue if the loss is below ln(1 + task.queue), because old keys are then told by their age; "
        "if it is not, views of an image that have more in common (data.augment, data.dataset.pairs = false)"
    )
    width: int = 128
    queue: int = 65536
    momentum: float = 0.999
    temperature: float = 0.2
    bn_groups: int = 1

    def network(self, encoder: nn.Module, features: int) -> nn.Module:
        """The two encoders with their heads, and the queue.

        It maps views [n, 2, C, H, W] to `logits` [n, 1 + queue] and embeddings `z` [n, 2, d].
        """
        return MoCoNet(encoder, features, self)

    def local_leaves(self, spec: TreeSpec) -> frozenset[str]:
        """The queue, and the place of its next key."""
        return frozenset(QUEUE)

    def notes(self, examples: int) -> Sequence[str]:
        """That the queue is never full of keys, if so."""
        if examples >= self.queue:
            return ()
        return [
            f"the queue of {self.queue:,} keys is never full: a client trains on {examples:,} images at most, and the "
            "other keys stay random vectors. Set task.queue lower"
        ]

    def loss(
        self,
        outputs: Mapping[str, Tensor],
        targets: Any,
        weights: Tensor | None = None,
        normalize: bool = True,
    ) -> Tensor:
        """The mean of Eq. 9 over the images of the batch; targets and weights are not used."""
        logits = outputs["logits"]
        return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64, device=logits.device))

    def output_values(self, info: DatasetInfo) -> int:
        """The values of `z`."""
        return 2 * self.width


class MoCoNet(nn.Module):
    """The trained encoder and head, the key encoder and head as buffers, and the queue."""

    queue: Tensor
    next_place: Tensor

    def __init__(self, encoder: nn.Module, features: int, task: MoCo) -> None:
        super().__init__()
        self.encoder, self.head = encoder, mlp([features, features, task.width], norm=False)
        self.key_encoder, self.key_head = _as_buffers(encoder), _as_buffers(self.head)
        self.momentum, self.temperature, self.bn_groups = task.momentum, task.temperature, task.bn_groups
        self.register_buffer("queue", F.normalize(torch.randn(task.queue, task.width), dim=1))
        self.register_buffer("next_place", torch.zeros((), dtype=torch.int64))

    def forward(self, views: Tensor) -> dict[str, Tensor]:
        """`logits` [n, 1 + queue], the positive pair first, and `z` [n, 2, d] = (q, k), from the views [n, 2, C, H, W].

        In training mode the key encoder moves first, and the keys enter the queue last. In evaluation mode there is `z`
        alone: no metric needs the logits.
        """
        first, second = views.unbind(1)
        if self.training:
            self._check_size(len(first))
        groups = self.bn_groups if self.training else 1
        parts = [self.head(self.encoder(part)) for part in first.tensor_split(groups)]
        q = F.normalize(torch.cat(parts), dim=1)
        with torch.no_grad():
            if self.training:
                self._follow()
            k = torch.empty_like(q)
            for group in range(groups):
                k[group::groups] = F.normalize(self.key_head(self.key_encoder(second[group::groups])), dim=1)
        z = torch.stack([q, k], 1)
        if not self.training:
            return {"z": z}
        # A copy, because the keys of this step are written into the queue before its gradient is taken.
        earlier = self.queue.to(q.dtype, copy=True)
        positive = (q * k).sum(1, keepdim=True)
        logits = torch.cat([positive, q @ earlier.t()], 1) / self.temperature
        self._keep(k)
        return {"logits": logits, "z": z}

    def _check_size(self, images: int) -> None:
        """Raises `ConfigError` if a batch of so many images has too many keys for the queue, or too few for groups."""
        if images > len(self.queue):
            raise ConfigError(
                f"a batch of {images} images has more keys than the queue of {len(self.queue)}",
                where="task.queue",
                hint=f"set it to at least {images}, or lower local.batch_size",
            )
        if images < self.bn_groups:
            raise ConfigError(
                f"a batch of {images} images cannot have {self.bn_groups} groups of batch statistics",
                where="task.bn_groups",
                hint="lower it, or set local.last_batch = 'drop'",
            )

    @torch.no_grad()
    def _follow(self) -> None:
        """Moves the key encoder towards the trained one."""
        for trained, followed in ((self.encoder, self.key_encoder), (self.head, self.key_head)):
            followers = dict(followed.named_buffers())
            for name, parameter in trained.named_parameters():
                followers[name].lerp_(parameter.to(followers[name].dtype), 1 - self.momentum)

    @torch.no_grad()
    def _keep(self, keys: Tensor) -> None:
        """Writes the keys over the oldest ones."""
        places = (self.next_place + torch.arange(len(keys), device=keys.device)) % len(self.queue)
        self.queue.index_copy_(0, places, keys.to(self.queue.dtype))
        self.next_place.copy_((self.next_place + len(keys)) % len(self.queue))


def _as_buffers(module: nn.Module) -> nn.Module:
    """A copy whose parameters are buffers: averaged and sent as such, and no gradient reaches them.

    A parameter without a gradient would count as frozen, and never be sent.
    """
    copied = copy.deepcopy(module)
    for layer in copied.modules():
        for name in list(layer._parameters):
            parameter = layer._parameters.pop(name)
            layer.register_buffer(name, None if parameter is None else parameter.detach().clone())
    return copied


def moco_v2(
    *,
    width: Annotated[
        int, Field(ge=1, le=65536, description="units of the head's output, the embedding")
    ] = 128,
    queue: Annotated[
        int, Field(ge=1, le=2**22, description="number of keys in the queue of each client")
    ] = 65536,
    momentum: Annotated[float, Field(ge=0, le=1, description="momentum of the key encoder")] = 0.999,
    temperature: Annotated[float, Field(gt=0, le=10, description="temperature of the loss")] = 0.2,
    bn_groups: Annotated[
        int,
        Field(
            ge=1,
            le=1024,
            description="groups of a batch with batch statistics of their own, shuffled for keys",
        ),
    ] = 1,
) -> MoCo:
    """MoCo v2 (He et al. 2020, Chen et al. 2020)."""
    return MoCo(width=width, queue=queue, momentum=momentum, temperature=temperature, bn_groups=bn_groups)
