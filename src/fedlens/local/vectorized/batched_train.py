"""Local training of one client, or of several clients as one computation where they can train together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedlens.base.errors import FedlensError, out_of_memory, told
from fedlens.base.frozen import held
from fedlens.core.arithmetic import lays_out_channels_last
from fedlens.core.modules import module_in
from fedlens.core.protocol import Call, Obstacle, Outcome, Trial
from fedlens.core.tree import tree_of
from fedlens.local.rules import ClientRule
from fedlens.local.training import Train
from fedlens.local.vectorized.batches import held_bytes
from fedlens.local.vectorized.train_group import train_together
from fedlens.local.vectorized.trial import OTHER, of_model, of_rule


@dataclass(frozen=True)
class BatchedTrain(Train):
    """`Train` as a `BatchedOp`, which algorithms offer to engines."""

    def together(self, calls: Sequence[Call]) -> Sequence[Outcome | BaseException]:
        """Trains several clients at once; see `fedlens.local.vectorized.train_group`.

        An error of the common computation names the client rule, which may declare `stackable` by mistake.
        """
        try:
            return train_together(self, calls)
        except Exception as error:
            if self.rule.plain or isinstance(error, FedlensError) or out_of_memory(error):
                raise
            raise RuntimeError(f"with {self.rule.called}: {told(error)}") from error

    def obstacle(self) -> Obstacle | None:
        """The reason against training several clients at once; None if there is none."""
        return obstacle(self)

    def footprint(self, device: torch.device, largest: int | None = None, data: Any = None) -> int:
        """The approximate bytes of each client; see `fedlens.local.vectorized.batched_train.footprint`."""
        return footprint(self, device, largest, data)

    def trial(self, steps: int) -> Trial:
        """Plain training of this number of steps."""
        settings = self.settings.model_copy(update={"steps": steps, "epochs": None, "stragglers": 0.0})
        plain = replace(self, settings=settings, rule=ClientRule(), normalized=False, keep_optimizer=False)
        model = self.model.build(initial=False)
        convolutions = any(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules())
        # A small rate, so that no weights diverge.
        return Trial(
            plain, {"model": tree_of(model), "lr": 1e-9}, convolutions, lays_out_channels_last(model)
        )


_UNKNOWN = 32  # assumed examples of a client, if batches hold all of them and the number is unknown


def obstacle(train: Train) -> Obstacle | None:
    """Why this training cannot be computed for several clients at once; None if it can."""
    rule = train.rule
    if rule.solve is not None:
        return Obstacle(f"'{rule.name}' solves each client's problem separately", "client", OTHER)
    if train.personal:
        return Obstacle("parts of the model stay at the clients", "algorithm.name", OTHER)
    if train.keep_optimizer:
        return Obstacle(
            "the optimizer's state is kept, so clients train one after the other", "algorithm.name", OTHER
        )
    if train.settings.optimizer == "lars":
        what = "lars scales each leaf by its norm, which stacked clients share a leaf of"
        return Obstacle(what, "local.optimizer", f"take 'sgd', or {OTHER}")
    if not rule.plain and not rule.traits.stackable:
        who = f"the client rule '{rule.name}'" if rule.name else "a client rule without a name"
        return Obstacle(
            f"{who} does not declare that its clients may train together",
            "client",
            f"set traits=Traits(stackable=True) if they may, or {OTHER}",
        )
    if train.task.weighs:
        return Obstacle(
            "with class weights the loss of a batch is not the mean of losses of its examples",
            "task.class_weights",
            f"set task.class_weights = 'none', or {OTHER}",
        )
    if train.task.losses is None or train.task.takes_targets:
        what = (
            train.task.unstacked
            if train.task.losses is None
            else "the model needs the targets in its forward pass"
        )
        return Obstacle(what, "task.name", OTHER)
    for name, module in train.model.build(initial=False).named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not held(module):
            return Obstacle(
                f"the layer {name!r} normalizes over the examples of a batch and keeps statistics of them, which "
                "stacked clients do not have for themselves",
                "model",
                f"use group normalization (model.norm = 'group'), or {OTHER}",
            )
        if isinstance(module, nn.RNNBase):
            return Obstacle(
                f"the layer {name!r} is recurrent, and PyTorch computes such layers for one client at a time",
                "model",
                OTHER,
            )
    return of_model(train) or of_rule(train)


def footprint(train: Train, device: torch.device, largest: int | None = None, data: Any = None) -> int:
    """The approximate bytes of a client in a group: its copies of the weights, a batch and its activations.

    On a GPU also the patches of convolutions, as if all were `unfolded`: see `fedlens.local.vectorized.convolution`.

    Args:
        train: the training.
        device: of the training.
        largest: the examples of the largest client, if known: no batch is larger.
        data: one client's data, if all have the same form: data may keep images in memory during training.
    """
    learner = module_in(train.model, {}, device)
    weights = sum(value.nbytes for value in learner.trainable.values())
    settings = train.settings
    n = settings.examples or largest or (_UNKNOWN if settings.batch_size == "all" else settings.batch_size)
    size = settings.batch(n)
    activations, patches = 0, [0]

    def count(module: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal activations
        if isinstance(output, Tensor) and not any(module.children()):
            activations += output.nbytes
        if device.type == "cuda" and isinstance(module, nn.Conv2d) and module.groups == 1:  # see `chosen`
            patches.append(output[0, 0].nbytes * module.weight[0].numel())

    handles = [module.register_forward_hook(count) for module in learner.module.modules()]
    dtype = next(iter(learner.trainable.values())).dtype
    images = train.task.blank(1, train.model.input_shape, dtype).to(device)
    with torch.no_grad():
        train.task.outputs(learner.module.eval(), images, None)
    for handle in handles:
        handle.remove()
    copies = 6 if train.rule.references is None else 9  # two reference models, and the features
    own = 0 if data is None else held_bytes(data, n)
    # Patches are kept until the backward pass, which computes the gradients of a layer's patches in two layouts.
    unfolded = sum(patches) + 2 * max(patches)
    return copies * weights + size * (images.nbytes + 3 * activations + unfolded) + own
